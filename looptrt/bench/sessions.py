"""`looptrt bench sessions`: conversations over shared prefixes, and whether hits change answers.

Owns the turns, the cold replay and the comparison; leaves requests to `runs`. Invariant: a
cold run answers exactly the prompt that the served run answered, alone, without a cache.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from looptrt.bench import results
from looptrt.bench.arms import Arm, engines, with_default
from looptrt.bench.burst import Outcome, compared
from looptrt.bench.runs import Ask, Record, Run, run
from looptrt.bench.setup import Setup, interleave
from looptrt.bench.watch import watching
from looptrt.bench.workload import Conversation, conversations
from looptrt.errors import EngineError
from looptrt.runtime.llm import LLM

_COLD = " cold"


@dataclass(frozen=True)
class Sessions:
    """The workload.

    Attributes:
        count: conversations.
        turns: of each.
        system_tokens: that all begin with; turn_tokens: what a turn adds, before its answer.
        output_tokens: of each answer.
        at_once: conversations that are held at the same time.
        grid: also run an arm whose hits and chunks end at multiples of this.
        cold: replay every prompt of the last repeat without a cache and compare the answers.
    """

    count: int = 16
    turns: int = 4
    system_tokens: int = 1024
    turn_tokens: int = 256
    output_tokens: int = 64
    at_once: int = 16
    grid: int | None = None
    cold: bool = True

    def __post_init__(self) -> None:
        for name in ("count", "turns", "system_tokens", "turn_tokens", "output_tokens", "at_once"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def longest_prompt(self) -> int:
        """Tokens of the last turn's prompt."""
        answers = (self.turns - 1) * self.output_tokens
        return self.system_tokens + self.turns * self.turn_tokens + answers


@dataclass(frozen=True)
class _Turn:
    """A prompt as it was served, and what came of it."""

    prompt: list[int]
    record: Record


def measure(setup: Setup, sessions: Sessions) -> dict[str, Any]:
    """Hold all conversations in every arm; returns the result as JSON values.

    Raises:
        EngineError: an engine could not start, has ended, or is too small for the lengths.
    """
    others = [*setup.others]
    if sessions.grid is not None:
        others.append(Arm("grid", {"prefix_grid": sessions.grid}))
    arms = with_default(others)
    cold = [_cold_arm(arm) for arm in arms] if sessions.cold else []
    every = with_default([*others, *cold])
    by_name = {arm.name: arm for arm in every}
    total = len(arms) * (setup.repeats + 1) + len(cold)
    with engines(setup.engine_dir, setup.config, every, in_process=setup.in_process) as llms:
        first = next(iter(llms.values()))
        setup.check_room(llms, sessions.longest_prompt, sessions.output_tokens)

        latest: dict[str, list[_Turn]] = {}

        def once(name: str, repeat: int) -> Outcome:
            setup.on_run(f"{name}: {sessions.count} conversations", total)
            outcome, latest[name] = _hold(setup, sessions, by_name[name], llms[name], repeat)
            return outcome

        outcomes = interleave([arm.name for arm in arms], setup.repeats, once)
        entries: dict[str, Any] = {}
        # An arm's answers are part of its own later prompts.
        for name, cell in compared(outcomes, same_requests=False).items():
            arm = by_name[name]
            entries[name] = {**results.described(arm, llms[name]), "cells": [cell]}
            if sessions.cold:
                setup.on_run(f"{name}: cold runs", total)
                cold_arm = by_name[name + _COLD]
                entries[name]["against_cold"] = _replay(
                    setup, sessions, cold_arm, llms[cold_arm.name], latest[name]
                )
        return results.result(
            "sessions",
            manifest=first.manifest,
            config=setup.config,
            workload={**vars(sessions), "repeats": setup.repeats, "seed": setup.seed},
            commit=setup.commit,
            arms=entries,
        )


def _cold_arm(arm: Arm) -> Arm:
    """The same arm without a cache: its chunks still end at the grid, where it has one."""
    config = {**arm.config, "enable_prefix_cache": False}
    return dataclasses.replace(arm, name=arm.name + _COLD, config=config)


def _hold(
    setup: Setup, sessions: Sessions, arm: Arm, llm: LLM, repeat: int
) -> tuple[Outcome, list[_Turn]]:
    """Hold all conversations, each turn after the answer to the one before."""
    held = conversations(
        sessions.count,
        sessions.turns,
        llm.manifest.spec.vocab_size,
        system=sessions.system_tokens,
        turn=sessions.turn_tokens,
        seed=f"{setup.seed} {repeat}",
    )
    start_s = time.monotonic()

    def talk(index: int) -> list[_Turn]:
        return _talk(setup, sessions, arm, llm, held[index], index, repeat, start_s)

    with watching(llm) as watch, ThreadPoolExecutor(sessions.at_once) as pool:
        turns = [turn for talked in pool.map(talk, range(len(held))) for turn in talked]
    records = tuple(
        dataclasses.replace(turn.record, index=index) for index, turn in enumerate(turns)
    )
    ends = [record.finished_s for record in records if record.finished_s is not None]
    wall_s = max(ends, default=time.monotonic()) - start_s
    return Outcome(Run(records, wall_s), watch), turns


def _talk(
    setup: Setup,
    sessions: Sessions,
    arm: Arm,
    llm: LLM,
    conversation: Conversation,
    index: int,
    repeat: int,
    start_s: float,
) -> list[_Turn]:
    prompt, turns = list(conversation.system), []
    for number, said in enumerate(conversation.turns):
        prompt = prompt + said
        params = setup.request(
            arm,
            index * sessions.turns + number,
            output_tokens=sessions.output_tokens,
            salt=f"sessions {repeat}",
        )
        left_s = max(0.0, start_s + setup.deadline_s - time.monotonic())
        (record,) = run(llm, [Ask(prompt, params)], deadline_s=left_s).records
        turns.append(_Turn(prompt, record))
        if record.error is not None:
            missing = f"not asked: turn {number + 1} failed"
            rest = range(number + 1, sessions.turns)
            turns += [_Turn([], Record(0, record.due_s, error=missing)) for _ in rest]
            break
        prompt = prompt + list(record.token_ids)
    return turns


def _replay(
    setup: Setup, sessions: Sessions, arm: Arm, llm: LLM, turns: Sequence[_Turn]
) -> dict[str, Any]:
    """Answer the served prompts again, one at a time, and compare."""
    served, again = [], []
    for index, turn in enumerate(turns):
        if turn.record.error is not None:
            continue
        params = setup.request(
            arm, index, output_tokens=sessions.output_tokens, salt="sessions cold"
        )
        (record,) = run(llm, [Ask(turn.prompt, params)], deadline_s=setup.deadline_s).records
        served.append(turn.record)
        again.append(record)
    hits = [place for place, record in enumerate(served) if record.num_cached]
    return {
        "all": results.identical(served, again),
        "hits": results.identical([served[i] for i in hits], [again[i] for i in hits]),
        "failed": [
            {"index": index, "error": record.error}
            for index, record in enumerate(again)
            if record.error is not None
        ],
    }


def reused_share(entry: dict[str, Any]) -> float | None:
    """Share of prompt tokens that an arm found in the cache; median of the repeats."""
    share: float | None = entry["cells"][0]["median"].get("cached_share")
    return share
