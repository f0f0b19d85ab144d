"""The caller's side of a connection to an engine: submit, listen, abort, stop.

Owns the engine's life (start, end, why it ended) and who hears of which request; leaves
text to `answer` and the loop to `engine_process`. Invariant: every submitted request's
listener hears its end or an error within a bounded time, or the request was dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from looptrt.errors import EngineError, LooptrtError, RequestError
from looptrt.manifest import Manifest
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_process import Core, load_core, serve
from looptrt.runtime.outputs import FinishedRequest, StepOutput, TokenLogprobs
from looptrt.runtime.protocol import (
    AbortRequest,
    AddRequest,
    Connection,
    EngineFailed,
    GetStats,
    Message,
    Ready,
    RequestRefused,
    Shutdown,
    Stats,
    Worker,
)
from looptrt.runtime.request import FinishReason, Request

_ENGINE_MODULE = "looptrt.runtime.engine_process"
_POLL_S = 1.0  # how often silence is checked against the step deadline
_STOP_TIMEOUT_S = 10.0  # for each of: a polite stop, SIGTERM, SIGKILL
_NUM_LINES_KEPT = 50
_NUM_LINES_SHOWN = 5

_logger = logging.getLogger(__name__)
_engine_logger = logging.getLogger("looptrt.engine")


@dataclass
class Update:
    """What one step brought one request; after `finished` or `error` nothing follows.

    Attributes:
        logprobs: of each token, where the request asks for them, else empty.
        prompt_logprobs: (position, log-probabilities) of prompt tokens; a request that was
            preempted in its prompt may bring one twice.
    """

    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finished: FinishedRequest | None = None
    error: LooptrtError | None = None


# Both are called on the client's reader thread: must neither block nor raise.
Listener = Callable[[Update], None]
Observer = Callable[[StepOutput], None]


class EngineClient(ABC):
    """One engine, wherever it runs. Thread-safe; of use in the process that made it only.

    Attributes:
        manifest: what the engine loaded.
        num_units: units of its KV pool that requests may own.
    """

    manifest: Manifest
    num_units: int

    def __init__(self, sock: socket.socket, engine_dir: Path, config: EngineConfig) -> None:
        self._connection = Connection(sock)
        self._engine_dir = engine_dir
        self._config = config
        self._owner_pid = os.getpid()
        # Re-entrant: a collected LLM closes its client in whatever thread the collector runs.
        self._lock = threading.RLock()
        self._listeners: dict[int, Listener] = {}
        self._observers: tuple[Observer, ...] = ()
        self._calls: dict[int, queue.SimpleQueue[Stats | LooptrtError]] = {}
        self._num_calls = 0
        self._failure: LooptrtError | None = None
        self._is_closed = False
        self._heard_s = time.monotonic()
        self._started = threading.Event()
        self._reader = Worker("looptrt-client", self._read)

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; `listener` hears of everything that happens to it.

        Raises:
            RequestError: the request is too large to be sent.
            EngineError: the engine has ended, or is another process's.
        """
        self._check_owner()
        with self._lock:
            self._ensure_alive()
            self._expect_answer()
            self._listeners[request.request_id] = listener
        try:
            self._send(AddRequest(request))
        except RequestError:
            self._take_listener(request.request_id)
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the engine can take requests, as far as this side knows."""
        return self._failure is None and not self._is_closed

    def observe(self, observer: Observer) -> None:
        """Show everything that steps bring, of all requests, to an observer as well.

        It hears of a request's end before the listener does.
        """
        self._observers = (*self._observers, observer)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ask for a request's end, which its listener hears; unknown ids are harmless."""
        if not self._is_owner():
            return
        with self._lock:
            is_known = request_id in self._listeners
        if is_known:
            self._send(AbortRequest(request_id, reason))

    def drop(self, request_id: int) -> None:
        """End a request that nobody listens to any more; unknown ids are harmless."""
        if self._is_owner() and self._take_listener(request_id) is not None:
            self._send(AbortRequest(request_id))

    def stats(self) -> dict[str, int | float]:
        """The engine's figures, taken between two steps.

        Raises:
            EngineError: the engine has ended, is another process's or does not answer in time.
        """
        self._check_owner()
        answer: queue.SimpleQueue[Stats | LooptrtError] = queue.SimpleQueue()
        with self._lock:
            self._ensure_alive()
            self._expect_answer()
            call_id = self._num_calls
            self._num_calls += 1
            self._calls[call_id] = answer
        self._send(GetStats(call_id))
        result = answer.get()  # the reader answers every call, at the latest at the deadline
        if isinstance(result, LooptrtError):
            raise result
        return result.values

    def check_alive(self) -> None:
        """Do nothing while the engine runs.

        Raises:
            EngineError: the engine has ended or was shut down; says why.
        """
        with self._lock:
            self._ensure_alive()

    def close(self) -> None:
        """Stop the engine and wait for its end; running requests get an error.

        Does nothing in a process forked from the one that made the client.
        """
        if not self._is_owner():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if isinstance(threading.current_thread(), Worker):
            # The collector closes a client in any thread, also in one that the end waits for.
            threading.Thread(target=self._finish, name="looptrt-close").start()
        else:
            self._finish()

    def _finish(self) -> None:
        self._send(Shutdown())
        self._stop()
        self._connection.hang_up()
        self._reader.join(_STOP_TIMEOUT_S)
        self._connection.close()

    @abstractmethod
    def _end_reason(self) -> str:
        """Why the connection has ended, in words."""

    @abstractmethod
    def _stop(self) -> None:
        """Wait for the end of an engine that was asked to stop, or force it."""

    # ---- start

    def _start(self) -> None:
        """Wait until the engine is ready; on a failure nothing is left behind."""
        self._reader.start()
        try:
            if not self._started.wait(self._config.start_timeout_s):
                raise EngineError(
                    f"{self._engine_dir}: the engine did not start within "
                    f"start_timeout_s {self._config.start_timeout_s:g}"
                )
            self._ensure_alive()
        except BaseException:
            self.close()
            raise

    # ---- sending

    def _is_owner(self) -> bool:
        """False in a forked process, which has the client's memory but none of its threads."""
        return os.getpid() == self._owner_pid

    def _check_owner(self) -> None:
        if not self._is_owner():
            raise EngineError(
                f"the engine belongs to process {self._owner_pid}, this is {os.getpid()}; "
                "start an engine in each process"
            )

    def _ensure_alive(self) -> None:
        if self._failure is not None:
            raise copy(self._failure)
        if self._is_closed:
            raise EngineError("the engine was shut down")

    def _expect_answer(self) -> None:
        if not self._listeners and not self._calls:
            self._heard_s = time.monotonic()  # an idle engine says nothing

    def _take_listener(self, request_id: int) -> Listener | None:
        with self._lock:
            return self._listeners.pop(request_id, None)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(EngineError):  # the reader sees the end and tells everyone why
            self._connection.send(message)

    # ---- the reader thread

    def _read(self) -> None:
        failure = self._supervise(self._listen)
        assert failure is not None
        self._fail(failure)
        self._started.set()
        self._connection.hang_up()  # an engine that nobody listens to ends

    def _supervise(self, work: Callable[[], None]) -> LooptrtError | None:
        """Run a part of the reader's work; returns what it raised."""
        try:
            work()
        except LooptrtError as error:
            return error
        except Exception as error:  # this thread is the only one to tell the callers of it
            _logger.exception("the client's reader failed")
            return EngineError(f"the client's reader failed: {type(error).__name__}: {error}")
        return None

    def _listen(self) -> None:
        """Dispatch messages until the connection ends, which is an EngineError."""
        while (message := self._next_message()) is not None:
            self._dispatch(message)
        raise EngineError("the engine was shut down" if self._is_closed else self._end_reason())

    def _next_message(self) -> Message | None:
        timeout_s = self._config.step_timeout_s
        while not self._connection.wait(min(_POLL_S, timeout_s)):
            with self._lock:
                is_awaited = bool(self._listeners or self._calls)
                silent_s = time.monotonic() - self._heard_s
            if is_awaited and silent_s > timeout_s:
                raise EngineError(
                    f"the engine has not finished a step for step_timeout_s {timeout_s:g}"
                )
        self._heard_s = time.monotonic()
        return self._connection.receive()

    def _dispatch(self, message: Message) -> None:
        match message:
            case StepOutput():
                self._deliver(message)
            case RequestRefused(request_id, error):
                if listener := self._take_listener(request_id):
                    listener(Update(error=error))
            case Stats(call_id):
                with self._lock:
                    answer = self._calls.pop(call_id)
                answer.put(message)
            case Ready(manifest, num_units):
                self.manifest = Manifest.from_json(manifest, self._engine_dir)
                self.num_units = num_units
                self._started.set()
            case EngineFailed(error):
                raise error
            case _:
                raise EngineError(f"unexpected message from the engine: {message!r}")

    def _deliver(self, output: StepOutput) -> None:
        for observe in self._observers:
            observe(output)
        for request_id, update in _updates(output).items():
            with self._lock:
                take = self._listeners.get if update.finished is None else self._take_listener
                listener = take(request_id)
            if listener is not None:
                listener(update)

    def _fail(self, failure: LooptrtError) -> None:
        with self._lock:
            self._failure = failure
            listeners, self._listeners = self._listeners, {}
            calls, self._calls = self._calls, {}
        for listener in listeners.values():
            self._supervise(partial(listener, Update(error=copy(failure))))
        for answer in calls.values():
            answer.put(copy(failure))


