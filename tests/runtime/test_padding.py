"""Steps filled up to fixed sizes: what is added touches nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from looptrt.runtime.batch import loop_rows
from looptrt.runtime.config import MAX_GRAPH_ROWS
from looptrt.runtime.padding import (
    LOOP_SIZES,
    PACKED_SIZES,
    SEQ_SIZES,
    SIZES,
    StepShape,
    filled_rows,
    filled_step,
    graph_rows,
    size_for,
    step_shape,
    usual_shapes,
)
from looptrt.runtime.step_plan import PlaneCopies, StepPlan, TableUpdates

NONE = np.zeros(0, np.int32)
NULL_SLOT, SPARE_ROW = 99, 1024


def plan_of(counts: list[int], depths: list[int] | None = None) -> StepPlan:
    """Sequences with these rows each; rows of depth 4 unless told otherwise."""
    bounds = np.cumsum([0, *counts]).astype(np.int32)
    positions = np.concatenate([np.arange(count) + 7 for count in counts]).astype(np.int32)
    num_rows = int(bounds[-1])
    slots = np.arange(len(counts), dtype=np.int32)
    return StepPlan(
        input_ids=np.arange(num_rows, dtype=np.int32) + 1,
        positions=positions,
        depths=np.array(depths or [4] * num_rows, np.int32),
        noise_seeds=np.full(num_rows, 5, np.int64),
        cu_seqlens=bounds,
        seq_slots=slots,
        logit_rows=bounds[1:] - 1,
        sample_slots=slots,
        prompt_rows=NONE,
        prompt_slots=NONE,
        table_updates=TableUpdates(NONE, NONE, NONE.reshape(0, 1)),
        copies=PlaneCopies.of([]),
    )


def owner_of_rows(bounds: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Slot that every row belongs to; fails where bounds do not ascend or leave a row out."""
    counts = np.diff(bounds)
    assert (counts >= 0).all()
    return np.repeat(slots, counts)


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("counts", [[1], [1] * 5, [1] * 8, [3], [1, 1, 9], [17, 1], [1] * 31 + [2]])
def test_every_row_that_fills_up_belongs_to_the_null_slot(counts: list[int], shrinks: bool) -> None:
    plan = plan_of(counts)
    shape = step_shape(plan, shrinks=shrinks, max_slots=128)
    assert shape is not None
    longest = int(plan.positions.max()) + 1
    arrays = filled_step(plan, shape, NULL_SLOT, longest)
    assert arrays["positions"].max() < longest  # a table of angles may have no more
    assert {len(arrays[name]) for name in ("input_ids", "positions", "noise_seeds")} == {shape.rows}
    assert len(arrays["cu_seqlens"]) == shape.seqs + 1
    assert len(arrays["logit_rows"]) == shape.samples
    owners = owner_of_rows(arrays["cu_seqlens"], arrays["seq_slots"])
    assert len(owners) == shape.rows
    np.testing.assert_array_equal(owners[: plan.num_rows], np.repeat(plan.seq_slots, counts))
    assert (owners[plan.num_rows :] == NULL_SLOT).all()
    np.testing.assert_array_equal(arrays["positions"][: plan.num_rows], plan.positions)


@pytest.mark.parametrize("counts", [[1] * 8, [1] * 7, [4, 1, 1, 1], [5, 5, 5]])
@pytest.mark.parametrize("deep", [1, 3])
def test_rows_of_a_shrunken_loop_keep_their_sequences(counts: list[int], deep: int) -> None:
    num_rows = sum(counts)
    plan = plan_of(counts, [2] * (num_rows - deep) + [4] * deep)
    shape = step_shape(plan, shrinks=True, max_slots=128)
    assert shape is not None
    slots = filled_step(plan, shape, NULL_SLOT, 64)["seq_slots"]
    rows = loop_rows(plan, plan.depths, 2)
    size = size_for(len(rows.rows))
    assert size is not None
    longest = int(plan.positions.max()) + 1
    arrays = filled_rows(rows, shape._replace(rows=size), SPARE_ROW, longest)
    assert arrays["positions"].max() < longest
    owners = owner_of_rows(arrays["cu_seqlens"], slots)
    assert len(owners) == size
    every = np.repeat(plan.seq_slots, counts)
    np.testing.assert_array_equal(owners[:deep], every[rows.rows])
    assert (owners[deep:] == NULL_SLOT).all()
    assert (arrays["rows"][deep:] == SPARE_ROW).all()
    np.testing.assert_array_equal(arrays["rows"][:deep], rows.rows)


