"""Statistics of benchmarks, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from looptrt.bench.latency import StepClock
from looptrt.bench.statistics import PairedDifference, Verdict, medians, percentile, spread


def test_percentile_interpolates_between_the_closest_ranks() -> None:
    values = [40.0, 10.0, 20.0, 30.0]
    assert percentile(values, 50) == 25.0
    assert percentile(values, 90) == pytest.approx(37.0)  # rank 2.7 of 10, 20, 30, 40
    assert percentile(values, 0) == 10.0
    assert percentile(values, 100) == 40.0
    assert percentile([7.0], 99) == 7.0


def test_percentile_equals_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=57).tolist()
    for percent in (1, 50, 90, 99):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_an_empty_sample_has_no_spread() -> None:
    assert spread([]) is None
    assert spread([2.0, 4.0]) == {"n": 2, "mean": 3.0, "p50": 3.0, "p90": 3.8, "p99": 3.98}


def test_medians_go_element_by_element_and_skip_what_a_repeat_lacks() -> None:
    repeats = [
        {"speed": 3, "ttft": {"p50": 1.0}, "failed": [], "share": None, "name": "a", "ok": True},
        {"speed": 1, "ttft": None, "failed": [], "share": 0.5, "name": "b", "ok": True},
        {"speed": 9, "ttft": {"p50": 2.0}, "failed": [], "share": 0.25, "name": "c", "ok": False},
    ]
    assert medians(repeats) == {"speed": 3, "ttft": {"p50": 1.5}, "share": 0.375}


def test_paired_difference_of_a_hand_computed_case() -> None:
    # Of 8 samples the change repairs one and breaks two: differences +1, -1, -1, 0 x 5.
    without = [True, True, True, True, False, False, True, False]
    with_change = [False, False, True, True, True, False, True, False]
    difference = PairedDifference.of(with_change, without)
    assert (difference.right_with, difference.right_without) == (4, 5)
    assert difference.points == -12.5
    mean = -1 / 8
    squares = (1 - mean) ** 2 + 2 * (-1 - mean) ** 2 + 5 * mean**2
    assert difference.standard_error == pytest.approx(100 * math.sqrt(squares / 7) / math.sqrt(8))
    assert difference.verdict is Verdict.UNRESOLVED


def pairs(worse: int, better: int, total: int) -> PairedDifference:
    with_change = [False] * worse + [True] * (total - worse)
    without = [True] * worse + [False] * better + [True] * (total - worse - better)
    return PairedDifference.of(with_change, without)


def test_equal_answers_pass_and_resolved_losses_beyond_a_point_fail() -> None:
    assert pairs(0, 0, 4096) == PairedDifference(4096, 4096, 4096, 0.0, 0.0)
    assert pairs(0, 0, 4096).verdict is Verdict.PASS
    lost = pairs(60, 0, 4096)  # 1.46 points, standard error 0.19
    assert lost.points == pytest.approx(-100 * 60 / 4096)
    assert 2 * lost.standard_error < 1
    assert lost.verdict is Verdict.FAIL
    assert pairs(30, 0, 4096).verdict is Verdict.PASS
    assert pairs(0, 60, 4096).verdict is Verdict.PASS


def test_few_samples_are_unresolved_whatever_the_difference() -> None:
    assert pairs(2, 0, 87).verdict is Verdict.UNRESOLVED
    assert pairs(600, 600, 4096).verdict is Verdict.UNRESOLVED


def clock(*steps: tuple[float, int, int]) -> StepClock:
    made = StepClock()
    made.steps.extend(steps)
    return made


def test_intervals_are_of_settled_steps_of_the_whole_batch_only() -> None:
    filling = [(0.0, 1, 0), (1.0, 2, 0), (2.5, 2, 0), (3.5, 3, 0)]
    full = [(4.0 + index, 3, 0) for index in range(7)]
    ending = [(20.0, 3, 1), (30.0, 2, 0)]
    # The 7 steps make 7 intervals with the one before them; four of them settle.
    assert clock(*filling, *full, *ending).steady_intervals(3) == [1.0, 1.0, 1.0]


def test_a_step_without_the_whole_batch_starts_the_settling_again() -> None:
    full = [(float(index), 2, 0) for index in range(6)]
    gap = [(6.0, 1, 0)]
    more = [(7.0 + index, 2, 0) for index in range(5)]
    assert clock(*full, *gap, *more).steady_intervals(2) == [1.0]
    assert clock(*full[:5]).steady_intervals(2) == []
