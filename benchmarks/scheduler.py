"""Host cost of one scheduler step, without any model: schedule and commit.

Requests decode with 64 pages of 32 tokens and 33 table rows each (Huginn-0125: one
boundary unit and 32 planes). Prints a table and writes the JSON under benchmarks/results.

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


def running(num_requests: int) -> Scheduler:
    """A scheduler whose requests all decode, their positions spread over a page."""
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
            max_num_tokens=8192,
            max_seq_len=max_seq_len,
            num_units=num_requests * PAGES * layout.num_rows + 1,
            max_waiting=num_requests,
        ),
        layout,
        CacheIdentity(model=("benchmark",), uses_noise=True),
    )
    rng = np.random.default_rng(0)
    for request_id in range(num_requests):
        num_prompt = max_seq_len - STEPS - 1 - request_id % PAGE_SIZE
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


def measure(num_requests: int) -> dict[str, float]:
    """Microseconds a decode step: medians over steps, then over repeats."""
    rows = []
    for _ in range(REPEATS):
        scheduler = running(num_requests)
        times = np.array([step(scheduler) for _ in range(STEPS // 2)]) * 1e6
        total = times.sum(axis=1)
        rows.append((*np.median(times, axis=0), np.median(total), np.quantile(total, 0.99)))
    schedule, commit, total, p99 = np.median(rows, axis=0).tolist()
    return {
        "requests": num_requests,
        "schedule_us": round(schedule, 1),
        "commit_us": round(commit, 1),
        "step_us": round(total, 1),
        "step_p99_us": round(p99, 1),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scheduler.json"))
    out = parser.parse_args().out
    results = [measure(count) for count in (1, 32, 128, 512)]
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
    print("| running requests | schedule µs | commit µs | step µs | step p99 µs |")
    print("|---|---|---|---|---|")
    for row in results:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
