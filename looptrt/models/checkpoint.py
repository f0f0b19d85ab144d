"""A checkpoint directory, Hugging Face's or TensorRT-LLM's: its config and its tensors.

Owns finding the files, checking them as a whole and reading one tensor at a time; leaves
what the names mean to the families and the fused layout to the builder. Never opens a
pickle and never runs code from the directory. Invariant: every listed tensor lies whole in
a file that exists, and a tensor that is read is finite.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from looptrt.errors import CheckpointError
from looptrt.models.files import read_json, shown
from looptrt.models.safetensors_header import TensorEntry, read_header
from looptrt.models.trtllm_config import RANK_NAME, check_ranks, family_config, is_trtllm_config

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_FLOATS = ("F32", "BF16", "F16", "F64")
_COARSE = ("BF16", "F16")  # a computed table in one of these is off by rounding
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CHUNK = 1 << 22  # elements looked at together, so that checks take no second copy

_logger = logging.getLogger(__name__)


class Naming(StrEnum):
    """Whose names a checkpoint's files and tensors have."""

    HF = "hf"
    TRTLLM = "trtllm"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; nothing but headers has been read.

    Attributes:
        directory: where it lies.
        config: the family's config: config.json as it stands, or its `hf_config`.
        listing: the file that says which tensors there are (for messages).
        tensors: {name: where it lies} of every tensor in every file.
        config_path: where the config was read.
        naming: whose names the tensors have.
    """

    directory: Path
    config: dict[str, Any]
    listing: Path
    tensors: dict[str, TensorEntry]
    config_path: Path
    naming: Naming

    @staticmethod
    def open(directory: Path) -> Checkpoint:
        """Open a directory and check every file's header against its size.

        Raises:
            CheckpointError: the directory, config.json or a weight file is missing, cut, a
                Git LFS pointer or malformed, the index disagrees with the files, the
                weights are only there as pickles, or they are split over ranks.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such checkpoint directory")
        described = Checkpoint.describe(directory / CONFIG_NAME)
        if described.naming is Naming.TRTLLM:
            check_ranks(directory)
            listing = directory / RANK_NAME
        else:
            listing = _listing_of(directory)
        tensors = _read_index(listing) if listing.name == INDEX_NAME else read_header(listing)
        return replace(described, listing=listing, tensors=tensors)

    @staticmethod
    def describe(config_path: Path) -> Checkpoint:
        """A checkpoint without tensors: what its config says.

        Raises:
            CheckpointError: the file is missing, malformed, an engine directory's, or
                describes weights that are split over ranks or quantised.
        """
        config = read_json(config_path)
        if "pretrained_config" in config and "build_config" in config:
            raise CheckpointError(
                f"{config_path}: expected a checkpoint's config, found an engine directory's"
            )
        naming = Naming.TRTLLM if is_trtllm_config(config) else Naming.HF
        if naming is Naming.TRTLLM:
            config = family_config(config, config_path)
        if "auto_map" in config:
            _logger.info("%s: auto_map names code; it is not executed", config_path)
        return Checkpoint(config_path.parent, config, config_path, {}, config_path, naming)

    @property
    def architecture(self) -> str:
        """The one architecture name that config.json gives.

        Raises:
            CheckpointError: there is none, or several.
        """
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise CheckpointError(
                f"{self.config_path}: architectures: expected a list of one name, got "
                f"{shown(names)}"
            )
        return names[0]

    @property
    def declared_dtype(self) -> str:
        """The dtype config.json declares under `dtype` or `torch_dtype`.

        Raises:
            CheckpointError: neither key is there, they disagree, or the name is unusable.
        """
        found = {
            key: self.config[key]
            for key in ("dtype", "torch_dtype")
            if self.config.get(key) is not None
        }
        names: set[str] = set()
        for key, value in found.items():
            if not isinstance(value, str):
                raise CheckpointError(
                    f"{self.config_path}: {key}: expected a name, found {shown(value)}"
                )
            names.add(value.removeprefix("torch."))
        if not names:
            raise CheckpointError(
                f"{self.config_path}: neither dtype nor torch_dtype is set; choose with --dtype"
            )
        if len(names) > 1:
            raise CheckpointError(f"{self.config_path}: dtype keys disagree: {shown(found)}")
        return names.pop()

    def renamed(self, old: str, new: str) -> Checkpoint:
        """The same checkpoint, one of its tensors under another name."""
        tensors = {name: entry for name, entry in self.tensors.items() if name != old}
        return replace(self, tensors={**tensors, new: self.tensors[old]})

    def check(self, needed: Mapping[str, tuple[int, ...]], ignored: Iterable[str]) -> None:
        """Check that exactly the needed tensors are there, in float and in shape.

        Args:
            needed: {name: shape} of every tensor that the model takes.
            ignored: fnmatch patterns of further tensors that may be there: what the engine
                computes itself.

        Raises:
            CheckpointError: a tensor is missing, unknown, of another shape or not a float.
        """
        for name, shape in needed.items():
            self._check_one(name, shape)
        patterns = tuple(ignored)
        for name, entry in self.tensors.items():
            if name in needed:
                continue
            if not any(fnmatchcase(name, pattern) for pattern in patterns):
                raise CheckpointError(
                    f"{entry.file}: tensor {name!r}: unknown to {self.architecture}, "
                    f"expected only its {len(needed)} tensors and known extras"
                )
            _logger.log(
                logging.WARNING if entry.dtype in _COARSE else logging.INFO,
                "%s: tensor %r (%s) is not used, the engine has its own",
                entry.file,
                name,
                entry.dtype,
            )

    def _check_one(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.listing}: tensor {name!r}: missing, expected shape {list(shape)}; "
                f"found {len(self.tensors)} other tensors"
            )
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r}: expected shape {list(shape)}, "
                f"found {list(entry.shape)}"
            )
        if entry.dtype not in _FLOATS:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r}: expected one of {', '.join(_FLOATS)}, "
                f"found {entry.dtype}; quantised checkpoints are not supported"
            )

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor as it is stored; it maps the file and dies with its last reference.

        Raises:
            CheckpointError: the tensor has a NaN or an infinity, or the file changed since it
                was opened.
        """
        entry = self.tensors[name]
        try:
            with safe_open(entry.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(entry.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{entry.file}: tensor {entry.name!r}: {error}") from error
        for start, chunk in _chunks(tensor):
            bad = (~torch.isfinite(chunk)).nonzero()
            if len(bad):
                place = int(bad[0])
                raise CheckpointError(
                    f"{entry.file}: tensor {name!r}: expected finite values, found "
                    f"{float(chunk[place])} at flat index {start + place}"
                )
        return tensor

    def same_values(self, first: str, second: str) -> bool:
        """Whether two float tensors are equal in dtype, shape and every value."""
        one, other = self.tensors[first], self.tensors[second]
        if (one.dtype, one.shape) != (other.dtype, other.shape) or one.dtype not in _FLOATS:
            return False
        return torch.equal(self.read(first), self.read(second))


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Cast a finite tensor once.

    Returns:
        The tensor in `dtype` (itself if it has it), and the largest absolute error; an
        infinite error says that a value left the range of `dtype`.
    """
    if tensor.dtype == dtype:
        return tensor, 0.0
    result = tensor.to(dtype)
    error = 0.0
    for (_, before), (_, after) in zip(_chunks(tensor), _chunks(result), strict=True):
        error = max(error, float((before.double() - after.double()).abs().max()))
    return result, error