@pytest.mark.parametrize("max_slots", [1, 3, 8, 100, 128, 256, 513, 600, 1024])
@pytest.mark.parametrize("max_rows", [16, 128, 1024, 2048, 8192])
def test_the_usual_shapes_are_those_that_steps_get(max_slots: int, max_rows: int) -> None:
    usual = usual_shapes(max_slots, max_rows)
    # In one cache, and captured in seconds at start.
    assert len(set(usual)) == len(usual) < 80
    for num_seqs in {1, max_slots // 2 or 1, max_slots}:
        if num_seqs <= max_rows // 2:
            assert step_shape(plan_of([1] * num_seqs), shrinks=False, max_slots=max_slots) in usual
            for longest in (2, max_rows // 2, max_rows - num_seqs + 1):
                packed = step_shape(
                    plan_of([longest] + [1] * (num_seqs - 1)), shrinks=False, max_slots=max_slots
                )
                assert packed in usual


@pytest.mark.parametrize("max_slots", [1, 128, 512, 1024, 5000])
def test_what_is_captured_first_is_what_comes_most(max_slots: int) -> None:
    usual = usual_shapes(max_slots, MAX_GRAPH_ROWS)
    decodes = [shape for shape in usual if shape.rows == shape.seqs]
    assert usual[: len(decodes)] == decodes
    assert decodes[-1].rows == min(size_for(max_slots) or SIZES[-1], SIZES[-1])
    packed = usual[len(decodes) :]
    assert packed == sorted(packed)
    assert [shape for shape in packed if shape.rows <= 1024] == usual_shapes(max_slots, 1024)[
        len(decodes) :
    ]


def test_a_large_step_is_filled_up_by_a_third_at_most() -> None:
    assert (PACKED_SIZES[-1], LOOP_SIZES[-1]) == (MAX_GRAPH_ROWS, MAX_GRAPH_ROWS)
    for count in range(SIZES[-1] + 1, MAX_GRAPH_ROWS + 1):
        rows = size_for(count, PACKED_SIZES)
        assert rows is not None
        assert count <= rows < count * 4 / 3
    assert {*PACKED_SIZES} <= {*LOOP_SIZES}, "a loop of a whole step would have no size"


@pytest.mark.parametrize(
    ("max_rows", "rows"), [(1, 16), (1000, 1024), (1024, 1024), (3000, 3072), (8192, 8192)]
)
def test_the_largest_graph_is_the_limit_rounded_up(max_rows: int, rows: int) -> None:
    assert graph_rows(max_rows) == rows
    assert max(shape.rows for shape in usual_shapes(8, rows)) == rows


def test_steps_above_the_largest_size_have_no_shape() -> None:
    for shrinks in (False, True):
        assert step_shape(plan_of([MAX_GRAPH_ROWS]), shrinks=shrinks, max_slots=128) is not None
        assert step_shape(plan_of([MAX_GRAPH_ROWS + 1]), shrinks=shrinks, max_slots=128) is None
    assert step_shape(plan_of([1000, 2, 30]), shrinks=False, max_slots=128) == StepShape(
        1280, 129, 129
    )
    assert size_for(SIZES[-1] + 1) is None


@pytest.mark.parametrize(("max_slots", "seqs"), [(1, 9), (8, 9), (9, 33), (128, 129), (5000, 2049)])
def test_large_steps_of_a_size_share_one_shape(max_slots: int, seqs: int) -> None:
    for counts in ([1500], [1400, 1, 1, 1]):
        shape = step_shape(plan_of(counts), shrinks=False, max_slots=max_slots)
        assert shape == StepShape(1536, seqs, seqs)
    large = [shape for shape in usual_shapes(max_slots, MAX_GRAPH_ROWS) if shape.rows > 1024]
    assert len(large) == len({shape.rows for shape in large}) == 9


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("longest", [1, 2])
def test_a_step_of_more_sequences_than_one_of_a_row_each_may_have_has_no_shape(
    shrinks: bool, longest: int
) -> None:
    """Its successor would be no graph, and could not take its tokens from device memory."""
    most = [longest] + [1] * (SIZES[-1] - 1)
    assert step_shape(plan_of(most), shrinks=shrinks, max_slots=2000) is not None
    assert step_shape(plan_of([*most, 1]), shrinks=shrinks, max_slots=2000) is None


def test_more_sampled_rows_than_a_graph_has_room_for_have_no_shape() -> None:
    plan = plan_of([SEQ_SIZES[-1] + 1])
    every = np.arange(plan.num_rows, dtype=np.int32)
    assert (
        step_shape(dataclasses.replace(plan, logit_rows=every[1:]), shrinks=False, max_slots=128)
        is not None
    )
    assert (
        step_shape(dataclasses.replace(plan, logit_rows=every), shrinks=False, max_slots=128)
        is None
    )


def test_sizes_are_the_smallest_that_hold_a_count() -> None:
    assert [size_for(count) for count in (0, 1, 3, 9, 33)] == [1, 1, 4, 16, 48]
