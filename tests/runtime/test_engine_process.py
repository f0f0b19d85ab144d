"""The engine in a process or on a thread: messages, ends, deadlines, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import (
    EngineError,
    InvariantError,
    LooptrtError,
    ManifestError,
    QueueFullError,
    RequestError,
    TransferError,
)
from looptrt.runtime import protocol
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_client import EngineClient, InProcessClient, ProcessClient, Update
from looptrt.runtime.engine_process import serve
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
    decode,
    encode,
)
from looptrt.runtime.request import (
    ExitKv,
    ExitParams,
    ExitRule,
    FinishReason,
    LogprobsMode,
    Request,
    SamplerParams,
)
from tests.support.scripted import (
    DEADLINE_S,
    ScriptedCore,
    client_of,
    forever,
    is_running,
    manifest,
    open_descriptors,
    step_until,
    wait_until,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


def request(request_id: int = 0, max_new_tokens: int = 8, **fields: object) -> Request:
    return Request(
        request_id=request_id,
        prompt=np.array([1, 17, 40], np.int32),
        max_new_tokens=max_new_tokens,
        stop_token_ids=(),
        loops=4,
        prefill_loops=4,
        **fields,  # type: ignore[arg-type]
    )


class Listener(queue.SimpleQueue[Update]):
    """Takes a request's updates."""

    def next(self) -> Update:
        return self.get(timeout=DEADLINE_S)

    def tokens(self) -> list[int]:
        """All tokens up to the end."""
        tokens: list[int] = []
        while True:
            update = self.next()
            if update.error is not None:
                raise update.error
            tokens += update.token_ids
            if update.finished is not None:
                return tokens


# ---- messages


