"""`looptrt bench burst`: C requests at once.

Owns the workload and its result; leaves requests to `runs`. Invariant: all arms of a cell
answer the same prompts, and no repeat finds another's pages in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looptrt.bench import results
from looptrt.bench.arms import Arm, engines
from looptrt.bench.runs import Ask, Prompt, Record, Run, run
from looptrt.bench.setup import Repeats, Setup, check_counts, interleave, is_default
from looptrt.bench.statistics import medians
from looptrt.bench.watch import Watch, watching
from looptrt.bench.workload import Question, random_prompts
from looptrt.errors import EngineError
from looptrt.runtime.llm import LLM


@dataclass(frozen=True)
class Burst:
    """The workload.

    Attributes:
        concurrency: requests at once, a cell for each.
        prompt_tokens: of random prompts.
        questions: given prompts instead, taken in turn.
    """

    concurrency: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 512
    output_tokens: int = 128
    questions: tuple[Question, ...] = ()

    def __post_init__(self) -> None:
        check_counts("concurrency", self.concurrency)
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def prompts(self, count: int, vocab_size: int, *seed: int) -> Sequence[Prompt]:
        """Prompts of one run."""
        if self.questions:
            return [self.questions[i % len(self.questions)].prompt for i in range(count)]
        return random_prompts(count, self.prompt_tokens, vocab_size, *seed)

    def to_json(self) -> dict[str, Any]:
        """What was asked."""
        given = len(self.questions)
        return {
            "concurrency": list(self.concurrency),
            "prompts": f"{given} given" if given else f"random, {self.prompt_tokens} tokens",
            "output_tokens": self.output_tokens,
        }


@dataclass(frozen=True)
class Outcome:
    """One run of one arm, and the engine's figures of it."""

    run: Run
    watch: Watch


def measure(setup: Setup, burst: Burst) -> dict[str, Any]:
    """Run every cell in every arm; returns the result as JSON values.

    Raises:
        EngineError: an engine could not start, has ended, or is too small for the lengths.
    """
    arms = {arm.name: arm for arm in setup.arms}
    total = len(burst.concurrency) * len(arms) * (setup.repeats + 1)
    with engines(setup.engine_dir, setup.config, setup.arms, in_process=setup.in_process) as llms:
        first = next(iter(llms.values()))
        if not burst.questions:
            setup.check_room(llms, burst.prompt_tokens, burst.output_tokens)
        cells: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        for count in burst.concurrency:

            def once(name: str, repeat: int, count: int = count) -> Outcome:
                setup.on_run(f"{name}: {count} requests", total)
                return _run(setup, burst, arms[name], llms[name], count, repeat)

            outcomes = interleave(list(arms), setup.repeats, once)
            for name, cell in compared(outcomes).items():
                cells[name].append({"concurrency": count, **cell})
        return results.result(
            "burst",
            manifest=first.manifest,
            config=setup.config,
            workload={**burst.to_json(), "repeats": setup.repeats, "seed": setup.seed},
            commit=setup.commit,
            arms={
                name: {**results.described(arms[name], llms[name]), "cells": entries}
                for name, entries in cells.items()
            },
        )


def _run(setup: Setup, burst: Burst, arm: Arm, llm: LLM, count: int, repeat: int) -> Outcome:
    vocab_size = llm.manifest.spec.vocab_size
    prompts = burst.prompts(count, vocab_size, setup.seed, count, repeat)
    salt = f"burst {count} {repeat}"
    asks = [
        Ask(prompt, setup.request(arm, i, output_tokens=burst.output_tokens, salt=salt))
        for i, prompt in enumerate(prompts)
    ]
    with watching(llm) as watch:
        outcome = run(llm, asks, deadline_s=setup.deadline_s)
    return Outcome(outcome, watch)


def compared(
    outcomes: Mapping[str, Repeats[Outcome]], *, same_requests: bool = True
) -> dict[str, dict[str, Any]]:
    """Each arm's repeats and their medians, against the default arm's.

    Args:
        outcomes: of each arm, the default one among them.
        same_requests: whether all arms answered the same prompts, so that answers compare.
    """
    cells = {name: _cell(repeats) for name, repeats in outcomes.items()}
    default = next(name for name in outcomes if is_default(name))
    reference = _records(outcomes[default])
    before = cells[default]["median"].get("output_tokens_per_s")
    for name, cell in cells.items():
        if is_default(name):
            continue
        speed = cell["median"].get("output_tokens_per_s")
        against: dict[str, Any] = {"throughput_ratio": speed / before if speed and before else None}
        if same_requests:
            against |= results.identical(_records(outcomes[name]), reference)
        cell["against_default"] = against
    return cells


def _cell(repeats: Repeats[Outcome]) -> dict[str, Any]:
    kept = [_entry(outcome) for outcome in repeats.kept]
    return {
        "median": medians(kept),
        "repeats": kept,
        "dropped": [_entry(outcome) for outcome in repeats.dropped],
    }


def _entry(outcome: Outcome) -> dict[str, Any]:
    watch = outcome.watch
    return {
        **results.summary(outcome.run),
        "counters": watch.counters(),
        "kv": watch.kv_use(),
        "step_mix": watch.step_mix(),
    }


def _records(repeats: Repeats[Outcome]) -> list[Record]:
    every = [*repeats.dropped, *repeats.kept]
    return [record for outcome in every for record in outcome.run.records]
