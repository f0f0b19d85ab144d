"""`packed_plane_attention` on CUDA against float64, its promise about bits, and what it touches.

Each test says which one-line change of a kernel makes it fail.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from looptrt.errors import PluginError
from tests.plugins.attention_cases import PLACE, PLANE, Geometry, Rows, World, span
from tests.plugins.pools import assert_bitwise, bits, int32

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# Every kernel: tensor cores at 64, 96, 128; groups of 1, 2, 8, 16 and 20 heads; the generic one.
GEOMETRIES = [
    Geometry(4, 4, 128),
    Geometry(4, 2, 128, page_size=32, max_pages=32, dtype=F16),
    Geometry(5, 5, 96),
    Geometry(8, 1, 96, page_size=64, max_pages=16, dtype=F16),
    Geometry(4, 4, 64, page_size=128, max_pages=8),
    Geometry(16, 1, 64, page_size=7, max_pages=150, dtype=F16),
    Geometry(20, 1, 128),
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
def test_prefill_chunks_and_decode_match_float64(geometry: Geometry) -> None:
    """Fails with `>=` for `>` in a mask, or a tile left out at a split's end."""
    world = World(geometry)
    world.check([(3, span(0, 530)), (0, []), (2, span(0, 71)), (4, span(0, 3))])
    world.check([(0, span(0, 140)), (3, [530]), (2, span(71, 75)), (4, []), (1, [0])])
    world.check([(3, [531]), (2, [75]), (0, [140]), (4, [3]), (1, [1])])
    world.check([(3, span(532, 830)), (4, [4])])
    world.check([(4, [5]), (3, [830])])


@by_geometry
def test_a_row_s_bits_do_not_depend_on_its_call(geometry: Geometry) -> None:
    """Chunks, neighbours, pages and kernels: fails if a split is summed on from the last one.

    (In the prefill kernel: leave out `foldSplit` at a split's end.)
    """
    num_tokens = 700
    whole = World(geometry)
    want = whole.step([(1, span(0, num_tokens))])
    chunked = World(geometry, seed=1)
    cuts = [0, 1, 2, 5, 17, 63, 64, 65, 130, 255, 256, 257, 320, 512, 513, 690, 700]
    for begin, end in itertools.pairwise(cuts):
        # A neighbour with many rows, or none: both ways of storing K and V.
        rows: Rows = [(1, span(begin, end))]
        if begin % 2:
            rows = [(5, span(0, 40)), *rows, (0, [])]
        first = 40 if begin % 2 else 0
        got = chunked.step(rows)[first : first + end - begin]
        assert_bitwise(got, want[begin:end])
    for position in (*range(0, num_tokens, 37), 255, 256, 699):
        assert_bitwise(whole.step([(1, [position])])[0], want[position])


@by_fast_geometry
def test_page_size_changes_no_bits(geometry: Geometry) -> None:
    """Fails with tiles that start at a page instead of at a multiple of 64."""
    rows = [(2, span(0, 400)), (1, [0])]
    want = World(geometry).step(rows)
    sizes = {**vars(geometry), "page_size": 24, "max_pages": 40}
    assert_bitwise(World(Geometry(**sizes), seed=3).step(rows), want)


def test_many_sequences_decode_as_one_does() -> None:
    """More sequences than a round of the decode kernel holds; fails with `base` left out."""
    geometry = Geometry(4, 4, 64, page_size=32, max_pages=12, max_slots=300)
    lengths = [(37 * slot) % 380 for slot in range(300)]
    world = World(geometry)
    for slot, length in enumerate(lengths):
        world.fill(slot, length)
    batch = [(slot, [length]) for slot, length in enumerate(lengths)]
    got = world.check(batch, sample=1)
    for slot in (0, 1, 126, 127, 128, 129, 255, 256, 299):
        assert_bitwise(got[slot], world.step([batch[slot]])[0])
    kept = [entry if entry[0] % 3 else (entry[0], []) for entry in batch]
    assert_bitwise(world.step(kept), got[[slot for slot in range(300) if slot % 3]])


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


@by_geometry
def test_rows_with_gaps_attend_to_every_earlier_token(geometry: Geometry) -> None:
    """Fails with a row's position taken from its place in the call."""
    world = World(geometry)
    world.step([(1, span(0, 600)), (2, span(0, 100))])
    world.check([(1, [2, 5, 63, 64, 256, 400, 599])])
    many = [*range(0, 600, 3)]
    world.check([(1, many), (2, [4, 99])])
    want = world.step([(1, span(0, 600))])
    assert_bitwise(world.step([(1, many)]), want[many])


