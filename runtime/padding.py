"""Steps of a few fixed sizes: what a captured graph runs, whatever a plan's own size.

Owns the sizes and the rows that fill a step up; leaves tensors and graphs to the executor.
Invariant: a filling row belongs to a sequence whose slot holds null units only, so it writes to
no unit and no row of the plan sees it (case C13).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from looptrt.runtime.batch import LoopRows
from looptrt.runtime.step_plan import Int32Array, StepPlan

# Ouro-1.4B on an H200: 512 rows take 14 ms as a graph and 55 ms kernel by kernel; at 8192 rows
# launches hide behind kernels. Where between the two they begin to was not measured.
MAX_GRAPH_ROWS = 1024
# Rows of a step in which every sequence has one, and of a loop.
SIZES: tuple[int, ...] = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, MAX_GRAPH_ROWS),
)
# Rows and sequences of other steps: few enough that all can be captured ahead of time.
PACKED_SIZES: tuple[int, ...] = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, MAX_GRAPH_ROWS),
)
SEQ_SIZES: tuple[int, ...] = (9, 33, 129, 513, 2 * MAX_GRAPH_ROWS + 1)  # the filling one included


class StepShape(NamedTuple):
    """Size of a filled-up step, or of one loop of it.

    Attributes:
        rows: token rows.
        seqs: sequences.
        samples: rows that are sampled.
    """

    rows: int
    seqs: int
    samples: int


def size_for(count: int, sizes: tuple[int, ...] = SIZES) -> int | None:
    """The smallest of the sizes that holds `count`; None above the largest."""
    place = bisect_left(sizes, max(count, 1))
    return sizes[place] if place < len(sizes) else None


def step_shape(plan: StepPlan, *, shrinks: bool) -> StepShape | None:
    """The size that a plan is filled up to; None if it is too large for a graph.

    Args:
        plan: the step.
        shrinks: whether later loops may run fewer rows, which then need a sequence to fill up.
    """
    num_seqs = len(plan.seq_slots)
    if num_seqs == plan.num_rows and not shrinks:
        rows = size_for(plan.num_rows)
        return None if rows is None else StepShape(rows, rows, rows)
    rows = size_for(plan.num_rows, PACKED_SIZES)
    seqs = size_for(max(num_seqs + 1, len(plan.logit_rows)), SEQ_SIZES)
    return None if rows is None or seqs is None else StepShape(rows, seqs, seqs)


def usual_shapes(max_slots: int, max_rows: int) -> list[StepShape]:
    """Shapes of all steps at one depth for up to `max_slots` requests and `max_rows` rows."""
    largest = size_for(min(max_slots, max_rows)) or MAX_GRAPH_ROWS
    decodes = [StepShape(rows, rows, rows) for rows in SIZES if rows <= largest]
    most_seqs = size_for(max_slots + 1, SEQ_SIZES) or SEQ_SIZES[-1]
    packed = [
        StepShape(rows, seqs, seqs)
        for rows in PACKED_SIZES
        for fewer, seqs in zip((0, *SEQ_SIZES), SEQ_SIZES, strict=False)
        if rows <= max_rows and fewer <= rows and seqs <= most_seqs
    ]
    return decodes + packed


def filled_step(plan: StepPlan, shape: StepShape, null_slot: int) -> dict[str, np.ndarray]:
    """The plan's inputs of all phases, filled up to `shape`.

    Args:
        plan: the step.
        shape: at least its size, from `step_shape`.
        null_slot: row of the block table that holds null units only.

    Returns:
        input_ids, positions [rows] int32, noise_seeds [rows] int64, cu_seqlens [seqs + 1],
        seq_slots [seqs], logit_rows [samples] int32.
    """
    return {
        "input_ids": filled(plan.input_ids, shape.rows),
        "positions": _positions(plan.positions, plan.cu_seqlens, shape),
        "noise_seeds": filled(plan.noise_seeds, shape.rows),
        "cu_seqlens": _bounds(plan.cu_seqlens, shape),
        "seq_slots": filled(plan.seq_slots, shape.seqs, null_slot),
        "logit_rows": filled(plan.logit_rows, shape.samples),
    }


def filled_rows(rows: LoopRows, shape: StepShape, spare_row: int) -> dict[str, np.ndarray]:
    """One loop's rows, filled up to `shape`.

    Args:
        rows: the rows that go on.
        shape: as many sequences as the step's shape has.
        spare_row: row of the state that filling rows read and write.

    Returns:
        rows [rows] int64, positions [rows], cu_seqlens [seqs + 1] int32.
    """
    return {
        "rows": filled(rows.rows.astype(np.int64), shape.rows, spare_row),
        "positions": _positions(rows.positions, rows.cu_seqlens, shape),
        "cu_seqlens": _bounds(rows.cu_seqlens, shape),
    }


def _fill_is_apart(cu_seqlens: Int32Array, shape: StepShape) -> bool:
    """Whether every filling row has a sequence of its own, as every row of the plan has."""
    return shape.rows == shape.seqs and bool((np.diff(cu_seqlens) == 1).all())


def _bounds(cu_seqlens: Int32Array, shape: StepShape) -> Int32Array:
    if _fill_is_apart(cu_seqlens, shape):
        return np.arange(shape.seqs + 1, dtype=np.int32)
    return filled(cu_seqlens, shape.seqs + 1, shape.rows)


def _positions(positions: Int32Array, cu_seqlens: Int32Array, shape: StepShape) -> Int32Array:
    """Positions that increase within the filling sequence."""
    more = shape.rows - len(positions)
    if _fill_is_apart(cu_seqlens, shape):
        return filled(positions, shape.rows)
    return np.concatenate([positions, np.arange(more, dtype=np.int32)])


def filled(values: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    """[size] the values, then `value`."""
    whole = np.full(size, value, values.dtype)
    whole[: len(values)] = values
    return whole
