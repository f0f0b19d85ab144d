"""Host cost of one scheduler step, without any model: schedule and commit.

Requests decode with 64 pages of 32 tokens and 33 table rows each (Huginn-0125: one
boundary unit and 32 planes). `spread` requests cross a page at different steps; requests
`in phase` (equal prompts, the usual offline batch) all cross one in the same step, which
then takes 33 units for each of them. Prints a table and writes the JSON under
benchmarks/results.

    python benchmarks/scheduler.py [--out benchmarks/results/scheduler.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from looptrt.kv_layout import PlaneLayout, PlaneStrategy
from looptrt.runtime.kv.prefix_cache import CacheIdentity
from looptrt.runtime.request import Request
from looptrt.runtime.scheduler import Scheduler, SchedulerConfig
from looptrt.runtime.step_plan import StepResult

PAGE_SIZE, PAGES, LOOPS = 32, 64, 32
STEPS = 192
REPEATS = 5


def running(num_requests: int, spread: int) -> Scheduler:
    """A scheduler whose requests all decode, their positions spread over `spread` tokens."""
    layout = PlaneLayout(
        unit_slots=4,
        prelude_layers=2,
        coda_layers=2,
        max_loops=LOOPS,
        page_size=PAGE_SIZE,
        num_kv_heads=55,
        head_dim=96,
        dtype="bfloat16",
        strategy=PlaneStrategy.parse("latest", 4),
    )
    max_seq_len = PAGES * PAGE_SIZE
    scheduler = Scheduler(
        SchedulerConfig(
            max_batch_size=num_requests,
            max_num_tokens=num_requests * max_seq_len,  # all prompts in the first step
            max_seq_len=max_seq_len,
            num_units=num_requests * PAGES * layout.num_rows + 1,
            max_waiting=num_requests,
        ),
        layout,
        CacheIdentity(model=("benchmark",), uses_noise=True),
    )
    rng = np.random.default_rng(0)
    for request_id in range(num_requests):
        num_prompt = max_seq_len - STEPS - 1 - request_id % spread
        scheduler.add(
            Request(
                request_id=request_id,
                prompt=rng.integers(0, 65536, num_prompt, np.int32),
                max_new_tokens=max_seq_len,
                stop_token_ids=(65505, 65508),
                loops=LOOPS,
                prefill_loops=LOOPS,
            )
        )
    while (
        scheduler.stats().num_waiting
        or (scheduler.slots.num_computed[scheduler.slots.active] == 0).any()
    ):
        step(scheduler)
    while (scheduler.slots.num_tokens - scheduler.slots.num_computed > 1).any():
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, float]:
    """One step with made-up tokens; seconds of schedule and of commit."""
    begin = time.perf_counter()
    plan = scheduler.schedule()
    middle = time.perf_counter()
    assert plan is not None
    result = StepResult.at_planned_depths(plan, np.full(len(plan.sample_slots), 7, np.int32))
    before = time.perf_counter()
    scheduler.commit(plan, result)
    return middle - begin, time.perf_counter() - before


def measure(num_requests: int, spread: int) -> dict[str, float | str]:
    """Microseconds a decode step, over the steps of a run; medians over repeats."""
    rows = []
    for _ in range(REPEATS):
        scheduler = running(num_requests, spread)
        times = np.array([step(scheduler) for _ in range(STEPS // 2)]) * 1e6
        total = times.sum(axis=1)
        rows.append((*np.median(times, axis=0), np.median(total), total.mean(), total.max()))
    schedule, commit, median, mean, longest = np.median(rows, axis=0).round(1).tolist()
    return {
        "requests": num_requests,
        "pages": "spread" if spread > 1 else "in phase",
        "schedule_median_us": schedule,
        "commit_median_us": commit,
        "step_median_us": median,
        "step_mean_us": mean,
        "step_max_us": longest,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scheduler.json"))
    out = parser.parse_args().out
    results = [measure(count, spread) for count in (1, 32, 128, 512) for spread in (PAGE_SIZE, 1)]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "pages": PAGES,
        "table_rows": LOOPS + 1,
        "repeats": REPEATS,
        "steps": STEPS // 2,
        "results": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print("| " + " | ".join(results[0]) + " |")
    print("|" + "---|" * len(results[0]))
    for row in results:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
