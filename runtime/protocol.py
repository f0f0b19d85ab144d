"""Messages between a client and an engine, and the socket that carries them.

Owns the wire format: a 4-byte length, then a msgpack array of kind and fields. Leaves what
messages mean to `engine_client` and `engine_process`. Invariant: a frame is sent and taken
whole or the connection is over.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from dataclasses import astuple, dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from looptrt import errors
from looptrt.errors import EngineError, LooptrtError, RequestError
from looptrt.runtime.outputs import FinishedRequest, StepOutput
from looptrt.runtime.request import FinishReason, Request, SamplerParams

MAX_FRAME_BYTES = 16 * 2**20
# A frame that has begun moves at memory speed; only a stopped peer takes this long.
FRAME_TIMEOUT_S = 300.0
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class AddRequest:
    """Client to engine: queue a request."""

    request: Request


@dataclass(frozen=True)
class AbortRequest:
    """Client to engine: end a request."""

    request_id: int


@dataclass(frozen=True)
class GetStats:
    """Client to engine: asks for Stats with the same number."""

    call_id: int


@dataclass(frozen=True)
class Shutdown:
    """Client to engine: stop after the current step."""


@dataclass(frozen=True)
class Ready:
    """Engine to client: loaded; config.json's content."""

    manifest: dict[str, Any]


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


class Connection:
    """One end of a socket: `send` from any thread, `receive` from one.

    Args:
        sock: a connected stream socket, owned from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(FRAME_TIMEOUT_S)
        self._sock = sock
        self._send_lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            RequestError: the message is too large; nothing was sent.
            EngineError: the peer is gone or has not read for FRAME_TIMEOUT_S.
        """
        data = encode(message)
        try:
            with self._send_lock:
                self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise EngineError(f"the peer process is gone: {error}") from error

    def wait(self, timeout_s: float) -> bool:
        """Whether something, a message or the end, can be received within the time."""
        return bool(self._poll.poll(timeout_s * 1000))

    def receive(self) -> Message | None:
        """The next message; None when the peer has closed.

        Raises:
            EngineError: the frame is malformed or too large.
        """
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (size,) = _LENGTH.unpack(header)
        if size > MAX_FRAME_BYTES:
            raise EngineError(f"message of {size} bytes, more than {MAX_FRAME_BYTES}")
        data = self._read(size)
        return None if data is None else decode(data)

    def hang_up(self) -> None:
        """End the connection for both sides; a `receive` under way returns None."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def close(self) -> None:
        """Give the descriptor back; no other call may be under way."""
        self._sock.close()

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._sock.recv(size - len(data))
            except OSError:
                return None  # a reset or silent peer is a closed one
            if not piece:
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
        case StepOutput(request_ids, token_ids, depths, finished):
            return (request_ids, token_ids, depths, [astuple(entry) for entry in finished])
        case AbortRequest() | GetStats() | Shutdown() | Ready() | Stats():
            return tuple(vars(message).values())


def _request_fields(request: Request) -> tuple[Any, ...]:
    return (
        request.request_id,
        request.prompt.astype("<i4").tobytes(),
        request.max_new_tokens,
        request.stop_token_ids,
        request.loops,
        request.prefill_loops,
        request.noise_seed,
        request.cache_salt,
        request.priority,
        astuple(request.sampler),
    )


def _build_request(request_id: int, prompt: bytes, *fields: Any) -> AddRequest:  # noqa: ANN401
    *numbers, noise_seed, cache_salt, priority, sampler = fields
    max_new_tokens, stop_token_ids, loops, prefill_loops = numbers
    return AddRequest(
        Request(
            request_id=request_id,
            prompt=np.frombuffer(prompt, "<i4").astype(np.int32),
            max_new_tokens=max_new_tokens,
            stop_token_ids=tuple(stop_token_ids),
            loops=loops,
            prefill_loops=prefill_loops,
            noise_seed=noise_seed,
            cache_salt=cache_salt,
            priority=priority,
            sampler=SamplerParams(*sampler),
        )
    )


def _build_output(
    request_ids: list[int], token_ids: list[int], depths: list[int], finished: list[list[Any]]
) -> StepOutput:
    ended = [
        FinishedRequest(request_id, FinishReason(reason), *rest)
        for request_id, reason, *rest in finished
    ]
    return StepOutput(request_ids, token_ids, depths, ended)


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
    "AbortRequest": AbortRequest,
    "GetStats": GetStats,
    "Shutdown": Shutdown,
    "Ready": Ready,
    "Stats": Stats,
    "RequestRefused": lambda request_id, *error: RequestRefused(request_id, _build_error(*error)),
    "EngineFailed": lambda *error: EngineFailed(_build_error(*error)),
    "StepOutput": _build_output,
}
