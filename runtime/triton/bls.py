"""`tensorrt_llm_bls`: text requests through the three models behind it, cancellation included.

Owns the order of the calls inside the server, how many requests are carried at a time and the
end of those whose caller has gone; leaves each model's work to it. Invariant: every request
gets one final message; the engine's request of one that is cancelled is ended.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from looptrt.errors import LooptrtError
from looptrt.runtime.triton.channel import (
    Channel,
    Code,
    RemoteError,
    Server,
    ServerModule,
    ServerObject,
    Tensors,
    code_of,
)
from looptrt.runtime.triton.requests import Inputs, check_inputs
from looptrt.runtime.triton.responses import Outputs
from looptrt.runtime.triton.tensors import (
    FROM_PREPROCESSING,
    SHARED_OUTPUTS,
    TENSORRT_LLM_BLS,
    TO_POSTPROCESSING,
    TO_PREPROCESSING,
    TO_TENSORRT_LLM,
)

_LOOK_S = 0.02  # how often callers are looked for
_STOP_TIMEOUT_S = 10.0
_KEEP_S = 2.0  # far longer than the stub's own thread takes
_CANCELLED = "the request was cancelled"
_ENGINE_OUTPUTS = (*(name for name in TO_POSTPROCESSING if name != "stop_key"), *SHARED_OUTPUTS)

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Carried:
    """A request on its way; `lock` guards its channel and what follows."""

    channel: Channel
    inputs: Inputs
    timeout_us: int
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_cancelled: bool = False
    is_over: bool = False
    thread: threading.Thread | None = None
    is_unseen: bool = False  # looking for its caller has failed, and the log says so


class Models:
    """Calls to the models of this server.

    Args:
        module: `triton_python_backend_utils`.
        llm: name of the model that has the engine.
        is_decoupled: whether it may give several responses.
    """

    def __init__(self, module: ServerModule, llm: str, *, is_decoupled: bool) -> None:
        self._server = Server(module)
        self._llm = llm
        self._is_decoupled = is_decoupled
        self._kept: deque[tuple[float, ServerObject]] = deque()
        self._kept_lock = threading.Lock()

    def call(self, model: str, inputs: Tensors, outputs: Iterable[str]) -> Outputs:
        """The one response of a model.

        Raises:
            RemoteError: it is an error.
        """
        return self._server.outputs(self._server.request(model, inputs, outputs).exec())

    def answers(
        self, inputs: Tensors, outputs: Iterable[str], key: str, timeout_us: int
    ) -> Iterator[Outputs]:
        """The engine's responses, as they come.

        Args:
            inputs: of `tensorrt_llm`.
            outputs: names of those wanted.
            key: id under which `stop` ends the request.
            timeout_us: for the whole request; 0 is for ever.

        Raises:
            RemoteError: one is an error.
        """
        request = self._server.request(
            self._llm, inputs, outputs, request_id=key, timeout=timeout_us
        )
        yield from self._responses(request)

    def stop(self, key: str) -> None:
        """End the engine's request that has this id; an unknown one is harmless."""
        inputs = {
            "input_ids": np.zeros((1, 1), np.int32),
            "input_lengths": np.zeros((1, 1), np.int32),
            "request_output_len": np.zeros((1, 1), np.int32),
            "stop": np.ones((1, 1), bool),
        }
        for _ in self._responses(self._server.request(self._llm, inputs, (), request_id=key)):
            pass

    def _responses(self, request: ServerObject) -> Iterator[Outputs]:
        responses = request.exec(decoupled=True) if self._is_decoupled else (request.exec(),)
        try:
            for response in responses:
                if tensors := self._server.outputs(response):  # one without any is an end mark
                    yield tensors
        finally:
            self._keep(responses)

    def _keep(self, responses: ServerObject) -> None:
        """Hold responses for a while after their use.

        The stub has a reference of its own, which it lets go of soon, on a thread that does not
        hold the interpreter's lock. In server 2.51 the last reference to go frees Python's
        arrays, so it has to be this one: otherwise the stub's memory is corrupted.
        """
        now_s = time.monotonic()
        with self._kept_lock:
            self._kept.append((now_s, responses))
            while self._kept[0][0] < now_s - _KEEP_S:
                self._kept.popleft()