SCORED = TokenLogprobs([7, 1, 2], [-3.5, -0.25, -math.inf], [9, 1, 2])
FINISHED = FinishedRequest(7, FinishReason.STOP, 2, 16, 4096, 1, 0.5, 1.5, None, 2.5)
MESSAGES: list[Message] = [
    AbortRequest(2**40),
    GetStats(3),
    Shutdown(),
    Ready({"a": {"b": [1, "ü", None]}}, 2**40),
    Stats(3, {"num_waiting": 1, "rate": 0.5}),
    StepOutput(),
    StepOutput([7, 8], [1, 2], [4, 3], [FINISHED]),
    StepOutput([7, 8], [1, 2], [4, 3], [], {1: SCORED}, [(2**40, 5, SCORED), (8, 1, SCORED)]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_request_survives_the_wire() -> None:
    sent = Request(
        request_id=2**40,
        prompt=np.arange(70_000, dtype=np.int32),
        max_new_tokens=9,
        stop_token_ids=(2, 5),
        loops=4,
        prefill_loops=2,
        noise_seed=2**63 - 1,
        cache_salt=b"\x00salt",
        priority=-3,
        sampler=SamplerParams(
            temperature=0.8,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            seed=2**63 - 1,
            prompt_logprobs=0,
            logprobs=4,
            logprobs_mode=LogprobsMode.PROCESSED,
            repetition_penalty=1.3,
            presence_penalty=-1e30,
            frequency_penalty=0.2,
            min_tokens=3,
            end_ids=(2, 5),
            bad_words=((7,), (1, 2, 3)),
            embedding_bias=np.linspace(-1, 1, 7).astype("<f4").tobytes(),
        ),
        exit=ExitParams(ExitRule.ARGMAX_STABILITY, 5, ExitKv.RUN_ALL),
        fork_of=2**40 - 1,
    )
    for default in (Request, SamplerParams, ExitParams):
        part = {SamplerParams: sent.sampler, ExitParams: sent.exit}.get(default, sent)
        for name, field in default.__dataclass_fields__.items():
            if default is not Request:
                assert getattr(part, name) != field.default, f"{name} is not tested"
    got = decode(encode(AddRequest(sent)))
    assert isinstance(got, AddRequest)
    for name in ("prompt", "token_ids", "depths"):
        assert np.array_equal(getattr(got.request, name), getattr(sent, name))
        assert getattr(got.request, name).dtype == getattr(sent, name).dtype
    for name in Request.__dataclass_fields__.keys() - {"prompt", "token_ids", "depths"}:
        assert getattr(got.request, name) == getattr(sent, name), name
    assert type(got.request.sampler.logprobs_mode) is LogprobsMode
    assert (type(got.request.exit.rule), type(got.request.exit.kv)) == (ExitRule, ExitKv)
    assert hash(got.request.sampler) == hash(sent.sampler)
    got.request.prompt[0] = 1  # the engine owns its copy


@pytest.mark.parametrize("kind", [RequestError, QueueFullError, EngineError, ManifestError])
def test_error_keeps_its_type(kind: type[LooptrtError]) -> None:
    for message in (RequestRefused(3, kind("why")), EngineFailed(kind("why"))):
        got = decode(encode(message))
        assert isinstance(got, RequestRefused | EngineFailed)
        assert type(got.error) is kind
        assert str(got.error) == "why"


def test_error_that_cannot_be_rebuilt_is_an_engine_error_that_names_it() -> None:
    got = decode(encode(EngineFailed(TransferError("lost", retryable=True))))
    assert isinstance(got, EngineFailed)
    assert type(got.error) is EngineError
    assert str(got.error) == "TransferError: lost"


@given(st.binary(max_size=40))
def test_garbage_is_an_engine_error_or_a_message(data: bytes) -> None:
    with contextlib.suppress(EngineError):
        decode(data)


@pytest.mark.parametrize(
    "content",
    [5, [], ["Unknown"], [[]], ["AbortRequest"], ["AddRequest", 1, 2], ["EngineFailed", 5, 6]],
)
def test_message_of_another_protocol_is_malformed(content: object) -> None:
    with pytest.raises(EngineError, match="malformed message"):
        decode(msgpack.packb(content))


def test_message_too_large_for_a_frame_is_refused_before_it_is_sent() -> None:
    huge = request()
    huge.stop_token_ids = tuple(range(2**16, 2**22))
    with pytest.raises(RequestError, match="bytes are more than"):
        encode(AddRequest(huge))


def test_many_logprobs_travel_in_messages_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_MAX_LOGPROBS", 10)
    ends = [replace(FINISHED, request_id=request_id) for request_id in (1, 3, 99)]
    whole = StepOutput(
        [0, 1, 2, 3],
        [10, 11, 12, 13],
        [4, 3, 2, 1],
        ends,
        {row: TokenLogprobs([row] * 6, [0.0] * 6, [1] * 6) for row in (0, 1, 3)},
        [(5, position, SCORED) for position in range(1, 12)],
    )
    parts = [decode(encode(part)) for part in protocol.parts_of(whole)]
    joined = StepOutput()
    for part in parts:
        assert isinstance(part, StepOutput)
        assert len(part.logprobs) <= 1 < 4 >= len(part.prompt_logprobs)
        for ended in part.finished:
            assert ended.request_id in (*part.request_ids, 99)
        for row, scored in part.logprobs.items():
            joined.logprobs[len(joined.token_ids) + row] = scored
        for name in ("request_ids", "token_ids", "depths", "finished", "prompt_logprobs"):
            getattr(joined, name).extend(getattr(part, name))
    assert joined == whole
    assert list(protocol.parts_of(StepOutput())) == [StepOutput()]


def test_step_with_the_most_logprobs_fits_its_frames() -> None:
    num_top = 2**18
    scored = TokenLogprobs([2**31 - 1] * num_top, [-1.1] * num_top, [2**31 - 1] * num_top)
    whole = StepOutput([1] * 3, [2] * 3, [3] * 3, [], dict.fromkeys(range(3), scored))
    sizes = [len(encode(part)) for part in protocol.parts_of(whole)]
    assert len(sizes) == 3


def connected() -> tuple[Connection, socket.socket]:
    ours, theirs = socket.socketpair()
    return Connection(ours), theirs


def test_frame_longer_than_allowed_is_an_error_and_not_an_allocation() -> None:
    connection, peer = connected()
    peer.sendall(struct.pack("<I", 2**32 - 1))
    with pytest.raises(EngineError, match="message of 4294967295 bytes"):
        connection.receive()
    connection.close()
    peer.close()


def test_peer_that_closes_inside_a_frame_is_gone() -> None:
    connection, peer = connected()
    peer.sendall(struct.pack("<I", 100) + b"half")
    peer.close()
    assert connection.receive() is None
    with pytest.raises(EngineError, match="peer"):
        connection.send(GetStats(0))
    connection.close()


def test_frame_that_comes_byte_by_byte_is_whole() -> None:
    connection, peer = connected()
    data = encode(GetStats(5))
    frame = struct.pack("<I", len(data)) + data
    sender = threading.Thread(target=lambda: [peer.sendall(bytes([byte])) for byte in frame])
    sender.start()
    assert connection.wait(DEADLINE_S)
    assert connection.receive() == GetStats(5)
    sender.join()
    connection.close()
    peer.close()


def pair(frame_timeout_s: float) -> tuple[Connection, socket.socket]:
    ours, theirs = socket.socketpair()
    return Connection(ours, frame_timeout_s), theirs


def test_peer_may_be_silent_for_longer_than_a_message_may_take() -> None:
    connection, peer = pair(0.05)
    data = encode(GetStats(5))
    frame = struct.pack("<I", len(data)) + data
    for _ in range(2):
        sender = threading.Timer(0.3, peer.sendall, (frame,))
        sender.start()
        assert connection.receive() == GetStats(5)
        sender.join()
    connection.close()
    peer.close()


def test_peer_that_stops_inside_a_frame_is_an_error() -> None:
    for part in (b"\x09", struct.pack("<I", 100) + b"half"):
        connection, peer = pair(0.1)
        peer.sendall(part)
        with pytest.raises(EngineError, match=r"not finished a message within 0\.1 s"):
            connection.receive()
        connection.close()
        peer.close()


def test_peer_that_does_not_read_ends_the_connection_and_delays_no_sender() -> None:
    connection, peer = pair(0.1)
    big = Stats(0, {"x" * 2**20: 1})
    for _ in range(4):
        connection.send(big)
    assert connection.receive() is None  # the writer has given up
    with pytest.raises(EngineError, match="the peer process is gone"):
        connection.send(GetStats(0))
    connection.close()
    peer.close()


def test_everything_that_was_queued_is_sent_before_the_end() -> None:
    connection, peer = connected()
    big = Stats(0, {"x" * 2**20: 1})
    theirs, got = Connection(peer), []
    for _ in range(4):
        connection.send(big)
    closing = threading.Thread(target=connection.close)
    closing.start()
    while (message := theirs.receive()) is not None:
        got.append(message)
    closing.join(DEADLINE_S)
    assert got == [big] * 4
    theirs.close()


def test_finaliser_inside_send_may_send_too(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, peer = connected()
    theirs = Connection(peer)
    length, finalised = protocol._LENGTH, [GetStats(1)]

    class Collecting:
        """Packs a length; the first time the collector runs meanwhile."""

        size, unpack = length.size, length.unpack

        @staticmethod
        def pack(size: int) -> bytes:
            while finalised:
                connection.send(finalised.pop())
            return length.pack(size)

    monkeypatch.setattr(protocol, "_LENGTH", Collecting)
    sender = threading.Thread(target=connection.send, args=(GetStats(2),), daemon=True)
    sender.start()
    sender.join(DEADLINE_S)
    assert not sender.is_alive()
    assert [theirs.receive(), theirs.receive()] == [GetStats(1), GetStats(2)]
    connection.close()
    theirs.close()


def test_interrupt_of_a_sender_leaves_no_half_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT comes while the socket is full; both messages arrive whole all the same."""
    connection, peer = connected()
    theirs = Connection(peer)
    big = Stats(0, {"x" * 2**22: 1})
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()

    def send() -> None:
        connection.send(big)
        threading.Event().wait(DEADLINE_S)

    with pytest.raises(KeyboardInterrupt):
        send()
    connection.send(GetStats(1))
    assert [theirs.receive(), theirs.receive()] == [big, GetStats(1)]
    connection.close()
    theirs.close()


# ---- the loop, on a thread


@pytest.mark.parametrize("is_busy", [False, True])
def test_engine_outlives_a_client_that_is_silent(is_busy: bool) -> None:
    connection, peer = pair(0.05)
    core = ScriptedCore(forever, turns=threading.Semaphore(0))
    engine = threading.Thread(target=serve, args=(lambda: core, connection))
    engine.start()
    ours = Connection(peer)
    assert isinstance(ours.receive(), Ready)
    if is_busy:
        ours.send(AddRequest(request(max_new_tokens=1)))
    threading.Event().wait(0.3)
    core.turns.release(10)  # type: ignore[union-attr]
    if is_busy:
        assert ours.receive().token_ids == [5]  # type: ignore[union-attr]
    ours.send(GetStats(7))
    assert ours.receive() == Stats(7, core.stats())
    ours.close()
    engine.join(DEADLINE_S)
    assert not engine.is_alive()


def test_client_that_stops_inside_a_message_is_told(caplog: pytest.LogCaptureFixture) -> None:
    connection, peer = pair(0.1)
    engine = threading.Thread(target=serve, args=(lambda: ScriptedCore(forever), connection))
    engine.start()
    ours = Connection(peer)
    assert isinstance(ours.receive(), Ready)
    peer.sendall(struct.pack("<I", 100) + b"half")
    failed = ours.receive()
    assert isinstance(failed, EngineFailed)
    assert "has not finished a message" in str(failed.error)
    engine.join(DEADLINE_S)
    ours.close()


def test_listener_that_raises_leaves_no_caller_waiting(tmp_path: Path) -> None:
    def broken(_: Update) -> None:
        raise ZeroDivisionError("in a listener")

    core = ScriptedCore(forever, turns=threading.Semaphore(0))
    client, listeners = client_of(core, tmp_path), [Listener() for _ in range(3)]
    client.submit(request(0, 60), broken)
    for index, listener in enumerate(listeners):
        client.submit(request(index + 1, 60), listener.put)
    core.turns.release(1000)  # type: ignore[union-attr]
    for listener in listeners:
        with pytest.raises(EngineError, match="reader failed: ZeroDivisionError: in a listener"):
            listener.tokens()
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        client.stats()
    wait_until(lambda: core.is_closed, "the end of an engine that nobody listens to")
    client.close()


def test_answer_to_no_call_ends_every_caller(tmp_path: Path) -> None:
    client, listener = client_of(ScriptedCore(forever), tmp_path), Listener()
    client._calls.clear()
    client._send(GetStats(99))
    client.submit(request(0, 10_000), listener.put)
    with pytest.raises(EngineError, match="reader failed: KeyError"):
        listener.tokens()
    client.close()


def test_client_that_is_collected_in_its_own_thread_closes(tmp_path: Path) -> None:
    """Not in the thread that waits: the collector runs in any."""
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    core = ScriptedCore(forever)
    client = client_of(core, tmp_path)
    client.submit(request(max_new_tokens=1), lambda _: client.close())
    wait_until(lambda: core.is_closed, "the engine's end")
    wait_until(lambda: not set(threading.enumerate()) - threads, "the threads' end")
    assert not open_descriptors() - descriptors


def test_engine_ends_when_its_client_closes() -> None:
    connection, peer = connected()
    core = ScriptedCore(forever)
    engine = threading.Thread(target=serve, args=(lambda: core, connection))
    engine.start()
    ours = Connection(peer)
    assert isinstance(ours.receive(), Ready)
    ours.send(AddRequest(request(max_new_tokens=60)))
    assert isinstance(ours.receive(), StepOutput)
    ours.close()
    engine.join(DEADLINE_S)
    assert not engine.is_alive()
    assert core.is_closed


def test_message_that_no_client_sends_is_a_fatal_error() -> None:
    connection, peer = connected()
    engine = threading.Thread(target=serve, args=(lambda: ScriptedCore(forever), connection))
    engine.start()
    ours = Connection(peer)
    assert isinstance(ours.receive(), Ready)
    ours.send(Ready({}, 1))
    failed = ours.receive()
    assert isinstance(failed, EngineFailed)
    assert "unexpected message" in str(failed.error)
    engine.join(DEADLINE_S)
    assert not engine.is_alive()
    ours.close()


def test_tokens_and_end_reach_the_listener(tmp_path: Path) -> None:
    client, listener = client_of(ScriptedCore(forever), tmp_path), Listener()
    client.submit(request(max_new_tokens=3), listener.put)
    assert listener.tokens() == [5, 5, 5]
    client.close()


def test_refused_request_keeps_the_error_type(tmp_path: Path) -> None:
    client, listener = client_of(ScriptedCore(forever, max_waiting=0), tmp_path), Listener()
    client.submit(request(0), listener.put)
    assert type(listener.next().error) is QueueFullError
    client.close()
    client = client_of(ScriptedCore(forever), tmp_path)
    client.submit(request(0, cache_salt=b"never fits"), listener.put)
    assert type(listener.next().error) is RequestError
    client.close()


def test_failure_of_a_step_reaches_every_request_and_later_callers(tmp_path: Path) -> None:
    core = ScriptedCore(forever, fail_at_step=3)
    client, listeners = client_of(core, tmp_path), [Listener() for _ in range(6)]
    for index, listener in enumerate(listeners):
        client.submit(request(index), listener.put)
    for listener in listeners:
        with pytest.raises(EngineError, match="ZeroDivisionError: scripted"):
            listener.tokens()
    for call in (client.stats, lambda: client.submit(request(9), Listener().put)):
        with pytest.raises(EngineError, match="ZeroDivisionError: scripted"):
            call()
    client.close()
    assert core.is_closed


def test_broken_invariant_keeps_its_type(tmp_path: Path) -> None:
    def broken(_: Request) -> list[int]:
        raise InvariantError("a unit is owned twice")

    client, listener = client_of(ScriptedCore(broken), tmp_path), Listener()
    client.submit(request(), listener.put)
    with pytest.raises(InvariantError, match="owned twice"):
        listener.tokens()
    client.close()


def test_engine_that_hangs_in_a_step_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    turns = threading.Semaphore(0)
    core = ScriptedCore(forever, turns=turns)
    client, listener = client_of(core, tmp_path, step_timeout_s=0.2), Listener()
    client.submit(request(), listener.put)
    with pytest.raises(EngineError, match=r"step_timeout_s 0\.2"):
        listener.tokens()
    turns.release(100)
    client.close()


def test_idle_engine_is_not_taken_for_one_that_hangs(tmp_path: Path) -> None:
    client, listener = client_of(ScriptedCore(forever), tmp_path, step_timeout_s=0.05), Listener()
    for _ in range(3):
        threading.Event().wait(0.1)
        assert client.stats() == ScriptedCore(forever).stats()
    client.submit(request(max_new_tokens=1), listener.put)
    assert listener.tokens() == [5]
    client.close()


def test_error_of_the_start_keeps_its_type(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"config\.json: no such file"):
        InProcessClient(tmp_path, EngineConfig())


def test_engine_that_does_not_start_in_time_is_an_error(tmp_path: Path) -> None:
    release = threading.Event()

    def slow(*_: object) -> ScriptedCore:
        assert release.wait(DEADLINE_S)
        return ScriptedCore(forever)

    timer = threading.Timer(0.3, release.set)
    timer.start()
    with pytest.raises(EngineError, match=r"did not start within start_timeout_s 0\.1"):
        InProcessClient(tmp_path, EngineConfig(start_timeout_s=0.1), slow)
    timer.join()


def test_requests_that_run_at_the_end_get_an_error(tmp_path: Path) -> None:
    core = ScriptedCore(forever, turns=threading.Semaphore(1))
    client, listener = client_of(core, tmp_path), Listener()
    client.submit(request(max_new_tokens=10_000), listener.put)
    assert listener.next().token_ids == [5]
    closing = threading.Thread(target=client.close)
    closing.start()
    step_until(core, lambda: not closing.is_alive())
    with pytest.raises(EngineError, match="was shut down"):
        listener.tokens()
    with pytest.raises(EngineError, match="was shut down"):
        client.submit(request(1), listener.put)
    client.close()


def test_no_thread_and_no_descriptor_is_left(tmp_path: Path) -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    for _ in range(5):
        client = client_of(ScriptedCore(forever), tmp_path)
        client.close()
        with pytest.raises(ManifestError):
            InProcessClient(tmp_path, EngineConfig())
    assert set(threading.enumerate()) == threads
    assert open_descriptors() == descriptors


def test_config_survives_the_command_line() -> None:
    config = EngineConfig(max_waiting=3, prefix_depth="at_least", device="cuda:1")
    assert EngineConfig(**config.to_json()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_cache_bytes", 0),
        ("max_batch_size", True),
        ("max_num_tokens", "8"),
        ("max_seq_len", -1),
        ("max_waiting", None),
        ("max_logprobs", -1),
        ("max_logprobs", 2**18 + 1),
        ("prefix_grid", 0),
        ("prefix_depth", "deep"),
        ("enable_prefix_cache", 1),
        ("noise_seed", -1),
        ("device", "tpu"),
        ("num_threads", 0),
        ("start_timeout_s", float("nan")),
        ("step_timeout_s", 0),
    ],
)
def test_bad_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(EngineError, match=f"{field}: expected"):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


def test_setting_of_any_size_is_named() -> None:
    with pytest.raises(EngineError, match=r"max_waiting: expected an integer .*, got a huge int"):
        EngineConfig(max_waiting=10**5000)


def test_limit_can_be_lowered_and_not_raised() -> None:
    limits = EngineConfig(max_seq_len=10, max_batch_size=2).limits(manifest())
    assert (limits.max_seq_len, limits.max_input_len, limits.max_batch_size) == (10, 10, 2)
    with pytest.raises(EngineError, match="max_seq_len: expected at most 64"):
        EngineConfig(max_seq_len=65).limits(manifest())


# ---- the engine's own process


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("process") / "ouro"
    build(
        BuildConfig(
            checkpoint_dir=EXAMPLES / "tiny-ouro",
            output_dir=directory,
            max_batch_size=4,
            max_input_len=64,
            max_seq_len=64,
            max_num_tokens=64,
        )
    )
    return directory


CONFIG = EngineConfig(num_threads=1)


@pytest.fixture(scope="module")
def shared(engine_dir: Path) -> Iterator[ProcessClient]:
    client = ProcessClient(engine_dir, CONFIG)
    yield client
    client.close()
    assert not is_running(client.pid)


@pytest.fixture
def own(engine_dir: Path) -> Iterator[ProcessClient]:
    client = ProcessClient(engine_dir, CONFIG)
    yield client
    client.close()
    assert not is_running(client.pid)


def answer(client: EngineClient, request_id: int) -> list[int]:
    listener = Listener()
    client.submit(request(request_id), listener.put)
    return listener.tokens()


def test_process_and_thread_give_the_same_tokens(engine_dir: Path, shared: ProcessClient) -> None:
    thread = InProcessClient(engine_dir, CONFIG)
    assert answer(shared, 0) == answer(thread, 0)
    assert shared.stats().keys() == thread.stats().keys()
    assert shared.manifest == thread.manifest
    thread.close()


def test_interrupt_from_the_terminal_leaves_the_engine_alone(shared: ProcessClient) -> None:
    os.kill(shared.pid, signal.SIGINT)
    assert len(answer(shared, 1)) == 8


def test_request_refused_by_the_process_keeps_its_type(shared: ProcessClient) -> None:
    listener = Listener()
    bad = request(2)
    bad.loops = 99
    shared.submit(bad, listener.put)
    assert type(listener.next().error) is RequestError
    assert len(answer(shared, 3)) == 8


def test_killed_engine_is_named_to_every_request(own: ProcessClient) -> None:
    listeners = [Listener() for _ in range(6)]
    for index, listener in enumerate(listeners):
        own.submit(request(index, max_new_tokens=60), listener.put)
    assert listeners[0].next().token_ids
    os.kill(own.pid, signal.SIGKILL)
    for listener in listeners:
        with pytest.raises(EngineError, match="the engine process was killed by SIGKILL"):
            listener.tokens()
    with pytest.raises(EngineError, match="SIGKILL"):
        own.stats()


def test_last_words_of_a_crashed_engine_are_kept(own: ProcessClient) -> None:
    listener = Listener()
    own.submit(request(max_new_tokens=60), listener.put)
    os.kill(own.pid, signal.SIGSEGV)
    with pytest.raises(EngineError, match=r"SIGSEGV; its last lines: .*engine_process"):
        listener.tokens()


def test_engine_that_ignores_every_polite_request_is_killed(
    own: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("looptrt.runtime.engine_client._STOP_TIMEOUT_S", 0.2)
    os.kill(own.pid, signal.SIGSTOP)
    own.close()
    assert not is_running(own.pid)


def test_engine_ends_when_its_parent_is_killed(engine_dir: Path) -> None:
    program = (
        "import sys, threading; from pathlib import Path\n"
        "from looptrt.runtime.config import EngineConfig\n"
        "from looptrt.runtime.engine_client import ProcessClient\n"
        "client = ProcessClient(Path(sys.argv[1]), EngineConfig(num_threads=1))\n"
        "print(client.pid, flush=True); threading.Event().wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", program, str(engine_dir)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_until(lambda: not is_running(pid), "the engine's end")


def test_damaged_directory_is_the_error_of_the_start(engine_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(engine_dir, broken)
    weights = broken / "rank0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    children = child_processes()
    with pytest.raises(ManifestError, match=r"rank0\.safetensors: expected \d+ bytes"):
        ProcessClient(broken, CONFIG)
    assert child_processes() == children


def test_start_that_takes_too_long_leaves_no_process(engine_dir: Path) -> None:
    children = child_processes()
    with pytest.raises(EngineError, match="did not start within"):
        ProcessClient(engine_dir, EngineConfig(start_timeout_s=0.01))
    assert child_processes() == children


def test_process_leaves_no_thread_and_no_descriptor(engine_dir: Path) -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    client = ProcessClient(engine_dir, CONFIG)
    assert len(answer(client, 0)) == 8
    client.close()
    assert not is_running(client.pid)
    assert set(threading.enumerate()) == threads
    assert open_descriptors() == descriptors


def test_collections_in_an_engine_process_leave_out_what_was_loaded(
    engine_dir: Path, tmp_path: Path
) -> None:
    """They would look at all of torch; a caller's own process keeps its collector's settings."""
    program = tmp_path / "engine.py"
    program.write_text(
        "import gc, sys\n"
        "from looptrt.runtime import engine_process\n"
        "load = engine_process.load_core\n"
        "def load_and_count(*args):\n"
        "    core = load(*args)\n"
        "    stats = core.stats\n"
        "    core.stats = lambda: stats() | {'num_frozen': gc.get_freeze_count()}\n"
        "    return core\n"
        "engine_process.load_core = load_and_count\n"
        "sys.exit(engine_process.main(sys.argv[1:]))\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 3  # -P -m MODULE\nexec {sys.executable} {program} "$@"\n')
    python.chmod(0o755)
    client = ProcessClient(engine_dir, CONFIG, python=str(python))
    num_frozen = client.stats()["num_frozen"]
    client.close()
    assert num_frozen > 50_000
    before = gc.get_freeze_count()
    thread = InProcessClient(engine_dir, CONFIG)
    assert len(answer(thread, 0)) == 8
    thread.close()
    assert gc.get_freeze_count() == before


def test_forked_process_that_ends_leaves_the_engine_alone(own: ProcessClient) -> None:
    keeper = weakref.finalize(own, own.close)  # as an LLM does; it also runs at exit
    listener = Listener()
    own.submit(request(1, max_new_tokens=40), listener.put)
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(DEADLINE_S))
        try:
            own.abort(1)
            own.drop(1)
            with contextlib.suppress(EngineError):
                own.stats()
                os._exit(2)
            keeper()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(listener.tokens()) == 40
    assert len(answer(own, 2)) == 8
    keeper.detach()


def child_processes() -> set[str]:
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(task.read_text().split())


def test_frame_limit_holds_the_largest_prompt() -> None:
    longest = request()
    longest.prompt = np.zeros(2**20, np.int32)
    assert len(encode(AddRequest(longest))) < protocol.MAX_FRAME_BYTES