def _chunks(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    pieces = torch.split(tensor.reshape(-1), _CHUNK)
    return [(index * _CHUNK, piece) for index, piece in enumerate(pieces) if piece.numel()]


def _listing_of(directory: Path) -> Path:
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    if single.exists() and index.exists():
        raise CheckpointError(
            f"{directory}: both {SINGLE_NAME} and {INDEX_NAME} are there; remove the stale one"
        )
    names = sorted(path.name for path in directory.iterdir())
    if single.exists() or index.exists():
        for name in names:
            if name.endswith(_PICKLES):
                _logger.info("%s: ignored, the safetensors files are used", directory / name)
        return single if single.exists() else index
    raise CheckpointError(f"{directory}: {_why_no_weights(names)}")


def _why_no_weights(names: list[str]) -> str:
    expected = f"expected {SINGLE_NAME} or {INDEX_NAME}"
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return f"{expected}, found {', '.join(shards)} without an index"
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{expected}, found only {', '.join(pickles)}: pickles can run code and are not "
            "read; convert the checkpoint to safetensors"
        )
    return f"{expected}, found no weights"


def _read_index(index: Path) -> dict[str, TensorEntry]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index}: weight_map: expected an object of {{tensor: file}}")
    tensors: dict[str, TensorEntry] = {}
    for shard in sorted({_shard_name(index, name, shard) for name, shard in places.items()}):
        for name, entry in _read_shard(index, shard).items():
            if places.get(name) != shard:
                raise CheckpointError(
                    f"{entry.file}: tensor {name!r}: {index.name} places it in "
                    f"{places.get(name)!r}, found it in {shard!r}"
                )
            tensors[name] = entry
    for name, shard in places.items():
        if name not in tensors:
            raise CheckpointError(
                f"{index.parent / shard}: tensor {name!r}: {index.name} places it here, "
                "the file does not have it"
            )
    return tensors


def _shard_name(index: Path, tensor: str, shard: object) -> str:
    if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or "\0" in shard:
        raise CheckpointError(
            f"{index}: tensor {tensor!r}: expected a file name in the same directory, got "
            f"{shown(shard)}"
        )
    if not shard.endswith(".safetensors"):
        raise CheckpointError(
            f"{index}: tensor {tensor!r}: expected a .safetensors file, got {shown(shard)}"
        )
    return shard


def _read_shard(index: Path, shard: str) -> dict[str, TensorEntry]:
    path = index.parent / shard
    if not path.exists():
        raise CheckpointError(f"{path}: missing, but {index.name} names it")
    return read_header(path)
