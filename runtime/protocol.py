"""Messages between a client and an engine, and the socket that carries them.

Owns the wire format: a 4-byte length, then a msgpack array of kind and fields. Leaves what
messages mean to `engine_client` and `engine_process`. Invariant: a frame is sent and taken
whole or the connection is over; whoever sends never waits and holds no lock.
"""

from __future__ import annotations

import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np

from looptrt import errors
from looptrt.errors import EngineError, LooptrtError, RequestError
from looptrt.runtime.outputs import FinishedRequest, StepOutput, TokenLogprobs
from looptrt.runtime.request import (
    ExitKv,
    ExitParams,
    ExitRule,
    FinishReason,
    LogprobsMode,
    Request,
    SamplerParams,
)

# Fields of a Request that msgpack takes as they are.
_PLAIN_FIELDS = (
    *("max_new_tokens", "stop_token_ids", "loops", "prefill_loops"),
    *("noise_seed", "cache_salt", "priority", "fork_of"),
)
MAX_FRAME_BYTES = 16 * 2**20
# Log-probabilities in one message; each takes at most 5 + 9 + 5 bytes.
_MAX_LOGPROBS = 2**19
# A frame that has begun moves at memory speed; only a stopped peer takes this long.
FRAME_TIMEOUT_S = 300.0
_FLUSH_TIMEOUT_S = 10.0  # for what is queued when a connection ends
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class AddRequest:
    """Client to engine: queue a request."""

    request: Request


@dataclass(frozen=True)
class AbortRequest:
    """Client to engine: end a request, for this reason."""

    request_id: int
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True)
class GetStats:
    """Client to engine: asks for Stats with the same number."""

    call_id: int


@dataclass(frozen=True)
class Shutdown:
    """Client to engine: stop after the current step."""


@dataclass(frozen=True)
class Ready:
    """Engine to client: loaded; config.json's content and the units that requests may own."""

    manifest: dict[str, Any]
    num_units: int


@dataclass(frozen=True)
class Stats:
    """Engine to client: the engine's figures."""

    call_id: int
    values: dict[str, int | float]


@dataclass(frozen=True)
class RequestRefused:
    """Engine to client: a request was not queued."""

    request_id: int
    error: LooptrtError


@dataclass(frozen=True)
class EngineFailed:
    """Engine to client: the engine stops because of this."""

    error: LooptrtError


Message = (
    AddRequest
    | AbortRequest
    | GetStats
    | Shutdown
    | Ready
    | Stats
    | RequestRefused
    | EngineFailed
    | StepOutput
)


def encode(message: Message) -> bytes:
    """The frame's content.

    Raises:
        RequestError: the message is larger than a frame may be.
    """
    data: bytes = msgpack.packb([type(message).__name__, *_fields(message)])
    if len(data) > MAX_FRAME_BYTES:
        raise RequestError(
            f"request: {len(data)} bytes are more than the {MAX_FRAME_BYTES} of one message"
        )
    return data


def decode(data: bytes) -> Message:
    """The message of a frame.

    Raises:
        EngineError: the frame is not one of the protocol's.
    """
    try:
        kind, *fields = msgpack.unpackb(data)
        message: Message = _BUILDERS[kind](*fields)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise EngineError(f"malformed message of {len(data)} bytes: {error!r}") from error
    return message


def parts_of(output: StepOutput) -> Iterator[StepOutput]:
    """A step's outcome in messages that fit a frame: one, unless there are log-probabilities.

    A request's end stays with its last token.
    """
    if not output.logprobs and not output.prompt_logprobs:
        yield output
        return
    scored = ((entry, len(entry[2].token_ids)) for entry in output.prompt_logprobs)
    for chunk in _chunks(scored):
        yield StepOutput(prompt_logprobs=chunk)
    finished = {ended.request_id: ended for ended in output.finished}
    sizes = [1] * len(output.token_ids)
    for row, at in output.logprobs.items():
        sizes[row] += len(at.token_ids)
    last_rows = {request_id: row for row, request_id in enumerate(output.request_ids)}
    for rows in _chunks(enumerate(sizes)):
        ids = [output.request_ids[row] for row in rows]
        ending = [ids[index] for index, row in enumerate(rows) if last_rows[ids[index]] == row]
        yield StepOutput(
            request_ids=ids,
            token_ids=[output.token_ids[row] for row in rows],
            depths=[output.depths[row] for row in rows],
            finished=[finished.pop(request_id) for request_id in ending if request_id in finished],
            logprobs={
                index: output.logprobs[row]
                for index, row in enumerate(rows)
                if row in output.logprobs
            },
        )
    if finished:
        yield StepOutput(finished=list(finished.values()))


