"""KV pools between guard bytes, integer tensors and bitwise comparison for operator tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GUARD_BYTES = 4096
GUARD_VALUE = 0xA5

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True)
class Pool:
    """A KV pool with guards on both sides.

    Attributes:
        memory: all bytes, guards included.
        units: [num_units, *unit_shape] view of the pool.
        kv_pool: [2] int64 operand.
    """

    memory: Tensor
    units: Tensor
    kv_pool: Tensor

    @staticmethod
    def of(num_units: int, unit_shape: tuple[int, ...], dtype: torch.dtype) -> Pool:
        """A pool full of NaN."""
        num_bytes = num_units * math.prod(unit_shape) * dtype.itemsize
        memory = torch.full((num_bytes + 2 * GUARD_BYTES,), GUARD_VALUE, dtype=torch.uint8)
        inside = memory[GUARD_BYTES:-GUARD_BYTES]
        units = inside.view(dtype).view(num_units, *unit_shape).fill_(math.nan)
        return Pool(memory, units, torch.tensor([inside.data_ptr(), num_units]))

    def assert_guards_intact(self) -> None:
        """Nothing was written outside the pool."""
        assert (self.memory[:GUARD_BYTES] == GUARD_VALUE).all()
        assert (self.memory[-GUARD_BYTES:] == GUARD_VALUE).all()


def int32(*values: object) -> Tensor:
    """An int32 tensor of numbers or nested lists."""
    return torch.tensor(*values, dtype=torch.int32)


def bits(x: Tensor) -> Tensor:
    """Float values as integers, so that -0.0 and NaN count."""
    return x.contiguous().view(_BITS[x.dtype])


def assert_bitwise(got: Tensor, want: Tensor) -> None:
    """Same dtype, shape and bits; reports the first difference."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    wrong = (bits(got) != bits(want)).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{len(wrong)} of {got.numel()} differ, first at {first}: {got[first]!r} "
            f"({bits(got)[first]:#x}), want {want[first]!r} ({bits(want)[first]:#x})"
        )
