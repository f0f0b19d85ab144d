"""An executor without arithmetic: it checks what every query would read.

Memory holds, for each unit and token index, a tag saying which token, in which context, at
which loop wrote it. A step replays the plan's writes, copies and reads, and fails when a
query at loop k would not see, for each earlier token, the deepest plane that token reached
up to k. The next token is a hash of the context, so equal contexts give equal answers.

Tokens that may exit early do so where a hash of their context says.

The simulated memory knows what it ran, not what the scheduler holds to be true: tokens come
from slot starts, input rows and its own answers, and a guess stands at the depth it ran at.

Where deeper pages may be shared (`at_least`), depths may differ from the request's own, but
tokens, salt and noise seed may not, and no plane may be shallower than asked.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

import numpy as np

from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.batch import loop_rows
from looptrt.runtime.request import ExitKv, ExitParams, ExitRule
from looptrt.runtime.scheduler import Scheduler
from looptrt.runtime.step_plan import Int32Array, PlaneCopies, StepPlan, StepResult

BOUNDARY = -1


class Tag(NamedTuple):
    """What wrote a token's KV: tokens, salt and seed; the depths of the context; the loop."""

    context: bytes
    depths: bytes
    loop: int


def next_token(token_ids: list[int], vocab: int) -> int:
    """The answer of the simulated model after these tokens."""
    digest = hashlib.sha256(np.array(token_ids, np.int32).tobytes()).digest()
    return digest[0] % vocab


def exit_loops(token_ids: list[int], loops: int) -> int:
    """Loops after which the last of these tokens stops, if it may: 1 to `loops`."""
    return 1 + next_token([-2, *token_ids], loops)


