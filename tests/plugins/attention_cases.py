"""What every kernel of `packed_plane_attention` is held to, on a GPU and on the emulated machine.

Owns the calls and what is compared with what; leaves sizes, how a call is made and what only one
machine can do to `test_cuda_attention` and `tests/emulator`. Invariant: a check takes a way to make
a `World` and sizes, and asks for as long a table as it needs: one added to `CHECKS` or
`LONG_CHECKS` runs on both. Where it says "fails with", that one-line change of a kernel is found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from looptrt.errors import PluginError
from looptrt.plugins import reference
from tests.plugins.attention_world import PLACE, PLANE, Geometry, NewWorld, Rows, World, span
from tests.plugins.pools import assert_bitwise, bits, int32

Check = Callable[[NewWorld, Geometry], None]

_REACH = 640  # positions of a table, unless a check needs more


def results_are_near_float64(new: NewWorld, sizes: Geometry) -> None:
    """Prefill and decode, split and not, mixed in a call, with cached prefixes and empty rows.

    Fails with `>=` for `>` in a mask, or a tile left out at a split's end.
    """
    world = new(sizes.reaching(_REACH))
    world.check([(1, span(0, 130)), (0, []), (2, [0])], sample=9)
    world.check([(1, [130]), (2, [1]), (0, [])])
    world.fill(3, 575)
    world.check([(3, [575]), (1, [131]), (2, [2])])
    world.check([(3, [576, 577]), (1, [132])])
    world.check([(1, span(133, 152)), (3, span(578, 600))], sample=5)
    world.fill(4, 62)
    world.check([(4, [62]), (5, [])])  # one key of the tile is not there yet
    world.check([(4, span(63, 126))], sample=9)
    world.check([(4, span(126, 130)), (5, [0])])  # over a split's end
    # No more rows than sequences: the decode kernel takes all, here in more tiles than one.
    world.check([(4, span(130, 148)), *[(0, [])] * 18], sample=18)
    world.fill(5, 62)
    world.check([(5, span(62, 100))], sample=9)


def chunks_and_decode_of_longer_rows_are_near_float64(new: NewWorld, sizes: Geometry) -> None:
    world = new(sizes.reaching(840))
    world.check([(3, span(0, 530)), (0, []), (2, span(0, 71)), (4, span(0, 3))])
    world.check([(0, span(0, 140)), (3, [530]), (2, span(71, 75)), (4, []), (1, [0])])
    world.check([(3, [531]), (2, [75]), (0, [140]), (4, [3]), (1, [1])])
    world.check([(3, span(532, 830)), (4, [4])])
    world.check([(4, [5]), (3, [830])])


def bits_do_not_depend_on_the_call(new: NewWorld, sizes: Geometry) -> None:
    """Chunks, neighbours, pages, gaps and kernels.

    Fails if a split is summed on from the last one: in the prefill kernel, without `foldSplit` at a
    split's end.
    """
    # Tiles of 8, 9 and 16 rows and more, and of rows on both sides of a split's end.
    cuts = (0, 1, 2, 5, 17, 26, 62, 63, 64, 65, 126, 129, 137, 153, 255, 256, 257, 280)
    whole = _chunks_have_the_bits_of_one_call(new, sizes.reaching(_REACH), cuts)
    want = whole.step([(1, span(0, 280))])
    for position in (0, 63, 64, 200, 255, 256, 279):
        assert_bitwise(whole.step([(1, [position])])[0], want[position])
    gaps = [*range(0, 280, 3)]
    assert_bitwise(whole.step([(1, gaps)]), want[gaps])


def bits_of_longer_rows_do_not_depend_on_the_call(new: NewWorld, sizes: Geometry) -> None:
    cuts = (0, 1, 2, 5, 17, 63, 64, 65, 130, 255, 256, 257, 320, 512, 513, 690, 700)
    whole = _chunks_have_the_bits_of_one_call(new, sizes.reaching(700), cuts)
    want = whole.step([(1, span(0, 700))])
    for position in (*range(0, 700, 37), 255, 256, 699):
        assert_bitwise(whole.step([(1, [position])])[0], want[position])


def _chunks_have_the_bits_of_one_call(new: NewWorld, sizes: Geometry, cuts: Sequence[int]) -> World:
    whole, chunked = new(sizes), new(sizes, 1)
    want = whole.step([(1, span(0, cuts[-1]))])
    for begin, end in itertools.pairwise(cuts):
        # A neighbour with many rows, or none: both ways of storing K and V.
        rows: Rows = [(1, span(begin, end))]
        first = 0
        if begin % 2:
            rows = [(5, span(0, 40)), *rows, (0, [])]
            first = 40
        assert_bitwise(chunked.step(rows)[first : first + end - begin], want[begin:end])
    return whole


def page_size_changes_no_bits(new: NewWorld, sizes: Geometry) -> None:
    """Fails with tiles that start at a page instead of at a multiple of 64."""
    rows = [(2, span(0, 400)), (1, [0])]
    want = new(sizes.reaching(400)).step(rows)
    assert_bitwise(new(sizes.reaching(400, page_size=24), 3).step(rows), want)


def twin_agrees(new: NewWorld, sizes: Geometry) -> None:
    """The CPU twin's pool, bit for bit, and its results within both bounds."""
    sizes = sizes.reaching(_REACH)
    kernel = new(sizes)
    twin = World(replace(sizes, device="cpu"), 0, reference.packed_plane_attention)
    for rows in ([(1, span(0, 70)), (2, [0])], [(1, [70]), (2, span(1, 20))]):
        qkv = kernel.qkv_of(rows)
        got, other = kernel.step(rows, qkv), twin.step(rows, qkv.cpu())
        _, bound = kernel.expect(rows, qkv)
        assert bool(((got.double() - other.to(got.device).double()).abs() <= 2 * bound).all())
        assert_bitwise(kernel.pool.cpu(), twin.pool)


