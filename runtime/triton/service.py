"""`tensorrt_llm`: requests of the server to an LLM, and its answers back, many at a time.

Owns which requests are live and which thread speaks to their callers: some send what is new, one
looks for callers that have gone and for deadlines. Leaves the meaning of tensors to `requests`
and `responses`. Invariant: every request gets one final message, in every path, and nothing
after it; a request that is over holds nothing in the engine.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from looptrt.errors import EngineError, LooptrtError, RequestError
from looptrt.runtime.llm import LLM, AnswerStream
from looptrt.runtime.outputs import StepOutput
from looptrt.runtime.request import FinishReason
from looptrt.runtime.triton.channel import Channel, Code, code_of
from looptrt.runtime.triton.requests import Wishes, is_stop, named_tensors, prompts_of, wishes_of
from looptrt.runtime.triton.responses import AnswerResponses, Outputs

# A send waits for the server's threads and back; so a few wait at a time.
_NUM_SENDERS = 4
_IDLE_LOOK_S = 0.1  # how often callers are looked for while no step ends
_RETRY_S = 10.0  # for how long an error is sent again that finds no shared memory
_STOP_TIMEOUT_S = 10.0
_ERROR = FinishReason.ERROR

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Live:
    """A request that has not had its final message; `lock` guards everything below it."""

    channel: Channel
    wishes: Wishes
    keys: tuple[str, ...]
    deadline_s: float | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: list[tuple[AnswerStream, AnswerResponses]] = field(default_factory=list)
    num_running: int = 0
    is_queued: bool = False
    has_sent: bool = False
    is_over: bool = False


@dataclass(frozen=True)
class _Unsaid:
    """The final message of a request that is over, which could not be sent yet."""

    channel: Channel
    lock: threading.Lock  # of the channel
    code: Code
    message: str
    give_up_s: float


class Service:
    """Serves one LLM. Thread-safe; owns the LLM from here on.

    Args:
        llm: the engine.
        excludes_input: whether answers leave their prompt out where a request says nothing.
        is_decoupled: whether a request may have several responses.
        drain_file: while it exists, new requests are refused.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        excludes_input: bool,
        is_decoupled: bool,
        drain_file: Path | None = None,
    ) -> None:
        self._llm = llm
        self._drain_file = drain_file
        self._excludes_input = excludes_input
        self._is_decoupled = is_decoupled
        self._lock = threading.Lock()
        self._live: set[_Live] = set()
        self._unsaid: list[_Unsaid] = []
        self._by_key: defaultdict[str, set[_Live]] = defaultdict(set)
        # Requests with news; those whose caller has nothing yet go first: a first token does not
        # wait behind the others of its step. For each there is a ticket; a false one is the end.
        self._first: deque[_Live] = deque()
        self._ready: deque[_Live] = deque()
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_closed = False
        self._has_stepped = False
        self._look = threading.Event()
        self._senders = [
            threading.Thread(target=self._send_all, name="looptrt-send", daemon=True)
            for _ in range(_NUM_SENDERS)
        ]
        self._watcher = threading.Thread(target=self._watch, name="looptrt-watch", daemon=True)
        for thread in (*self._senders, self._watcher):
            thread.start()
        llm.observe(self._note_step)

    def take(
        self, inputs: Outputs, channel: Channel, request_id: str = "", timeout_s: float = 0.0
    ) -> None:
        """Admit a request and return; everything else, errors too, goes to its channel.

        Args:
            inputs: tensors by name, with the batch dimension.
            channel: where the responses go.
            request_id: under which a `stop` request ends it; "" is none.
            timeout_s: how long the whole request may take; 0 is for ever.
        """
        try:
            if is_stop(inputs):
                self._stop(request_id)
                channel.send({}, is_final=True)
                return
            if self._drain_file is not None and self._drain_file.exists():
                raise EngineError("the server is being shut down")
            self._admit(inputs, channel, request_id, timeout_s)
        except LooptrtError as error:
            self._say(channel, threading.Lock(), code_of(error), str(error))

    @property
    def is_alive(self) -> bool:
        """Whether the engine can take requests."""
        return self._llm.is_alive

    def close(self) -> None:
        """Fail what still runs, stop the engine and the threads."""
        self._is_closed = True
        self._look.set()
        for live in self._snapshot():
            with live.lock:
                if not live.is_over:
                    self._fail(live, Code.UNAVAILABLE, "the model is being unloaded")
        for _ in self._senders:
            self._tickets.put(False)
        for thread in (self._watcher, *self._senders):
            thread.join(_STOP_TIMEOUT_S)
        self._llm.shutdown()

    # ---- admission

    def _admit(self, inputs: Outputs, channel: Channel, request_id: str, timeout_s: float) -> None:
        wishes = wishes_of(inputs)
        prompts = list(prompts_of(inputs, excludes_input=self._excludes_input))
        if not self._is_decoupled:
            _check_single(wishes, len(prompts), max(one.params.n for one in prompts))
        stop_key = secrets.token_hex(8)
        keys = (stop_key, request_id) if request_id else (stop_key,)
        deadline_s = time.monotonic() + timeout_s if timeout_s > 0 else None
        live = _Live(channel, wishes, keys, deadline_s, num_running=len(prompts))
        with live.lock:
            try:
                for row, prompt in enumerate(prompts):
                    batch_index = row if len(prompts) > 1 else None
                    responses = AnswerResponses(wishes, batch_index, stop_key, channel.outputs)
                    with named_tensors():
                        stream = self._llm.stream(
                            prompt.token_ids, prompt.params, on_news=lambda: self._wake(live)
                        )
                    live.answers.append((stream, responses))
            except BaseException:
                _close(live)
                raise
            self._register(live)

    def _register(self, live: _Live) -> None:
        with self._lock:
            self._live.add(live)
            for key in live.keys:
                self._by_key[key].add(live)
        self._look.set()  # it is looked for from here on

    def _snapshot(self) -> list[_Live]:
        with self._lock:
            return list(self._live)

    def _stop(self, request_id: str) -> None:
        """End the requests of an id; their callers get what there is."""
        if not request_id:
            raise RequestError("stop: expected the id of the request to end as this request's id")
        with self._lock:
            named = list(self._by_key.get(request_id, ()))
        for live in named:
            with live.lock:
                for stream, _ in live.answers:
                    self._llm.abort(stream.request_id)

    # ---- what is new

    def _note_step(self, _output: StepOutput) -> None:
        self._has_stepped = True  # before the listeners hear of it, and so the sender

    def _wake(self, live: _Live) -> None:
        """Have a sender look at a request, once however much there is."""
        if not live.is_queued:
            live.is_queued = True
            (self._ready if live.has_sent else self._first).append(live)
            self._tickets.put(True)

    def _send_all(self) -> None:
        while self._tickets.get():
            live = _popped(self._first) or _popped(self._ready)
            assert live is not None  # as many requests are queued as there are tickets
            live.is_queued = False  # before the poll: what comes from here on wakes again
            self._supervised(self._advance, live)
            if self._has_stepped and not self._first and not self._ready:
                self._has_stepped = False  # answers go before looks
                self._look.set()

    def _advance(self, live: _Live) -> None:
        with live.lock:
            if live.is_over:
                return
            try:
                with named_tensors():
                    new = [response for answer in live.answers for response in _poll(live, *answer)]
            except LooptrtError as error:
                self._fail(live, code_of(error), str(error))
                return
            for number, response in enumerate(new, 1):
                self._send(live, response, is_final=not live.num_running and number == len(new))

    # ---- callers that have gone, deadlines

    def _watch(self) -> None:
        """Look at every request's caller once a step, and now and then without one.

        Not more often: a look is a message to the server and back, as dear as a response.
        """
        while not self._is_closed:
            self._look.wait(_IDLE_LOOK_S if self._live or self._unsaid else None)
            self._look.clear()
            now_s = time.monotonic()
            for live in self._snapshot():
                self._supervised(self._check, live, now_s)
            self._say_again(now_s)

    def _check(self, live: _Live, now_s: float) -> None:
        with live.lock:  # the server frees what it would look at with the final message
            if live.is_over:
                return
            if live.channel.is_cancelled():
                self._fail(live, Code.CANCELLED, "the request was cancelled")
            elif live.deadline_s is not None and now_s > live.deadline_s:
                self._fail(live, Code.UNAVAILABLE, "the request's timeout has passed")

    def _supervised(self, work: Callable[..., None], live: _Live, *args: float) -> None:
        """Let a failure of ours end one request and not the thread that serves all."""
        try:
            work(live, *args)
        except Exception as error:  # whatever it is, the request must have its final message
            _logger.exception("a request failed")
            with live.lock:
                if not live.is_over:
                    self._fail(live, Code.INTERNAL, f"{type(error).__name__}: {error}")

    # ---- the caller's side of a live request; its lock is held

    def _send(self, live: _Live, response: Outputs, *, is_final: bool) -> None:
        if live.is_over:
            return
        if is_final:
            self._leave(live)
        live.has_sent = True
        try:
            live.channel.send(response, is_final=is_final)
        except Exception as error:  # no shared memory is left, or the caller has gone
            _logger.exception("a response could not be sent; its request ends")
            self._fail(live, Code.UNAVAILABLE, f"a response could not be sent: {error}")

    def _fail(self, live: _Live, code: Code, message: str) -> None:
        self._leave(live)
        self._say(live.channel, live.lock, code, message)

    def _say(self, channel: Channel, lock: threading.Lock, code: Code, message: str) -> None:
        """Send a final message, later if it finds no room; `lock` is held or the caller's own."""
        try:
            channel.fail(code, message)
        except Exception:  # no shared memory is left, or the caller has gone
            _logger.exception("an error could not be sent: %s", message)
            unsaid = _Unsaid(channel, lock, code, message, time.monotonic() + _RETRY_S)
            with self._lock:
                self._unsaid.append(unsaid)
            self._look.set()

    def _say_again(self, now_s: float) -> None:
        with self._lock:
            unsaid, self._unsaid = self._unsaid, []
        for one in unsaid:
            try:
                with one.lock:
                    one.channel.fail(one.code, one.message)
            except Exception:  # as before, which is in the log
                if now_s > one.give_up_s:
                    _logger.exception("an error could not be sent for %g s", _RETRY_S)
                    continue
                with self._lock:
                    self._unsaid.append(one)

    def _leave(self, live: _Live) -> None:
        """Make a request over: nothing of it stays, in the engine or here."""
        live.is_over = True
        _close(live)
        with self._lock:
            self._live.discard(live)
            for key in live.keys:
                self._by_key[key].discard(live)
                if not self._by_key[key]:
                    del self._by_key[key]


def _popped(queued: deque[_Live]) -> _Live | None:
    try:
        return queued.popleft()
    except IndexError:
        return None


def _poll(live: _Live, stream: AnswerStream, responses: AnswerResponses) -> list[Outputs]:
    """Responses for what has come of one row's answers."""
    output = stream.poll()
    if output is None:
        return []
    errors = {str(one.stop_reason) for one in output.outputs if one.finish_reason is _ERROR}
    if errors:
        raise LooptrtError(f"the answer ended in an error: {'; '.join(sorted(errors))}")
    live.num_running -= output.finished
    return responses.of(output)


def _close(live: _Live) -> None:
    for stream, _ in live.answers:
        stream.close()


def _check_single(wishes: Wishes, num_rows: int, most_answers: int) -> None:
    """Refuse what a model that gives one response for each request cannot do."""
    for name, is_asked in (
        ("streaming", wishes.is_streaming),
        ("num_return_sequences", most_answers > 1),
        ("input_ids", num_rows > 1),
    ):
        if is_asked:
            raise RequestError(
                f"{name}: a request of several responses needs decoupled_mode, "
                "which this model repository switches off"
            )
