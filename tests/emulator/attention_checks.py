"""What the emulated attention is held to; each takes sizes and uses `launch` as it finds it.

The pool of a `World` is full of NaN but for the tokens put there, and so is a result before a call:
what is read or left out by mistake shows.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from looptrt.plugins import launch, reference
from tests.plugins.attention_cases import PLACE, PLANE, Geometry, Rows, World, span
from tests.plugins.pools import assert_bitwise, bits, int32

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def geometry(
    num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> Geometry:
    max_pages = -(-640 // page_size)
    return Geometry(num_heads, num_kv_heads, head_dim, page_size, max_pages, 6, dtype, "cpu")


# Tensor cores: every head_dim, MHA and GQA, a group of more than 16 heads, pages that tiles cross.
FAST = (
    geometry(2, 2, 64, 16, BF16),
    geometry(4, 1, 128, 32, F16),
    geometry(2, 2, 96, 7, BF16),
    geometry(18, 1, 64, 64, F16),
)
GENERIC = (geometry(2, 1, 16, 16, F32), geometry(3, 3, 80, 5, BF16))


def world(sizes: Geometry, seed: int = 0) -> World:
    return World(sizes, seed, launch.packed_plane_attention)


def results_are_near_float64(sizes: Geometry) -> None:
    """Prefill and decode, split and not, mixed in a call, with cached prefixes and empty rows."""
    one = world(sizes)
    one.check([(1, span(0, 130)), (0, []), (2, [0])], sample=9)
    one.check([(1, [130]), (2, [1]), (0, [])])
    one.fill(3, 575)
    one.check([(3, [575]), (1, [131]), (2, [2])])
    one.check([(3, [576, 577]), (1, [132])])
    one.check([(1, span(133, 152)), (3, span(578, 600))], sample=5)


def bits_do_not_depend_on_the_call(sizes: Geometry) -> None:
    """Chunks, neighbours, pages and kernels."""
    num_tokens = 280
    whole = world(sizes)
    want = whole.step([(1, span(0, num_tokens))])
    chunked = world(sizes, seed=1)
    cuts = (0, 1, 2, 5, 17, 63, 64, 65, 129, 255, 256, 257, num_tokens)
    for begin, end in itertools.pairwise(cuts):
        rows: Rows = [(1, span(begin, end))]
        first = 0
        if begin % 2:
            rows = [(5, span(0, 20)), *rows, (0, [])]
            first = 20
        assert_bitwise(chunked.step(rows)[first : first + end - begin], want[begin:end])
    for position in (0, 63, 64, 200, 255, 256, num_tokens - 1):
        assert_bitwise(whole.step([(1, [position])])[0], want[position])
    gaps = [*range(0, num_tokens, 3)]
    assert_bitwise(whole.step([(1, gaps)]), want[gaps])


def twin_agrees(sizes: Geometry) -> None:
    """The CPU twin's pool, bit for bit, and its results within both bounds."""
    kernel, twin = world(sizes), World(sizes, 0, reference.packed_plane_attention)
    for rows in ([(1, span(0, 70)), (2, [0])], [(1, [70]), (2, span(1, 20))]):
        qkv = kernel.qkv_of(rows)
        got, other = kernel.step(rows, qkv), twin.step(rows, qkv)
        _, bound = kernel.expect(rows, qkv)
        assert bool(((got.double() - other.double()).abs() <= 2 * bound).all())
        assert_bitwise(kernel.pool, twin.pool)


def later_nan_reaches_no_earlier_row(sizes: Geometry) -> None:
    """V alone is NaN, whose keys the kernels note themselves; or K and V are infinite."""
    key = sizes.num_heads * sizes.head_dim
    value = key + sizes.num_kv_heads * sizes.head_dim
    for count in (6, 70):
        rows = [(1, span(0, count)), (2, span(0, 6))]
        one = world(sizes)
        clean = one.qkv_of(rows)
        want = one.step(rows, clean)
        for bad, begin, number in ((4, value, math.nan), (count - 2, key, math.inf)):
            poisoned = clean.clone()
            poisoned[bad, begin:] = number
            got = world(sizes, seed=2).step(rows, poisoned)
            seeing = torch.zeros(count + 6, dtype=torch.bool)
            seeing[bad:count] = True
            assert got[seeing].isnan().all()
            assert_bitwise(got[~seeing], want[~seeing])