class SimExecutor:
    """Replays plans over tagged memory.

    Args:
        scheduler: whose slots say which request a slot holds.
        layout: geometry of units and planes.
        check: what the tags read must be: `exact`, `at_least` as deep, or anything
            `written` (where planes are overwritten on purpose).
        good_guesses: of ten guesses, those that equal what full depth answers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        layout: PlaneLayout,
        *,
        vocab: int,
        check: Literal["exact", "at_least", "written"] = "exact",
        good_guesses: int = 7,
    ) -> None:
        slots, pages = len(scheduler.slots.requests), scheduler.kv.table.units.shape[2]
        self.scheduler, self.layout, self.vocab, self.check = scheduler, layout, vocab, check
        self.good_guesses = good_guesses
        self.table = np.zeros((slots, layout.num_rows, pages), np.int32)
        self.memory: dict[tuple[int, int], Tag] = {}
        self.rows_run = 0
        size = pages * layout.page_size
        self._tokens = np.zeros((slots, size), np.int32)
        self._depths = np.zeros((slots, size), np.int16)  # that each token last ran at
        self._newest = np.zeros(slots, np.int32)
        self._settings: list[tuple[bytes | None, int]] = [(None, 0)] * slots
        self._exits = [ExitParams()] * slots

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan."""
        self._start(plan)
        updates = plan.table_updates
        for slot, page, units in zip(updates.slots, updates.pages, updates.units, strict=True):
            self.table[slot, :, page] = units
        assert np.array_equal(self.table, self.scheduler.kv.table.units)
        self.rows_run += plan.num_rows
        assert plan.num_rows <= self.scheduler.config.max_num_tokens
        row_slots = np.repeat(plan.seq_slots, np.diff(plan.cu_seqlens))
        unknown = plan.input_ids < 0
        self._tokens[row_slots, plan.positions] = np.where(
            unknown, self._newest[row_slots], plan.input_ids
        )
        depths, spent = self._stopped(plan, row_slots)
        self._depths[row_slots, plan.positions] = depths
        if not plan.is_draft:
            self._check_depths(row_slots, plan.positions)
        self._copy(plan.copies, 0, 1)
        num_loops = 0
        for loop in range(plan.num_loops):
            rows = loop_rows(plan, depths, loop)
            if not len(rows.rows):
                break
            if loop:
                self._copy(plan.copies, loop, loop + 1)
            row = self.layout.boundary_units + self.layout.strategy.plane(loop)
            self._write(plan, row_slots, rows.rows, row, loop)
            self._read(plan, row_slots, rows.rows, row, loop)
            num_loops = loop + 1
        self._copy(plan.copies, num_loops, None)
        self._copy_forward(plan, depths)
        everyone = np.arange(plan.num_rows)
        for row in range(self.layout.boundary_units):
            self._write(plan, row_slots, everyone, row, BOUNDARY)
            self._read(plan, row_slots, everyone, row, BOUNDARY)
        token_ids = [
            self._sample(slot, position, plan.is_draft)
            for slot, position in zip(
                plan.sample_slots.tolist(), plan.positions[plan.logit_rows].tolist(), strict=True
            )
        ]
        self._newest[plan.sample_slots] = token_ids
        return StepResult(np.array(token_ids, np.int32), spent, depths[plan.logit_rows])

    def _stopped(self, plan: StepPlan, row_slots: np.ndarray) -> tuple[Int32Array, Int32Array]:
        """[num_rows] loops that rows run, [num_samples] loops behind their tokens."""
        depths, spent = plan.depths.copy(), plan.depths[plan.logit_rows].copy()
        for index, row in enumerate(plan.logit_rows.tolist()):
            slot, position = int(row_slots[row]), int(plan.positions[row])
            rule = self._exits[slot]
            has_exit = plan.exits is not None and row in plan.exits.rows
            assert has_exit is (rule.rule is not ExitRule.NONE)
            if has_exit:
                known = self._tokens[slot, : position + 1].tolist()
                spent[index] = exit_loops(known, int(depths[row]))
                if rule.kv is ExitKv.LAST_EXITED:
                    depths[row] = spent[index]
        return depths, spent

    def _copy_forward(self, plan: StepPlan, depths: Int32Array) -> None:
        """Rows that stopped leave their deepest plane in all that were planned for them."""
        if plan.exits is None:
            return
        for index, row in enumerate(plan.exits.rows.tolist()):
            units, token = plan.exits.units[index].tolist(), int(plan.exits.token_index[index])
            written = self.layout.planes_of_depth(int(depths[row]))
            for plane in range(written, self.layout.planes_of_depth(int(plan.depths[row]))):
                self.memory[units[plane], token] = self.memory[units[written - 1], token]

    def _start(self, plan: StepPlan) -> None:
        for start in plan.slot_starts:
            request = self.scheduler.slots.requests[start.slot]
            assert request is not None
            self._tokens[start.slot, : len(start.token_ids)] = start.token_ids
            self._depths[start.slot, : len(start.token_ids)] = request.depths
            self._settings[start.slot] = request.cache_salt, request.noise_seed
            self._exits[start.slot] = start.exit

    def _check_depths(self, row_slots: np.ndarray, positions: np.ndarray) -> None:
        """Every token up to a row that counts has run as deep as its request asks.

        A token that may exit is decided once: what runs it again runs it as deep.
        """
        last = dict(zip(row_slots.tolist(), positions.tolist(), strict=True))
        for slot, position in last.items():
            request = self.scheduler.slots.request(slot)
            wanted = np.full(position + 1, request.loops)
            wanted[: request.num_prompt - 1] = request.prefill_loops
            if request.exit.rule is not ExitRule.NONE and request.exit.kv is ExitKv.LAST_EXITED:
                known = self._tokens[slot].tolist()
                for place in range(request.num_prompt - 1, position + 1):
                    wanted[place] = exit_loops(known[: place + 1], request.loops)
            assert np.array_equal(self._depths[slot, : position + 1], wanted)

    def _sample(self, slot: int, position: int, is_draft: bool) -> int:
        known = self._tokens[slot, : position + 1].tolist()
        token = next_token(known, self.vocab)
        is_good = not is_draft or next_token([-1, *known], 10) < self.good_guesses
        return token if is_good else (token + 1) % self.vocab

    def _place(self, slot: int, row: int, position: int) -> tuple[int, int]:
        unit = int(self.table[slot, row, position // self.layout.page_size])
        assert unit > 0, "a live token points at the null unit"
        return unit, position % self.layout.page_size

    def _tag(self, slot: int, position: int, loop: int) -> Tag:
        end = position + 1
        context = (self._tokens[slot, :end].tolist(), *self._settings[slot])
        return Tag(
            hashlib.sha256(repr(context).encode()).digest(),
            self._depths[slot, :end].tobytes(),
            loop,
        )

    def _write(
        self, plan: StepPlan, row_slots: np.ndarray, rows: np.ndarray, row: int, loop: int
    ) -> None:
        for index in rows.tolist():
            slot, position = int(row_slots[index]), int(plan.positions[index])
            self.memory[self._place(slot, row, position)] = self._tag(slot, position, loop)

    def _read(
        self, plan: StepPlan, row_slots: np.ndarray, rows: np.ndarray, row: int, loop: int
    ) -> None:
        last = {int(row_slots[i]): int(plan.positions[i]) for i in rows.tolist()}
        for slot, position in last.items():
            for earlier in range(position + 1):
                self._check_read(slot, row, earlier, loop)

    def _check_read(self, slot: int, row: int, position: int, loop: int) -> None:
        found = self.memory[self._place(slot, row, position)]
        if self.check == "written":
            return
        depth = int(self._depths[slot, position])
        wanted = self._tag(slot, position, loop if loop == BOUNDARY else min(loop, depth - 1))
        assert found.context == wanted.context, "a query reads another context's KV"
        if self.check == "exact":
            assert found == wanted, "a query reads the wrong plane or depths"
        else:
            assert wanted.loop <= found.loop <= loop, "a query reads a plane too shallow"

    def _copy(self, copies: PlaneCopies, begin: int, end: int | None) -> None:
        for i in range(len(copies.before_loop)):
            due = copies.before_loop[i] >= begin and (end is None or copies.before_loop[i] < end)
            for token in range(copies.token_begin[i], copies.token_end[i]) if due else ():
                source = (int(copies.src_units[i]), token)
                self.memory[int(copies.dst_units[i]), token] = self.memory[source]
