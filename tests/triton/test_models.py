"""`tensorrt_llm` behind a stand-in for the server's module: what 2.51 never asks of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from looptrt.runtime.triton.models import LlmModel
from looptrt.runtime.triton.requests import Inputs
from tests.support.scripted import wait_until
from tests.triton.test_requests import inputs_of


class Refused(Exception):
    """What the server raises when a model cannot be loaded."""


class Sender:
    """A response sender that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []

    def send(self, response: Any = None, *, flags: int) -> None:
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        return False


class Metric:
    """A metric of the server."""

    def set(self, value: float) -> None: ...

    def increment(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...

    def value(self) -> float:
        return 0.0


class MetricFamily:
    """A family of them."""

    GAUGE, COUNTER, HISTOGRAM = range(3)

    def __init__(self, **_fields: Any) -> None: ...

    def Metric(self, **_fields: Any) -> Metric:
        return Metric()


def triton_error(message: str, code: int) -> SimpleNamespace:
    return SimpleNamespace(message=message, code=code)


for _name in ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"):
    setattr(triton_error, _name, _name)


@pytest.fixture
def module() -> SimpleNamespace:
    said: list[str] = []
    return SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonModelException=Refused,
        TritonError=triton_error,
        InferenceResponse=lambda **fields: SimpleNamespace(**{"error": None, **fields}),
        Tensor=lambda name, array: SimpleNamespace(name=name, array=array),
        MetricFamily=MetricFamily,
        Logger=SimpleNamespace(log_info=said.append, log_warn=said.append, log_error=said.append),
        said=said,
    )


def request_of(inputs: Inputs, sender: Sender) -> SimpleNamespace:
    tensors = [
        SimpleNamespace(name=lambda name=name: name, as_numpy=lambda array=array: array)
        for name, array in inputs.items()
    ]
    return SimpleNamespace(
        get_response_sender=lambda: sender,
        timeout=lambda: 0,
        inputs=lambda: tensors,
        request_id=lambda: "",
        requested_output_names=lambda: ["output_ids", "text"],
    )


def args_of(engine: Path, **parameters: str) -> dict[str, str]:
    values = {"engine_dir": str(engine), "engine_python": sys.executable, **parameters}
    config = {
        "parameters": {name: {"string_value": value} for name, value in values.items()},
        "model_transaction_policy": {"decoupled": True},
    }
    return {"model_config": json.dumps(config), "model_name": "m", "model_version": "1"}


def test_lazy_model_is_ready_once_loaded_and_refuses_until_then(
    module: SimpleNamespace, engine_dir: Path
) -> None:
    model = LlmModel(module, args_of(engine_dir, lazy_load="true"))
    try:
        early = Sender()
        assert not model.is_ready()
        model.execute([request_of(inputs_of(), early)])
        ((response, flags),) = early.sent
        assert (response.error.code, flags) == ("UNAVAILABLE", 1)
        assert response.error.message == "the engine is being loaded"
        wait_until(model.is_ready, "the loaded engine")
        late = Sender()
        model.execute([request_of(inputs_of(), late)])
        wait_until(lambda: bool(late.sent), "the answer")
        ((response, flags),) = late.sent
        assert (response.error, flags) == (None, 1)
        # No others: server 2.51 corrupts the stub's memory when it leaves some out itself.
        assert {tensor.name for tensor in response.output_tensors} == {"output_ids", "text"}
        pid = next(int(line.split()[-1]) for line in module.said if "engine process" in line)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not model.is_ready(), "the news of the engine's end")
    finally:
        model.finalize()


def test_lazy_model_that_cannot_load_is_never_ready_and_says_why(
    module: SimpleNamespace, engine_dir: Path
) -> None:
    model = LlmModel(module, args_of(engine_dir, lazy_load="true", kv_cache_bytes="1"))
    try:
        wait_until(lambda: any("cannot start" in line for line in module.said), "the failure")
        sender = Sender()
        model.execute([request_of(inputs_of(), sender)])
        ((response, _),) = sender.sent
        assert response.error.code == "UNAVAILABLE"
        assert "kv_cache_bytes" in response.error.message
        assert not model.is_ready()
    finally:
        model.finalize()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"engine_python": "/no/such/python"}, "/no/such/python"),
        ({"engine_dir": "${engine_dir}"}, "parameter engine_dir"),
        ({"lazy_load": "perhaps"}, "parameter lazy_load"),
        ({"max_waiting": "0"}, "max_waiting"),
        ({"exclude_input_in_output": "maybe"}, "exclude_input_in_output"),
    ],
)
def test_model_that_cannot_start_says_why_and_leaves_nothing(
    module: SimpleNamespace, engine_dir: Path, parameters: dict[str, str], message: str
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused, match=message):
        LlmModel(module, args_of(engine_dir, **parameters))
    wait_until(lambda: set(os.listdir("/proc/self/fd")) <= before, "the descriptors' return")
