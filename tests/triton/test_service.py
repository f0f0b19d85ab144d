"""The service over a scripted engine: one final message in every path, and nothing left."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from looptrt.errors import EngineError, QueueFullError, RequestError
from looptrt.runtime.request import Request
from looptrt.runtime.triton import responses
from looptrt.runtime.triton.channel import Code, Server, ServerChannel, Tensors, code_of
from looptrt.runtime.triton.service import Service
from looptrt.runtime.triton.tensors import TENSORRT_LLM
from tests.support.scripted import (
    DEADLINE_S,
    ScriptedCore,
    forever,
    llm_of,
    step_until,
    wait_until,
    write_tokenizer,
)
from tests.triton.test_requests import inputs_of

ALL_OUTPUTS = frozenset(tensor.name for tensor in TENSORRT_LLM.outputs)


@dataclass
class Recorder:
    """A channel that keeps what it is told and fails on anything after the end."""

    outputs: frozenset[str] = ALL_OUTPUTS
    is_gone: bool = False
    breaks_at: int | None = None
    breaks_for_good: bool = False
    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    error: tuple[Code, str] | None = None
    wrong: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def send(self, tensors: Tensors, *, is_final: bool) -> None:
        self._check_open("a response")
        if self.breaks_at == len(self.responses):
            raise RuntimeError("no room")
        self.responses.append(dict(tensors))
        if is_final:
            self._ended.set()

    def fail(self, code: Code, message: str) -> None:
        self._check_open("an error")
        if self.breaks_for_good:
            raise RuntimeError("the sender has been closed")
        self.error = (code, message)
        self._ended.set()

    def is_cancelled(self) -> bool:
        self._check_open("a look")
        return self.is_gone

    def wait(self) -> None:
        assert self._ended.wait(DEADLINE_S), "no final message"
        assert not self.wrong

    @property
    def is_ended(self) -> bool:
        return self._ended.is_set()

    def ids(self) -> list[int]:
        return [int(one) for r in self.responses for one in r["output_ids"].ravel()]

    def text(self) -> bytes:
        return b"".join(r["text"].item() for r in self.responses)

    def _check_open(self, what: str) -> None:
        if self._ended.is_set():
            self.wrong.append(f"{what} after the end")


@dataclass
class Served:
    core: ScriptedCore
    service: Service

    def ask(self, *, timeout_s: float = 0.0, request_id: str = "", **values: Any) -> Recorder:
        recorder = Recorder()
        self.service.take(inputs_of(**values), recorder, request_id, timeout_s)
        return recorder

    def is_idle(self) -> bool:
        return not self.core.has_work()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Makes a service over a script; all end with the test."""
    made: list[Service] = []
    write_tokenizer(tmp_path, [f"<{i}>" if i == 2 else chr(97 + i) for i in range(26)])

    def make(
        script: Callable[[Request], list[int]] = forever,
        *,
        is_decoupled: bool = True,
        max_waiting: int = 1024,
        drain_file: Path | None = None,
        **core: Any,
    ) -> Served:
        scripted = ScriptedCore(script, max_waiting=max_waiting, **core)
        llm = llm_of(scripted, tmp_path, max_waiting=max_waiting)
        service = Service(
            llm, excludes_input=True, is_decoupled=is_decoupled, drain_file=drain_file
        )
        made.append(service)
        return Served(scripted, service)

    yield make
    for service in made:
        service.close()


def test_whole_answer_comes_in_one_response(serve: Callable[..., Served]) -> None:
    one = serve(lambda _: [3, 4, 5, 2]).ask()
    one.wait()
    (response,) = one.responses
    assert response["output_ids"].tolist() == [[[3, 4, 5, 2]]]
    assert response["sequence_length"].tolist() == [[4]]
    assert (one.text(), response["finish_reason"].item()) == (b"def", b"stop")
    assert response["stop_reason"].item() == b"2"
    assert response["loops_used"].tolist() == [[4, 4, 4, 4]]


