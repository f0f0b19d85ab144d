"""`looptrt bench ladder`: each change with and without it, on the same requests.

Owns the comparison and its tables; leaves what changes there are to `changes`. Invariant: both
arms of a change answer the same requests, all of which are queued before the first step, so
that arms with the same schedule run the same batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from looptrt.bench import results
from looptrt.bench.arms import DEFAULT, Arm, KvLayout, all_layers_bytes
from looptrt.bench.changes import CHANGES, Change, Rung
from looptrt.bench.left_out import reasons, sentences
from looptrt.bench.offline import Answers, Engine, offline
from looptrt.bench.runs import Prompt, Record
from looptrt.bench.setup import Repeats, Setup, check_counts, interleave
from looptrt.bench.statistics import PairedDifference, medians
from looptrt.bench.workload import Question, random_prompts
from looptrt.errors import EngineError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.request import FinishReason
from looptrt.runtime.sampling_params import SamplingParams

_QUALITY_BATCH = 512
_POOLS_SHARE = 0.4  # each of two engines, of what is free when the first one starts


@dataclass(frozen=True)
class Ladder:
    """The workload.

    Attributes:
        changes: to compare.
        concurrency: requests at once, a cell for each.
        questions: samples with right answers, on which quality is compared; none compares
            tokens and speed only.
        answer_tokens: of an answer to a question at most.
    """

    changes: tuple[Change, ...] = CHANGES
    concurrency: tuple[int, ...] = (1, 32)
    prompt_tokens: int = 512
    output_tokens: int = 128
    questions: tuple[Question, ...] = ()
    answer_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name}: expected at least 1, got {getattr(self, name)}")
        check_counts("concurrency", self.concurrency)
        if len(self.questions) == 1:
            raise EngineError("questions: one sample has no standard error; give more")

    def to_json(self) -> dict[str, Any]:
        """What was asked."""
        return {
            "changes": [change.name for change in self.changes],
            "concurrency": list(self.concurrency),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "questions": len(self.questions),
        }


def measure(setup: Setup, ladder: Ladder) -> dict[str, Any]:
    """Compare every change that this engine can have; returns the result as JSON values.

    Raises:
        EngineError: an engine could not start, has ended, is too small for the lengths, lacks
            the switch of a change, or can have none of the changes.
    """
    if setup.others:
        raise EngineError("ladder: its arms are the changes; leave out --arm")
    for change in ladder.changes:
        change.arms(1)  # a missing switch is told before anything runs
    config = setup.config
    if config.kv_cache_bytes is None:
        config = dataclasses.replace(config, kv_cache_free_gpu_memory_fraction=_POOLS_SHARE)
    with offline(setup.engine_dir, config, in_process=setup.in_process) as default:
        _check_room(config, default, ladder)
        loops = setup.params.loops or default.manifest.layout.max_loops
        left_out = reasons(ladder.changes, loops, default, config, setup.params)
        changes = [one for one in ladder.changes if one.name not in left_out]
        if not changes:
            raise EngineError(f"ladder: there is nothing to compare. {sentences(left_out)}")
        runs = len(ladder.concurrency) * 2 * (setup.repeats + 1)
        total = len(changes) * (runs + 2 * bool(ladder.questions))
        rows = {}
        for change in changes:
            arms = change.arms(loops)
            with _engines(setup, config, default, arms) as engines:
                rows[change.name] = _Comparison(setup, ladder, change, arms, engines, total).row()
        return results.result(
            "ladder",
            manifest=default.manifest,
            config=config,
            workload={**ladder.to_json(), "repeats": setup.repeats, "seed": setup.seed},
            commit=setup.commit,
            arms=rows,
            left_out=left_out,
        )


def _check_room(config: EngineConfig, engine: Engine, ladder: Ladder) -> None:
    limits = config.limits(engine.manifest)
    longest = ladder.prompt_tokens + ladder.output_tokens
    if ladder.prompt_tokens > limits.max_input_len or longest > limits.max_seq_len:
        raise EngineError(
            f"{ladder.prompt_tokens} prompt and {ladder.output_tokens} output tokens: the engine "
            f"takes prompts up to {limits.max_input_len} and {limits.max_seq_len} tokens in all"
        )


@contextmanager
def _engines(
    setup: Setup, config: EngineConfig, default: Engine, arms: Sequence[Arm]
) -> Iterator[dict[str, Engine]]:
    """The engines of both arms; one that only asks otherwise shares the default's."""
    (other,) = (arm for arm in arms if arm.name != DEFAULT)
    if not other.config and other.kv_layout is KvLayout.UNITS:
        yield {arm.name: default for arm in arms}
        return
    layout = default.manifest.layout
    pool_bytes = (default.facts.num_units + 1) * layout.unit_bytes
    if other.kv_layout is KvLayout.ALL_LAYERS:
        pool_bytes = all_layers_bytes(layout, pool_bytes)
    changed = dataclasses.replace(other.engine_config(config), kv_cache_bytes=pool_bytes)
    with offline(setup.engine_dir, changed, in_process=setup.in_process) as engine:
        yield {DEFAULT: default, other.name: engine}


