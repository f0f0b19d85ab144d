"""Random requests through LLM and asyncio, from callers who leave as callers do.

Owns the callers; leaves what is asked to `random_requests` and what an answer may be to `alone`.
A seed repeats the requests, not their order in the engine.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

from looptrt.errors import LooptrtError, RequestError
from looptrt.runtime.llm import LLM, AsyncAnswerStream
from looptrt.runtime.outputs import RequestOutput
from looptrt.runtime.request import FinishReason
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.alone import ROUNDING, Fault, SoloRuns, check_whole, differs
from tests.support.random_requests import VOCAB, Case, Cases

_PATIENCE_S = 120.0  # for the answers of a run


async def soak_llm(
    llm: LLM,
    solo: SoloRuns,
    cases: Cases,
    *,
    begin: int,
    end: int,
    seed: int,
    num_tasks: int = 16,
    rounding: float = ROUNDING,
) -> Counter[str]:
    """Send requests number begin..end-1 from several tasks; returns how they ended."""
    outcomes: Counter[str] = Counter()
    numbers = iter(range(begin, end))

    async def work() -> None:
        for number in numbers:
            caller = _Caller(llm, solo, cases.draw(number), rounding)
            try:
                outcomes[await caller.ask(random.Random(f"{seed}/{number}"))] += 1
            except (Fault, LooptrtError) as error:
                what = f"{type(error).__name__}: {error}"
                raise Fault(f"seed {seed}, request {number} {what}: {caller.case}") from error

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_tasks):
            tasks.create_task(work())
    return outcomes


@dataclass
class _Caller:
    """Who sends one request, and does what callers do with the answer."""

    llm: LLM
    solo: SoloRuns
    case: Case
    rounding: float
    text: str = ""  # of the first answer, piece by piece
    last: RequestOutput | None = None

    async def ask(self, rng: random.Random) -> str:
        """Send it; returns how it ended."""
        how = rng.choice(("take", "take", "take", "take", "abort", "close", "let go", "cancel"))
        patience = rng.choice((0, 1, 1, 3))
        try:
            params = SamplingParams(**self.case.fields)
            stream = self.llm.generate_async(self.case.prompt, params)
        except RequestError as error:
            if self.case.is_bad:
                return "refused"
            raise Fault(f"was refused: {error}") from error
        if self.case.is_bad:
            raise Fault("was not refused")
        if how == "take" or await self._read(stream, patience):
            await self._read(stream)
            self._check(may_abort=False)
            return "answered"
        await self._leave(stream, how)
        return how

    async def _read(self, stream: AsyncAnswerStream, most: int | None = None) -> bool:
        """Take outputs, all or some; returns whether that was the end."""
        num_read = 0
        while most is None or num_read < most:
            output = await anext(stream, None)
            if output is None:
                return True
            num_read, self.last = num_read + 1, output
            self.text += output.outputs[0].delta
        return False

    async def _leave(self, stream: AsyncAnswerStream, how: str) -> None:
        if how == "abort":
            self.llm.abort(stream.request_id)
            await self._read(stream)
            self._check(may_abort=True)
        elif how == "close":
            await stream.aclose()
        elif how == "cancel":
            waiter = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.wait([waiter], timeout=60)

    def _check(self, *, may_abort: bool) -> None:
        if self.last is None or not self.last.finished:
            raise Fault("the stream ended without a last output")
        if self.text != self.last.outputs[0].text:
            raise Fault(f"the pieces make {self.text!r}, not {self.last.outputs[0].text!r}")
        admission, params = self.llm._admission, SamplingParams(**self.case.fields)
        admitted = admission.admit(0, admission.encode(self.case.prompt), params)
        for index, got in enumerate(self.last.outputs):
            is_aborted = got.finish_reason is FinishReason.ABORT
            if is_aborted and not may_abort:
                raise Fault("was aborted, and nobody asked for that")
            alone = self.solo.of(self.case, admitted, index)
            if not differs(got, alone, self.rounding, {}) and not is_aborted:
                check_whole(got, alone.output)


# ---- load without comparison


async def closed_loop(llm: LLM, *, num_tasks: int, seconds: float, seed: int) -> float:
    """Requests a second that the engine ends when `num_tasks` callers never pause."""
    loop, rng, ended = asyncio.get_running_loop(), random.Random(seed), Counter[str]()
    begin = loop.time()

    async def work() -> None:
        while loop.time() < begin + seconds:
            ended[await _answer(llm, rng)] += 1

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(num_tasks))), _PATIENCE_S)
    return sum(ended.values()) / (loop.time() - begin)


async def poisson(llm: LLM, rate: float, *, seconds: float, seed: int) -> Counter[str]:
    """Send requests at random times, `rate` a second; returns how they ended."""
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    begin, at, tasks = loop.time(), 0.0, []
    while at < seconds:
        await asyncio.sleep(begin + at - loop.time())
        tasks.append(asyncio.create_task(_answer(llm, rng)))
        at += rng.expovariate(rate)
    return Counter(await asyncio.wait_for(asyncio.gather(*tasks), _PATIENCE_S))


async def _answer(llm: LLM, rng: random.Random) -> str:
    """One request to its end; returns the reason."""
    params = SamplingParams(
        max_tokens=rng.randint(1, 30),
        ignore_eos=True,
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(2**63),
    )
    reason = None
    async for output in llm.generate_async(rng.choices(range(VOCAB), k=rng.randint(1, 60)), params):
        reason = output.outputs[0].finish_reason
    return str(reason)
