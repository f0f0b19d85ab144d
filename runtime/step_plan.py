"""The only thing that passes from the scheduler to an executor: one engine step.

Owns the description of the rows, table changes and plane copies of a step; leaves tensors
to `runtime.batch` and `runtime.executor`. Invariant: everything is decided before the
step starts, and rows of one sequence are contiguous with increasing positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from looptrt.runtime.outputs import TokenLogprobs
from looptrt.runtime.request import ExitParams, SamplerParams

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class TableUpdates:
    """Block-table columns that changed since the previous plan.

    Attributes:
        slots: [n] sequences' slots in the table.
        pages: [n] page indices within the sequence.
        units: [n, num_rows] unit id of every row (boundary rows, then planes).
    """

    slots: Int32Array
    pages: Int32Array
    units: Int32Array


@dataclass(frozen=True)
class PlaneCopies:
    """Token ranges to copy from one unit to another, all layer slots of them.

    Attributes:
        before_loop: [n] loop (from 0) that must not start before the copy is done; 0 means
            before the prelude. Copies for a loop that the step does not run are done before
            the coda.
        src_units, dst_units: [n] unit ids.
        token_begin, token_end: [n] range of token indices within the page.
    """

    before_loop: Int32Array
    src_units: Int32Array
    dst_units: Int32Array
    token_begin: Int32Array
    token_end: Int32Array

    @staticmethod
    def of(entries: Sequence[tuple[int, int, int, int, int]]) -> PlaneCopies:
        """Arrays of (before_loop, src_unit, dst_unit, token_begin, token_end) entries."""
        columns = np.array(entries, np.int32).reshape(-1, 5).T
        return PlaneCopies(*(np.ascontiguousarray(column) for column in columns))

    def due(self, begin: int, end: int | None = None) -> PlaneCopies | None:
        """The copies due before the loops begin..end-1 (all later ones for None), if any."""
        mask = self.before_loop >= begin
        if end is not None:
            mask &= self.before_loop < end
        if not mask.any():
            return None
        return PlaneCopies(*(column[mask] for column in vars(self).values()))


@dataclass(frozen=True)
class SlotStart:
    """A slot that a request took since the previous plan, new or after preemption.

    Attributes:
        num_prompt: tokens of the prompt.
        token_ids: [num_tokens] prompt and all generated tokens so far.
    """

    slot: int
    sampler: SamplerParams
    exit: ExitParams
    num_prompt: int
    token_ids: Int32Array


@dataclass(frozen=True)
class ExitRows:
    """Sampled rows that may stop before the loops planned for them.

    Attributes:
        rows: [n] indices into the step's rows, ascending.
        slots: [n] slots they belong to.
        units: [n, num_planes] units of each row's page, plane by plane.
        token_index: [n] place of each row's token in its page.
    """

    rows: Int32Array
    slots: Int32Array
    units: Int32Array
    token_index: Int32Array


@dataclass(frozen=True)
class StepPlan:
    """One step: prelude over all rows, loop k over rows deeper than k, coda over all rows.

    Attributes:
        input_ids: [num_rows] token ids; -1 for the token that the step before, not committed
            yet, samples for the row's slot.
        positions: [num_rows] token positions in their sequences.
        depths: [num_rows] loops each row runs, at least 1.
        noise_seeds: [num_rows] seeds of the random initial state.
        cu_seqlens: [num_seqs + 1] rows of sequence i are cu_seqlens[i]:cu_seqlens[i + 1].
        seq_slots: [num_seqs] slot of each sequence in the block table.
        logit_rows: [num_samples] rows whose logits are sampled, ascending; the next token goes
            to positions[logit_rows] + 1. A sequence that verifies drafts has several.
        sample_slots: [num_samples] slots those rows belong to.
        prompt_rows: [num_prompt_rows] rows whose logits only score the prompt token that
            follows them.
        prompt_slots: [num_prompt_rows] slots those rows belong to.
        slot_starts: slots taken since the previous plan.
        exits: rows whose depth is decided while the step runs.
        table_updates: block-table columns changed since the previous plan.
        copies: plane copies of this step.
        is_draft: whether the tokens are guesses, which a later step verifies.
    """

    input_ids: Int32Array
    positions: Int32Array
    depths: Int32Array
    noise_seeds: Int64Array
    cu_seqlens: Int32Array
    seq_slots: Int32Array
    logit_rows: Int32Array
    sample_slots: Int32Array
    prompt_rows: Int32Array
    prompt_slots: Int32Array
    table_updates: TableUpdates
    copies: PlaneCopies
    slot_starts: tuple[SlotStart, ...] = ()
    exits: ExitRows | None = None
    is_draft: bool = False

    @property
    def num_rows(self) -> int:
        """Token rows of the step."""
        return len(self.input_ids)

    @property
    def num_loops(self) -> int:
        """Loops of the deepest row."""
        return int(self.depths.max())


@dataclass(frozen=True)
class StepResult:
    """What an executor gives back for a plan, in the order of plan.logit_rows.

    Attributes:
        token_ids: [num_samples] sampled tokens.
        loops: [num_samples] loops behind the logits that each token was sampled from.
        depths: [num_samples] loops each sampled row ran: the depth recorded for its token.
        logprobs: {index of a sample: log-probabilities} where a request asks for them.
        prompt_logprobs: one entry for each of plan.prompt_rows.
        failed: samples whose logits are not finite; their tokens mean nothing.
    """

    token_ids: Int32Array
    loops: Int32Array
    depths: Int32Array
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    failed: tuple[int, ...] = ()

    @staticmethod
    def at_planned_depths(plan: StepPlan, token_ids: Int32Array) -> StepResult:
        """Result of a step in which no row stopped early."""
        depths = plan.depths[plan.logit_rows]
        return StepResult(token_ids, depths, depths)