def _updates(output: StepOutput) -> dict[int, Update]:
    """A step's outcome by request."""
    updates: defaultdict[int, Update] = defaultdict(Update)
    for request_id, position, scored in output.prompt_logprobs:
        updates[request_id].prompt_logprobs.append((position, scored))
    rows = zip(output.request_ids, output.token_ids, output.depths, strict=True)
    for row, (request_id, token_id, depth) in enumerate(rows):
        update = updates[request_id]
        update.token_ids.append(token_id)
        update.depths.append(depth)
        if row in output.logprobs:
            update.logprobs.append(output.logprobs[row])
    for ended in output.finished:
        updates[ended.request_id].finished = ended
    return updates


class InProcessClient(EngineClient):
    """An engine on a thread of this process, for tests and debugging.

    Args:
        engine_dir: directory written by `looptrt build`.
        config: settings of the engine.
        make_core: makes the engine, on its thread.

    Raises:
        LooptrtError: the engine could not start.
    """

    def __init__(
        self,
        engine_dir: Path,
        config: EngineConfig,
        make_core: Callable[[Path, EngineConfig], Core] = load_core,
    ) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours, engine_dir, config)
        self._engine = Worker(
            "looptrt-engine", serve, lambda: make_core(engine_dir, config), Connection(theirs)
        )
        self._engine.start()
        self._start()

    def _end_reason(self) -> str:
        return "the engine's thread has ended"

    def _stop(self) -> None:
        self._engine.join(_STOP_TIMEOUT_S)
        if self._engine.is_alive():
            _logger.error("the engine's thread is still in a step; it ends with this process")


