"""The way back to one caller, and what a model's answer or refusal looks like on it.

Owns the translation between this package's values and the server's Python module; leaves what
is sent and when to `service` and `text_models`. Invariant: a channel takes one final message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Protocol, TypeAlias

import numpy as np

from looptrt.errors import EngineError, LooptrtError, QueueFullError, RequestError

Tensors = Mapping[str, np.ndarray]
ServerModule: TypeAlias = Any  # `triton_python_backend_utils` and what it makes have no types
ServerObject: TypeAlias = Any


class Code(Enum):
    """The server's error codes that are used; clients see them as gRPC and HTTP statuses."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


def code_of(error: LooptrtError) -> Code:
    """The code of an error: whose fault it is, and whether to try again."""
    if isinstance(error, QueueFullError | EngineError):
        return Code.UNAVAILABLE
    return Code.INVALID_ARG if isinstance(error, RequestError) else Code.INTERNAL


class Channel(Protocol):
    """Where the responses of one request go.

    Attributes:
        outputs: names of the tensors that the caller reads.
    """

    outputs: frozenset[str]

    def send(self, tensors: Tensors, *, is_final: bool) -> None:
        """Send a response; nothing may follow a final one."""

    def fail(self, code: Code, message: str) -> None:
        """Send an error, which is final; where that raises, it may be tried again."""

    def is_cancelled(self) -> bool:
        """Whether the caller has gone."""


class Server:
    """The server's Python module, as little of it as is used.

    Args:
        module: `triton_python_backend_utils`, which exists in a stub process only.
    """

    def __init__(self, module: ServerModule) -> None:
        self.module = module

    def inputs(self, request: ServerObject) -> dict[str, np.ndarray]:
        """The input tensors of a request, or the output tensors of a response, by name."""
        return _arrays(request.inputs())

    def outputs(self, response: ServerObject) -> dict[str, np.ndarray]:
        """The tensors of a response to a request of ours.

        Raises:
            RemoteError: the response is an error.
        """
        if response.has_error():
            error = response.error()
            raise RemoteError(self._code(error), error.message())
        return _arrays(response.output_tensors())

    def channel(self, request: ServerObject) -> ServerChannel:
        """Where the responses of a request go."""
        names = frozenset(request.requested_output_names())
        return ServerChannel(self, request.get_response_sender(), names)

    def response(self, tensors: Tensors) -> ServerObject:
        """A response with these tensors."""
        return self.module.InferenceResponse(output_tensors=self.tensors(tensors))

    def error(self, code: Code, message: str) -> ServerObject:
        """A response that is an error."""
        error = self.module.TritonError(message, getattr(self.module.TritonError, code.value))
        return self.module.InferenceResponse(output_tensors=[], error=error)

    def tensors(self, tensors: Tensors) -> list[ServerObject]:
        """The server's form of arrays."""
        return [self.module.Tensor(name, array) for name, array in tensors.items()]

    def request(
        self, model: str, tensors: Tensors, outputs: Iterable[str], **fields: str | int
    ) -> ServerObject:
        """A request to another model of this server."""
        return self.module.InferenceRequest(
            model_name=model,
            inputs=self.tensors(tensors),
            requested_output_names=list(outputs),
            **fields,
        )

    def _code(self, error: ServerObject) -> Code:
        names = {getattr(self.module.TritonError, code.value): code for code in Code}
        return names.get(error.code(), Code.INTERNAL)


class RemoteError(Exception):
    """What another model of this server answered instead of tensors."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class ServerChannel:
    """A request's response sender.

    Args:
        server: whose.
        sender: of the request.
        outputs: names of the tensors that the caller wants.
    """

    def __init__(self, server: Server, sender: ServerObject, outputs: frozenset[str]) -> None:
        self._server = server
        self._sender = sender
        self.outputs = outputs
        self._final: int = server.module.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._has_sent = False
        self._has_failed = False

    def send(self, tensors: Tensors, *, is_final: bool) -> None:
        """See `Channel`.

        Tensors that nobody wants are left out here: the sender of server 2.51 would free them,
        and Python's arrays in them, without holding the interpreter's lock.
        """
        wanted = {name: array for name, array in tensors.items() if name in self.outputs}
        self._has_sent = True
        self._sender.send(self._server.response(wanted), flags=self._final if is_final else 0)

    def fail(self, code: Code, message: str) -> None:
        """See `Channel`.

        Server 2.51 loses an error that follows a response on its way to another model, and its
        final flag with it: that model would wait for ever. So there the flag comes after it.
        That server also closes a sender before it looks for room for a final message, so one
        that found none is lost; its ensembles hang if every answer's flag came on its own.
        """
        if not self._has_failed:
            error = self._server.error(code, message)
            self._sender.send(error, flags=0 if self._has_sent else self._final)
            self._has_failed = True
        if self._has_sent:
            self._sender.send(flags=self._final)

    def is_cancelled(self) -> bool:
        """See `Channel`."""
        return bool(self._sender.is_cancelled())


def _arrays(tensors: Iterable[ServerObject]) -> dict[str, np.ndarray]:
    return {tensor.name(): tensor.as_numpy() for tensor in tensors}
