"""A call of `packed_plane_attention` on any device and what it must give, in float64.

Owns operands, the tokens that a pool holds and the oracle with its bound; leaves which calls are
made and what is asked of them to `attention_cases`. Invariant: a `World`'s pool is full of NaN but
for the tokens put there, and so are results and workspaces before a call: what is read or left out
by mistake shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators
from tests.plugins.pools import bits, int32

Rows = Sequence[tuple[int, Sequence[int]]]  # (slot, positions) of each sequence

UNIT_SLOTS, TABLE_ROWS = 2, 3
PLACE = {"row": 1, "slot": 1}
PLANE = 1
_UNIT_ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-19}


@dataclass(frozen=True)
class Geometry:
    """Sizes of a call."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    max_pages: int = 64
    max_slots: int = 6
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "unit_slots": UNIT_SLOTS,
            **PLACE,
            "scale": self.head_dim**-0.5,
        }

    def reaching(self, num_positions: int, **changes: Any) -> Geometry:
        """The same with a table of so many positions, up to a whole page, and other changes."""
        page_size = changes.get("page_size", self.page_size)
        return replace(self, max_pages=-(-num_positions // page_size), **changes)


def span(begin: int, end: int) -> list[int]:
    """Positions begin..end-1."""
    return list(range(begin, end))


@dataclass
class World:
    """A pool full of NaN, a table of units in random order, and every token's K and V.

    Attributes:
        seed: of the table's order and the pool's size; K, V and Q do not depend on it.
    """

    geometry: Geometry
    seed: int = 0
    call: Callable[..., Tensor] = torch.ops.looptrt.packed_plane_attention
    known: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = self.geometry
        count = g.max_slots * TABLE_ROWS * g.max_pages
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(count, generator=generator).add(1).to(torch.int32)
        self.table = order.view(g.max_slots, TABLE_ROWS, g.max_pages).to(g.device)
        shape = (count + 1, UNIT_SLOTS, 2, g.page_size, g.num_kv_heads, g.head_dim)
        self.pool = torch.full(shape, math.nan, dtype=g.dtype, device=g.device)
        self.kv_pool = torch.tensor([self.pool.data_ptr(), count + 1], device=g.device)

    def qkv_of(self, rows: Rows) -> Tensor:
        """Q, K and V that depend on slot and position alone: [R, qkv_width]."""
        g = self.geometry
        made = []
        for slot, positions in rows:
            for position in positions:
                generator = torch.Generator().manual_seed(position * 1000 + slot)
                made.append(torch.randn(g.qkv_width, generator=generator))
        qkv = torch.stack(made) if made else torch.empty(0, g.qkv_width)
        # Larger queries: some keys weigh much more than others.
        qkv[:, : g.num_heads * g.head_dim] *= 2.0
        return qkv.to(g.dtype).to(g.device)

    def operands(self, rows: Rows, qkv: Tensor | None = None) -> list[Tensor]:
        """Operands of a call."""
        device = self.geometry.device
        counts = [len(positions) for _, positions in rows]
        positions = [p for _, positions in rows for p in positions]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        return [
            self.qkv_of(rows) if qkv is None else qkv,
            int32(positions).to(device),
            int32(starts).to(device),
            int32([slot for slot, _ in rows]).to(device),
            self.table,
            self.kv_pool,
            int32([PLANE]).to(device),
        ]

    def step(self, rows: Rows, qkv: Tensor | None = None) -> Tensor:
        """Run (slot, positions) of each sequence: [R, num_heads * head_dim]."""
        operands = self.operands(rows, qkv)
        self.remember(rows, operands[0])
        return self.run(operands)

    def run(self, operands: list[Tensor], **changes: Any) -> Tensor:
        """Call with operands, whatever they are, and changed attributes."""
        with _new_memory_is_nan():
            return self.call(*operands, **(self.geometry.attributes | changes))

    def remember(self, rows: Rows, qkv: Tensor) -> None:
        """Keep K and V of new tokens for the oracle."""
        g = self.geometry
        kv = qkv[:, g.num_heads * g.head_dim :].view(-1, 2, g.num_kv_heads, g.head_dim).double()
        first = 0
        for slot, positions in rows:
            shape = (g.max_pages * g.page_size, 2, g.num_kv_heads, g.head_dim)
            if slot not in self.known:
                self.known[slot] = torch.full(shape, math.nan, dtype=torch.float64, device=g.device)
            index = torch.tensor(positions, dtype=torch.int64, device=g.device)
            self.known[slot][index] = kv[first : first + len(positions)]
            first += len(positions)

    def fill(self, slot: int, num_tokens: int) -> None:
        """Put random K and V of positions 0..num_tokens-1 into the pool, without a call."""
        g = self.geometry
        generator = torch.Generator().manual_seed(slot)
        shape = (num_tokens, 2, g.num_kv_heads, g.head_dim)
        kv = torch.randn(shape, generator=generator).to(g.dtype).to(g.device)
        whole = torch.full(
            (g.max_pages * g.page_size, *shape[1:]), math.nan, dtype=torch.float64, device=g.device
        )
        whole[:num_tokens] = kv.double()
        self.known[slot] = whole
        pages = torch.arange(num_tokens, device=g.device) // g.page_size
        tokens = torch.arange(num_tokens, device=g.device) % g.page_size
        units = self.table[slot, PLACE["row"] + PLANE].long()[pages]
        self.pool[units, PLACE["slot"], :, tokens] = kv

    def expect(self, rows: Rows, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The result and how far from it a kernel may be, both float64 [R, heads * head_dim].

        Weights are rounded to the dtype once, and so is the result; a float16 weight may also
        vanish.
        """
        g = self.geometry
        group = g.num_heads // g.num_kv_heads
        query = qkv[:, : g.num_heads * g.head_dim].view(-1, g.num_heads, g.head_dim).double()
        results, bounds = [], []
        first = 0
        for slot, positions in rows:
            for row, position in enumerate(positions, first):
                seen = self.known[slot][: position + 1]
                key, value = (
                    seen[:, half].repeat_interleave(group, dim=1).transpose(0, 1) for half in (0, 1)
                )
                scores = (key @ query[row, :, :, None])[..., 0] * g.head_dim**-0.5
                weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
                total = weights.sum(dim=-1, keepdim=True)
                mean = (weights[:, None] @ value)[:, 0] / total
                spread = (weights[:, None] @ value.abs())[:, 0] / total
                bound = _UNIT_ROUNDOFF[g.dtype] * 1.1 * (spread + mean.abs())
                if g.dtype is torch.float16:
                    bound = bound + 2**-25 * value.abs().sum(dim=1) / total
                results.append(mean.flatten())
                bounds.append(bound.flatten() + 1e-7)
            first += len(positions)
        return torch.stack(results), torch.stack(bounds)

    def check(self, rows: Rows, sample: int = 24) -> Tensor:
        """Run a step and hold a sample of its rows (the first, the last) against float64."""
        qkv = self.qkv_of(rows)
        got = self.step(rows, qkv)
        picked = [(slot, _sample(positions, sample)) for slot, positions in rows]
        where = _places(rows, picked)
        want, bound = self.expect(picked, qkv[where])
        error = (got[where].double() - want).abs()
        assert bool((error <= bound).all()), (
            f"{int((~(error <= bound)).sum())} of {error.numel()} too far off, worst "
            f"{float((error / bound).nan_to_num(nan=math.inf).max()):.3g} bounds, first row "
            f"{int((~(error <= bound)).any(dim=1).nonzero()[0, 0])} of {picked}"
        )
        return got

    def snapshot(self) -> Tensor:
        """Bits of the whole pool."""
        return bits(self.pool).clone()


class NewWorld(Protocol):
    """Makes a `World` for one way of calling, with a table in another order for each seed."""

    def __call__(self, geometry: Geometry, seed: int = 0) -> World: ...


@contextmanager
def _new_memory_is_nan() -> Iterator[None]:
    """Fill what torch.empty gives, on any device: floats with NaN, bytes with 255."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def _sample(positions: Sequence[int], count: int) -> list[int]:
    if len(positions) <= count:
        return list(positions)
    step = (len(positions) - 1) / (count - 1)
    return [positions[round(i * step)] for i in range(count)]


def _places(rows: Rows, picked: Rows) -> list[int]:
    """Rows of the call that the picked positions are."""
    places, first = [], 0
    for (_, positions), (_, some) in zip(rows, picked, strict=True):
        index = {position: first + i for i, position in enumerate(positions)}
        places.extend(index[position] for position in some)
        first += len(positions)
    return places
