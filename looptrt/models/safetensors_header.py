"""The header of a safetensors file, checked before a byte of any tensor is used.

Owns the file format and its rules; leaves reading tensors to `looptrt.models.checkpoint`
and the meaning of names to the families. Invariant: every entry returned lies inside the
file, has exactly the bytes of its shape, and the entries cover the data without a gap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from looptrt.errors import CheckpointError
from looptrt.models.files import file_bytes, parse_json, shown

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST = 2**63 - 1  # of anything that is counted
_MOST_DIMS = 64
_LFS_START = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: file, name in it, safetensors dtype, shape, absolute byte range."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check the header of a safetensors file.

    Returns:
        {tensor name: entry}, in the order of the file's data.

    Raises:
        CheckpointError: the file is missing, a Git LFS pointer, cut, or its header is
            malformed; names the file, the tensor, what was expected and what was found.
    """
    size = file_bytes(path)
    try:
        with path.open("rb") as file:
            start = file.read(max(_LENGTH_BYTES, len(_LFS_START)))
            header_bytes = _header_bytes(path, start, size)
            file.seek(_LENGTH_BYTES)
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    data_start = _LENGTH_BYTES + header_bytes
    header = _parse(path, raw)
    entries = [_entry(path, name, value, data_start, size) for name, value in header.items()]
    return _in_data_order(path, dict(zip(header, entries, strict=True)), data_start, size)


def _header_bytes(path: Path, start: bytes, size: int) -> int:
    if start.startswith(_LFS_START):
        raise CheckpointError(
            f"{path}: expected a safetensors file, found a Git LFS pointer; "
            "fetch the file itself with `git lfs pull`"
        )
    if size < _LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: expected a safetensors file of at least {_LENGTH_BYTES} bytes, "
            f"found {size} bytes"
        )
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if length > size - _LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: the header claims {length} bytes, but only {size - _LENGTH_BYTES} follow; "
            "the file is cut or not a safetensors file"
        )
    if length > _MOST_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: expected a header of at most {_MOST_HEADER_BYTES} bytes, found {length}"
        )
    return length


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = parse_json(raw.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: expected a JSON object as header, got {shown(header)}")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, value: object, data_start: int, size: int) -> TensorEntry:
    def fail(what: str) -> NoReturn:
        raise CheckpointError(f"{path}: tensor {name!r}: {what}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        fail(f"expected dtype, shape and data_offsets, got {shown(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        fail(f"unknown dtype {shown(dtype)}, expected one of {', '.join(DTYPE_BYTES)}")
    if not _is_list_of_sizes(shape) or len(shape) > _MOST_DIMS or math.prod(shape) > _MOST:
        fail(f"expected a shape, got {shown(shape)}")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"expected data_offsets [begin, end], got {shown(offsets)}")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        fail(
            f"{dtype} of shape {shown(shape)} takes {expected} bytes, data_offsets give "
            f"{end - begin}"
        )
    if data_start + end > size:
        fail(f"expected data up to byte {data_start + end}, the file has {size} bytes; it is cut")
    return TensorEntry(path, name, dtype, tuple(shape), data_start + begin, data_start + end)


def _is_list_of_sizes(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(item) is int and 0 <= item <= _MOST for item in value)


def _in_data_order(
    path: Path, entries: dict[str, TensorEntry], data_start: int, size: int
) -> dict[str, TensorEntry]:
    position = data_start
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    for name, entry in ordered.items():
        if entry.begin != position:
            raise CheckpointError(
                f"{path}: tensor {name!r}: expected its data at byte {position}, found it at "
                f"{entry.begin}; tensors overlap or leave a gap"
            )
        position = entry.end
    if position != size:
        raise CheckpointError(
            f"{path}: expected {position} bytes by the header, found {size}; "
            "bytes after the last tensor"
        )
    return ordered
