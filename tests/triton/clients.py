"""Requests to a server by every way it has, and what came back in one form."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http
from tritonclient.utils import InferenceServerException

from looptrt.runtime.triton.tensors import MODELS, NUMPY_TYPES
from running_server import RunningServer
from tests.support.scripted import wait_until

DEADLINE_S = 60.0


@dataclass
class Reply:
    """All responses to one request.

    Attributes:
        responses: tensors by name.
        num_final: how often the server said that nothing follows.
        error: its text, None where there was none.
        status: the HTTP status, 200 over gRPC.
    """

    responses: list[dict[str, Any]] = field(default_factory=list)
    num_final: int = 0
    error: str | None = None
    status: int = 200

    def text(self, name: str = "text_output") -> str:
        """Text of all responses, joined."""
        return "".join(
            str(_plain(response[name])) for response in self.responses if name in response
        )

    def last(self, name: str) -> Any:
        """A value of the last response."""
        return _plain(self.responses[-1][name])


def arrays(model: str, **values: Any) -> dict[str, np.ndarray]:
    """[1, ...] arrays of a model's inputs; a scalar stands for a tensor of one element."""
    made = {}
    for name, value in values.items():
        tensor = MODELS[model].input(name)
        listed = value if isinstance(value, list) else [value]
        if tensor.dtype == "BYTES":
            listed = [one.encode() if isinstance(one, str) else one for one in listed]
        made[name] = np.array([listed], NUMPY_TYPES[tensor.dtype])
    return made


class GrpcStream:
    """A gRPC stream of a client; its requests are told apart by id."""

    def __init__(self, server: RunningServer) -> None:
        self._client = triton_grpc.InferenceServerClient(server.grpc)
        self._inbox: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._inbox.put((result, error)))

    def ask(
        self, model: str, inputs: dict[str, np.ndarray], outputs: Sequence[str] = (), **options: Any
    ) -> None:
        """Send a request."""
        self._client.async_stream_infer(
            model,
            _tensors(triton_grpc, model, inputs),
            outputs=[triton_grpc.InferRequestedOutput(name) for name in outputs] or None,
            **options,
        )

    def next(self) -> tuple[dict[str, Any] | None, bool, str | None]:
        """The next response: its tensors, whether it is the final one, the error's text."""
        result, error = self._inbox.get(timeout=DEADLINE_S)
        if error is not None:
            return None, True, str(error.message())
        response = result.get_response()
        is_final = response.parameters["triton_final_response"].bool_param
        tensors = {one.name: result.as_numpy(one.name) for one in response.outputs}
        return tensors, is_final, None

    def reply(self) -> Reply:
        """Everything up to the final response or the error."""
        reply = Reply()
        while not reply.num_final:
            tensors, is_final, reply.error = self.next()
            reply.num_final += is_final
            if tensors:
                reply.responses.append(tensors)
        return reply

    def num_left(self) -> int:
        """Responses that nobody took."""
        return self._inbox.qsize()

    def close(self, *, cancel: bool = False) -> None:
        """End the stream; a cancelled one does not wait for running requests."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


@contextlib.contextmanager
def grpc_stream(server: RunningServer) -> Iterator[GrpcStream]:
    """A stream for a block."""
    stream = GrpcStream(server)
    try:
        yield stream
    finally:
        stream.close(cancel=True)


def ask_grpc(
    server: RunningServer,
    model: str,
    outputs: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    **values: Any,
) -> Reply:
    """One request over a gRPC stream of its own."""
    with grpc_stream(server) as stream:
        stream.ask(model, arrays(model, **values), outputs, **(options or {}))
        reply = stream.reply()
        stream.close()  # waits for what may follow a final response
        reply.num_final += stream.num_left()
        return reply


def infer(server: RunningServer, model: str, *, over: str = "grpc", **values: Any) -> Reply:
    """One plain `infer` request."""
    module = triton_grpc if over == "grpc" else triton_http
    address = server.grpc if over == "grpc" else server.http
    with contextlib.closing(module.InferenceServerClient(address)) as client:
        try:
            result = client.infer(model, _tensors(module, model, arrays(model, **values)))
        except InferenceServerException as error:
            return Reply(error=str(error.message()), num_final=1, status=400)
        names = [tensor.name for tensor in MODELS[model].outputs]
        found = {name: result.as_numpy(name) for name in names}
        return Reply([{name: array for name, array in found.items() if array is not None}], 1)


def generate(server: RunningServer, model: str, **body: Any) -> Reply:
    """The generate endpoint."""
    with _posted(server, f"/v2/models/{model}/generate", body) as response:
        answer = json.loads(response.read())
        if "error" in answer:
            return Reply([], 1, answer["error"], response.status)
        return Reply([answer], 1)


def generate_stream(server: RunningServer, model: str, **body: Any) -> Reply:
    """The generate_stream endpoint; the end of the stream counts as the final mark."""
    with _posted(server, f"/v2/models/{model}/generate_stream", body) as response:
        text = response.read().decode()
        events = [json.loads(part[len("data:") :]) for part in text.split("\n\n") if part.strip()]
        errors = [event["error"] for event in events if "error" in event]
        answers = [event for event in events if "error" not in event]
        return Reply(answers, 1, errors[0] if errors else None, response.status)


@contextlib.contextmanager
def opened_stream(
    server: RunningServer, model: str, **body: Any
) -> Iterator[http.client.HTTPResponse]:
    """A generate_stream whose client leaves with the block."""
    with _posted(server, f"/v2/models/{model}/generate_stream", body) as response:
        yield response


def post(server: RunningServer, path: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON of any other call."""
    with _posted(server, path, body or {}) as response:
        text = response.read()
        return response.status, json.loads(text) if text else None


def wait_until_idle(server: RunningServer) -> None:
    """Wait until no request is active and no unit is used."""

    def is_idle() -> bool:
        figures = server.figures()
        busy = [
            value
            for name, value in figures.items()
            if 'state="used"' in name or 'request_type="active"' in name
        ]
        return len(busy) == 2 and not any(busy)

    wait_until(is_idle, "an idle engine")


def figure(server: RunningServer, name: str, label: str = "") -> float | None:
    """One figure of the metrics port; None before the model has set it."""
    found = [
        value for key, value in server.figures().items() if key.startswith(name) and label in key
    ]
    assert len(found) <= 1, found
    return found[0] if found else None


@contextlib.contextmanager
def _posted(server: RunningServer, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.http, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body).encode())
        yield connection.getresponse()


def _tensors(module: Any, model: str, inputs: dict[str, np.ndarray]) -> list[Any]:
    tensors = []
    for name, array in inputs.items():
        tensor = module.InferInput(name, list(array.shape), MODELS[model].input(name).dtype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def _plain(value: Any) -> Any:
    """A number, a text or a list, from JSON or from an array."""
    if isinstance(value, np.ndarray):
        value = value.ravel().tolist()
        value = [one.decode() if isinstance(one, bytes) else one for one in value]
        return value[0] if len(value) == 1 else value
    return value
