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
from looptrt.runtime.config import MAX_GRAPH_ROWS
from looptrt.runtime.step_plan import Int32Array, StepPlan

# Rows of a step in which every sequence has one.
SIZES: tuple[int, ...] = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
# Rows and sequences of other steps: few enough that the usual ones can be captured ahead of time.
PACKED_SIZES: tuple[int, ...] = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024),
    *(1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, MAX_GRAPH_ROWS),
)
SEQ_SIZES: tuple[int, ...] = (9, 33, 129, 513, 2049)  # the filling one included
# Sequences of a decode step, hence of any step that is a graph.
MAX_DECODE_SEQS = SIZES[-1]
# More logits than that are not kept: 67 MB in float32 for a vocabulary of 65,536. Steps that need
# more run as chained graphs, whose coda and sampler are none.
MAX_READ_SAMPLES = 256
# Rows of one loop.
LOOP_SIZES: tuple[int, ...] = (*SIZES, *(rows for rows in PACKED_SIZES if rows > SIZES[-1]))


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


def graph_rows(max_rows: int) -> int:
    """Rows of the largest graph where steps of up to `max_rows` rows are graphs."""
    return size_for(max_rows, PACKED_SIZES) or PACKED_SIZES[-1]


def step_shape(plan: StepPlan, *, shrinks: bool, max_slots: int) -> StepShape | None:
    """The size that a plan is filled up to; None if it is too large for a graph.

    A packed step has no more sequences than a step of one row each may have rows: that one may
    follow before the host has seen the packed step's tokens, which only graphs leave to it.

    Args:
        plan: the step.
        shrinks: whether later loops may run fewer rows, which then need a sequence to fill up.
        max_slots: sequences of any step.
    """
    num_seqs = len(plan.seq_slots)
    if num_seqs == plan.num_rows and not shrinks:
        rows = size_for(plan.num_rows)
        return None if rows is None else StepShape(rows, rows, rows)
    rows = size_for(plan.num_rows, PACKED_SIZES)
    if rows is None or num_seqs > MAX_DECODE_SEQS:
        return None
    fewest = _fewest_seqs(rows, max_slots)
    seqs = size_for(max(num_seqs + 1, len(plan.logit_rows), fewest), SEQ_SIZES)
    return None if seqs is None else StepShape(rows, seqs, seqs)


def usual_shapes(max_slots: int, max_rows: int) -> list[StepShape]:
    """Shapes of all steps at one depth for up to `max_slots` requests and `max_rows` rows.

    Those of most use first: steps of one row a sequence, then others, the smaller ones first.
    """
    largest = size_for(min(max_slots, max_rows)) or MAX_DECODE_SEQS
    decodes = [StepShape(rows, rows, rows) for rows in SIZES if rows <= largest]
    packed = [
        StepShape(rows, seqs, seqs)
        for rows in PACKED_SIZES
        if rows <= max_rows
        for seqs in _between(
            _fewest_seqs(rows, max_slots), min(max_slots, rows, MAX_DECODE_SEQS) + 1, SEQ_SIZES
        )
    ]
    return decodes + packed


def _fewest_seqs(rows: int, max_slots: int) -> int:
    """Sequences that a packed step has room for at least.

    Above `SIZES` all that there can be: beside so many rows they cost little, a graph more does.
    """
    return 0 if rows <= MAX_DECODE_SEQS else min(max_slots, MAX_DECODE_SEQS) + 1


def _between(low: int, high: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the sizes that counts from `low` to `high` get."""
    return sizes[bisect_left(sizes, low) : bisect_left(sizes, high) + 1]


def filled_step(
    plan: StepPlan, shape: StepShape, null_slot: int, max_seq_len: int
) -> dict[str, np.ndarray]:
    """The plan's inputs of all phases, filled up to `shape`.

    Args:
        plan: the step.
        shape: at least its size, from `step_shape`.
        null_slot: row of the block table that holds null units only.
        max_seq_len: tokens of the longest sequence; filling rows have no later position.

    Returns:
        input_ids, positions [rows] int32, noise_seeds [rows] int64, cu_seqlens [seqs + 1],
        seq_slots [seqs], logit_rows [samples] int32.
    """
    return {
        "input_ids": filled(plan.input_ids, shape.rows),
        "positions": _positions(plan.positions, plan.cu_seqlens, shape, max_seq_len),
        "noise_seeds": filled(plan.noise_seeds, shape.rows),
        "cu_seqlens": _bounds(plan.cu_seqlens, shape),
        "seq_slots": filled(plan.seq_slots, shape.seqs, null_slot),
        "logit_rows": filled(plan.logit_rows, shape.samples),
    }


def filled_rows(
    rows: LoopRows, shape: StepShape, spare_row: int, max_seq_len: int
) -> dict[str, np.ndarray]:
    """One loop's rows, filled up to `shape`.

    Args:
        rows: the rows that go on.
        shape: as many sequences as the step's shape has.
        spare_row: row of the state that filling rows read and write.
        max_seq_len: as in `filled_step`.

    Returns:
        rows [rows] int64, positions [rows], cu_seqlens [seqs + 1] int32.
    """
    return {
        "rows": filled(rows.rows.astype(np.int64), shape.rows, spare_row),
        "positions": _positions(rows.positions, rows.cu_seqlens, shape, max_seq_len),
        "cu_seqlens": _bounds(rows.cu_seqlens, shape),
    }


def _fill_is_apart(cu_seqlens: Int32Array, shape: StepShape) -> bool:
    """Whether every filling row has a sequence of its own, as every row of the plan has."""
    return shape.rows == shape.seqs and bool((np.diff(cu_seqlens) == 1).all())


def _bounds(cu_seqlens: Int32Array, shape: StepShape) -> Int32Array:
    if _fill_is_apart(cu_seqlens, shape):
        return np.arange(shape.seqs + 1, dtype=np.int32)
    return filled(cu_seqlens, shape.seqs + 1, shape.rows)


def _positions(
    positions: Int32Array, cu_seqlens: Int32Array, shape: StepShape, max_seq_len: int
) -> Int32Array:
    """Positions that increase within the filling sequence, up to the last that there is."""
    more = shape.rows - len(positions)
    if _fill_is_apart(cu_seqlens, shape):
        return filled(positions, shape.rows)
    return np.concatenate([positions, np.minimum(np.arange(more, dtype=np.int32), max_seq_len - 1)])


def filled(values: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    """[size] the values, then `value`."""
    whole = np.full(size, value, values.dtype)
    whole[: len(values)] = values
    return whole