@by_geometry
def test_nan_of_a_later_token_reaches_no_earlier_row(geometry: Geometry) -> None:
    """Fails with V multiplied by a weight of 0 instead of left out (no `removeNonFinite`)."""
    for count in (6, 300):
        rows = [(1, span(0, count)), (2, span(0, count))]
        world = World(geometry)
        clean = world.qkv_of(rows)
        want = world.step(rows, clean)
        keys = geometry.num_heads * geometry.head_dim
        values = keys + geometry.num_kv_heads * geometry.head_dim
        # K's NaN alone would hide whether V's is left out.
        cases = itertools.product(((4, math.nan), (count - 2, math.inf)), (keys, values))
        for (bad, value), first in cases:
            poisoned = clean.clone()
            poisoned[bad, first:] = value
            got = World(geometry, seed=2).step(rows, poisoned)
            seeing = torch.zeros(2 * count, dtype=torch.bool, device="cuda")
            seeing[bad:count] = True
            assert not got[seeing].isfinite().any()
            assert_bitwise(got[~seeing], want[~seeing])


@by_geometry
def test_only_the_places_of_new_tokens_are_written(geometry: Geometry) -> None:
    """Fails with the slot or the plane left out of the address."""
    for rows in ([(1, span(0, 200)), (3, [0])], [(1, [0]), (3, [0])]):
        world = World(geometry)
        qkv = world.qkv_of(rows)
        before = world.snapshot()
        world.step(rows, qkv)
        split = geometry.num_heads * geometry.head_dim
        kv = bits(qkv[:, split:]).view(-1, 2, geometry.num_kv_heads, geometry.head_dim)
        first = 0
        for slot, positions in rows:
            where = torch.tensor(positions, device="cuda")
            units = world.table[slot, PLACE["row"] + PLANE].long()[where // geometry.page_size]
            before[units, PLACE["slot"], :, where % geometry.page_size] = kv[
                first : first + len(positions)
            ]
            first += len(positions)
        assert torch.equal(bits(world.pool), before)


@by_geometry
@pytest.mark.parametrize("live", [3, 5])
def test_padded_rows_touch_no_unit_and_no_live_row(geometry: Geometry, live: int) -> None:
    """Case C13: fails with a write to unit 0, or to the unit that -1 or the pool's end names."""
    world = World(geometry)
    rows = [(slot, [40 + slot]) for slot in range(live)]
    for slot in range(live):
        world.fill(slot, 40 + slot)
    # The pool's last unit belongs to a live sequence.
    last = int((world.table[0, PLACE["row"] + PLANE, 0]).item())
    world.table[world.table == len(world.pool) - 1] = last
    world.pool[-1] = world.pool[last]
    world.table[0, PLACE["row"] + PLANE, 0] = len(world.pool) - 1
    alone = world.step(rows)
    after = world.snapshot()
    padding = [(5, [p]) for p in (0, 7, 0)]
    for unit in (0, len(world.pool), -1, 2**31 - 1, -(2**31)):
        world.table[5] = unit
        for more in ([], [(5, span(0, 60))]):
            call = [*rows, *padding, *more]
            for filling in (math.nan, 0.5):  # a NaN written over the pool's NaN would not show
                qkv = world.qkv_of(call)
                qkv[live:] = filling
                got = world.step(call, qkv)
                assert_bitwise(got[:live], alone)
                assert torch.equal(bits(world.pool), after)


def test_what_is_out_of_range_gives_nan_and_writes_nothing() -> None:
    """Fails with a clamp in place of the check in `isPosition` or `tableOf`."""
    world = World(Geometry())
    world.step([(1, span(0, 40))])
    before = world.snapshot()
    end = world.geometry.max_pages * world.geometry.page_size
    changes: list[tuple[int, Tensor]] = [
        (1, int32([-1])),
        (1, int32([end])),
        (3, int32([6])),
        (3, int32([-1])),
        (6, int32([2])),
        (6, int32([-2])),
    ]
    for index, value in changes:
        operands = world.operands([(1, [40])])
        operands[index] = value.cuda()
        got = world.call(*operands, **world.geometry.attributes)
        assert got.isnan().all(), (index, value)
        assert torch.equal(bits(world.pool), before)
    two = world.operands([(1, [-1, 39]), (2, [])])
    got = world.call(*two, **world.geometry.attributes)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()
    operands = world.operands([(1, [40])])
    operands[5] = torch.zeros(2, dtype=torch.int64, device="cuda")
    assert world.call(*operands, **world.geometry.attributes).isfinite().all()


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


def test_no_rows_is_a_call_too() -> None:
    world = World(Geometry())
    assert world.step([(1, []), (2, [])]).shape == (0, 512)


def test_what_the_kernel_cannot_serve_is_refused_by_name() -> None:
    for sizes in ({"head_dim": 12}, {"head_dim": 264}, {"num_heads": 4, "num_kv_heads": 3}):
        world = World(Geometry(**sizes))
        with pytest.raises(PluginError, match="packed_plane_attention: cudaErrorInvalidValue"):
            world.step([(1, [0])])
    world = World(Geometry())
    operands = world.operands([(1, [0])])
    for change in ({"slot": 2}, {"slot": -1}, {"scale": 0.0}, {"scale": math.nan}):
        with pytest.raises(PluginError, match="packed_plane_attention: cudaErrorInvalidValue"):
            world.call(*operands, **(world.geometry.attributes | change))
