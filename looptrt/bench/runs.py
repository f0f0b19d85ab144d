"""Requests at their times, and what became of each.

Owns submitting, waiting and the record of a request; leaves prompts to `workload` and sums to
`results`. Invariant: every request that was asked has a record, also one that was refused,
failed or did not end before the deadline; when `run` returns none is left in the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from looptrt.errors import LooptrtError
from looptrt.runtime.llm import LLM, AnswerStream
from looptrt.runtime.outputs import RequestOutput
from looptrt.runtime.request import FinishReason
from looptrt.runtime.sampling_params import SamplingParams

Prompt = str | list[int]


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        at_s: seconds after the start of the run.
    """

    prompt: Prompt
    params: SamplingParams
    at_s: float = 0.0


@dataclass(frozen=True)
class Record:
    """One request as its caller saw it.

    Times are of `time.monotonic`; those of tokens are when the engine had them, to which the
    way back to the caller is not added.

    Attributes:
        index: of the ask.
        due_s: when it should have been, and was no earlier, submitted.
        error: why it has no whole answer; None for one that has.
    """

    index: int
    due_s: float
    num_prompt: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """From the due time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between the tokens; None for fewer than two."""
        if self.first_token_s is None or self.last_token_s is None or len(self.token_ids) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (len(self.token_ids) - 1)

    @property
    def latency_per_token_s(self) -> float | None:
        """From the due time to the end, by the tokens of the answer."""
        if self.finished_s is None or not self.token_ids:
            return None
        return (self.finished_s - self.due_s) / len(self.token_ids)


@dataclass(frozen=True)
class Run:
    """All records of one run, in the order of the asks.

    Attributes:
        wall_s: from the start to the last answer's end.
    """

    records: tuple[Record, ...]
    wall_s: float

    @property
    def failed(self) -> list[Record]:
        """Requests without a whole answer."""
        return [record for record in self.records if record.error is not None]

    @property
    def answered(self) -> list[Record]:
        """The others."""
        return [record for record in self.records if record.error is None]


def run(
    llm: LLM,
    asks: Sequence[Ask],
    *,
    deadline_s: float,
    on_end: Callable[[], None] = lambda: None,
) -> Run:
    """Submit every request at its time and wait for all answers.

    A request whose answer is not whole at the deadline is aborted and recorded so.

    Args:
        llm: a running engine.
        asks: in the order of their times.
        deadline_s: from the start of the run.
        on_end: told of every request that has its record.

    Raises:
        EngineError: the engine has ended.
    """
    start_s = time.monotonic()
    submitted: list[tuple[float, AnswerStream | LooptrtError]] = []
    late = threading.Event()

    def expire() -> None:
        late.set()
        for _, stream in tuple(submitted):
            if isinstance(stream, AnswerStream):
                llm.abort(stream.request_id)

    timer = threading.Timer(deadline_s, expire)
    timer.daemon = True
    timer.start()
    try:
        for ask in asks:
            due_s = start_s + ask.at_s
            if late.wait(max(0.0, due_s - time.monotonic())) or late.is_set():
                break
            submitted.append((due_s, _submit(llm, ask)))
        if late.is_set():
            expire()  # again: it may have missed the one that was under way
        records = [*_collected(submitted, asks, deadline_s, late, on_end)]
    finally:
        timer.cancel()
        for _, stream in submitted:
            if isinstance(stream, AnswerStream):
                stream.close()
    llm.check_alive()
    for index in range(len(records), len(asks)):
        error = f"not submitted: the run's deadline of {deadline_s:g} s came before its time"
        records.append(Record(index, start_s + asks[index].at_s, error=error))
        on_end()
    ends = [record.finished_s for record in records if record.finished_s is not None]
    return Run(tuple(records), max(ends, default=time.monotonic()) - start_s)


def _submit(llm: LLM, ask: Ask) -> AnswerStream | LooptrtError:
    try:
        return llm.stream(ask.prompt, ask.params)
    except LooptrtError as error:
        return error


def _collected(
    submitted: Sequence[tuple[float, AnswerStream | LooptrtError]],
    asks: Sequence[Ask],
    deadline_s: float,
    late: threading.Event,
    on_end: Callable[[], None],
) -> Iterable[Record]:
    for index, (due_s, stream) in enumerate(submitted):
        yield _record(index, due_s, stream, asks[index].params.max_tokens, deadline_s, late)
        on_end()


def _record(
    index: int,
    due_s: float,
    stream: AnswerStream | LooptrtError,
    max_tokens: int | None,
    deadline_s: float,
    late: threading.Event,
) -> Record:
    output: RequestOutput | None = None
    try:
        if isinstance(stream, LooptrtError):
            raise stream
        for output in stream:  # noqa: B007 - the last one is wanted
            pass
    except LooptrtError as error:
        return Record(index, due_s, error=f"{type(error).__name__}: {error}")
    if output is None or output.metrics is None:
        return Record(index, due_s, error="the stream ended without an answer")
    (answer,), times = output.outputs, output.metrics
    why = None
    if answer.finish_reason is FinishReason.ABORT:
        why = f"not finished within the run's deadline of {deadline_s:g} s"
        if not late.is_set():
            why = "aborted by the engine"
    elif answer.finish_reason is FinishReason.ERROR:
        why = str(answer.stop_reason)
    elif answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) < (max_tokens or 0):
        why = f"cut to {len(answer.token_ids)} of {max_tokens} tokens: the engine has no room"
    return Record(
        index=index,
        due_s=due_s,
        num_prompt=len(output.prompt_token_ids),
        num_cached=output.num_cached_tokens or 0,
        num_preemptions=times.num_preemptions,
        token_ids=tuple(answer.token_ids),
        text=answer.text,
        finish_reason=None if answer.finish_reason is None else answer.finish_reason.value,
        first_token_s=times.first_token_s,
        last_token_s=times.last_token_s,
        finished_s=times.finished_s,
        error=why,
    )
