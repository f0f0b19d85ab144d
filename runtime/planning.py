"""Turns "these slots run these positions" into the arrays of a StepPlan.

Owns how rows, sampled rows, scored rows and exit rows follow from the slots' books; leaves
who runs to the scheduler. Invariant: a row is sampled exactly when no known token follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looptrt.runtime.kv.sequence_kv import SequenceKv
from looptrt.runtime.slots import NO_TOKEN, Slots
from looptrt.runtime.step_plan import (
    ExitRows,
    Int32Array,
    PlaneCopies,
    SlotStart,
    StepPlan,
)

_NO_ROWS: Int32Array = np.empty(0, np.int32)
_NO_COPIES = PlaneCopies.of([])
CopyEntry = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Runs:
    """Which positions of which slots a step runs.

    Attributes:
        slots: [n] slots.
        begins: [n] first position of each.
        counts: [n] rows of each, at least 1; None for one each.
    """

    slots: NDArray[np.intp]
    begins: Int32Array
    counts: Int32Array | None = None

    def rows(self) -> tuple[NDArray[np.intp], Int32Array, Int32Array]:
        """[num_rows] slot and position of every row, and [n + 1] bounds of the runs."""
        bounds = np.zeros(len(self.slots) + 1, np.int32)
        if self.counts is None:
            bounds[1:] = np.arange(1, len(self.slots) + 1)
            return self.slots, self.begins, bounds
        np.cumsum(self.counts, out=bounds[1:])
        offsets = np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], self.counts)
        positions = np.repeat(self.begins, self.counts) + offsets
        return np.repeat(self.slots, self.counts), positions, bounds


def decode_runs(slots: Slots, decodes: NDArray[np.intp], chunks: dict[int, int]) -> Runs:
    """The last known token of `decodes` with their drafts, then the chunks' prompt rows."""
    drafts = slots.num_drafts[decodes]
    if not chunks and not drafts.any():
        return Runs(decodes, slots.num_computed[decodes])
    runs = np.concatenate([decodes, np.fromiter(chunks, np.intp, len(chunks))])
    rows = np.fromiter(chunks.values(), np.int32, len(chunks))
    counts = np.concatenate([drafts + 1, rows])
    return Runs(runs, slots.num_computed[runs], counts)


def chunk_copies(slots: Slots, kv: SequenceKv, chunks: dict[int, int]) -> list[CopyEntry]:
    """Plane copies that the chunks' shallow rows need."""
    copies: list[CopyEntry] = []
    for slot, rows in chunks.items():
        begin = int(slots.num_computed[slot])
        copies.extend(kv.copies(slot, begin, begin + rows))
    return copies


def plan_step(
    slots: Slots,
    kv: SequenceKv,
    runs: Runs,
    *,
    copies: list[CopyEntry],
    slot_starts: list[SlotStart],
) -> StepPlan:
    """A step that runs known tokens and drafts at their recorded depths."""
    row_slots, positions, bounds = runs.rows()
    one_each = runs.counts is None
    sampled = positions >= slots.num_tokens[row_slots] - 1
    logit_rows = np.flatnonzero(sampled).astype(np.int32)
    sample_slots = row_slots[logit_rows].astype(np.int32)
    prompt_rows = _NO_ROWS if one_each else _prompt_rows(slots, row_slots, positions)
    return StepPlan(
        input_ids=slots.token_ids[row_slots, positions],
        positions=positions,
        depths=slots.depths[row_slots, positions].astype(np.int32),
        noise_seeds=slots.noise_seed[row_slots],
        cu_seqlens=bounds,
        seq_slots=runs.slots.astype(np.int32),
        logit_rows=logit_rows,
        sample_slots=sample_slots,
        prompt_rows=prompt_rows,
        prompt_slots=row_slots[prompt_rows].astype(np.int32),
        table_updates=kv.table.take_updates(),
        copies=PlaneCopies.of(copies) if copies else _NO_COPIES,
        slot_starts=tuple(slot_starts),
        exits=_exit_rows(slots, kv, logit_rows, sample_slots, positions),
    )


def plan_one_each(
    slots: Slots,
    kv: SequenceKv,
    runs: Runs,
    *,
    depths: Int32Array,
    input_ids: Int32Array,
    is_draft: bool = False,
) -> StepPlan:
    """A step of one sampled row a slot, none of them in the books yet."""
    row_slots, positions, bounds = runs.rows()
    seq_slots = row_slots.astype(np.int32)
    return StepPlan(
        input_ids=input_ids,
        positions=positions,
        depths=depths,
        noise_seeds=slots.noise_seed[row_slots],
        cu_seqlens=bounds,
        seq_slots=seq_slots,
        logit_rows=np.arange(len(seq_slots), dtype=np.int32),
        sample_slots=seq_slots,
        prompt_rows=_NO_ROWS,
        prompt_slots=_NO_ROWS,
        table_updates=kv.table.take_updates(),
        copies=_NO_COPIES,
        is_draft=is_draft,
    )


def plan_drafts(
    slots: Slots, kv: SequenceKv, drafting: NDArray[np.intp], draft_loops: int
) -> StepPlan:
    """One more guess for each of these slots: its newest token or guess, run shallow."""
    begins = slots.num_computed[drafting] + slots.num_drafts[drafting]
    return plan_one_each(
        slots,
        kv,
        Runs(drafting, begins),
        depths=np.full(len(drafting), draft_loops, np.int32),
        input_ids=slots.token_ids[drafting, begins],
        is_draft=True,
    )


def plan_ahead(slots: Slots, kv: SequenceKv, decodes: NDArray[np.intp]) -> StepPlan:
    """The step after one in flight that gives each of these slots one token, not known yet."""
    return plan_one_each(
        slots,
        kv,
        Runs(decodes, slots.num_tokens[decodes]),
        depths=slots.loops[decodes],
        input_ids=np.full(len(decodes), NO_TOKEN, np.int32),
    )


def _prompt_rows(slots: Slots, row_slots: NDArray[np.intp], positions: Int32Array) -> Int32Array:
    """Rows before the last of prompts that are to be scored and not answered yet."""
    wanted = slots.scores_prompt[row_slots] & (positions < slots.num_prompt[row_slots] - 1)
    wanted &= slots.num_tokens[row_slots] == slots.num_prompt[row_slots]
    return np.flatnonzero(wanted).astype(np.int32)


def _exit_rows(
    slots: Slots,
    kv: SequenceKv,
    logit_rows: Int32Array,
    sample_slots: Int32Array,
    positions: Int32Array,
) -> ExitRows | None:
    """Sampled rows whose request lets them stop early, with the units of their pages."""
    may_exit = slots.may_exit[sample_slots]
    if not may_exit.any():
        return None
    rows, owners = logit_rows[may_exit], sample_slots[may_exit]
    pages, token_index = np.divmod(positions[rows], kv.layout.page_size)
    units = kv.table.units[owners, kv.layout.boundary_units :, pages]
    return ExitRows(rows, owners, units, token_index.astype(np.int32))