def only_places_of_new_tokens_are_written(sizes: Geometry) -> None:
    for rows in ([(1, span(0, 100)), (3, [0])], [(1, [0]), (3, [0])], [(4, span(0, 3))]):
        one = world(sizes)
        qkv = one.qkv_of(rows)
        before = one.snapshot()
        one.step(rows, qkv)
        split = sizes.num_heads * sizes.head_dim
        kv = bits(qkv[:, split:]).view(-1, 2, sizes.num_kv_heads, sizes.head_dim)
        first = 0
        for slot, positions in rows:
            where = torch.tensor(positions)
            units = one.table[slot, PLACE["row"] + PLANE].long()[where // sizes.page_size]
            new = kv[first : first + len(positions)]
            before[units, PLACE["slot"], :, where % sizes.page_size] = new
            first += len(positions)
        assert torch.equal(bits(one.pool), before)


def null_units_hold_nothing(sizes: Geometry) -> None:
    """Rows that fill a graph up: units that do not exist are zeros and are not written."""
    one = world(sizes)
    live = 3
    rows = [(slot, [40 + slot]) for slot in range(live)]
    for slot in range(live):
        one.fill(slot, 40 + slot)
    alone = one.step(rows)
    after = one.snapshot()
    for unit in (0, len(one.pool), -1, 2**31 - 1, -(2**31)):
        one.table[5] = unit
        for more in ([], [(5, span(0, 20))]):
            call = [*rows, (5, [0]), (5, [7]), *more]
            qkv = one.qkv_of(call)
            got = one.step(call, qkv)
            assert_bitwise(got[:live], alone)
            assert not got[live:].any()
            assert torch.equal(bits(one.pool), after)
            qkv[live:] = math.nan
            assert_bitwise(one.step(call, qkv)[:live], alone)
            assert torch.equal(bits(one.pool), after)


def rows_reach_the_end_of_the_table(sizes: Geometry) -> None:
    """The last position of the last page, in the table's last slot and row."""
    one = world(replace(sizes, max_pages=-(-150 // sizes.page_size)))
    end = one.geometry.max_pages * sizes.page_size
    slot = sizes.max_slots - 1
    one.fill(slot, end - 40)
    one.check([(slot, span(end - 40, end - 1)), (0, [0])], sample=5)
    one.check([(slot, [end - 1]), (0, [1])])
    one.check([(slot, span(end - 20, end)), (0, [1])], sample=5)


def out_of_range_gives_nan_and_writes_nothing(sizes: Geometry) -> None:
    one = world(sizes)
    one.step([(1, span(0, 40))])
    before = one.snapshot()
    end = sizes.max_pages * sizes.page_size
    changes = [(1, -1), (1, end), (3, sizes.max_slots), (3, -1), (6, 2), (6, -2)]
    for index, value in changes:
        operands = one.operands([(1, [40])])
        operands[index] = int32([value])
        assert one.call(*operands, **sizes.attributes).isnan().all(), (index, value)
        assert torch.equal(bits(one.pool), before)


def many_sequences_decode_as_one_does(sizes: Geometry) -> None:
    """More than a round of the decode kernel holds, some of them empty."""
    count = 70
    one = world(replace(sizes, max_slots=count))
    lengths = [(37 * slot) % 290 for slot in range(count)]
    for slot, length in enumerate(lengths):
        one.fill(slot, length)
    batch = [(slot, [length]) for slot, length in enumerate(lengths)]
    got = one.step(batch)
    for slot in (0, 1, 31, 32, 33, 63, 64, 69):
        assert_bitwise(got[slot], one.step([batch[slot]])[0])
    kept = [entry if entry[0] % 3 else (entry[0], []) for entry in batch]
    assert_bitwise(one.step(kept), got[[slot for slot in range(count) if slot % 3]])


def long_rows_are_near_float64(sizes: Geometry) -> None:
    """More splits than are folded at once, of both lengths."""
    one = world(replace(sizes, max_pages=-(-4700 // sizes.page_size), max_slots=3))
    one.fill(1, 4610)
    decode = one.check([(1, [4610])])
    assert_bitwise(one.check([(1, span(4610, 4640))], sample=3)[:1], decode)
