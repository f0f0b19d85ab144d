"""`packed_plane_attention` against a loop over tokens, and what it may touch of the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.kv_layout import PlaneLayout, PlaneStrategy
from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators
from looptrt.plugins import reference
from tests.plugins.pools import Pool, assert_bitwise, int32

OPS = torch.ops.looptrt
HEAD_DIM = 8
UNIT_SLOTS = 3
NUM_ROWS = 4
MAX_PAGES = 6


@dataclass
class Setup:
    """A pool, a table of pages in random order, and the tokens written so far."""

    num_heads: int = 4
    num_kv_heads: int = 2
    page_size: int = 4
    max_slots: int = 5
    dtype: torch.dtype = torch.float32
    history: dict[int, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        count = self.max_slots * NUM_ROWS * MAX_PAGES
        shape = (UNIT_SLOTS, 2, self.page_size, self.num_kv_heads, HEAD_DIM)
        self.pool = Pool.of(count + 1, shape, self.dtype)
        units = torch.randperm(count, generator=self.generator).add(1).to(torch.int32)
        self.table = units.view(self.max_slots, NUM_ROWS, MAX_PAGES)

    def step(self, rows: list[tuple[int, list[int]]], **changes: Any) -> tuple[Tensor, Tensor]:
        """Run (slot, positions) of each sequence; returns the packed qkv and the result."""
        counts = [len(positions) for _, positions in rows]
        width = (self.num_heads + 2 * self.num_kv_heads) * HEAD_DIM
        operands = {
            "qkv": torch.randn(sum(counts), width, generator=self.generator).to(self.dtype),
            "positions": int32([p for _, positions in rows for p in positions]),
            "cu_seqlens": int32([sum(counts[:i]) for i in range(len(counts) + 1)]),
            "seq_slots": int32([slot for slot, _ in rows]),
            "block_table": self.table,
            "kv_pool": self.pool.kv_pool,
            "plane": int32([1]),
        }
        attributes = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": HEAD_DIM,
            "page_size": self.page_size,
            "unit_slots": UNIT_SLOTS,
            "row": 1,
            "slot": 2,
            "scale": HEAD_DIM**-0.5,
        }
        operands |= {name: value for name, value in changes.items() if name in operands}
        attributes |= {name: value for name, value in changes.items() if name in attributes}
        return operands["qkv"], OPS.packed_plane_attention(*operands.values(), **attributes)

    def expect(self, rows: list[tuple[int, list[int]]], qkv: Tensor) -> Tensor:
        """The same in float64, one token and one head at a time."""
        heads = qkv.view(len(qkv), -1, HEAD_DIM).double()
        key_end = self.num_heads + self.num_kv_heads
        tokens = [(slot, p) for slot, positions in rows for p in positions]
        for (slot, p), head in zip(tokens, heads, strict=True):
            key, value = head[self.num_heads : key_end], head[key_end:]
            self.history.setdefault(slot, {})[p] = (key, value)
        result = torch.empty(len(qkv), self.num_heads, HEAD_DIM, dtype=torch.float64)
        for (slot, p), head, out in zip(tokens, heads, result, strict=True):
            seen = [self.history[slot][earlier] for earlier in range(p + 1)]
            for h in range(self.num_heads):
                kv_head = h // (self.num_heads // self.num_kv_heads)
                keys = torch.stack([key[kv_head] for key, _ in seen])
                values = torch.stack([value[kv_head] for _, value in seen])
                weights = (keys @ head[h] * HEAD_DIM**-0.5).softmax(dim=0)
                out[h] = weights @ values
        return result.flatten(1)

    def check(self, rows: list[tuple[int, list[int]]], **changes: Any) -> None:
        qkv, got = self.step(rows, **changes)
        tolerance = 2e-6 if self.dtype == torch.float32 else 1.6e-2
        want = self.expect(rows, qkv)
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def span(begin: int, end: int) -> list[int]:
    return list(range(begin, end))


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_chunks_and_decode_match_a_loop_over_tokens(
    page_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    setup = Setup(*heads, page_size=page_size, dtype=dtype)
    longest = min(page_size * MAX_PAGES, 20)
    setup.check([(3, span(0, 3)), (0, []), (2, span(0, longest - 1)), (4, span(0, 3))])
    setup.check([(0, span(0, 4)), (3, [3]), (2, [longest - 1]), (4, []), (1, [0])])
    setup.check([(3, span(4, 6)), (0, [4])])
    setup.pool.assert_guards_intact()


def test_bfloat16_results_are_rounded_once() -> None:
    setup = Setup(dtype=torch.bfloat16)
    rows = [(1, span(0, 24)), (2, span(0, 24))]
    qkv, got = setup.step(rows)
    want = setup.expect(rows, qkv).to(torch.bfloat16)
    assert float((got == want).double().mean()) > 0.99


def test_rows_with_gaps_attend_to_every_earlier_token() -> None:
    setup = Setup()
    setup.check([(1, span(0, 9))])
    setup.check([(1, [2, 5, 8])])


def test_small_blocks_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MAX_FLOATS", 100)
    setup = Setup()
    setup.check([(1, span(0, 13)), (2, span(0, 13)), (4, [0])])
    setup.check([(1, [13]), (2, [13]), (4, [1])])


def test_no_rows_is_a_call_too() -> None:
    setup = Setup()
    _, attended = setup.step([(1, []), (2, [])])
    assert attended.shape == (0, setup.num_heads * HEAD_DIM)


def test_only_the_places_of_new_tokens_are_written() -> None:
    setup = Setup()
    qkv, _ = setup.step([(1, [0, 1]), (3, [0])])
    written = ~setup.pool.units.isnan().any(dim=(-1, -2))  # [units, slots, 2, page]
    places = {
        (int(setup.table[slot, 2, 0]), 2, half, p)
        for slot, p in [(1, 0), (1, 1), (3, 0)]
        for half in (0, 1)
    }
    assert {tuple(place) for place in written.nonzero().tolist()} == places
    key = qkv.view(3, -1, HEAD_DIM)[1, 4:6]
    assert_bitwise(setup.pool.units[setup.table[1, 2, 0], 2, 0, 1], key)
    setup.pool.assert_guards_intact()


def test_a_later_row_s_nan_does_not_reach_earlier_rows() -> None:
    setup = Setup()
    rows = [(1, span(0, 6)), (2, span(0, 6))]
    clean, _ = setup.step(rows)
    poisoned = clean.clone()
    poisoned[4, 4 * HEAD_DIM :] = torch.nan
    _, got = setup.step(rows, qkv=poisoned)
    want = setup.expect(rows, clean)
    assert got[4:6].isnan().all()
    rest = [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]
    torch.testing.assert_close(got[rest].double(), want[rest], atol=2e-6, rtol=2e-6)


def test_neighbours_and_pages_do_not_change_a_row_s_value() -> None:
    alone, crowded = Setup(), Setup()
    crowded.table[1] = crowded.table[1].flip(-1)
    qkv, want = alone.step([(1, span(0, 7))])
    others = torch.randn(9, qkv.shape[1])
    _, got = crowded.step([(1, span(0, 7)), (2, span(0, 9))], qkv=torch.cat((qkv, others)))
    torch.testing.assert_close(got[:7], want)


@pytest.mark.parametrize(("layers", "loops"), [(3, 4), (5, 2), (48, 4)])
def test_every_loop_and_layer_has_its_own_store(layers: int, loops: int) -> None:
    """Case A3: distinct values go in through the operator and come back from the pool."""
    layout = PlaneLayout(
        unit_slots=layers,
        prelude_layers=0,
        coda_layers=0,
        max_loops=loops,
        page_size=4,
        num_kv_heads=1,
        head_dim=2,
        dtype="float32",
        strategy=PlaneStrategy.parse("latest", layers),
    )
    pages, tokens = 2, 7
    pool = Pool.of(layout.num_rows * pages + 1, layout.unit_shape, torch.float32)
    order = torch.randperm(layout.num_rows * pages, generator=torch.Generator().manual_seed(1))
    table = order.add(1).to(torch.int32).view(1, layout.num_rows, pages)
    positions = torch.arange(tokens, dtype=torch.int32)

    def stored(loop: int, layer: int) -> Tensor:
        """[tokens, (K, V), head_dim] values that no other place holds."""
        first = ((loop * layers + layer) * tokens) * 4
        return torch.arange(first, first + tokens * 4, dtype=torch.float32).view(tokens, 2, 2)

    for loop in range(loops):
        for layer in range(layers):
            row, slot = layout.core_place(layer)
            qkv = torch.cat((torch.ones(tokens, 2), stored(loop, layer).flatten(1)), dim=1)
            OPS.packed_plane_attention(
                qkv,
                positions,
                int32([0, tokens]),
                int32([0]),
                table,
                pool.kv_pool,
                int32([layout.strategy.plane(loop)]),
                num_heads=1,
                num_kv_heads=1,
                head_dim=2,
                page_size=layout.page_size,
                unit_slots=layers,
                row=row,
                slot=slot,
                scale=1.0,
            )
    assert layout.num_planes * layout.unit_slots == layers * loops
    for loop in range(loops):
        for layer in range(layers):
            units = table[0, loop].long()
            held = pool.units[units, layer].transpose(1, 2).flatten(0, 1)[:tokens, :, 0]
            assert_bitwise(held, stored(loop, layer))
    pool.assert_guards_intact()


def test_reading_and_writing_bad_operands_is_refused() -> None:
    setup = Setup()
    rows = [(1, [0, 1])]
    last = setup.pool.units.shape[0]
    table = setup.table.clone()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"positions": int32([0, MAX_PAGES * 4])}, "positions: expected 0..23, got 24"),
        ({"positions": int32([-1, 0])}, "positions: expected 0..23, got -1"),
        ({"seq_slots": int32([5])}, "seq_slots: expected 0..4, got 5"),
        ({"plane": int32([3])}, r"row \+ plane: expected 0..3, got 4"),
        ({"plane": int32([-2])}, r"row \+ plane: expected 0..3, got -1"),
        ({"slot": 3}, "slot: expected 0..2, got 3"),
        ({"slot": -1}, "slot: expected 0..2, got -1"),
        ({"cu_seqlens": int32([0, 1])}, "cu_seqlens: expected rising from 0 to 2"),
        ({"cu_seqlens": int32([1, 2])}, "cu_seqlens: expected rising from 0 to 2"),
        ({"num_heads": 2, "num_kv_heads": 3}, "num_heads: expected a multiple of 3, got 2"),
        ({"kv_pool": torch.tensor([0, 9])}, "kv_pool: expected an address"),
        ({"block_table": table.clone().fill_(0)}, "unit: expected 1..120, got 0"),
        ({"block_table": table.clone().fill_(last)}, f"unit: expected 1..120, got {last}"),
    ]
    for changes, message in cases:
        with pytest.raises(PluginError, match=message):
            setup.step(rows, **changes)
    assert setup.pool.units.isnan().all()
    setup.pool.assert_guards_intact()


def test_a_null_unit_under_an_earlier_token_is_refused() -> None:
    setup = Setup()
    setup.step([(1, span(0, 5))])
    setup.table[1, 2, 0] = 0
    with pytest.raises(PluginError, match=r"unit: expected 1..120, got 0"):
        setup.step([(1, [5])])
