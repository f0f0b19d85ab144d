"""Casts of checkpoint tensors: each done once, and what they cost.

Owns the cast on the way from a checkpoint and the record of its error; leaves the arithmetic
to `looptrt.models.checkpoint`. Invariant: a value that leaves the range of the new dtype is
refused, never turned into an infinity.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from looptrt.errors import CheckpointError
from looptrt.models.checkpoint import Checkpoint, cast
from looptrt.models.family import WeightRecipe, fuse

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Cast:
    """What casting one checkpoint tensor cost."""

    from_dtype: torch.dtype
    to_dtype: torch.dtype
    error: float


class CastLog:
    """Reads tensors in a dtype and remembers the casts; several threads may use one."""

    def __init__(self) -> None:
        self._casts: dict[str, _Cast] = {}

    def read(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        """Read a tensor, cast to `dtype` if one is given.

        Raises:
            CheckpointError: a value is not finite or beyond the range of `dtype`.
        """
        stored = checkpoint.read(name)
        if dtype is None or stored.dtype == dtype:
            return stored
        result, error = cast(stored, dtype)
        if math.isinf(error):
            raise CheckpointError(
                f"{checkpoint.tensors[name].file}: tensor {name!r}: a value is beyond the range "
                f"of {dtype}"
            )
        self._casts[name] = _Cast(stored.dtype, dtype, error)
        return result

    def fused(
        self, checkpoint: Checkpoint, recipe: WeightRecipe, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """Make a stored tensor of a checkpoint's tensors.

        Raises:
            CheckpointError: as for `read`, or no dtype is given and the parts differ in theirs.
        """
        parts = [self.read(checkpoint, name, dtype) for name in recipe.sources]
        if len({part.dtype for part in parts}) > 1:
            raise CheckpointError(
                f"{checkpoint.listing}: {', '.join(map(repr, recipe.sources))}: expected one "
                f"dtype, as they make one tensor, found {[str(part.dtype) for part in parts]}; "
                "choose with --dtype"
            )
        return fuse(recipe, parts)

    def report(self) -> None:
        """Log the casts, a line for each dtype that was cast from."""
        for from_dtype in sorted({item.from_dtype for item in self._casts.values()}, key=str):
            mine = {
                name: item for name, item in self._casts.items() if item.from_dtype == from_dtype
            }
            worst = max(mine, key=lambda name: (mine[name].error, name))
            _logger.warning(
                "cast %d tensors from %s to %s, largest error %.3g in %r",
                len(mine),
                from_dtype,
                mine[worst].to_dtype,
                mine[worst].error,
                worst,
            )


def unfuse(recipe: WeightRecipe, stored: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The reverse of `fuse`: a stored tensor as the checkpoint tensors it is made of."""
    rows = [shape[0] for shape in recipe.hf_shapes]
    joined = stored.reshape(sum(rows), *recipe.hf_shapes[0][1:])
    return dict(zip(recipe.sources, torch.split(joined, rows), strict=True))
