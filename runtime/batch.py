"""A StepPlan's rows as the tensors that the phases take.

Owns the row lists of each loop; leaves KV memory and modules to the executor. Invariant:
loop k runs exactly the rows deeper than k, in the plan's order.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def loop_rows(plan: StepPlan) -> Iterator[tuple[int, LoopRows]]:
    """Rows of each loop; loops with the same rows share one LoopRows.

    Yields:
        (loop, rows) for loop 0 up to the deepest row's last loop.
    """
    loop_idx = 0
    for depth in np.unique(plan.depths).tolist():
        rows = np.flatnonzero(plan.depths > loop_idx).astype(np.int32)
        bounds = np.searchsorted(rows, plan.cu_seqlens).astype(np.int32)
        shared = LoopRows(rows, plan.positions[rows], bounds)
        for loop in range(loop_idx, depth):
            yield loop, shared
        loop_idx = depth