def test_stream_joined_is_the_whole_answer_and_ends_once(serve: Callable[..., Served]) -> None:
    served = serve(lambda _: [3, 4, 5, 2], turns=threading.Semaphore(0))
    one = served.ask(streaming=True)
    step_until(served.core, lambda: one.is_ended)
    one.wait()
    assert (one.ids(), one.text()) == ([3, 4, 5, 2], b"def")
    assert ["finish_reason" in response for response in one.responses[:-1]] == [False] * (
        len(one.responses) - 1
    )
    assert one.responses[-1]["finish_reason"].item() == b"stop"


def test_slow_sender_gets_several_steps_in_one_response(serve: Callable[..., Served]) -> None:
    hold = threading.Lock()
    served = serve()
    one = Recorder()
    send = one.send

    def slow(tensors: Tensors, *, is_final: bool) -> None:
        with hold:
            send(tensors, is_final=is_final)

    one.send = slow  # type: ignore[method-assign]
    with hold:
        served.service.take(inputs_of(streaming=True, request_output_len=30), one)
        client = served.service._llm._client
        wait_until(lambda: not client._listeners, "the arrival of the whole answer")
    one.wait()
    assert one.ids() == [5] * 30
    assert len(one.responses) <= 2  # the one that was held, and everything after it


def test_stop_text_ends_a_stream_without_it(serve: Callable[..., Served]) -> None:
    served = serve(lambda _: [3, 4, 5, 6, 7, 8, 9, 10])
    one = served.ask(streaming=True, stop_words=[b"fg"])
    one.wait()
    assert one.text() == b"de"
    assert one.responses[-1]["stop_reason"].item() == b"fg"
    wait_until(served.is_idle, "the engine's end of the answer")


def test_answers_of_a_request_come_each_on_their_own_and_end_once(
    serve: Callable[..., Served],
) -> None:
    one = serve(lambda r: [3 + r.request_id % 2, 2]).ask(num_return_sequences=2)
    one.wait()
    by_index = {
        int(r["sequence_index"].item()): r["output_ids"].ravel().tolist() for r in one.responses
    }
    assert by_index == {0: [3, 2], 1: [4, 2]}


def test_rows_of_a_batch_come_each_on_their_own_and_end_once(serve: Callable[..., Served]) -> None:
    row = inputs_of()
    batch = {name: np.concatenate([value, value]) for name, value in row.items()}
    one = Recorder()
    serve(lambda r: [3 + r.request_id, 2]).service.take(batch, one)
    one.wait()
    by_row = {int(r["batch_index"].item()): r["output_ids"].ravel().tolist() for r in one.responses}
    assert by_row == {0: [3, 2], 1: [4, 2]}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"beam_width": 2}, "beam_width"),
        ({"request_output_len": 0}, "request_output_len (max_tokens): "),
        ({"num_return_sequences": 0}, "num_return_sequences (n): "),
        ({"runtime_top_k": -1}, "runtime_top_k (top_k): "),
        ({"input_lengths": 0}, "input_ids (prompt): "),
        ({"loops": 9}, "loops"),
        ({"input_ids": [5, 6, 10**6]}, "prompt"),
    ],
)
def test_error_before_the_first_token_is_the_one_final_message(
    serve: Callable[..., Served], values: dict[str, Any], name: str
) -> None:
    served = serve()
    one = served.ask(streaming=True, **values)
    one.wait()
    assert one.error is not None
    assert one.error[0] is Code.INVALID_ARG
    assert name in one.error[1]
    assert not one.responses
    assert served.is_idle()


def test_what_the_engine_refuses_is_an_error_of_the_caller(serve: Callable[..., Served]) -> None:
    one = serve().ask(cache_salt=b"never fits")
    one.wait()
    assert one.error == (Code.INVALID_ARG, "input_ids (prompt): more pages than the pool")


def test_full_queue_is_unavailable_and_the_others_go_on(serve: Callable[..., Served]) -> None:
    served = serve(num_slots=1, max_waiting=1, turns=threading.Semaphore(0))
    asked = [served.ask() for _ in range(4)]
    step_until(served.core, lambda: all(one.is_ended for one in asked))
    refused = [one for one in asked if one.error is not None]
    assert 1 <= len(refused) <= 3
    for one in asked:
        one.wait()
        if one in refused:
            assert one.error is not None
            assert one.error[0] is Code.UNAVAILABLE
        else:
            assert one.ids() == [5] * 8