@dataclass(frozen=True)
class _Comparison:
    """One change: its arms, the one with it first, and their engines."""

    setup: Setup
    ladder: Ladder
    change: Change
    arms: tuple[Arm, Arm]
    engines: Mapping[str, Engine]
    total: int

    def row(self) -> dict[str, Any]:
        """What came out."""
        change, ladder = self.change, self.ladder
        with_arm, without = self.arms
        entry: dict[str, Any] = {
            "rung": change.rung.value,
            "preserves": change.preserves,
            "is_default": change.is_default,
            "with": with_arm.to_json(),
            "without": without.to_json(),
            "most_at_once": self._most_at_once,
            "cells": [self._cell(count) for count in ladder.concurrency],
        }
        if change.rung is Rung.R0:
            entry["holds"] = all(
                cell["identical"] == cell["total"] == cell["requests"] for cell in entry["cells"]
            )
        if ladder.questions:
            entry["quality"] = self._quality()
        return entry

    def _cell(self, count: int) -> dict[str, Any]:
        """One concurrency: identical answers of all repeats, throughput of those that count."""
        names = [arm.name for arm in self.arms]
        by_name = dict(zip(names, self.arms, strict=True))

        def once(name: str, repeat: int) -> Answers:
            self.setup.on_run(f"{self.change.name}: {name}, {count} requests", self.total)
            return self._run(by_name[name], count, repeat)

        outcomes = interleave(names, self.setup.repeats, once)
        sides = [_side(outcomes[name]) for name in names]
        records = [_records(outcomes[name]) for name in names]
        speeds = [side["median"]["output_tokens_per_s"] for side in sides]
        return {
            "concurrency": count,
            "requests": len(records[0]),
            **results.identical(*records),
            "throughput_ratio": speeds[0] / speeds[1] if all(speeds) else None,
            "with": sides[0],
            "without": sides[1],
        }

    def _run(self, arm: Arm, count: int, repeat: int) -> Answers:
        setup, ladder, engine = self.setup, self.ladder, self.engines[arm.name]
        salt = f"ladder {self.change.name} {count}"
        if not self.change.shares_prompts:
            salt += f" {repeat}"
        params = [
            setup.request(arm, index, output_tokens=ladder.output_tokens, salt=salt)
            for index in range(count)
        ]
        prompts = self._prompts(engine.manifest.spec.vocab_size, count, repeat)
        return self._asked(engine, prompts, params)

    @property
    def _most_at_once(self) -> int | None:
        """Requests at once beyond which the change would not show; None where it always does."""
        if not self.change.few_rows:
            return self.change.most_requests
        return max(engine.facts.skinny_rows for engine in self.engines.values())

    def _asked(
        self, engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> Answers:
        """Answers to all prompts; where they are too many at once, group by group."""
        size, left_s = self._most_at_once or len(prompts), self.setup.deadline_s
        groups: list[Answers] = []
        for begin in range(0, len(prompts), size):
            group = slice(begin, begin + size)
            groups.append(engine.answer(prompts[group], params[group], left_s))
            left_s = max(0.0, left_s - groups[-1].run.wall_s)
        return Answers.one_after_the_other(groups)

    def _prompts(self, vocab_size: int, count: int, repeat: int) -> list[Prompt]:
        """Random prompts; half of each is everyone's where the change is about sharing."""
        length, seed = self.ladder.prompt_tokens, self.setup.seed
        shared: list[int] = []
        if self.change.shares_prompts:
            (shared,) = random_prompts(1, length // 2, vocab_size, "shared", seed)
        own = random_prompts(count, length - len(shared), vocab_size, seed, count, repeat)
        return [shared + prompt for prompt in own]

    def _quality(self) -> dict[str, Any]:
        """Right answers with the change against those without, sample by sample."""
        right, failed = [], []
        for arm in self.arms:
            self.setup.on_run(f"{self.change.name}: {arm.name}, quality", self.total)
            records = self._answers(arm)
            failed += [
                {"arm": arm.name, "index": index, "error": record.error}
                for index, record in enumerate(records)
                if record.error is not None
            ]
            right.append(
                [
                    record.finish_reason == FinishReason.STOP and record.text == question.answer
                    for record, question in zip(records, self.ladder.questions, strict=True)
                ]
            )
        difference = PairedDifference.of(*right)
        return {**asdict(difference), "verdict": difference.verdict.value, "failed": failed}

    def _answers(self, arm: Arm) -> list[Record]:
        setup, questions, engine = self.setup, self.ladder.questions, self.engines[arm.name]
        # Of one seed all samples would share their noise, and be no independent samples of it.
        draws_own = self.change.needs_noise
        records: list[Record] = []
        for begin in range(0, len(questions), _QUALITY_BATCH):
            batch = questions[begin : begin + _QUALITY_BATCH]
            params = [
                setup.request(
                    arm,
                    begin + index,
                    output_tokens=self.ladder.answer_tokens,
                    salt="quality",
                    ignore_eos=False,
                    noise_seed=begin + index if draws_own else setup.params.noise_seed,
                )
                for index in range(len(batch))
            ]
            prompts: list[Prompt] = [question.prompt for question in batch]
            records += self._asked(engine, prompts, params).run.records
        return records


def _side(repeats: Repeats[Answers]) -> dict[str, Any]:
    kept = [
        {**results.summary(outcome.run), "counters": dict(outcome.counters)}
        for outcome in repeats.kept
    ]
    dropped = [results.summary(outcome.run) for outcome in repeats.dropped]
    return {"median": medians(kept), "repeats": kept, "dropped": dropped}


def _records(repeats: Repeats[Answers]) -> list[Record]:
    every = [*repeats.dropped, *repeats.kept]
    return [record for outcome in every for record in outcome.run.records]


def broken_promises(result: Mapping[str, Any]) -> dict[str, str]:
    """Changes that should keep every bit at equal batches and were not seen to, and why."""
    broken = {}
    for name, row in result["arms"].items():
        if row.get("holds") is False:
            differs = any(cell["identical"] < cell["total"] for cell in row["cells"])
            broken[name] = (
                "answers differ at equal batches"
                if differs
                else "not all answers could be compared, some requests failed"
            )
    return broken


def markdown(result: Mapping[str, Any]) -> str:
    """A ladder's result as a table."""
    rows = result["arms"]
    counts = result["workload"]["concurrency"]
    headers = ["rung", "change", "preserves", "on by default"]
    headers += [f"identical at {count}" for count in counts]
    headers += [f"throughput at {count}" for count in counts]
    has_quality = any("quality" in row for row in rows.values())
    headers += ["quality, points (s.e.)"] * has_quality
    lines = []
    for name, row in sorted(rows.items(), key=lambda item: item[1]["rung"]):
        cells = row["cells"]
        line = [row["rung"], name, row["preserves"], "yes" if row["is_default"] else "no"]
        line += [f"{cell['identical']}/{cell['requests']}" for cell in cells]
        line += [_ratio(cell["throughput_ratio"]) for cell in cells]
        lines.append(line + [_quality_text(row.get("quality"))] * has_quality)
    facts = result["machine"]
    place = facts["gpu"] or f"CPU, {facts['cores']} cores"
    head = (
        f"{result['engine']['architecture']} on {place}, torch {facts['torch']}, looptrt "
        f"{facts['looptrt']} ({facts['commit']}), {result['date'][:10]}. Identical: answers "
        "with the same token ids with and without the change, of the same requests, all queued "
        "before the first step. Throughput: with the change over without it.\n\n"
    )
    table = head + results.markdown_table(headers, lines)
    notes = [
        f"{name}: at most {row['most_at_once']} requests at once, the next ones after them."
        for name, row in rows.items()
        if row["most_at_once"] is not None
    ]
    notes += [sentences(result["left_out"])] * bool(result["left_out"])
    return f"{table}\n{' '.join(notes)}\n" if notes else table


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×"


def _quality_text(quality: Mapping[str, Any] | None) -> str:
    if quality is None:
        return "–"
    return (
        f"{quality['points']:+.2f} ({quality['standard_error']:.2f}) of "
        f"{quality['num_samples']:,}: {quality['verdict']}"
    )
