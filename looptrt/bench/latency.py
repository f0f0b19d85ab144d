"""`looptrt bench latency`: time per output token of a steady batch, and steps at saturation.

Owns when a batch counts as steady and the clock of its steps; leaves requests to `runs`.
Invariant: an interval is between two steps in which every request of the batch, and nothing
else, got a token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looptrt.bench import results
from looptrt.bench.arms import Arm, engines
from looptrt.bench.runs import Ask, Run, run
from looptrt.bench.setup import Repeats, Setup, check_counts, interleave, is_default
from looptrt.bench.statistics import medians, spread
from looptrt.bench.watch import Watch, watching
from looptrt.bench.workload import random_prompts
from looptrt.errors import EngineError
from looptrt.runtime.llm import LLM
from looptrt.runtime.outputs import StepOutput

# Steps of a batch that has just become steady may still capture graphs.
_SETTLING_STEPS = 4
_SATURATING = 2  # requests for each slot


@dataclass(frozen=True)
class Latency:
    """The workload.

    Attributes:
        batches: requests that decode together, a cell for each.
        saturation: also record the steps of twice as many requests as the engine has slots.
    """

    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    prompt_tokens: int = 512
    output_tokens: int = 64
    saturation: bool = True

    def __post_init__(self) -> None:
        check_counts("batches", self.batches)
        if self.output_tokens < _SETTLING_STEPS + 4:
            raise EngineError(
                f"output_tokens: expected at least {_SETTLING_STEPS + 4}, so that steps are left "
                f"to time after {_SETTLING_STEPS} that settle, got {self.output_tokens}"
            )


class StepClock:
    """When steps came, as the client's reader saw them."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int, int]] = []

    def __call__(self, output: StepOutput) -> None:
        """Take a step: an observer of an LLM."""
        self.steps.append((time.monotonic(), len(output.request_ids), len(output.finished)))

    def steady_intervals(self, batch: int) -> list[float]:
        """Seconds between steps that gave all of a batch a token and ended none.

        The batch must be the only requests. The first steps and the one after a gap are left
        out, so each interval is one step long.
        """
        full = [tokens == batch and not ended for _, tokens, ended in self.steps]
        intervals, settled = [], 0
        for index in range(1, len(full)):
            settled = settled + 1 if full[index - 1] and full[index] else 0
            if settled > _SETTLING_STEPS:
                intervals.append(self.steps[index][0] - self.steps[index - 1][0])
        return intervals


@dataclass(frozen=True)
class _Outcome:
    run: Run
    intervals: list[float]


def measure(setup: Setup, latency: Latency) -> dict[str, Any]:
    """Run every batch in every arm; returns the result as JSON values.

    Raises:
        EngineError: an engine could not start, has ended, is too small for the lengths, or
            never had a whole batch running.
    """
    arms = {arm.name: arm for arm in setup.arms}
    num_cells = len(latency.batches) * (setup.repeats + 1) + latency.saturation
    total = len(arms) * num_cells
    with engines(setup.engine_dir, setup.config, setup.arms, in_process=setup.in_process) as llms:
        first = next(iter(llms.values()))
        _check_batches(llms, latency)
        setup.check_room(llms, latency.prompt_tokens, latency.output_tokens)
        clocks = {id(llm): StepClock() for llm in llms.values()}
        for llm in {id(llm): llm for llm in llms.values()}.values():
            llm.observe(clocks[id(llm)])
        cells: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        for batch in latency.batches:

            def once(name: str, repeat: int, batch: int = batch) -> _Outcome:
                setup.on_run(f"{name}: batch {batch}", total)
                clock = clocks[id(llms[name])]
                return _run(setup, latency, arms[name], llms[name], clock, batch, repeat)

            outcomes = interleave(list(arms), setup.repeats, once)
            for name, cell in _compared(outcomes).items():
                cells[name].append({"batch": batch, **cell})
        entries = {}
        for name, arm in arms.items():
            entries[name] = {**results.described(arm, llms[name]), "cells": cells[name]}
            if latency.saturation:
                setup.on_run(f"{name}: saturation", total)
                entries[name]["saturation"] = _saturate(setup, latency, arm, llms[name])
        return results.result(
            "latency",
            manifest=first.manifest,
            config=setup.config,
            workload={**vars(latency), "repeats": setup.repeats, "seed": setup.seed},
            commit=setup.commit,
            arms=entries,
        )