_Entry = TypeVar("_Entry")


def _chunks(sized: Iterable[tuple[_Entry, int]]) -> Iterator[list[_Entry]]:
    """Entries in their order, as many at a time as hold _MAX_LOGPROBS, at least one."""
    chunk: list[_Entry] = []
    total = 0
    for entry, size in sized:
        if chunk and total + size > _MAX_LOGPROBS:
            yield chunk
            chunk, total = [], 0
        chunk.append(entry)
        total += size
    if chunk:
        yield chunk


class Worker(threading.Thread):
    """A daemon thread of a connection or an engine.

    The collector may finalise anything in it, also what waits for the end of this thread;
    so such waits look for Workers (see `EngineClient.close`).
    """

    def __init__(self, name: str, target: Callable[..., object], *args: object) -> None:
        super().__init__(name=name, target=target, args=args, daemon=True)


class Connection:
    """One end of a socket: `send` from anywhere, `receive` from one thread.

    Only the connection's own thread writes to the socket: a finaliser that runs inside `send`
    may send too, and an interrupt of the caller leaves no half of a frame behind.

    Args:
        sock: a connected stream socket, owned from here on; `close` gives it back.
        frame_timeout_s: how long the peer may take over one message, from its first byte. It
            may be silent between messages for ever.
    """

    def __init__(self, sock: socket.socket, frame_timeout_s: float = FRAME_TIMEOUT_S) -> None:
        sock.settimeout(frame_timeout_s)  # of one `sendall`; `recv` follows a poll
        self._sock = sock
        self._frame_timeout_s = frame_timeout_s
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._end: str | None = None  # why nothing can be sent any more
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None is the last
        self._writer = Worker("looptrt-outbox", self._write_all)
        self._writer.start()

    def send(self, message: Message) -> None:
        """Queue one message; the connection ends if it cannot be sent.

        Raises:
            RequestError: the message is too large; nothing was queued.
            EngineError: the peer is gone or took no message for the frame timeout.
        """
        data = encode(message)
        if self._end is not None:
            raise EngineError(f"the peer process is gone: {self._end}")
        self._outbox.put(_LENGTH.pack(len(data)) + data)

    def wait(self, timeout_s: float) -> bool:
        """Whether something, a message or the end, can be received within the time."""
        return bool(self._poll.poll(timeout_s * 1000))

    def receive(self) -> Message | None:
        """The next message, however long it takes to begin; None when the peer has closed.

        Raises:
            EngineError: the frame is malformed or too large, or stops half-way.
        """
        self._poll.poll()
        deadline_s = time.monotonic() + self._frame_timeout_s
        header = self._read(_LENGTH.size, deadline_s)
        if header is None:
            return None
        (size,) = _LENGTH.unpack(header)
        if size > MAX_FRAME_BYTES:
            raise EngineError(f"message of {size} bytes, more than {MAX_FRAME_BYTES}")
        data = self._read(size, deadline_s)
        return None if data is None else decode(data)

    def hang_up(self) -> None:
        """Send what is queued, then end the connection for both sides.

        A `receive` under way returns None.
        """
        self._outbox.put(None)
        self._writer.join(_FLUSH_TIMEOUT_S)
        self._shut_down("it was ended by this side")

    def close(self) -> None:
        """Hang up and give the descriptor back; no `receive` may be under way."""
        self.hang_up()
        self._writer.join(_FLUSH_TIMEOUT_S)
        self._sock.close()

    def _write_all(self) -> None:
        try:
            while (frame := self._outbox.get()) is not None:
                self._sock.sendall(frame)
        except OSError as error:
            self._shut_down(str(error))  # half a frame may be out; the readers see the end

    def _shut_down(self, reason: str) -> None:
        self._end = self._end or reason
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def _read(self, size: int, deadline_s: float) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            if not self.wait(max(0.0, deadline_s - time.monotonic())):
                raise EngineError(
                    f"the peer has not finished a message within {self._frame_timeout_s:g} s"
                )
            try:
                piece = self._sock.recv(size - len(data))
            except OSError as error:
                self._end = self._end or str(error)
                return None  # a peer that was reset is a closed one
            if not piece:
                self._end = self._end or "it has closed the connection"
                return None
            data += piece
        return bytes(data)


