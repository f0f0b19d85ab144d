"""The only thing that passes from the scheduler to an executor: one engine step.

Owns the description of the rows, table changes and plane copies of a step; leaves tensors
to `runtime.batch` and `runtime.executor`. Invariant: everything is decided before the
step starts, and rows of one sequence are contiguous with increasing positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from looptrt.runtime.request import SamplerParams

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


@dataclass(frozen=True)
class StepPlan:
    """One step: prelude over all rows, loop k over rows deeper than k, coda over all rows.

    Attributes:
        step_id: counts up from 0.
        input_ids: [num_rows] token ids.
        positions: [num_rows] token positions in their sequences.
        depths: [num_rows] loops each row runs, at least 1.
        noise_seeds: [num_rows] seeds of the random initial state.
        cu_seqlens: [num_seqs + 1] rows of sequence i are cu_seqlens[i]:cu_seqlens[i + 1].
        seq_slots: [num_seqs] slot of each sequence in the block table.
        logit_rows: [num_samples] rows whose logits are sampled; the next token goes to
            positions[logit_rows] + 1.
        sample_slots: [num_samples] slots those rows belong to.
        slot_params: sampling parameters of slots taken since the previous plan.
        table_updates: block-table columns changed since the previous plan.
        copies: plane copies of this step.
    """

    step_id: int
    input_ids: Int32Array
    positions: Int32Array
    depths: Int32Array
    noise_seeds: Int64Array
    cu_seqlens: Int32Array
    seq_slots: Int32Array
    logit_rows: Int32Array
    sample_slots: Int32Array
    table_updates: TableUpdates
    copies: PlaneCopies
    slot_params: tuple[tuple[int, SamplerParams], ...] = field(default=())

    @property
    def num_rows(self) -> int:
        """Token rows of the step."""
        return len(self.input_ids)

    @property
    def num_loops(self) -> int:
        """Loops of the deepest row."""
        return int(self.depths.max())
