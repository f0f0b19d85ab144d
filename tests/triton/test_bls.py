"""The BLS model's calls inside the server: what a real one shows only in a race."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import RequestError
from looptrt.runtime.triton import bls
from looptrt.runtime.triton.bls import BlsService, Models
from looptrt.runtime.triton.channel import Code, Tensors
from looptrt.runtime.triton.text_models import Preprocessing
from tests.support.scripted import DEADLINE_S, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = {"text_input": np.array([[b"x"]], object), "max_tokens": np.array([[4]], np.int32)}
PROMPT = {
    "INPUT_ID": np.array([[1, 2]], np.int32),
    "REQUEST_INPUT_LEN": np.array([[2]], np.int32),
    "REQUEST_OUTPUT_LEN": np.array([[4]], np.int32),
}


class Responses:
    """What the server's `exec(decoupled=True)` gives: iterable, freed with its last reference."""

    def __init__(self, outputs: list[dict[str, np.ndarray]]) -> None:
        self._outputs = outputs

    def __iter__(self) -> Iterator[Any]:
        return iter([response_of(tensors) for tensors in self._outputs])


def response_of(tensors: dict[str, np.ndarray]) -> Any:
    named = [
        SimpleNamespace(name=lambda n=name: n, as_numpy=lambda a=array: a)
        for name, array in tensors.items()
    ]
    return SimpleNamespace(has_error=lambda: False, output_tensors=lambda: named)


def module_of(answers: list[dict[str, np.ndarray]], made: list[weakref.ref[Responses]]) -> Any:
    """The server's module, whose engine gives these responses to every request."""

    def request(model_name: str, **_fields: Any) -> Any:
        def run(decoupled: bool = False) -> Any:
            if not decoupled:
                return response_of(PROMPT)
            responses = Responses(answers)
            made.append(weakref.ref(responses))
            return responses

        return SimpleNamespace(exec=run)

    return SimpleNamespace(
        InferenceRequest=request, Tensor=lambda name, array: (name, array), TritonError=object
    )


class Caller:
    """A channel that keeps what it is told."""

    outputs: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.errors: list[tuple[Code, str]] = []
        self.sent: list[Tensors] = []

    def send(self, tensors: Tensors, *, is_final: bool) -> None:
        self.sent.append(tensors)

    def end(self) -> None:
        raise AssertionError("never called")

    def fail(self, code: Code, message: str) -> None:
        self.errors.append((code, message))

    def is_cancelled(self) -> bool:
        return False


def test_responses_outlive_their_use_by_far_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[Responses]] = []
    ids = {"output_ids": np.array([[[3]]], np.int32)}
    models = Models(module_of([ids], made), "tensorrt_llm", is_decoupled=True)
    now_s = 100.0
    monkeypatch.setattr(bls.time, "monotonic", lambda: now_s)
    assert len(list(models.answers({}, ["output_ids"], "key", 0))) == 1
    now_s += bls._KEEP_S / 2
    assert len(list(models.answers({}, ["output_ids"], "key", 0))) == 1
    gc.collect()
    assert [one() is not None for one in made] == [True, True]
    now_s += 2 * bls._KEEP_S
    models.stop("key")
    gc.collect()
    assert [one() is not None for one in made] == [False, False, True]


def test_an_answer_without_an_end_is_an_error_and_no_silence() -> None:
    models = Models(module_of([], []), "tensorrt_llm", is_decoupled=True)
    service = BlsService(models, max_requests=2, accumulates=False)
    caller = Caller()
    try:
        service.take(TEXT, caller)
        wait_until(lambda: bool(caller.errors), "an error")
    finally:
        service.close()
    assert caller.errors == [(Code.INTERNAL, "the engine's answer has no end")]


def test_an_end_that_never_comes_does_not_hold_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server lost the end mark of an answer for lack of shared memory: unloading hung."""
    answer = {"output_ids": np.array([[[3]]], np.int32), "finish_reason": np.array([[b"stop"]])}
    comes = threading.Event()

    class Endless(Responses):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            comes.wait(DEADLINE_S)

    module = module_of([], [])
    request = module.InferenceRequest

    def asked(model_name: str, **fields: Any) -> Any:
        if model_name == "postprocessing":
            text = response_of({"OUTPUT": np.array([[b"x"]], object)})
            return SimpleNamespace(exec=lambda decoupled=False: text)
        plain = request(model_name, **fields)
        return SimpleNamespace(
            exec=lambda decoupled=False: Endless([answer]) if decoupled else plain.exec()
        )

    module.InferenceRequest = asked
    monkeypatch.setattr(bls, "_STOP_TIMEOUT_S", 0.2)
    service = BlsService(
        Models(module, "tensorrt_llm", is_decoupled=True), max_requests=2, accumulates=False
    )
    caller = Caller()
    service.take(TEXT, caller)
    wait_until(lambda: bool(caller.sent or caller.errors), "the answer")
    closer = threading.Thread(target=service.close, daemon=True)
    closer.start()
    closer.join(DEADLINE_S / 2)
    try:
        assert not closer.is_alive()
        assert caller.errors == []
        assert "1 requests did not end within" in caplog.text
    finally:
        comes.set()


def test_a_caller_that_cannot_be_looked_for_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks, goes_on = threading.Semaphore(0), threading.Event()

    class Lost(Caller):
        def is_cancelled(self) -> bool:
            looks.release()
            raise RuntimeError("no such request")

    models = Models(module_of([], []), "tensorrt_llm", is_decoupled=True)
    models.call = lambda *_: goes_on.wait(DEADLINE_S) and PROMPT  # type: ignore[method-assign]
    service = BlsService(models, max_requests=2, accumulates=False)
    caller = Lost()
    try:
        service.take(TEXT, caller)
        for _ in range(3):
            assert looks.acquire(timeout=DEADLINE_S)
        goes_on.set()
        wait_until(lambda: bool(caller.errors), "an error")
    finally:
        goes_on.set()
        service.close()
    texts = [record.message for record in caplog.records]
    assert texts.count("a request's caller could not be looked for") == 1


def test_a_prompt_beyond_the_engines_limit_goes_no_further_than_preprocessing(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "engine"
    build(
        BuildConfig(checkpoint_dir=EXAMPLES / "tiny-huginn", output_dir=directory, max_input_len=32)
    )
    model = Preprocessing(directory)
    length = np.array([[4]], np.int32)
    query = np.array([[b"n" * 31]], object)
    assert model.run({"QUERY": query, "REQUEST_OUTPUT_LEN": length})["INPUT_ID"].shape == (1, 32)
    with pytest.raises(RequestError, match="at most max_input_len 32 tokens, got 33"):
        model.run({"QUERY": query + b"n", "REQUEST_OUTPUT_LEN": length})
    with pytest.raises(RequestError, match="prompt: expected at most 2560 characters"):
        model.run({"QUERY": query * 100, "REQUEST_OUTPUT_LEN": length})  # before it is encoded
