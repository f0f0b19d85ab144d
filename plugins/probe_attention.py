"""Whether attention keeps its promises on the shapes of an engine.

Owns the scenes: sequences whose keys and values lie in scattered pages of NaN memory; leaves
verdicts to `probe`. Compared are the kernel's own bits between batches, chunks and page
placements, and its values with the CPU twin's. Invariant: a scene's inputs are the same in
every arrangement, so that any difference is the kernel's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.plugins import reference, unfused
from looptrt.plugins.probe import ATTENTION, Clock, OpCall, Operators, Verdict, num_different
from looptrt.plugins.schema import Exactness

# Largest distance from float32 sums of values around 1, by dtype.
_TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
_NUM_DECODED = 2
_LONG = 1300

_Part = tuple[int, int, int]  # sequence, first position, end


@dataclass
class Scene:
    """Sequences of one attention call.

    Attributes:
        call: the operator's attributes and sizes.
        qkv: [tokens, QKV] of each sequence.
        device: where the pool is.
    """

    call: OpCall
    qkv: list[Tensor]
    device: torch.device

    def place(self, seed: int) -> Placement:
        """Pages for every sequence, in an order of their own, full of NaN."""
        attributes = dict(self.call.attributes)
        page_size, row = int(attributes["page_size"]), int(attributes["row"])
        num_pages = [-(-len(rows) // page_size) for rows in self.qkv]
        num_units = 1 + sum(num_pages)
        order = 1 + torch.randperm(num_units - 1, generator=torch.Generator().manual_seed(seed))
        table = torch.zeros(
            len(self.qkv), dict(self.call.sizes)["num_rows"], max(num_pages), dtype=torch.int32
        )
        for seq, units in enumerate(torch.split(order.int(), num_pages)):
            table[seq, row, : len(units)] = units
        sizes = dict(self.call.sizes)
        unit = 2 * int(attributes["unit_slots"]) * page_size * sizes["K"]
        dtype = getattr(torch, self.call.dtype)
        pool = torch.full((num_units, unit), math.nan, dtype=dtype, device=self.device)
        return Placement(self, table.to(self.device), pool)


@dataclass
class Placement:
    """A scene's pages in memory."""

    scene: Scene
    table: Tensor
    pool: Tensor

    def attend(self, function: Callable[..., Any], parts: Sequence[_Part]) -> list[Tensor]:
        """One call over parts of sequences: the results of each part."""
        operands = self._operands(parts)
        attended = function(*operands, **self._attributes())
        return list(torch.split(attended, [end - begin for _, begin, end in parts]))

    def twin(self, parts: Sequence[_Part]) -> list[Tensor]:
        """What the CPU twin gives for the same call on the memory as it is now."""
        memory = self.pool.cpu()
        copy = Placement(self.scene, self.table.cpu(), memory)
        attended = reference.packed_plane_attention(
            *(operand.cpu() for operand in copy._operands(parts)), **self._attributes()
        )
        return list(torch.split(attended, [end - begin for _, begin, end in parts]))

    def _attributes(self) -> dict[str, Any]:
        return dict(self.scene.call.attributes)

    def _operands(self, parts: Sequence[_Part]) -> list[Tensor]:
        device = self.pool.device
        rows = [self.scene.qkv[seq][begin:end] for seq, begin, end in parts]
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in parts])
        lengths = torch.tensor([0, *(end - begin for _, begin, end in parts)])

        def int32(values: Tensor) -> Tensor:
            return values.to(device, torch.int32)

        return [
            torch.cat(rows).to(device),
            int32(positions),
            int32(lengths.cumsum(0)),
            int32(torch.tensor([seq for seq, *_ in parts])),
            self.table,
            torch.tensor([self.pool.data_ptr(), len(self.pool)], device=device),
            int32(torch.zeros(1)),
        ]


def probe_attention(
    calls: Iterable[OpCall], device: torch.device, operators: Operators, clock: Clock
) -> list[Verdict]:
    """Two verdicts on each geometry: bits that stay the same, and distance from the CPU twin.

    Args:
        calls: of an engine; one of each geometry is taken, that of the last layer slot.
        device: where to run; on the CPU the twin itself, which promises no bits, is compared
            with torch's attention.
        operators: the kernels, by operator name; none is used on the CPU.
        clock: when to stop; values are always compared.
    """
    last = {_geometry(call): call for call in calls if call.op == ATTENTION}
    verdicts = []
    for call in last.values():
        scene = make_scene(call, device)
        if device.type == "cpu":
            near = Verdict(call, Exactness.TOLERANCE, "torch's attention")
            _guard(near, check_values, unfused.packed_plane_attention, scene)
            verdicts.append(near)
            continue
        kernel = operators[ATTENTION]
        near = Verdict(call, Exactness.TOLERANCE, "its CPU twin")
        same = Verdict(call, Exactness.BATCH_INVARIANT, "itself in other batches and pages")
        _guard(near, check_values, kernel, scene)
        if not clock.is_over():
            _guard(same, check_bits, kernel, scene)
        verdicts += [near, same]
    return verdicts