def rows_with_gaps_attend_to_every_earlier_token(new: NewWorld, sizes: Geometry) -> None:
    """Fails with a row's position taken from its place in the call."""
    world = new(sizes.reaching(600))
    world.step([(1, span(0, 600)), (2, span(0, 100))])
    world.check([(1, [2, 5, 63, 64, 256, 400, 599])])
    many = [*range(0, 600, 3)]
    world.check([(1, many), (2, [4, 99])])
    want = world.step([(1, span(0, 600))])
    assert_bitwise(world.step([(1, many)]), want[many])


def later_nan_reaches_no_earlier_row(new: NewWorld, sizes: Geometry) -> None:
    """Fails with V multiplied by a weight of 0 instead of left out (no `removeNonFinite`).

    And with notes of a tile that are not cleared for a later one of the block, where it takes more
    sequences than one (the emulated machine's blocks do).
    """
    for count, num_sequences, bad in ((2, 2, 1), (4, 20, 2), (6, 20, 4), (70, 2, 4)):
        _later_nan_reaches_no_earlier_row(new, sizes, count, num_sequences, bad)
    for count in (4, 40):  # of a tile, one key alone is hidden from one row alone
        _later_nan_reaches_no_earlier_row(new, sizes, count, 2, bad=1, begin=62)


def later_nan_of_many_rows_reaches_no_earlier_one(new: NewWorld, sizes: Geometry) -> None:
    _later_nan_reaches_no_earlier_row(new, sizes, 300, 2, bad=4)


def _later_nan_reaches_no_earlier_row(
    new: NewWorld, sizes: Geometry, count: int, num_sequences: int, bad: int, begin: int = 0
) -> None:
    """Rows `bad` and the last but one of the first sequence; `begin` tokens are there before."""
    sizes = sizes.reaching(max(200, count), max_slots=num_sequences + 1)
    rows = [(slot, span(begin, begin + count)) for slot in range(1, 1 + num_sequences)]

    def filled(seed: int = 0) -> World:
        world = new(sizes, seed)
        for slot, _ in rows:
            world.fill(slot, begin)
        return world

    world = filled()
    clean = world.qkv_of(rows)
    want = world.step(rows, clean)
    keys = sizes.num_heads * sizes.head_dim
    values = keys + sizes.num_kv_heads * sizes.head_dim
    # K's NaN alone would hide whether V's is left out.
    cases = itertools.product(((bad, math.nan), (count - 2, math.inf)), (keys, values))
    for (row, number), first in cases:
        poisoned = clean.clone()
        poisoned[row, first:] = number
        got = filled(seed=2).step(rows, poisoned)
        seeing = torch.zeros(len(rows) * count, dtype=torch.bool, device=sizes.device)
        seeing[row:count] = True
        assert not got[seeing].isfinite().any()
        assert_bitwise(got[~seeing], want[~seeing])