def _fields(message: Message) -> tuple[Any, ...]:
    match message:
        case AddRequest(request):
            return _request_fields(request)
        case RequestRefused(request_id, error):
            return (request_id, *_error_fields(error))
        case EngineFailed(error):
            return _error_fields(error)
        case StepOutput():
            return _output_fields(message)
        case AbortRequest() | GetStats() | Shutdown() | Ready() | Stats():
            return tuple(vars(message).values())


def _request_fields(request: Request) -> tuple[Any, ...]:
    return (
        request.request_id,
        request.prompt.astype("<i4").tobytes(),
        vars(request.sampler),
        astuple(request.exit),
        {name: getattr(request, name) for name in _PLAIN_FIELDS},
    )


def _build_request(
    request_id: int,
    prompt: bytes,
    sampler: dict[str, Any],
    exit_params: list[Any],
    plain: dict[str, Any],
) -> AddRequest:
    rule, threshold, kv = exit_params
    sampler["logprobs_mode"] = LogprobsMode(sampler["logprobs_mode"])
    sampler["end_ids"] = tuple(sampler["end_ids"])
    sampler["bad_words"] = tuple(map(tuple, sampler["bad_words"]))
    plain["stop_token_ids"] = tuple(plain["stop_token_ids"])
    return AddRequest(
        Request(
            request_id=request_id,
            prompt=np.frombuffer(prompt, "<i4").astype(np.int32),
            sampler=SamplerParams(**sampler),
            exit=ExitParams(ExitRule(rule), threshold, ExitKv(kv)),
            **plain,
        )
    )


def _output_fields(output: StepOutput) -> tuple[Any, ...]:
    return (
        output.request_ids,
        output.token_ids,
        output.depths,
        [astuple(entry) for entry in output.finished],
        [(row, *_logprob_fields(scored)) for row, scored in output.logprobs.items()],
        [(*place, *_logprob_fields(scored)) for *place, scored in output.prompt_logprobs],
    )


def _logprob_fields(scored: TokenLogprobs) -> tuple[list[int], list[float], list[int]]:
    return scored.token_ids, scored.logprobs, scored.ranks


def _build_output(
    request_ids: list[int],
    token_ids: list[int],
    depths: list[int],
    finished: list[list[Any]],
    logprobs: list[list[Any]],
    prompt_logprobs: list[list[Any]],
) -> StepOutput:
    return StepOutput(
        request_ids,
        token_ids,
        depths,
        [FinishedRequest(ended, FinishReason(reason), *rest) for ended, reason, *rest in finished],
        {row: TokenLogprobs(*scored) for row, *scored in logprobs},
        [(asked, position, TokenLogprobs(*scored)) for asked, position, *scored in prompt_logprobs],
    )


def _error_fields(error: LooptrtError) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _build_error(name: str, message: str) -> LooptrtError:
    kind = getattr(errors, name, None)
    if (
        isinstance(kind, type)
        and issubclass(kind, LooptrtError)
        and kind is not errors.TransferError
    ):
        return kind(message)
    return EngineError(f"{name}: {message}")


_BUILDERS: dict[str, Any] = {
    "AddRequest": _build_request,
    "AbortRequest": lambda request_id, reason: AbortRequest(request_id, FinishReason(reason)),
    "GetStats": GetStats,
    "Shutdown": Shutdown,
    "Ready": Ready,
    "Stats": Stats,
    "RequestRefused": lambda request_id, *error: RequestRefused(request_id, _build_error(*error)),
    "EngineFailed": lambda *error: EngineFailed(_build_error(*error)),
    "StepOutput": _build_output,
}
