"""`packed_plane_attention` on CUDA: `attention_cases` at its sizes, and what only a GPU can do.

A test, as most checks there, says which one-line change of a kernel makes it fail.
"""

from __future__ import annotations

import math

import pytest
import torch

from looptrt.plugins import launch
from tests.plugins.attention_cases import (
    CHECKS,
    LONG_CHECKS,
    Check,
    many_sequences_decode_as_one_does,
)
from tests.plugins.attention_world import PLACE, PLANE, Geometry, Rows, World, span
from tests.plugins.pools import assert_bitwise, int32

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# Every kernel: tensor cores at 64, 96, 128; groups of 1, 2, 8, 16 and 20 heads; the generic one; so
# many heads that the larger prompts fill a GPU, for which sm_90a has a kernel of its own.
GEOMETRIES = [
    Geometry(4, 4, 128),
    Geometry(4, 2, 128, page_size=32, max_pages=32, dtype=F16),
    Geometry(5, 5, 96),
    Geometry(8, 1, 96, page_size=64, max_pages=16, dtype=F16),
    Geometry(4, 4, 64, page_size=128, max_pages=8),
    Geometry(16, 1, 64, page_size=7, max_pages=150, dtype=F16),
    Geometry(20, 1, 128),
    Geometry(72, 72, 128),
    Geometry(72, 36, 96, dtype=F16),
    Geometry(4, 2, 32, dtype=F32),
    Geometry(3, 3, 8, page_size=5, max_pages=200),
    Geometry(6, 2, 80, dtype=F16),
    Geometry(2, 2, 256),
]
FAST = [g for g in GEOMETRIES if g.head_dim in (64, 96, 128)]


def named(geometry: Geometry) -> str:
    kind = str(geometry.dtype).removeprefix("torch.")
    return f"{geometry.num_heads}:{geometry.num_kv_heads}x{geometry.head_dim}-{kind}"


by_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=named)
by_fast_geometry = pytest.mark.parametrize("geometry", FAST, ids=named)


@by_geometry
@pytest.mark.parametrize("check", [*CHECKS, *LONG_CHECKS], ids=lambda check: check.__name__)
def test_every_kernel_keeps_its_promises(check: Check, geometry: Geometry) -> None:
    check(World, geometry)


def test_300_sequences_decode_as_one_does() -> None:
    many_sequences_decode_as_one_does(World, Geometry(4, 4, 64, page_size=32), count=300)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_64k_positions(dtype: torch.dtype) -> None:
    """Fails with the unit's offset in 32 bits, or a fold of only the first eight splits."""
    geometry = Geometry(4, 2, 128, page_size=32, max_pages=2048, max_slots=2, dtype=dtype)
    world = World(geometry)
    world.fill(1, 65_535)
    chunk = world.check([(1, span(65_300, 65_460))], sample=6)
    one = world.check([(1, [65_400])])
    assert_bitwise(chunk[100], one[0])
    world.check([(1, [65_535]), (0, [0])])


def test_a_pool_beyond_two_to_the_31_elements() -> None:
    """Fails with the unit's offset in 32 bits."""
    geometry = Geometry(2, 2, 128, page_size=128, max_pages=9, max_slots=1300)
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of GPU memory")
    world = World(geometry)
    assert world.pool.numel() > 2**31
    slot = int(world.table[:, PLACE["row"] + PLANE, 0].argmax())
    world.check([(slot, span(0, 200))])
    world.check([(slot, [200])])


def test_the_same_call_gives_the_same_bits_again_and_again() -> None:
    """Fails without the barrier between two tiles (a race)."""
    geometry = Geometry(16, 16, 128, max_pages=160, max_slots=8)
    world = World(geometry)
    for slot in range(8):
        world.fill(slot, 2000 + 60 * slot)
    decode = [(slot, [2000 + 60 * slot]) for slot in range(8)]
    prefill = [(slot, span(1000, 1400)) for slot in range(4)]
    for rows in (decode, prefill):
        qkv = world.qkv_of(rows)
        want = world.step(rows, qkv)
        for _ in range(50):
            assert_bitwise(world.step(rows, qkv), want)


@by_fast_geometry
def test_a_captured_call_replays_on_new_values(geometry: Geometry) -> None:
    """Fails with a value of the device read on the host: positions, table, pool or plane."""
    world, eager = World(geometry), World(geometry, seed=4)
    for one in (world, eager):
        one.fill(1, 300)
        one.fill(2, 20)
    rows: Rows = [(1, [300]), (2, [20]), (3, [])]
    operands = world.operands(rows)
    world.call(*operands, **geometry.attributes)
    eager.step(rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended = world.call(*operands, **geometry.attributes)
    for step in range(1, 40):
        rows = [(1, [300 + step]), (2, [20 + step]), (3, [])]
        if step == 20:
            world.table[1] = world.table[1].flip(-1)
            world.pool[:] = math.nan
            world.fill(1, 320)
            world.fill(2, 40)
            eager.fill(1, 320)
            eager.fill(2, 40)
        for operand, value in zip(operands[:4], world.operands(rows)[:4], strict=True):
            operand.copy_(value)
        graph.replay()
        assert_bitwise(attended, eager.step(rows))


@by_fast_geometry
@pytest.mark.parametrize("reach", [120, 400], ids=["one split", "several splits"])
def test_calls_in_a_row_read_what_was_written_just_before(geometry: Geometry, reach: int) -> None:
    """Fails if a kernel that writes the pool or the table lets the next one start before its end.

    One row a call, whose kernel may then start early; each call's table entry comes just before it.
    """
    sizes = geometry.reaching(reach, page_size=8)
    world, alone = World(sizes), World(sizes)
    first = reach - 60
    rows: list[Rows] = [[(1, [position])] for position in range(first, reach)]
    for one in (world, alone):
        one.fill(1, first)
    want = torch.stack([alone.step(row) for row in rows])
    operands = [world.operands(row) for row in rows]
    table = world.table[1].clone()
    pages = [int32([position // 8]).cuda() for position in range(first, reach)]
    units = [table[:, page.item()][None].contiguous() for page in pages]
    slot, later = int32([1]).cuda(), slice((first + 7) // 8, None)
    stored = world.pool.clone()
    world.call(*operands[0], **sizes.attributes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended = []
        for operand, page, unit in zip(operands, pages, units, strict=True):
            launch.update_tables(world.table, slot, page, unit)
            attended.append(world.call(*operand, **sizes.attributes))
    for _ in range(20):
        world.table[1, :, later] = 0
        world.pool[:] = stored
        graph.replay()
        assert_bitwise(torch.stack(attended), want)
    assert_bitwise(world.pool, alone.pool)