class BlsService:
    """Carries requests, each on a thread of its own.

    Args:
        models: the models behind.
        max_requests: at a time; one more is refused.
        accumulates: every response of a stream holds the whole text so far.
    """

    def __init__(self, models: Models, *, max_requests: int, accumulates: bool) -> None:
        self._models = models
        self._max_requests = max_requests
        self._accumulates = accumulates
        self._lock = threading.Lock()
        self._carried: set[_Carried] = set()
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="looptrt-watch", daemon=True)
        self._watcher.start()

    def take(self, inputs: Inputs, channel: Channel, timeout_us: int = 0) -> None:
        """Start a request and return; everything else, errors too, goes to its channel.

        Args:
            inputs: tensors by name, with the batch dimension.
            channel: where the responses go.
            timeout_us: of the engine's part; 0 is for ever.
        """
        one = _Carried(channel, inputs, timeout_us)
        with self._lock:
            # Those that only wait for an end mark, which the server may have lost, do not count.
            is_full = sum(not one.is_over for one in self._carried) >= self._max_requests
            if not is_full:
                self._carried.add(one)
        if is_full:
            channel.fail(
                Code.UNAVAILABLE, f"bls_max_requests {self._max_requests} are being carried"
            )
            return
        # A daemon: the server may lose the end of an answer, and would then never be let go of.
        one.thread = threading.Thread(
            target=self._carry, args=(one,), name="looptrt-bls", daemon=True
        )
        one.thread.start()

    def close(self) -> None:
        """Let what is carried end, for a while, and then go."""
        self._is_closed.set()
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        with self._lock:
            threads = [one.thread for one in self._carried if one.thread is not None]
        for thread in (self._watcher, *threads):
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if left := sum(thread.is_alive() for thread in threads):
            _logger.warning("%d requests did not end within %g s", left, _STOP_TIMEOUT_S)

    # ---- one request

    def _carry(self, one: _Carried) -> None:
        try:
            self._answer(one)
        except LooptrtError as error:
            self._fail(one, code_of(error), str(error))
        except RemoteError as error:
            self._fail(one, error.code, str(error))
        except Exception as error:  # one request must not take the others with it
            _logger.exception("a request failed")
            self._fail(one, Code.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._carried.discard(one)

    def _answer(self, one: _Carried) -> None:
        check_inputs(one.inputs, TENSORRT_LLM_BLS)
        prompt = self._models.call(
            "preprocessing", _renamed(one.inputs, TO_PREPROCESSING), FROM_PREPROCESSING
        )
        inputs = _renamed(one.inputs, TO_TENSORRT_LLM) | _renamed(prompt, FROM_PREPROCESSING)
        num_rows = len(inputs["input_ids"])
        num_answers = int(inputs.get("num_return_sequences", np.ones(num_rows, np.int64)).sum())
        texts: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
        if one.is_cancelled:
            self._fail(one, Code.CANCELLED, _CANCELLED)
            return
        for tensors in self._models.answers(inputs, _ENGINE_OUTPUTS, one.key, one.timeout_us):
            num_answers -= "finish_reason" in tensors
            if one.is_cancelled:
                continue  # the rest is taken in: the server counts on it
            response = {name: tensors[name] for name in SHARED_OUTPUTS if name in tensors}
            response["text_output"] = self._text(tensors, texts)
            self._send(one, response, is_final=num_answers == 0)
        if one.is_cancelled:
            self._fail(one, Code.CANCELLED, _CANCELLED)
        else:  # changes nothing where the last response has been sent
            self._fail(one, Code.INTERNAL, "the engine's answer has no end")

    def _text(
        self, tensors: Outputs, texts: defaultdict[tuple[int, int], list[bytes]]
    ) -> np.ndarray:
        """[1, 1] text of a response, as `postprocessing` makes it."""
        inputs = _renamed(tensors, TO_POSTPROCESSING)
        text = self._models.call("postprocessing", inputs, ["OUTPUT"])["OUTPUT"]
        if not self._accumulates:
            return text
        place = ("batch_index", "sequence_index")
        row, index = (int(tensors.get(name, np.zeros(1)).item()) for name in place)
        texts[row, index].append(text.item())
        return np.array([[b"".join(texts[row, index])]], object)

    # ---- callers that have gone

    def _watch(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            with self._lock:
                carried = list(self._carried)
            for one in carried:
                try:
                    self._look(one)
                except Exception:  # the next look tries again, many times a second
                    if not one.is_unseen:
                        _logger.exception("a request's caller could not be looked for")
                    one.is_unseen = True

    def _look(self, one: _Carried) -> None:
        with one.lock:  # the server frees what is looked at with the final message
            if not one.is_over and not one.is_cancelled:
                one.is_cancelled = one.channel.is_cancelled()
            must_stop = one.is_cancelled and not one.is_over
        if must_stop:  # at every look: the engine may not have had the request before
            self._models.stop(one.key)

    # ---- the caller's side of a request

    def _send(self, one: _Carried, response: Outputs, *, is_final: bool) -> None:
        with one.lock:
            if one.is_over or one.is_cancelled:
                return
            one.is_over = is_final
            one.channel.send(response, is_final=is_final)

    def _fail(self, one: _Carried, code: Code, message: str) -> None:
        with one.lock:
            if one.is_over:
                return
            one.is_over = True
            try:
                one.channel.fail(code, message)
            except Exception:  # the caller has gone, whatever the server's module says of it
                _logger.exception("an error could not be sent: %s", message)


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    return {name: tensors[own] for own, name in names.items() if own in tensors}
