"""A StepPlan's rows as the tensors that the phases take.

Owns the row lists of each loop; leaves KV memory and modules to the executor. Invariant:
loop k runs exactly the rows deeper than k, in the plan's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from looptrt.runtime.step_plan import Int32Array, StepPlan


@dataclass(frozen=True)
class LoopRows:
    """Rows that run one loop.

    Attributes:
        rows: [num_rows] indices into the step's rows, ascending.
        positions: [num_rows] their token positions.
        cu_seqlens: [num_seqs + 1] bounds of each sequence's rows within `rows`.
    """

    rows: Int32Array
    positions: Int32Array
    cu_seqlens: Int32Array


def loop_rows(plan: StepPlan, depths: Int32Array, loop_idx: int) -> LoopRows:
    """Rows that run loop `loop_idx` when row i runs depths[i] loops."""
    return select_rows(plan, np.flatnonzero(depths > loop_idx).astype(np.int32))


def select_rows(plan: StepPlan, rows: Int32Array) -> LoopRows:
    """Some of the step's rows, ascending, with their sequences' bounds."""
    bounds = np.searchsorted(rows, plan.cu_seqlens).astype(np.int32)
    return LoopRows(rows, plan.positions[rows], bounds)