class ProcessClient(EngineClient):
    """An engine in a process of its own, which ends with this one.

    Args:
        engine_dir: directory written by `looptrt build`.
        config: settings of the engine.
        python: interpreter that has looptrt and torch; this process's own by default.

    Raises:
        LooptrtError: the engine could not start.
    """

    def __init__(
        self, engine_dir: Path, config: EngineConfig, python: str = sys.executable
    ) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours, engine_dir, config)
        command = [
            *(python, "-P", "-m", _ENGINE_MODULE),
            *("--fd", str(theirs.fileno())),
            *("--engine-dir", str(engine_dir)),
            *("--config", json.dumps(config.to_json())),
        ]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",
                    errors="replace",
                )
        except OSError as error:
            self._connection.close()
            raise EngineError(f"the engine process cannot start: {error}") from error
        except BaseException:
            self._connection.close()
            raise
        assert self._process.stdout is not None
        self._lines: deque[str] = deque(maxlen=_NUM_LINES_KEPT)
        self._line_reader = Worker("looptrt-engine-log", self._read_lines, self._process.stdout)
        self._line_reader.start()
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def _read_lines(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._lines.append(line.rstrip())
                _engine_logger.info("%s", line.rstrip())

    def _end_reason(self) -> str:
        try:
            code = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "the engine process has closed its connection but has not ended"
        self._line_reader.join(_STOP_TIMEOUT_S)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        said = " | ".join(list(self._lines)[-_NUM_LINES_SHOWN:])
        return f"the engine process {how}" + (f"; its last lines: {said}" if said else "")

    def _stop(self) -> None:
        for force in (None, self._process.terminate, self._process.kill):
            if force is not None:
                _logger.warning("the engine process does not stop; %s", force.__name__)
                force()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
            break
        self._line_reader.join(_STOP_TIMEOUT_S)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