def test_one_row_that_is_refused_takes_its_batch_with_it(serve: Callable[..., Served]) -> None:
    served = serve(num_slots=0)
    good, bad = inputs_of(), inputs_of(loops=9) | {}
    batch = {name: np.concatenate([good.get(name, bad[name] * 0 + 1), bad[name]]) for name in bad}
    one = Recorder()
    served.service.take(batch, one)
    one.wait()
    assert one.error is not None
    assert "loops" in one.error[1]
    wait_until(served.is_idle, "the end of the row that was fine")


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("num_slots", [1, 0])
def test_cancelled_request_leaves_the_engine_and_gets_one_final_message(
    serve: Callable[..., Served], streaming: bool, num_slots: int
) -> None:
    served = serve(num_slots=num_slots, turns=threading.Semaphore(0))
    one = served.ask(streaming=streaming, request_output_len=50)
    wait_until(lambda: bool(served.core.seen), "the request's arrival")
    one.is_gone = True
    step_until(served.core, lambda: one.is_ended)
    one.wait()
    assert one.error == (Code.CANCELLED, "the request was cancelled")
    step_until(served.core, served.is_idle)
    assert served.core.aborted == [0]


def test_cancel_and_end_at_the_same_time_make_one_final_message(
    serve: Callable[..., Served],
) -> None:
    served = serve(lambda _: [3, 2])
    for _ in range(200):
        one = served.ask(streaming=True)
        one.is_gone = True
        one.wait()
    wait_until(served.is_idle, "the engine's rest")


@pytest.mark.parametrize("is_open", [True, False])
def test_response_that_cannot_be_sent_ends_its_request_alone(
    serve: Callable[..., Served], is_open: bool
) -> None:
    """Without shared memory an error still fits; a caller that has gone gets nothing."""
    served = serve(turns=threading.Semaphore(0))
    one = Recorder(breaks_at=1, breaks_for_good=not is_open)
    served.service.take(inputs_of(streaming=True, request_output_len=50), one)
    step_until(served.core, lambda: bool(served.core.aborted))
    step_until(served.core, served.is_idle)
    other = served.ask()
    step_until(served.core, lambda: other.is_ended)
    assert (len(one.responses), one.wrong) == (1, [])
    told = (Code.UNAVAILABLE, "a response could not be sent: no room") if is_open else None
    assert one.error == told
    assert other.ids() == [5] * 8


class Sender:
    """A response sender as server 2.51 has it: a final message closes it before it needs room."""

    def __init__(self, room: int) -> None:
        self.room = room  # messages that there is shared memory for
        self.sent: list[Any] = []
        self.is_closed = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        if self.is_closed:
            raise RuntimeError("the response sender has been closed")
        self.is_closed = flags == FINAL
        if self.room == 0:
            raise RuntimeError("no shared memory")
        self.room -= 1
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        return False


class Refusal(tuple):
    """The module's error: made of a message and one of its codes."""

    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = Code

    def __new__(cls, message: str, code: Code) -> tuple[Code, str]:  # type: ignore[misc]
        return (code, message)


FINAL = 1


def channel_of(sender: Sender) -> ServerChannel:
    module = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=lambda output_tensors, error=None: error or dict(output_tensors),
        TritonError=Refusal,
    )
    return ServerChannel(Server(module), sender, ALL_OUTPUTS)


@pytest.mark.parametrize("room", [0, 1])
def test_where_no_piece_of_a_stream_finds_room_the_caller_hears_of_it_once_there_is_some(
    serve: Callable[..., Served], room: int
) -> None:
    served = serve(turns=threading.Semaphore(0))
    sender = Sender(room)
    inputs = inputs_of(streaming=True, request_output_len=50)
    served.service.take(inputs, channel_of(sender))
    step_until(served.core, lambda: bool(served.service._unsaid))
    sender.room = 100
    wait_until(lambda: FINAL in [flag for _, flag in sender.sent], "the final message")
    wait_until(lambda: not served.service._unsaid, "the end of trying")
    error = (Code.UNAVAILABLE, "a response could not be sent: no shared memory")
    assert sender.sent[-2:] == [(error, 0), (None, FINAL)]
    assert len(sender.sent) == room + 2
    step_until(served.core, served.is_idle)