def _check_batches(llms: Mapping[str, LLM], latency: Latency) -> None:
    largest = max(latency.batches)
    for name, llm in llms.items():
        if largest > llm.limits.max_batch_size:
            raise EngineError(
                f"arm {name}: batch {largest}: this engine runs at most "
                f"{llm.limits.max_batch_size} requests"
            )
        if llm.config.speculative_loops is not None:
            raise EngineError(
                f"arm {name}: speculative_loops: expected none, got "
                f"{llm.config.speculative_loops}: a step may give a request several tokens, so "
                "steps do not time a token; bench burst does"
            )


def _asks(setup: Setup, latency: Latency, arm: Arm, llm: LLM, count: int, salt: str) -> list[Ask]:
    vocab_size = llm.manifest.spec.vocab_size
    prompts = random_prompts(count, latency.prompt_tokens, vocab_size, setup.seed, salt)
    return [
        Ask(prompt, setup.request(arm, i, output_tokens=latency.output_tokens, salt=salt))
        for i, prompt in enumerate(prompts)
    ]


def _run(
    setup: Setup,
    latency: Latency,
    arm: Arm,
    llm: LLM,
    clock: StepClock,
    batch: int,
    repeat: int,
) -> _Outcome:
    asks = _asks(setup, latency, arm, llm, batch, f"latency {batch} {repeat}")
    clock.steps.clear()
    outcome = run(llm, asks, deadline_s=setup.deadline_s)
    return _Outcome(outcome, clock.steady_intervals(batch))


def _compared(outcomes: Mapping[str, Repeats[_Outcome]]) -> dict[str, dict[str, Any]]:
    cells = {
        name: {
            "median": medians([_entry(outcome) for outcome in repeats.kept]),
            "repeats": [_entry(outcome) for outcome in repeats.kept],
            "dropped": [_entry(outcome) for outcome in repeats.dropped],
        }
        for name, repeats in outcomes.items()
    }
    default = next(name for name in outcomes if is_default(name))
    before = cells[default]["median"]["ms_per_token"]
    for name, cell in cells.items():
        if not is_default(name):
            after = cell["median"]["ms_per_token"]
            cell["against_default"] = {"time_ratio": after / before}
    return cells


def _entry(outcome: _Outcome) -> dict[str, Any]:
    """A repeat: its median step is the time per output token."""
    intervals = [1e3 * seconds for seconds in outcome.intervals]
    if not intervals:
        raise EngineError(
            "latency: the batch was never steady: raise output_tokens, or the KV pool is too "
            f"small for it; failed requests: {results.failures(outcome.run)}"
        )
    return {
        "ms_per_token": statistics.median(intervals),
        "step_ms": spread(intervals),
        "failed": results.failures(outcome.run),
    }


def _saturate(setup: Setup, latency: Latency, arm: Arm, llm: LLM) -> dict[str, Any]:
    """Steps while more requests wait than there are slots, as the engine's figures tell."""
    count = _SATURATING * llm.limits.max_batch_size
    count = min(count, setup.config.max_waiting)
    asks = _asks(setup, latency, arm, llm, count, "latency saturation")
    with watching(llm) as watch:
        outcome = run(llm, asks, deadline_s=setup.deadline_s)
    return {
        **results.summary(outcome),
        "counters": watch.counters(),
        "kv": watch.kv_use(),
        "step_mix": {**watch.step_mix(), **_per_step(outcome, watch)},
    }


def _per_step(outcome: Run, watch: Watch) -> dict[str, float]:
    """Exact means over all steps; a prompt's last row, which gives a token, is a prompt's row."""
    counters, answered = watch.counters(), outcome.answered
    steps = counters["num_steps"]
    prompts = counters["num_prompt_tokens"] - counters["num_hit_tokens"]
    tokens = sum(len(record.token_ids) for record in answered) - len(answered)
    return {
        "steps": steps,
        "mean_prompt_rows": prompts / steps if steps else 0.0,
        "mean_decode_rows": tokens / steps if steps else 0.0,
    }


def median_ms(cells: Sequence[Mapping[str, Any]], batch: int) -> float:
    """Milliseconds per token of a batch in an arm's cells."""
    return float(next(cell["median"]["ms_per_token"] for cell in cells if cell["batch"] == batch))
