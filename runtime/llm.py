"""`LLM`: prompts in, answers out, for whole batches, streams and asyncio.

Owns the calls that users make and what they wait for; leaves checks to `admission`, text to
`answer` and the engine to `engine_client`. Invariant: when a call or a stream ends, however
it ends, none of its requests is left in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeGuard, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from looptrt.errors import EngineError, QueueFullError, RequestError
from looptrt.manifest import BuildLimits
from looptrt.runtime.admission import Admission, EncodedPrompt, Prompt
from looptrt.runtime.answer import Answer, Completion
from looptrt.runtime.chat import ChatTemplate, Message
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_client import (
    EngineClient,
    InProcessClient,
    Observer,
    ProcessClient,
    Update,
)
from looptrt.runtime.metrics import Family, Metrics
from looptrt.runtime.outputs import RequestOutput
from looptrt.runtime.request import FinishReason
from looptrt.runtime.sampling_params import SamplingParams, shown
from looptrt.runtime.tokenizer import Tokenizer

Conversation = Sequence[Message]
_Arrival = tuple[Completion, Update] | None  # None: the stream was closed

_QUEUE_FULL_RETRY_S = 0.05

_logger = logging.getLogger(__name__)


class LLM:
    """A looped language model, served from an engine directory.

    Thread-safe. Use it as a context manager, or call `shutdown`; an engine process also ends
    when the LLM is collected or this process ends.

    Args:
        engine_dir: directory written by `looptrt build`.
        config: settings of the engine.
        in_process: run the engine on a thread of this process, for tests and debugging.

    Raises:
        ManifestError: the directory is damaged, incomplete or of another version.
        EngineError: the engine could not start, or `config` does not fit it.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        config: EngineConfig | None = None,
        *,
        in_process: bool = False,
    ) -> None:
        config = config or EngineConfig()
        start = InProcessClient if in_process else ProcessClient
        self._attach(start(Path(engine_dir), config), Path(engine_dir), config)

    @classmethod
    def over(cls, client: EngineClient, engine_dir: Path, config: EngineConfig) -> Self:
        """An LLM over an engine that is already running; it is closed with the LLM."""
        llm = cls.__new__(cls)
        llm._attach(client, engine_dir, config)
        return llm

    def _attach(self, client: EngineClient, engine_dir: Path, config: EngineConfig) -> None:
        self._client = client
        self._close = weakref.finalize(self, client.close)
        self._next_id = 0
        self._id_lock = threading.Lock()
        self._answers: weakref.WeakValueDictionary[int, Answer] = weakref.WeakValueDictionary()
        self.config = config
        self.manifest = client.manifest
        try:
            self._admission = Admission(
                manifest=client.manifest,
                num_units=client.num_units,
                limits=config.limits(client.manifest),
                config=config,
                tokenizer=Tokenizer.of_engine(engine_dir),
                template=ChatTemplate.of_engine(engine_dir),
            )
        except BaseException:
            self._close()
            raise
        max_active = self.limits.max_batch_size + config.max_waiting
        self._metrics = Metrics(client.manifest.layout, max_active=max_active)
        client.observe(self._metrics.take)
        tokens = client.manifest.tokens
        _logger.info("answers end at token ids %s (%s)", list(tokens.eos), tokens.source)

    @property
    def limits(self) -> BuildLimits:
        """The engine's limits as configured."""
        return self._admission.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine directory's tokenizer, None where it has none."""
        return self._admission.tokenizer

    # ---- answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts; returns when all are answered.

        Args:
            prompts: a text, a list of token ids, or a list of either. `[]` is a prompt
                without tokens.
            sampling_params: for all prompts, or one for each; None is `SamplingParams()`.
            progress: show a bar on the standard error stream.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt or its parameters cannot be served; all are checked before
                any is submitted.
            EngineError: the engine has ended.
        """
        is_one = isinstance(prompts, str) or not _is_nested(prompts)
        batch = [cast(Prompt, prompts)] if is_one else cast(Sequence[Prompt], prompts)
        encoded = [self._admission.encode(prompt) for prompt in batch]
        return self._answer(encoded, sampling_params, progress=progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        enable_thinking: bool | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations by the model's chat template; see `generate`.

        Args:
            messages: a conversation, or a list of conversations.
            sampling_params: for all, or one for each.
            enable_thinking: given to the template; None leaves it undefined there.
            progress: show a bar on the standard error stream.
        """
        batch = messages if _are_conversations(messages) else [cast(Conversation, messages)]
        encoded = [self._admission.encode_chat(one, enable_thinking) for one in batch]
        return self._answer(encoded, sampling_params, progress=progress)

    def chat_prompt(
        self, messages: Conversation, *, enable_thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a conversation, for `stream` and `generate_async`."""
        return self.encode_chat(messages, enable_thinking=enable_thinking).token_ids

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """A prompt for `stream` and `generate_async`, encoded in the caller's thread.

        Raises:
            RequestError: the prompt cannot be encoded.
        """
        return self._admission.encode(prompt)

    def encode_chat(
        self, messages: Conversation, *, enable_thinking: bool | None = None
    ) -> EncodedPrompt:
        """The same of a conversation; see `chat`."""
        return self._admission.encode_chat(messages, enable_thinking)

    def stream(
        self,
        prompt: Prompt | EncodedPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_news: Callable[[], None] | None = None,
    ) -> AnswerStream:
        """Answer one prompt, output by output; the request is queued at once.

        Args:
            prompt: as for `generate`.
            sampling_params: None is `SamplingParams()`.
            on_news: called on a thread of the LLM's whenever `poll` of the stream may have
                something; must neither block nor raise.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
            EngineError: the engine has ended.
        """
        answer = self._admit_one(prompt, sampling_params)
        return AnswerStream(self, answer, on_news)

    def generate_async(
        self, prompt: Prompt | EncodedPrompt, sampling_params: SamplingParams | None = None
    ) -> AsyncAnswerStream:
        """Answer one prompt under asyncio; call it where an event loop runs.

        The request is queued at once. Cancelling the task that iterates, closing the stream
        or letting go of it aborts the request.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
            EngineError: the engine has ended.
        """
        (stream,) = self.generate_all_async([prompt], sampling_params)
        return stream

    def generate_all_async(
        self,
        prompts: Sequence[Prompt | EncodedPrompt],
        sampling_params: SamplingParams | None = None,
    ) -> list[AsyncAnswerStream]:
        """`generate_async` for several prompts; all are checked before any is queued."""
        encoded = [self._admission.encode(prompt) for prompt in prompts]
        params = SamplingParams() if sampling_params is None else sampling_params
        answers = self._admit(encoded, [params] * len(encoded))
        return [AsyncAnswerStream(self, answer) for answer in answers]

    # ---- control

    def abort(self, request_id: int) -> None:
        """End a request, all its answers: its caller gets what there is, finished as `abort`.

        Unknown and finished ids are harmless.
        """
        answer = self._answers.get(request_id)
        for completion in () if answer is None else answer.completions:
            self._client.abort(completion.request_id)

    def stats(self) -> dict[str, int | float]:
        """Queue, pool and cache figures of the engine.

        Raises:
            EngineError: the engine has ended.
        """
        return self._client.stats()

    @property
    def is_alive(self) -> bool:
        """Whether the engine can take requests."""
        return self._client.is_alive

    def check_alive(self) -> None:
        """Do nothing while the engine can take requests.

        Raises:
            EngineError: it cannot; says why.
        """
        self._client.check_alive()

    def observe(self, observer: Observer) -> None:
        """Show what every step brings to an observer; see `EngineClient.observe`."""
        self._client.observe(observer)

    def metrics(self, labels: Mapping[str, str] | None = None) -> list[Family]:
        """All figures under the names that dashboards know, also of an engine that has ended.

        Args:
            labels: put on every sample.
        """
        try:
            stats = self.stats()
        except EngineError:
            stats = None
        return self._metrics.families(stats, labels)

    def shutdown(self) -> None:
        """Stop the engine; running requests get an EngineError."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    # ---- inside

    def _admit_one(self, prompt: Prompt | EncodedPrompt, params: SamplingParams | None) -> Answer:
        encoded = self._admission.encode(prompt)
        (answer,) = self._admit([encoded], [SamplingParams() if params is None else params])
        return answer

    def _admit(
        self, prompts: list[EncodedPrompt], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        answers = []
        for prompt, of_prompt in zip(prompts, params, strict=True):
            if not isinstance(of_prompt, SamplingParams):
                raise RequestError(
                    f"sampling_params: expected SamplingParams, got {shown(of_prompt)}"
                )
            first_id = self._take_ids(of_prompt.n)
            admitted = self._admission.admit(first_id, prompt, of_prompt)
            answers.append(Answer(admitted, self.tokenizer))
        self._answers.update({answer.request_id: answer for answer in answers})
        return answers

    def _take_ids(self, count: int) -> int:
        """Reserve consecutive request ids; returns the first."""
        with self._id_lock:
            first, self._next_id = self._next_id, self._next_id + count
        return first

    def _answer(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        params = _params_of_each(sampling_params, len(prompts))
        answers = self._admit(prompts, params)
        completions = [one for answer in answers for one in answer.completions]
        batch = _Batch(self._client, completions, self.config)
        with _progress_bar(len(completions)) if progress else contextlib.nullcontext() as advance:
            batch.run(advance or (lambda: None))
        return [answer.output() for answer in answers]


class _Batch:
    """Submits requests in a window that the waiting queue can hold, and collects answers."""

    def __init__(
        self, client: EngineClient, completions: list[Completion], config: EngineConfig
    ) -> None:
        self._client = client
        self._window = config.max_waiting
        self._patience_s = config.step_timeout_s
        self._pending = deque(completions)
        self._live: set[int] = set()
        self._inbox: queue.SimpleQueue[tuple[Completion, Update]] = queue.SimpleQueue()
        self._give_up_s: float | None = None  # set while other callers fill the queue

    def run(self, on_finish: Callable[[], None]) -> None:
        """Answer everything; whatever happens, nothing of the batch stays in the engine."""
        try:
            while self._pending or self._live:
                self._submit()
                # The client tells every listener in bounded time, so this wait needs no deadline.
                completion, update = self._inbox.get()
                if isinstance(update.error, QueueFullError):
                    self._put_back(completion, update.error)
                    continue
                _take(self._client, completion, update)
                if completion.ended is not None:
                    self._live.remove(completion.request_id)
                    self._give_up_s = None
                    on_finish()
        finally:
            _drop(self._client, tuple(self._live))

    def _submit(self) -> None:
        is_blocked = self._give_up_s is not None and self._live
        while self._pending and len(self._live) < self._window and not is_blocked:
            completion = self._pending.popleft()
            self._live.add(completion.request_id)
            self._client.submit(completion.request, _listener(completion, self._inbox.put))

    def _put_back(self, completion: Completion, error: QueueFullError) -> None:
        """Wait for room: until an own request ends, or else for a moment."""
        self._live.remove(completion.request_id)
        self._pending.appendleft(completion)
        now = time.monotonic()
        self._give_up_s = self._give_up_s or now + self._patience_s
        if now > self._give_up_s:
            raise error
        if not self._live:
            time.sleep(_QUEUE_FULL_RETRY_S)


class AnswerStream(Iterator[RequestOutput]):
    """Outputs of one request as they come, the last one finished.

    A slow consumer gets several steps in one output. Closing or letting go of the stream
    aborts the request; the stream keeps its LLM.
    """

    def __init__(self, llm: LLM, answer: Answer, on_news: Callable[[], None] | None = None) -> None:
        self._llm = llm
        self._answer = answer
        self._inbox: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        put = self._inbox.put if on_news is None else _telling(self._inbox, on_news)
        self._drop = _submit_all(self, llm._client, answer, put)

    @property
    def request_id(self) -> int:
        """Id for `LLM.abort`."""
        return self._answer.request_id

    def __next__(self) -> RequestOutput:
        if not self._drop.alive:
            raise StopIteration
        try:
            # The client tells every listener in bounded time, so these waits need no deadline.
            while not _take_all(self._llm._client, self._inbox.get(), self._rest()):
                if not self._drop.alive:
                    raise StopIteration
        except BaseException:
            self.close()
            raise
        return self._output()

    def poll(self) -> RequestOutput | None:
        """What has come since the last output, without waiting; None where there is nothing.

        For one thread that serves many streams; the output after the last one is None, too.

        Raises:
            LooptrtError: the request or the engine failed; the stream has ended.
        """
        try:
            if not _take_all(self._llm._client, None, self._rest()) or not self._drop.alive:
                return None
        except BaseException:
            self.close()
            raise
        return self._output()

    def _output(self) -> RequestOutput:
        if self._answer.is_finished:
            self.close()
        return self._answer.output()

    def _rest(self) -> Iterator[_Arrival]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._inbox.get_nowait()

    def close(self) -> None:
        """End the stream, from any thread; a request that runs is aborted."""
        self._drop()
        self._inbox.put(None)  # wakes whoever waits for an output


class AsyncAnswerStream:
    """`AnswerStream` for `async for`."""

    def __init__(self, llm: LLM, answer: Answer) -> None:
        self._llm = llm
        self._answer = answer
        self._inbox: asyncio.Queue[_Arrival] = asyncio.Queue()
        self._put = _loop_putter(asyncio.get_running_loop(), self._inbox)
        self._drop = _submit_all(self, llm._client, answer, self._put)

    @property
    def request_id(self) -> int:
        """Id for `LLM.abort`."""
        return self._answer.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._drop.alive:
            raise StopAsyncIteration
        try:
            while not _take_all(self._llm._client, await self._inbox.get(), self._rest()):
                if not self._drop.alive:
                    raise StopAsyncIteration
        except BaseException:
            self.close()
            raise
        if self._answer.is_finished:
            self.close()
        return self._answer.output()

    def _rest(self) -> Iterator[_Arrival]:
        while not self._inbox.empty():
            yield self._inbox.get_nowait()

    async def aclose(self) -> None:
        """The same as `close`."""
        self.close()

    def close(self) -> None:
        """End the stream, from any task or thread; a request that runs is aborted."""
        self._drop()
        self._put(None)  # wakes whoever waits for an output


def _submit_all(
    stream: object, client: EngineClient, answer: Answer, put: Callable[[_Arrival], None]
) -> weakref.finalize[..., object]:
    """Submit an answer's requests; returns what drops them, at the latest with the stream."""
    ids = tuple(completion.request_id for completion in answer.completions)
    drop = weakref.finalize(stream, _drop, client, ids)
    drop.atexit = False
    try:
        for completion in answer.completions:
            client.submit(completion.request, _listener(completion, put))
    except BaseException:
        drop()
        raise
    return drop


def _drop(client: EngineClient, request_ids: tuple[int, ...]) -> None:
    for request_id in request_ids:
        client.drop(request_id)


def _take(client: EngineClient, completion: Completion, update: Update) -> bool:
    """Add an update to its answer; returns whether there is something new to show."""
    was_stopped = completion.is_stopped
    has_news = completion.take(update)
    if completion.is_stopped and not was_stopped and completion.ended is None:
        client.abort(completion.request_id, FinishReason.STOP)
    return has_news


def _take_all(client: EngineClient, first: _Arrival, rest: Iterable[_Arrival]) -> bool:
    """Add updates to their answers; False while there is nothing new to show."""
    has_news = False
    for arrival in itertools.chain([first], rest):
        if arrival is not None:
            has_news |= _take(client, *arrival)
    return has_news


def _listener(
    completion: Completion, put: Callable[[tuple[Completion, Update]], None]
) -> Callable[[Update], None]:
    return lambda update: put((completion, update))


def _telling(
    inbox: queue.SimpleQueue[_Arrival], on_news: Callable[[], None]
) -> Callable[[_Arrival], None]:
    def put(arrival: _Arrival) -> None:
        inbox.put(arrival)
        on_news()

    return put


def _loop_putter(
    loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[_Arrival]
) -> Callable[[_Arrival], None]:
    def put(arrival: _Arrival) -> None:
        # A loop that was closed has no one who waits; the stream's end drops the request.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(inbox.put_nowait, arrival)

    return put


def _is_nested(prompts: object) -> bool:
    """Whether `prompts` is a list of prompts and not one prompt."""
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    return isinstance(prompts[0], str) or hasattr(prompts[0], "__len__")


def _are_conversations(
    messages: Conversation | Sequence[Conversation],
) -> TypeGuard[Sequence[Conversation]]:
    return isinstance(messages, Sequence) and isinstance(next(iter(messages), None), list | tuple)


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str | bytes | bytearray):
        raise RequestError(
            f"sampling_params: expected SamplingParams or a list of them, got {shown(params)}"
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"sampling_params: expected one for each of {num_prompts} prompts, got {len(params)}"
        )
    return params


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
