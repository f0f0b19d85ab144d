"""Random requests to one engine: each ends once, as it would alone, and nothing is left behind.

Owns the driving of an engine in this process, step by step, so that a seed repeats a run exactly;
leaves what is asked to `random_requests`, what an answer may be to `alone` and an engine behind
its LLM to `soak_llm`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from looptrt.errors import QueueFullError, RequestError
from looptrt.runtime.admission import Admission, Admitted
from looptrt.runtime.answer import Answer, Completion
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_client import Update, _updates
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.kv.page_pool import Page
from looptrt.runtime.outputs import CompletionOutput, StepOutput
from looptrt.runtime.request import FinishReason, Request
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.step_plan import StepPlan, StepResult
from looptrt.runtime.tokenizer import Tokenizer
from tests.support.alone import (
    ROUNDING,
    Fault,
    SoloRuns,
    check_scores,
    check_whole,
    differs,
)
from tests.support.engines import Harness, poison_free_units
from tests.support.random_requests import Case, Cases

MAX_TICKS = 4_000  # steps that a request may live through


@dataclass(frozen=True)
class Usage:
    """What a process holds while no request runs.

    Attributes:
        num_objects: that Python's collector knows, in this process; 0 for another one.
    """

    rss_bytes: int
    num_fds: int
    num_threads: int
    num_objects: int

    @staticmethod
    def of(process: psutil.Process) -> Usage:
        for _ in range(3):  # nested tuples of numbers are let go from the innermost on
            gc.collect()
        return Usage(
            rss_bytes=process.memory_info().rss,
            num_fds=process.num_fds(),
            num_threads=process.num_threads(),
            num_objects=len(gc.get_objects()) if process.pid == os.getpid() else 0,
        )


def growth(before: Usage, after: Usage, num_requests: int) -> list[str]:
    """What grew with the number of requests, beyond what allocators keep.

    Args:
        num_requests: between the two; one lasting object for two of them is too many.
    """
    slack = {
        "rss_bytes": 32 * 2**20,
        "num_fds": 0,
        "num_threads": 0,
        "num_objects": 200 + num_requests // 2,
    }
    return [
        f"{name} grew from {getattr(before, name):,} to {getattr(after, name):,}"
        for name, most in slack.items()
        if getattr(after, name) > getattr(before, name) + most
    ]


@dataclass
class _Live:
    """A request on its way.

    Attributes:
        cancel_tick: when it is aborted, None for never; `in_flight` while a step runs.
        stop_ticks: when the engine hears of a stop string, by request id.
    """

    number: int
    case: Case
    admitted: Admitted
    answer: Answer
    born_tick: int
    cancel_tick: int | None
    in_flight: bool
    is_cancelled: bool = False
    stop_ticks: dict[int, int] = field(default_factory=dict)


class StepSoak:
    """The load on one engine, driven by one thread.

    Args:
        engine_dir: with a tokenizer.
        cases: what is asked.
        seed: of everything that is not in the cases.
        rounding: distance of two runs' logits, as a share of the largest.
        compares: whether answers depend on nothing but their request.
        broken_token: whose embedding is made NaN; a request that meets it fails alone.
        max_live: answers on their way at most; None fills the queue, and sometimes over.
        config: of the engine.

    Attributes:
        outcomes: ends of requests, by kind.
    """

    def __init__(
        self,
        engine_dir: Path,
        cases: Cases,
        *,
        seed: int,
        rounding: float = ROUNDING,
        compares: bool = True,
        broken_token: int | None = None,
        max_live: int | None = None,
        **config: Any,
    ) -> None:
        settings = EngineConfig(**Harness.CONFIG | config)
        self.core = EngineCore(engine_dir, settings)
        self.solo = SoloRuns(engine_dir)
        self.outcomes: Counter[str] = Counter()
        self._cases, self._seed, self._rounding = cases, seed, rounding
        self._compares = compares
        self._rng = random.Random(f"{seed}/ticks")
        self._tokenizer = Tokenizer.of_engine(engine_dir)
        self._admission = Admission(
            manifest=self.core.manifest,
            num_units=self.core.scheduler.stats().num_units,
            limits=settings.limits(self.core.manifest),
            config=settings,
            tokenizer=self._tokenizer,
            template=None,
        )
        room = self.core.scheduler.config.max_batch_size + settings.max_waiting
        self._max_live = room - 1 if max_live is None else max_live
        self._live: dict[int, _Live] = {}
        self._completions: dict[int, Completion] = {}
        self._logits: dict[int, dict[int, torch.Tensor]] = {}
        self._next_id, self._tick_idx = 8, 0
        self._listen()
        if broken_token is not None:
            for core in (self.core, self.solo.harness.core):
                break_token(core, broken_token)

    def _listen(self) -> None:
        """Record logits by request and position, and abort requests while steps run."""
        sampler, scheduler = self.core.executor.sampler, self.core.scheduler
        sample, commit = sampler.sample, scheduler.commit

        def record(logits: torch.Tensor, plan: StepPlan) -> StepResult:
            if not plan.is_draft:
                rows = zip(plan.sample_slots.tolist(), plan.logit_rows.tolist(), strict=True)
                for index, (slot, row) in enumerate(rows):
                    request = scheduler.slots.request(slot)
                    known = self._logits.get(request.request_id)
                    if known is not None:
                        place = int(plan.positions[row]) + 1 - request.num_prompt
                        known[place] = logits[index].float().cpu().clone()
            return sample(logits, plan)

        def abort_first(plan: StepPlan, result: StepResult) -> StepOutput:
            for request_id in self._cancels(in_flight=True):
                self.core.abort_request(request_id, FinishReason.ABORT)
            output = commit(plan, result)
            self._forget_rejected(plan)
            return output

        sampler.sample = record  # type: ignore[method-assign]
        scheduler.commit = abort_first  # type: ignore[method-assign]

    def _forget_rejected(self, plan: StepPlan) -> None:
        """Drop the logits behind guesses that a step did not keep."""
        slots = self.core.scheduler.slots
        for slot in set(plan.sample_slots.tolist()):
            request = slots.requests[slot]
            known = None if request is None else self._logits.get(request.request_id)
            if request is not None and known is not None:
                end = int(slots.num_tokens[slot]) - request.num_prompt
                for place in [place for place in known if place >= end]:
                    del known[place]

    def prepare(self) -> None:
        """Run every case alone, so that the soak itself takes up no more memory."""
        for case in self._cases.all():
            with contextlib.suppress(RequestError):
                admitted = self._admit(case, 0)
                for index in range(len(admitted.requests)):
                    self.solo.of(case, admitted, index)

    def run(self, begin: int, end: int) -> None:
        """Send the requests number begin..end-1 and wait for their ends."""
        for number in range(begin, end):
            self._arrive(number)
            while len(self._completions) >= self._max_live or self._rng.random() < 0.55:
                self._tick()
        while self.core.has_work():
            self._tick()
        self._check_idle()

    # ---- requests

    def _arrive(self, number: int) -> None:
        case, rng = self._cases.draw(number), random.Random(f"{self._seed}/{number}")
        first_id = self._next_id
        self._next_id += 8
        try:
            admitted = self._admit(case, first_id)
        except RequestError as error:
            is_expected = case.is_bad or "KV units, the pool has" in str(error)
            self._must(is_expected, number, case, f"was refused: {error}")
            self.outcomes["refused"] += 1
            return
        self._must(not case.is_bad, number, case, "was not refused")
        for request in admitted.requests:
            try:
                self.core.add_request(request)
            except QueueFullError:
                for queued in admitted.requests:
                    self.core.abort_request(queued.request_id, FinishReason.ABORT)
                self.outcomes["queue full"] += 1
                return
        answer = Answer(admitted, self._tokenizer)
        is_cancelled = rng.random() < 0.25
        self._live[answer.request_id] = _Live(
            number=number,
            case=case,
            admitted=admitted,
            answer=answer,
            born_tick=self._tick_idx,
            cancel_tick=self._tick_idx + rng.choice((0, 0, 1, 2, 4, 9)) if is_cancelled else None,
            in_flight=rng.random() < 0.5,
        )
        self._completions |= {one.request_id: one for one in answer.completions}
        self._logits |= {one.request_id: {} for one in answer.completions}

    def _admit(self, case: Case, first_id: int) -> Admitted:
        prompt = self._admission.encode(case.prompt)
        return self._admission.admit(first_id, prompt, SamplingParams(**case.fields))

    def _cancels(self, *, in_flight: bool) -> list[int]:
        """Requests to abort now; a few of them twice, and some that nobody knows."""
        ids = []
        for live in self._live.values():
            if live.cancel_tick == self._tick_idx and live.in_flight == in_flight:
                live.is_cancelled = True
                ids += [one.request_id for one in live.admitted.requests]
        if self._rng.random() < 0.1:
            ids += [*ids, self._next_id + 7]
        return ids

    # ---- steps

    def _tick(self) -> None:
        for request_id in self._cancels(in_flight=False):
            self.core.abort_request(request_id, FinishReason.ABORT)
        for live in self._live.values():
            for request_id, tick in live.stop_ticks.items():
                if tick == self._tick_idx:
                    self.core.abort_request(request_id, FinishReason.STOP)
        if self._rng.random() < 0.2:
            poison_free_units(self.core)
        published = list(self._published()) if self._rng.random() < 0.1 else []
        output = self.core.step()
        self.core.scheduler.check_integrity()
        for page, key, bits in published:
            if page.key == key and not torch.equal(self._bits(page), bits):
                raise Fault(f"seed {self._seed}: a published page changed")
        for request_id, update in _updates(output).items():
            completion = self._completions.get(request_id)
            if completion is not None:  # else its prompt was not queued as a whole
                self._deliver(completion, update)
        self._end_finished()
        self._tick_idx += 1

    def _deliver(self, completion: Completion, update: Update) -> None:
        was_stopped = completion.is_stopped
        completion.take(update)
        if completion.is_stopped and not was_stopped and completion.ended is None:
            live = self._live[completion.request.fork_of or completion.request_id]
            delay = self._rng.choice((1, 1, 2, 3))  # the engine hears of it some steps later
            live.stop_ticks[completion.request_id] = self._tick_idx + delay

    def _end_finished(self) -> None:
        for first_id, live in list(self._live.items()):
            if live.answer.is_finished:
                del self._live[first_id]
                self._check(live)
                for request in live.admitted.requests:
                    del self._completions[request.request_id]
                    del self._logits[request.request_id]
            elif self._tick_idx - live.born_tick > MAX_TICKS:
                self._must(False, live.number, live.case, f"has not ended in {MAX_TICKS} steps")

    def _published(self) -> Iterator[tuple[Page, bytes | None, torch.Tensor]]:
        for page in self.core.scheduler.kv.pool.cache.pages():
            yield page, page.key, self._bits(page)

    def _bits(self, page: Page) -> torch.Tensor:
        units = self.core.executor.pool.view(-1, self.core.manifest.layout.unit_bytes)
        return units[list(page.units)].clone()

    # ---- checks

    def _check(self, live: _Live) -> None:
        """Hold every answer against the request run alone."""
        output = live.answer.output()
        for index, one in enumerate(output.outputs):
            request = live.admitted.requests[index]
            try:
                outcome = self._outcome(live, one, request, index)
            except Fault as fault:
                self._must(False, live.number, live.case, f"answer {index}: {fault}")
            self.outcomes[outcome] += 1

    def _outcome(self, live: _Live, got: CompletionOutput, request: Request, index: int) -> str:
        reason = got.finish_reason
        if reason is FinishReason.ABORT and not live.is_cancelled:
            raise Fault("was aborted, and nobody asked for that")
        if not self._compares:
            return f"{reason}, not compared"
        solo = self.solo.of(live.case, live.admitted, index)
        if differs(got, solo, self._rounding, self._logits[request.request_id]):
            return f"{reason}, rounded to another token"
        if reason is FinishReason.ABORT:
            return "cancelled"
        check_whole(got, solo.output)
        completion = live.answer.completions[index]
        check_scores(got, solo, completion.prompt_logprobs, self._rounding)
        return str(reason)

    def _check_idle(self) -> None:
        stats, pool = self.core.scheduler.stats(), self.core.scheduler.kv.pool
        if self._live or self._completions or self._logits:
            raise Fault(f"seed {self._seed}: unanswered: {sorted(self._completions)}")
        left = (stats.num_running, stats.num_waiting, stats.num_paused)
        if left != (0, 0, 0):
            raise Fault(f"seed {self._seed}: running, waiting, paused are {left} at the end")
        if pool.num_available != stats.num_units or pool.cache.idle_units != stats.num_cached_units:
            raise Fault(f"seed {self._seed}: {pool.num_available} of {stats.num_units} units left")

    def _must(self, is_right: bool, number: int, case: Case, what: str) -> None:
        if not is_right:
            raise Fault(f"seed {self._seed}, request {number} {what}: {case}")


def break_token(core: Any, token_id: int) -> None:
    """Make a token's embedding NaN, so that whoever meets it has no finite logits."""
    core.executor._model.prelude.embedding.weight.data[token_id] = torch.nan
