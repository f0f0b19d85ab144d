"""rank0.safetensors: the model's tensors in the layout the engine reads.

Owns the file's layout and the model's fingerprint; leaves making the tensors to its caller.
Invariant: the file holds every tensor of the model once, and no more than one of them per
worker is in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from looptrt.builder.progress import progress
from looptrt.loop_spec import LoopSpec
from looptrt.models.blocks import stored_names

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_NAMES_OF_DTYPES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_ALIGNMENT = 256  # safetensors has no padding, so the order of the tensors aligns them
_HEADER_ALIGNMENT = 4096


@dataclass(frozen=True)
class Place:
    """Where a stored tensor lies in the file: its first byte and number of bytes."""

    begin: int
    num_bytes: int


@dataclass(frozen=True)
class WeightsLayout:
    """The file before its data: header bytes, and every tensor's stand-in and place.

    Attributes:
        tensors: {stored name: tensor on the meta device}, in the order of the file.
    """

    header: bytes
    tensors: dict[str, torch.Tensor]
    places: dict[str, Place]

    @staticmethod
    def of(model: nn.Module) -> WeightsLayout:
        """Lay out a model's tensors."""
        state = model.state_dict()
        return WeightsLayout.of_tensors(
            {name: state[name] for name in set(stored_names(model).values())}
        )

    @staticmethod
    def of_tensors(tensors: Mapping[str, torch.Tensor]) -> WeightsLayout:
        """Lay out tensors, of which only names, shapes and dtypes are looked at.

        Each begins at a multiple of the largest power of two in its size, up to 256: sizes
        with larger powers come first, then names decide.
        """
        order = sorted(tensors, key=lambda name: (-_alignment(tensors[name].nbytes), name))
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in order:
            end = offset + tensors[name].nbytes
            entries[name] = {
                "dtype": _NAMES_OF_DTYPES[tensors[name].dtype],
                "shape": list(tensors[name].shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(entries, separators=(",", ":"))
        length = -(-(len(text) + 8) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT - 8
        header = length.to_bytes(8, "little") + text.encode().ljust(length)
        places, begin = {}, len(header)
        for name in order:
            places[name] = Place(begin, tensors[name].nbytes)
            begin += tensors[name].nbytes
        return WeightsLayout(header, {name: tensors[name] for name in order}, places)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(place.num_bytes for place in self.places.values())


def _alignment(num_bytes: int) -> int:
    return min(num_bytes & -num_bytes, _ALIGNMENT)


def write_weights(
    make: Callable[[str], torch.Tensor], layout: WeightsLayout, path: Path, workers: int
) -> dict[str, str]:
    """Make every tensor and write it to its place.

    Args:
        make: {stored name} to the tensor in its final dtype; called from several threads.
        layout: the file's layout.
        path: the file to write.
        workers: threads.

    Returns:
        {stored name: SHA-256 of its bytes}.
    """
    with path.open("wb") as file, progress("weights", len(layout.places)) as advance:
        file.write(layout.header)
        file.flush()

        def convert(name: str) -> str:
            data = _bytes_of(make(name))
            _write_at(file.fileno(), data, layout.places[name].begin)
            advance(1)
            return hashlib.sha256(data).hexdigest()

        with ThreadPoolExecutor(workers) as pool:
            futures = {name: pool.submit(convert, name) for name in layout.places}
            try:
                return {name: future.result() for name, future in futures.items()}
            finally:
                pool.shutdown(cancel_futures=True)


def fingerprint(
    spec: LoopSpec, layout: WeightsLayout, digests: Mapping[str, str], names: Iterable[str]
) -> str:
    """SHA-256 over a model: its spec and the named weights; of the flags only dtype counts."""
    weights = {
        name: [str(layout.tensors[name].dtype), list(layout.tensors[name].shape), digests[name]]
        for name in names
    }
    text = json.dumps({"spec": spec.to_json(), "weights": weights}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.data


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