def test_caller_that_cannot_be_looked_for_ends_alone(serve: Callable[..., Served]) -> None:
    served = serve(turns=threading.Semaphore(0))
    one = Recorder()

    def look() -> bool:
        raise RuntimeError("no such request")

    one.is_cancelled = look  # type: ignore[method-assign]
    served.service.take(inputs_of(request_output_len=50), one)
    one.wait()
    assert one.error == (Code.INTERNAL, "RuntimeError: no such request")
    other = served.ask()
    step_until(served.core, lambda: other.is_ended)
    assert other.ids() == [5] * 8


def test_draining_service_refuses_new_requests_and_ends_the_running_ones(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    drain_file = tmp_path / "draining"
    served = serve(turns=threading.Semaphore(0), drain_file=drain_file)
    running = served.ask(request_id="x", request_output_len=50)
    drain_file.touch()
    late = served.ask()
    late.wait()
    assert late.error == (Code.UNAVAILABLE, "the server is being shut down")
    served.ask(request_id="x", stop=True).wait()  # what only ends requests is still taken
    step_until(served.core, lambda: running.is_ended)
    assert running.responses[-1]["finish_reason"].item() == b"abort"


def test_request_that_takes_too_long_ends_as_unavailable(serve: Callable[..., Served]) -> None:
    served = serve(num_slots=0)
    one = served.ask(timeout_s=0.01)
    one.wait()
    assert one.error == (Code.UNAVAILABLE, "the request's timeout has passed")
    wait_until(served.is_idle, "the end in the engine")


def test_stop_by_id_gives_what_there_is_to_those_that_have_it(serve: Callable[..., Served]) -> None:
    served = serve(turns=threading.Semaphore(0))
    named = [served.ask(request_id="x", request_output_len=50) for _ in range(2)]
    other = served.ask(request_id="y", request_output_len=3)
    step_until(served.core, lambda: len(served.core.seen) == 3)
    stop = served.ask(request_id="x", stop=True)
    stop.wait()
    assert (stop.responses, stop.error) == ([{}], None)
    step_until(served.core, lambda: all(one.is_ended for one in (*named, other)))
    for one in named:
        one.wait()
        assert one.responses[-1]["finish_reason"].item() == b"abort"
    assert other.ids() == [5] * 3


def test_stop_by_the_key_of_a_response_ends_its_request(serve: Callable[..., Served]) -> None:
    served = serve(turns=threading.Semaphore(0))
    one = served.ask(streaming=True, request_output_len=50)
    step_until(served.core, lambda: bool(one.responses))
    key = one.responses[0]["stop_key"].item().decode()
    served.ask(request_id=key, stop=True).wait()
    step_until(served.core, lambda: one.is_ended)
    assert one.responses[-1]["finish_reason"].item() == b"abort"


@pytest.mark.parametrize(("look_s", "num_keys"), [(1e6, 1), (0.0, 8)])
def test_stop_key_is_in_the_first_response_and_then_now_and_then(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, look_s: float, num_keys: int
) -> None:
    monkeypatch.setattr(responses, "_LOOK_S", look_s)
    served = serve(turns=threading.Semaphore(0))
    one = served.ask(streaming=True)
    for num_sent in range(8):  # a response for each step
        served.core.turns.release()
        wait_until(lambda count=num_sent: len(one.responses) > count, "a response")
    keys = [response["stop_key"].item() for response in one.responses]
    assert [key == keys[0] for key in keys] == [number < num_keys for number in range(8)]
    assert keys[0]


def test_what_the_caller_does_not_read_is_not_made(serve: Callable[..., Served]) -> None:
    served = serve(lambda _: [3, 4, 2])
    one = Recorder(outputs=frozenset({"text"}))
    served.service.take(inputs_of(), one)
    one.wait()
    (response,) = one.responses
    assert one.text() == b"de"
    assert not {"output_ids", "sequence_length", "stop_key", "loops_used"} & set(response)


def test_stop_of_nobody_is_harmless_and_one_without_an_id_is_refused(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    unknown = served.ask(request_id="nobody", stop=True)
    unknown.wait()
    assert unknown.error is None
    nameless = served.ask(stop=True)
    nameless.wait()
    assert nameless.error is not None
    assert nameless.error[0] is Code.INVALID_ARG


def test_engine_that_dies_ends_every_request_once_and_later_ones_at_once(
    serve: Callable[..., Served],
) -> None:
    served = serve(fail_at_step=3)
    asked = [served.ask(streaming=True, request_output_len=50) for _ in range(3)]
    for one in asked:
        one.wait()
        assert one.error is not None
        assert one.error[0] is Code.UNAVAILABLE
    assert not served.service.is_alive
    late = served.ask()
    late.wait()
    assert late.error is not None
    assert late.error[0] is Code.UNAVAILABLE


def test_answer_that_is_not_finite_is_an_error(serve: Callable[..., Served]) -> None:
    one = serve(lambda _: [3, 9], error_token=9).ask(streaming=True)
    one.wait()
    assert one.error == (
        Code.INTERNAL,
        "the answer ended in an error: the model's logits are not finite",
    )


@pytest.mark.parametrize("name", ["streaming", "return_log_probs", "stop"])
def test_rows_that_want_different_responses_are_refused(
    serve: Callable[..., Served], name: str
) -> None:
    rows = [inputs_of(**{name: value}) for value in (False, True)]
    batch = {one: np.concatenate([row[one] for row in rows]) for one in rows[0]}
    asked = Recorder()
    serve().service.take(batch, asked, "an id")
    asked.wait()
    assert asked.error == (
        Code.INVALID_ARG,
        f"{name}: expected the same value in all rows of a request, got both",
    )


def test_close_fails_what_runs_and_leaves_no_thread(serve: Callable[..., Served]) -> None:
    served = serve(num_slots=0)
    asked = [served.ask() for _ in range(3)]
    served.service.close()
    for one in asked:
        one.wait()
        assert one.error == (Code.UNAVAILABLE, "the model is being unloaded")
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"looptrt-send", "looptrt-watch"}


@pytest.mark.parametrize(
    ("values", "name"),
    [({"streaming": True}, "streaming"), ({"num_return_sequences": 2}, "num_return")],
)
def test_several_responses_are_refused_where_the_model_gives_one(
    serve: Callable[..., Served], values: dict[str, Any], name: str
) -> None:
    served = serve(is_decoupled=False)
    one = served.ask(**values)
    one.wait()
    assert one.error is not None
    assert name in one.error[1]
    plain = served.ask()
    plain.wait()
    assert len(plain.responses) == 1


def test_what_a_request_asks_for_is_in_its_responses(serve: Callable[..., Served]) -> None:
    one = serve(lambda _: [3, 4, 2]).ask(
        return_perf_metrics=True, return_num_input_tokens=True, return_num_output_tokens=True
    )
    one.wait()
    response = one.responses[0]
    assert (response["num_input_tokens"].item(), response["num_output_tokens"].item()) == (3, 3)
    assert response["arrival_time_ns"].item() <= response["first_token_time_ns"].item()
    assert {"kv_cache_alloc_new_blocks", "last_token_time_ns"} <= set(response)


def test_many_threads_asking_at_once_get_their_own_answers(serve: Callable[..., Served]) -> None:
    served = serve(lambda r: [int(r.prompt[0])] * r.max_new_tokens, num_slots=8)
    done: queue.SimpleQueue[tuple[int, Recorder]] = queue.SimpleQueue()

    def run(first: int) -> None:
        for _ in range(10):
            done.put((first, served.ask(streaming=True, input_ids=[first, 6, 7])))

    threads = [threading.Thread(target=run, args=(first,)) for first in range(3, 19)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(160):
        first, one = done.get(timeout=DEADLINE_S)
        one.wait()
        assert one.ids() == [first] * 8
    assert served.is_idle()


def test_codes_tell_whose_fault_it_is() -> None:
    assert code_of(RequestError("x")) is Code.INVALID_ARG
    assert code_of(QueueFullError("x")) is Code.UNAVAILABLE
    assert code_of(EngineError("x")) is Code.UNAVAILABLE
