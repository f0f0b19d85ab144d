"""`looptrt bench poisson`: requests that arrive by chance, and the highest rate that holds.

Owns rates, lengths and the search; leaves requests to `runs`. Invariant: at a rate every arm
gets the same requests at the same times, and a rate holds only if every request was answered
and they came for long enough to form a queue where the engine does not keep up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from looptrt.bench import results
from looptrt.bench.arms import Arm, engines
from looptrt.bench.burst import Outcome, compared
from looptrt.bench.runs import Ask, run
from looptrt.bench.setup import Setup, check_distinct, interleave
from looptrt.bench.watch import watching
from looptrt.bench.workload import Lengths, arrival_times, random_prompts
from looptrt.errors import EngineError
from looptrt.runtime.llm import LLM

_MOST_DOUBLINGS = 10
_LEAST_RATE = 1e-6  # arrivals a second: one in twelve days


@dataclass(frozen=True)
class Poisson:
    """The workload.

    Attributes:
        rates: arrivals a second, a cell for each.
        lengths: of prompts and answers, each as likely.
        num_requests: of a run; of one in the search at least.
        threshold_ms: find the highest rate whose median latency per output token stays at or
            under this; None does not search.
        search_steps: halvings of the interval in which that rate lies.
        search_s: how long requests come at least in a run of the search. A few that all come
            at once would be a burst, whose latency has an end at any rate.
    """

    rates: tuple[float, ...] = (1.0, 2.0, 4.0)
    lengths: tuple[Lengths, ...] = (Lengths(512, 128),)
    num_requests: int = 64
    threshold_ms: float | None = None
    search_steps: int = 4
    search_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.rates or not all(_LEAST_RATE <= rate < math.inf for rate in self.rates):
            raise EngineError(f"rates: expected numbers from {_LEAST_RATE:g} on, got {self.rates}")
        check_distinct("rates", self.rates)
        if self.num_requests < 1:
            raise EngineError(f"num_requests: expected at least 1, got {self.num_requests}")
        if not self.lengths:
            raise EngineError("lengths: expected at least one pair")
        if self.threshold_ms is not None and not 0 < self.threshold_ms < math.inf:
            raise EngineError(f"threshold_ms: expected a number above 0, got {self.threshold_ms}")
        if not 0 < self.search_s < math.inf:
            raise EngineError(f"search_s: expected seconds above 0, got {self.search_s}")

    def to_json(self) -> dict[str, Any]:
        """What was asked."""
        lengths = [f"{pair.prompt}:{pair.answer}" for pair in self.lengths]
        return {**vars(self), "lengths": lengths}


def measure(setup: Setup, poisson: Poisson) -> dict[str, Any]:
    """Run every rate in every arm, then search; returns the result as JSON values.

    Raises:
        EngineError: an engine could not start, has ended, or is too small for the lengths; or
            the requests of a search come for longer than a run may take.
    """
    if poisson.threshold_ms is not None and poisson.search_s >= setup.deadline_s:
        raise EngineError(
            f"search_s: expected less than the deadline of {setup.deadline_s:g} s, "
            f"got {poisson.search_s:g}"
        )
    arms = {arm.name: arm for arm in setup.arms}
    runs = len(poisson.rates) * len(arms) * (setup.repeats + 1)
    with engines(setup.engine_dir, setup.config, setup.arms, in_process=setup.in_process) as llms:
        first = next(iter(llms.values()))
        for pair in poisson.lengths:
            setup.check_room(llms, pair.prompt, pair.answer)
        cells: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        for rate in poisson.rates:

            def once(name: str, repeat: int, rate: float = rate) -> Outcome:
                setup.on_run(f"{name}: {rate:g} requests/s", runs)
                count = poisson.num_requests
                salt = f"poisson {rate!r} {repeat}"
                return _run(setup, poisson, arms[name], llms[name], salt, rate, repeat, count)

            outcomes = interleave(list(arms), setup.repeats, once)
            for name, cell in compared(outcomes).items():
                cells[name].append({"rate": rate, **cell})
        entries: dict[str, Any] = {}
        for name, arm in arms.items():
            entries[name] = {**results.described(arm, llms[name]), "cells": cells[name]}
            if poisson.threshold_ms is not None:
                entries[name]["search"] = _search(setup, poisson, arm, llms[name])
        return results.result(
            "poisson",
            manifest=first.manifest,
            config=setup.config,
            workload={**poisson.to_json(), "repeats": setup.repeats, "seed": setup.seed},
            commit=setup.commit,
            arms=entries,
        )


def _run(
    setup: Setup,
    poisson: Poisson,
    arm: Arm,
    llm: LLM,
    salt: str,
    rate: float,
    repeat: int,
    num_requests: int,
) -> Outcome:
    vocab_size = llm.manifest.spec.vocab_size
    times = arrival_times(rate, num_requests, setup.seed, repeat)
    asks = []
    for index, at_s in enumerate(times):
        # Drawn like the times: by the seed alone, so that runs of any rate ask for the same.
        pair = _pair(poisson, setup.seed, repeat, index)
        (prompt,) = random_prompts(1, pair.prompt, vocab_size, setup.seed, repeat, index)
        params = setup.request(arm, index, output_tokens=pair.answer, salt=salt)
        asks.append(Ask(prompt, params, at_s))
    with watching(llm) as watch:
        outcome = run(llm, asks, deadline_s=setup.deadline_s)
    return Outcome(outcome, watch)


def _pair(poisson: Poisson, *seed: int) -> Lengths:
    (place,) = random_prompts(1, 1, len(poisson.lengths), "lengths", *seed)
    return poisson.lengths[place[0]]


def _search(setup: Setup, poisson: Poisson, arm: Arm, llm: LLM) -> dict[str, Any]:
    """Double the first rate until one does not hold, then halve the interval.

    Rates at which the arrivals alone take longer than the deadline are not tried.
    """
    assert poisson.threshold_ms is not None
    tried: list[dict[str, Any]] = []

    def holds(rate: float) -> bool:
        setup.on_run(f"{arm.name}: searching, {rate:.3g} requests/s", 0)
        count = max(poisson.num_requests, math.ceil(rate * poisson.search_s))
        number = len(tried) + 1
        # Of its own: no pages of the cells, whose requests of this rate may be the same.
        salt = f"poisson search {number}"
        outcome = _run(setup, poisson, arm, llm, salt, rate, number, count).run
        entry = results.summary(outcome)
        # At a rate that is too high this is an answer to the question, not a fault.
        entry["unanswered"] = entry.pop("failed")
        points = entry["latency_per_token_ms"]
        is_held = not outcome.failed and points is not None and points["p50"] <= threshold
        tried.append({"rate": rate, "holds": is_held, **entry})
        return is_held

    threshold = poisson.threshold_ms
    best, lowest_bad = bracket(poisson.rates[0], poisson.num_requests / setup.deadline_s, holds)
    if best is not None and lowest_bad is not None:
        for _ in range(poisson.search_steps):
            middle = math.sqrt(best * lowest_bad)
            if holds(middle):
                best = middle
            else:
                lowest_bad = middle
    return {
        "threshold_ms": threshold,
        "highest_rate_held": best,
        "lowest_rate_not_held": lowest_bad,
        "tried": tried,
    }


def bracket(
    first: float, lowest: float, holds: Callable[[float], bool]
) -> tuple[float | None, float | None]:
    """A rate that holds and one that does not, neighbours by a factor of two.

    Args:
        first: rate to begin with.
        lowest: under this none is tried.
        holds: tries a rate.

    Returns:
        None for the side that was not found.
    """
    if not holds(first):
        bad, rate = first, first / 2
        while rate >= lowest:
            if holds(rate):
                return rate, bad
            bad, rate = rate, rate / 2
        return None, bad
    best = first
    for _ in range(_MOST_DOUBLINGS):
        if not holds(2 * best):
            return best, 2 * best
        best *= 2
    return best, None
