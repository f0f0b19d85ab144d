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
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeGuard, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from looptrt.errors import QueueFullError, RequestError
from looptrt.runtime.admission import Admission, Admitted, EncodedPrompt, Prompt
from looptrt.runtime.answer import Answer
from looptrt.runtime.chat import ChatTemplate, Message
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_client import EngineClient, InProcessClient, ProcessClient, Update
from looptrt.runtime.outputs import RequestOutput
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.tokenizer import Tokenizer

Conversation = Sequence[Message]

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
        self._request_ids = itertools.count()
        self._config = config
        self.manifest = client.manifest
        try:
            self._admission = Admission(
                manifest=client.manifest,
                limits=config.limits(client.manifest),
                config=config,
                tokenizer=Tokenizer.of_engine(engine_dir),
                template=ChatTemplate.of_engine(engine_dir, client.manifest.spec.architecture),
            )
        except BaseException:
            self._close()
            raise
        tokens = client.manifest.tokens
        _logger.info("answers end at token ids %s (%s)", list(tokens.eos), tokens.source)

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
        return self._admission.encode_chat(messages, enable_thinking).token_ids

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AnswerStream:
        """Answer one prompt, output by output; the request is queued at once.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
            EngineError: the engine has ended.
        """
        answer = self._admit_one(prompt, sampling_params)
        return AnswerStream(self._client, answer)

    def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncAnswerStream:
        """Answer one prompt under asyncio; call it where an event loop runs.

        The request is queued at once. Cancelling the task that iterates, closing the stream
        or letting go of it aborts the request.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
            EngineError: the engine has ended.
        """
        answer = self._admit_one(prompt, sampling_params)
        return AsyncAnswerStream(self._client, answer)

    # ---- control

    def abort(self, request_id: int) -> None:
        """End a request: its caller gets what there is, with finish reason `abort`.

        Unknown and finished ids are harmless.
        """
        self._client.abort(request_id)

    def stats(self) -> dict[str, int | float]:
        """Queue, pool and cache figures of the engine.

        Raises:
            EngineError: the engine has ended.
        """
        return self._client.stats()

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

    def _admit_one(self, prompt: Prompt, params: SamplingParams | None) -> Answer:
        encoded = self._admission.encode(prompt)
        (admitted,) = self._admit([encoded], [params or SamplingParams()])
        return Answer(admitted, self.tokenizer)

    def _admit(
        self, prompts: list[EncodedPrompt], params: Sequence[SamplingParams]
    ) -> list[Admitted]:
        return [
            self._admission.admit(next(self._request_ids), prompt, of_prompt)
            for prompt, of_prompt in zip(prompts, params, strict=True)
        ]

    def _answer(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        params = _params_of_each(sampling_params, len(prompts))
        answers = [Answer(admitted, self.tokenizer) for admitted in self._admit(prompts, params)]
        batch = _Batch(self._client, answers, self._config)
        with _progress_bar(len(answers)) if progress else contextlib.nullcontext() as advance:
            batch.run(advance or (lambda: None))
        return [answer.output() for answer in answers]


class _Batch:
    """Submits requests in a window that the waiting queue can hold, and collects answers."""

    def __init__(self, client: EngineClient, answers: list[Answer], config: EngineConfig) -> None:
        self._client = client
        self._window = config.max_waiting
        self._patience_s = config.step_timeout_s
        self._pending = deque(answers)
        self._live: dict[int, Answer] = {}
        self._inbox: queue.SimpleQueue[tuple[Answer, Update]] = queue.SimpleQueue()
        self._give_up_s: float | None = None  # set while other callers fill the queue

    def run(self, on_finish: Callable[[], None]) -> None:
        """Answer everything; whatever happens, nothing of the batch stays in the engine."""
        try:
            while self._pending or self._live:
                self._submit()
                # The client tells every listener in bounded time, so this wait needs no deadline.
                answer, update = self._inbox.get()
                if isinstance(update.error, QueueFullError):
                    self._put_back(answer, update.error)
                    continue
                self._take(answer, update)
                if answer.is_finished:
                    on_finish()
        finally:
            for request_id in self._live:
                self._client.drop(request_id)

    def _submit(self) -> None:
        is_blocked = self._give_up_s is not None and self._live
        while self._pending and len(self._live) < self._window and not is_blocked:
            answer = self._pending.popleft()
            self._live[answer.request_id] = answer
            self._client.submit(answer.admitted.request, _putter(self._inbox, answer))

    def _put_back(self, answer: Answer, error: QueueFullError) -> None:
        """Wait for room: until an own request ends, or else for a moment."""
        del self._live[answer.request_id]
        self._pending.appendleft(answer)
        now = time.monotonic()
        self._give_up_s = self._give_up_s or now + self._patience_s
        if now > self._give_up_s:
            raise error
        if not self._live:
            time.sleep(_QUEUE_FULL_RETRY_S)

    def _take(self, answer: Answer, update: Update) -> None:
        was_stopped = answer.is_stopped
        answer.take(update)
        if answer.is_finished:
            del self._live[answer.request_id]
            self._give_up_s = None
        elif answer.is_stopped and not was_stopped:
            self._client.abort(answer.request_id)


class AnswerStream(Iterator[RequestOutput]):
    """Outputs of one request as they come, the last one finished.

    A slow consumer gets several steps in one output. Closing or letting go of the stream
    aborts the request.
    """

    def __init__(self, client: EngineClient, answer: Answer) -> None:
        self._client = client
        self._answer = answer
        self._inbox: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._drop = weakref.finalize(self, client.drop, answer.request_id)
        self._drop.atexit = False
        client.submit(answer.admitted.request, self._inbox.put)

    @property
    def request_id(self) -> int:
        """Id for `LLM.abort`."""
        return self._answer.request_id

    def __next__(self) -> RequestOutput:
        if not self._drop.alive:
            raise StopIteration
        try:
            # The client tells every listener in bounded time, so these waits need no deadline.
            while not _take_all(self._client, self._answer, self._inbox.get(), self._rest()):
                pass
        except BaseException:
            self.close()
            raise
        if self._answer.is_finished:
            self.close()
        return self._answer.output()

    def _rest(self) -> Iterator[Update]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._inbox.get_nowait()

    def close(self) -> None:
        """End the stream; a request that runs is aborted."""
        self._drop()


class AsyncAnswerStream:
    """`AnswerStream` for `async for`."""

    def __init__(self, client: EngineClient, answer: Answer) -> None:
        self._client = client
        self._answer = answer
        self._inbox: asyncio.Queue[Update] = asyncio.Queue()
        self._drop = weakref.finalize(self, client.drop, answer.request_id)
        self._drop.atexit = False
        loop = asyncio.get_running_loop()
        client.submit(answer.admitted.request, _loop_putter(loop, self._inbox))

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
            while not _take_all(self._client, self._answer, await self._inbox.get(), self._rest()):
                pass
        except BaseException:
            self._drop()
            raise
        if self._answer.is_finished:
            self._drop()
        return self._answer.output()

    def _rest(self) -> Iterator[Update]:
        while not self._inbox.empty():
            yield self._inbox.get_nowait()

    async def aclose(self) -> None:
        """End the stream; a request that runs is aborted."""
        self._drop()


def _take_all(client: EngineClient, answer: Answer, first: Update, rest: Iterable[Update]) -> bool:
    """Add updates to an answer; False while there is nothing new to show."""
    was_stopped = answer.is_stopped
    for update in itertools.chain([first], rest):
        answer.take(update)
    if answer.is_finished:
        return True
    if answer.is_stopped and not was_stopped:
        client.abort(answer.request_id)
    return not answer.is_stopped


def _putter(
    inbox: queue.SimpleQueue[tuple[Answer, Update]], answer: Answer
) -> Callable[[Update], None]:
    return lambda update: inbox.put((answer, update))


def _loop_putter(
    loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Update]
) -> Callable[[Update], None]:
    def put(update: Update) -> None:
        # A loop that was closed has no one who waits; the stream's end drops the request.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(inbox.put_nowait, update)

    return put


def _is_nested(prompts: object) -> bool:
    """Whether `prompts` is a list of prompts and not one prompt."""
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    return isinstance(prompts[0], str) or hasattr(prompts[0], "__len__")


def _are_conversations(
    messages: Conversation | Sequence[Conversation],
) -> TypeGuard[Sequence[Conversation]]:
    return bool(messages) and isinstance(messages[0], list | tuple)


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
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
