"""Sizes of the emulated attention, and the check that only its machine can make.

Leaves what every kernel is held to, here and on a GPU, to `tests.plugins.attention_cases`.
"""

from __future__ import annotations

from functools import partial

import torch

from looptrt.plugins import launch
from tests.emulator.emulated import Emulated
from tests.plugins.attention_world import Geometry, Rows, World, span
from tests.plugins.pools import assert_bitwise

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def geometry(
    num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> Geometry:
    return Geometry(num_heads, num_kv_heads, head_dim, page_size, dtype=dtype, device="cpu")


# Tensor cores: every head_dim, MHA and GQA, a group of more than 16 heads, pages that tiles cross.
FAST = (
    geometry(2, 2, 64, 16, BF16),
    geometry(4, 1, 128, 32, F16),
    geometry(2, 2, 96, 7, BF16),
    geometry(18, 1, 64, 64, F16),
)
GENERIC = (geometry(2, 1, 16, 16, F32), geometry(3, 3, 80, 5, BF16))

new_world = partial(World, call=launch.packed_plane_attention)


def a_chain_reads_what_it_stored(library: Emulated, sizes: Geometry) -> None:
    """Calls whose kernels start before the call that stores their keys has ended.

    With a table of one split nothing is folded: the decode kernel is a call's last.
    """
    for prompt in (60, 140):
        calls: list[Rows] = [
            [(1, span(0, prompt)), (2, [0])],
            [(1, [prompt]), (2, [1])],
            [(2, span(2, 30)), (1, span(prompt + 1, prompt + 30))],
            [(2, [30]), (1, [prompt + 30])],
        ]
        table = sizes.reaching(prompt + 40)
        alone, chained = new_world(table), new_world(table)
        want = [alone.step(rows) for rows in calls]
        with library.overlapping():
            got = [chained.step(rows) for rows in calls]
        for one, other in zip(got, want, strict=True):
            assert_bitwise(one, other)
        assert_bitwise(chained.pool, alone.pool)