def only_places_of_new_tokens_are_written(new: NewWorld, sizes: Geometry) -> None:
    """Fails with the slot or the plane left out of the address."""
    sizes = sizes.reaching(_REACH)
    for rows in ([(1, span(0, 200)), (3, [0])], [(1, [0]), (3, [0])], [(4, span(0, 3))]):
        world = new(sizes)
        qkv = world.qkv_of(rows)
        before = world.snapshot()
        world.step(rows, qkv)
        split = sizes.num_heads * sizes.head_dim
        kv = bits(qkv[:, split:]).view(-1, 2, sizes.num_kv_heads, sizes.head_dim)
        first = 0
        for slot, positions in rows:
            where = torch.tensor(positions, device=sizes.device)
            units = world.table[slot, PLACE["row"] + PLANE].long()[where // sizes.page_size]
            new_kv = kv[first : first + len(positions)]
            before[units, PLACE["slot"], :, where % sizes.page_size] = new_kv
            first += len(positions)
        assert torch.equal(bits(world.pool), before)


def null_units_hold_nothing(new: NewWorld, sizes: Geometry) -> None:
    """Rows that fill a graph up: units that do not exist are zeros and are not written (case C13).

    Fails with a write to unit 0, or to the unit that -1 or the pool's end names.
    """
    _null_units_hold_nothing(new, sizes, live=3)


def null_units_beside_more_rows_hold_nothing(new: NewWorld, sizes: Geometry) -> None:
    _null_units_hold_nothing(new, sizes, live=5)


def _null_units_hold_nothing(new: NewWorld, sizes: Geometry, live: int) -> None:
    world = new(sizes.reaching(200))
    rows = [(slot, [40 + slot]) for slot in range(live)]
    for slot in range(live):
        world.fill(slot, 40 + slot)
    _give_a_live_sequence_the_last_unit(world)
    alone = world.step(rows)
    after = world.snapshot()
    for unit in (0, len(world.pool), -1, 2**31 - 1, -(2**31)):
        world.table[5] = unit
        for more in ([], [(5, span(0, 60))]):
            call = [*rows, (5, [0]), (5, [7]), (5, [0]), *more]
            qkv = world.qkv_of(call)
            got = world.step(call, qkv)
            assert_bitwise(got[:live], alone)
            assert not got[live:].any()
            # Numbers show where they are written, NaN where it is read.
            assert torch.equal(bits(world.pool), after)
            qkv[live:] = math.nan
            assert_bitwise(world.step(call, qkv)[:live], alone)
            assert torch.equal(bits(world.pool), after)


def _give_a_live_sequence_the_last_unit(world: World) -> None:
    """Of the pool, for the first page of slot 0."""
    first = int(world.table[0, PLACE["row"] + PLANE, 0])
    world.table[world.table == len(world.pool) - 1] = first
    world.pool[-1] = world.pool[first]
    world.table[0, PLACE["row"] + PLANE, 0] = len(world.pool) - 1


def rows_of_no_sequence_are_left_alone(new: NewWorld, sizes: Geometry) -> None:
    """Behind cu_seqlens' end: their K and V go nowhere and the others' bits stay."""
    calls: list[Rows] = [
        [(1, [300]), (2, [40])],
        [(1, [300]), (2, [40]), (4, []), (5, [])],
        [(1, span(300, 340)), (2, [40])],
    ]
    for rows in calls:
        world = new(sizes.reaching(_REACH))
        world.fill(1, 300)
        world.fill(2, 40)
        want = world.step(rows)
        after = world.snapshot()
        for extra in (1, 30):
            operands = world.operands([*rows, (3, span(200, 200 + extra))])
            operands[2], operands[3] = operands[2][:-1].clone(), operands[3][:-1].clone()
            got = world.run(operands)
            assert_bitwise(got[: len(want)], want)
            untouched = torch.full_like(got[len(want) :], math.nan)
            assert_bitwise(got[len(want) :], untouched)
            assert torch.equal(bits(world.pool), after)


def rows_reach_the_end_of_the_table(new: NewWorld, sizes: Geometry) -> None:
    """The last position of the last page, in the table's last slot and row.

    Tables of one split, which nothing folds, and of two.
    """
    for num_positions in (100, 150):
        world = new(sizes.reaching(num_positions))
        end = world.geometry.max_pages * sizes.page_size
        slot = sizes.max_slots - 1
        world.fill(slot, end - 40)
        world.check([(slot, span(end - 40, end - 1)), (0, [0])], sample=5)
        world.check([(slot, [end - 1]), (0, [1])])
        world.check([(slot, span(end - 20, end)), (0, [1])], sample=5)


def out_of_range_gives_nan_and_writes_nothing(new: NewWorld, sizes: Geometry) -> None:
    """Fails with a clamp in place of the check in `isPosition` or `tableOf`."""
    sizes = sizes.reaching(_REACH)
    world = new(sizes)
    world.step([(1, span(0, 40))])
    before = world.snapshot()
    end = sizes.max_pages * sizes.page_size
    changes = [(1, -1), (1, end), (3, sizes.max_slots), (3, -1), (6, 2), (6, -2)]
    for index, value in changes:
        operands = world.operands([(1, [40])])
        operands[index] = int32([value]).to(sizes.device)
        assert world.run(operands).isnan().all(), (index, value)
        assert torch.equal(bits(world.pool), before)
    operands = world.operands([(1, [38, 39]), (2, [])])
    operands[1] = int32([-1, 39]).to(sizes.device)
    got = world.run(operands)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()
    operands = world.operands([(1, [40])])
    operands[5] = torch.zeros(2, dtype=torch.int64, device=sizes.device)
    assert world.run(operands).isfinite().all()


def many_sequences_decode_as_one_does(new: NewWorld, sizes: Geometry, count: int = 70) -> None:
    """More than a round of the decode kernel holds, some of them empty; fails without `base_`."""
    world = new(sizes.reaching(380, max_slots=count))
    lengths = [(37 * slot) % 380 for slot in range(count)]
    for slot, length in enumerate(lengths):
        world.fill(slot, length)
    batch = [(slot, [length]) for slot, length in enumerate(lengths)]
    got = world.check(batch, sample=1)
    for slot in {0, 1, 31, 32, 33, 63, 64, 126, 127, 128, 129, 255, 256, count - 1}:
        if slot < count:
            assert_bitwise(got[slot], world.step([batch[slot]])[0])
    kept = [entry if entry[0] % 3 else (entry[0], []) for entry in batch]
    assert_bitwise(world.step(kept), got[[slot for slot in range(count) if slot % 3]])


def decode_beside_prefill_is_as_alone(new: NewWorld, sizes: Geometry) -> None:
    """More sequences than a round holds, of one row and of many, and more rows than places for
    partial results; fails with another row's place, or another round's sequence.
    """
    count = 36
    world = new(sizes.reaching(360, max_slots=count))
    batch: list[tuple[int, list[int]]] = []
    for slot in range(count):
        length = 5 * slot if slot % 4 == 0 else 90 + 7 * slot
        world.fill(slot, length)
        batch.append((slot, span(length, length + (70 if slot % 4 == 0 else 1))))
    got = world.check(batch, sample=2)
    first = 0
    for slot, positions in batch:
        if slot in (1, 4, 31, 32, 35):
            alone = world.step([(slot, positions)])
            assert_bitwise(got[first : first + len(positions)], alone)
        first += len(positions)


def long_rows_are_near_float64(new: NewWorld, sizes: Geometry) -> None:
    """More splits than are folded at once, of three lengths; splits of more than two tiles."""
    world = new(sizes.reaching(4700, max_slots=3))
    world.fill(1, 4610)
    for position in (2175, 2176, 2240, 2303, 2304):  # ends of tiles, pairs of tiles and a split
        world.check([(1, [position])])
    decode = world.check([(1, [4610])])
    assert_bitwise(world.check([(1, span(4610, 4640))], sample=3)[:1], decode)


def no_rows_is_a_call_too(new: NewWorld, sizes: Geometry) -> None:
    world = new(sizes.reaching(_REACH))
    assert world.step([(1, []), (2, [])]).shape == (0, sizes.num_heads * sizes.head_dim)


def what_the_kernel_cannot_serve_is_refused_by_name(new: NewWorld, sizes: Geometry) -> None:
    refused = "packed_plane_attention: cudaErrorInvalidValue"
    for change in ({"head_dim": 12}, {"head_dim": 264}, {"num_heads": 4, "num_kv_heads": 3}):
        with pytest.raises(PluginError, match=refused):
            new(sizes.reaching(_REACH, **change)).step([(1, [0])])
    world = new(sizes.reaching(_REACH))
    operands = world.operands([(1, [0])])
    for attribute in ({"slot": 2}, {"slot": -1}, {"scale": 0.0}, {"scale": math.nan}):
        with pytest.raises(PluginError, match=refused):
            world.run(operands, **attribute)


# Of these the emulator's fast tier runs all, in one order each.
CHECKS: list[Check] = [
    results_are_near_float64,
    bits_do_not_depend_on_the_call,
    twin_agrees,
    later_nan_reaches_no_earlier_row,
    only_places_of_new_tokens_are_written,
    null_units_hold_nothing,
    rows_of_no_sequence_are_left_alone,
    rows_reach_the_end_of_the_table,
    out_of_range_gives_nan_and_writes_nothing,
    decode_beside_prefill_is_as_alone,
    no_rows_is_a_call_too,
    what_the_kernel_cannot_serve_is_refused_by_name,
]
# Of these, only its slower tier.
LONG_CHECKS: list[Check] = [
    chunks_and_decode_of_longer_rows_are_near_float64,
    bits_of_longer_rows_do_not_depend_on_the_call,
    page_size_changes_no_bits,
    rows_with_gaps_attend_to_every_earlier_token,
    later_nan_of_many_rows_reaches_no_earlier_one,
    null_units_beside_more_rows_hold_nothing,
    many_sequences_decode_as_one_does,
    long_rows_are_near_float64,
]
