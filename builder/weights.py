"""rank0.safetensors: the checkpoint's tensors in the layout the engine reads.

Owns the file's layout, the one cast to the engine's dtype and the model's fingerprint;
leaves what is fused with what to the families' recipes. Invariant: the file holds every
tensor of the model once, and no more than one of them per worker is in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from looptrt.builder.progress import progress
from looptrt.errors import CheckpointError
from looptrt.loop_spec import LoopSpec
from looptrt.models.blocks import stored_names
from looptrt.models.checkpoint import Checkpoint, cast
from looptrt.models.family import WeightRecipe, fuse

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 256  # safetensors has no padding, so the order of the tensors aligns them
_HEADER_ALIGNMENT = 4096

_logger = logging.getLogger(__name__)


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
        """Lay out a model's tensors.

        Each begins at a multiple of the largest power of two in its size, up to 256: sizes
        with larger powers come first, then names decide.
        """
        state = model.state_dict()
        tensors = {name: state[name] for name in set(stored_names(model).values())}
        order = sorted(tensors, key=lambda name: (-_alignment(tensors[name].nbytes), name))
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in order:
            end = offset + tensors[name].nbytes
            entries[name] = {
                "dtype": _STORED_DTYPES[tensors[name].dtype],
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


@dataclass(frozen=True)
class _Cast:
    """What casting one checkpoint tensor cost."""

    source: str
    from_dtype: torch.dtype
    to_dtype: torch.dtype
    error: float


def _alignment(num_bytes: int) -> int:
    return min(num_bytes & -num_bytes, _ALIGNMENT)


def write_weights(
    checkpoint: Checkpoint,
    recipes: Mapping[str, WeightRecipe],
    tables: Mapping[str, torch.Tensor],
    layout: WeightsLayout,
    path: Path,
    workers: int,
) -> dict[str, str]:
    """Convert every tensor of a checked checkpoint and write it to its place.

    Args:
        checkpoint: the source.
        recipes: {stored name: recipe} of the tensors that come from the checkpoint.
        tables: the other stored tensors, computed.
        layout: the file's layout; its names are those of recipes and tables.
        path: the file to write.
        workers: threads.

    Returns:
        {stored name: SHA-256 of its bytes}.

    Raises:
        CheckpointError: a tensor has a NaN or infinity, or does not fit the dtype.
    """
    with path.open("wb") as file, progress("weights", len(layout.places)) as advance:
        file.write(layout.header)
        file.flush()

        def convert(name: str) -> tuple[str, list[_Cast]]:
            casts: list[_Cast] = []
            if name in tables:
                tensor = tables[name]
            else:
                tensor, casts = _fused(checkpoint, recipes[name], layout.tensors[name].dtype)
            data = _bytes_of(tensor)
            _write_at(file.fileno(), data, layout.places[name].begin)
            advance(1)
            return hashlib.sha256(data).hexdigest(), casts

        with ThreadPoolExecutor(workers) as pool:
            futures = {name: pool.submit(convert, name) for name in layout.places}
            try:
                results = {name: future.result() for name, future in futures.items()}
            finally:
                pool.shutdown(cancel_futures=True)
    _log_casts([item for _, casts in results.values() for item in casts])
    return {name: digest for name, (digest, _) in results.items()}


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


def _fused(
    checkpoint: Checkpoint, recipe: WeightRecipe, dtype: torch.dtype
) -> tuple[torch.Tensor, list[_Cast]]:
    """A fused tensor, and the casts of its sources."""
    parts, casts = [], []
    for source in recipe.sources:
        stored = checkpoint.read(source)
        part, error = cast(stored, dtype)
        if math.isinf(error):
            raise CheckpointError(
                f"{checkpoint.tensors[source].file}: tensor {source!r}: a value is beyond the "
                f"range of {dtype}"
            )
        if stored.dtype != dtype:
            casts.append(_Cast(source, stored.dtype, dtype, error))
        parts.append(part)
    return fuse(recipe, parts), casts


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.data


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _log_casts(casts: list[_Cast]) -> None:
    for from_dtype in sorted({item.from_dtype for item in casts}, key=str):
        mine = [item for item in casts if item.from_dtype == from_dtype]
        worst = max(mine, key=lambda item: item.error)
        _logger.warning(
            "cast %d tensors from %s to %s, largest error %.3g in %r",
            len(mine),
            from_dtype,
            worst.to_dtype,
            worst.error,
            worst.source,
        )