def _geometry(call: OpCall) -> tuple[tuple[str, float], ...]:
    return tuple(item for item in call.attributes if item[0] not in ("row", "slot"))


def _guard(
    verdict: Verdict,
    check: Callable[[Verdict, Callable[..., Any], Scene], None],
    kernel: Callable[..., Any],
    scene: Scene,
) -> None:
    try:
        check(verdict, kernel, scene)
    except PluginError as error:
        verdict.refused(f"{scene.call.dtype} {dict(scene.call.attributes)}", error)


def make_scene(call: OpCall, device: torch.device) -> Scene:
    """Sequences within a page, across one, of many pages, and one that decoding splits."""
    page_size = int(dict(call.attributes)["page_size"])
    lengths = (_NUM_DECODED + 1, page_size + 1, 3 * page_size + 5, 150, _LONG)
    generator = torch.Generator().manual_seed(1)
    shape = dict(call.sizes)["QKV"]
    dtype = getattr(torch, call.dtype)
    qkv = [torch.randn(n, shape, generator=generator).to(dtype) for n in lengths]
    return Scene(call, qkv, device)


def _whole(scene: Scene, cut: int = 0) -> list[_Part]:
    """All of every sequence but its last `cut` tokens."""
    return [(seq, 0, len(rows) - cut) for seq, rows in enumerate(scene.qkv)]


def check_bits(verdict: Verdict, kernel: Callable[..., Any], scene: Scene) -> None:
    """Compare a kernel's bits between batches, chunks, pages, prefill and decoding."""
    packed = scene.place(0)
    whole = packed.attend(kernel, _whole(scene))
    verdict.rows.append(sum(map(len, whole)))

    moved = scene.place(1).attend(kernel, _whole(scene))
    _count(verdict, "other pages", moved, whole)
    alone = scene.place(0)
    for part, together in zip(_whole(scene), whole, strict=True):
        _count(verdict, "a prompt alone", alone.attend(kernel, [part]), [together])
    parts = [(seq, end - _NUM_DECODED, end) for seq, _, end in _whole(scene)]
    steps = [[(s, b + i, b + i + 1) for s, b, _ in parts] for i in range(_NUM_DECODED)]
    for step in steps:
        together_rows = packed.attend(kernel, step)
        verdict.rows.append(len(step))
        for part, row in zip(step, together_rows, strict=True):
            seq, begin, end = part
            _count(verdict, "a decoded token alone", alone.attend(kernel, [part]), [row])
            _count(verdict, "a token decoded and in a prompt", [row], [whole[seq][begin:end]])
    in_chunks = scene.place(2)
    cuts = [(seq, 0, max(1, end * 2 // 3)) for seq, _, end in _whole(scene)]
    rest = [(seq, first, len(scene.qkv[seq])) for seq, _, first in cuts]
    begun = in_chunks.attend(kernel, cuts)
    ended = in_chunks.attend(kernel, rest)
    joined = [torch.cat(pair) for pair in zip(begun, ended, strict=True)]
    _count(verdict, "a prompt in two chunks", joined, whole)


def _count(verdict: Verdict, case: str, got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        wrong = num_different(one, other)
        wrong = wrong or int((~other.isfinite()).sum())  # NaN of unwritten memory
        verdict.count(case, wrong, other.numel())


def check_values(verdict: Verdict, kernel: Callable[..., Any], scene: Scene) -> None:
    """Compare a kernel's results with the CPU twin's."""
    allowed = _TOLERANCES[scene.call.dtype]
    placed = scene.place(0)
    prefill = _whole(scene, cut=_NUM_DECODED)
    decode = [(seq, end, end + 1) for seq, _, end in prefill]
    for name, parts in (("prefill", prefill), ("decode", decode)):
        got = placed.attend(kernel, parts)
        # The longest prompt would keep the twin busy for seconds; its decoded token is compared.
        compared = [i for i, part in enumerate(parts) if part[2] - part[1] < _LONG - _NUM_DECODED]
        want = placed.twin([parts[i] for i in compared])
        verdict.rows.append(sum(map(len, want)))
        for i, other in zip(compared, want, strict=True):
            distance = (got[i].cpu().double() - other.double()).abs()
            wrong = int((~(distance <= allowed)).sum())  # NaN is not within anything
            verdict.count(f"{name} of {scene.call.dtype}", wrong, other.numel())
