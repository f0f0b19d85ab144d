"""Requests that end early, clients that leave, servers that stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_client import ProcessClient
from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.endpoint import MODEL, Endpoint, serving, serving_process
from tests.support.scripted import (
    DEADLINE_S,
    ScriptedCore,
    forever,
    llm_of,
    manifest,
    step_until,
    wait_until,
    write_tokenizer,
)

MUCH: dict[str, Any] = {"prompt": [1], "max_tokens": 200, "stream": True}
LONG: dict[str, Any] = {"prompt": "a=b;", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


@contextlib.contextmanager
def scripted(directory: Path, **fields: Any) -> Iterator[tuple[ScriptedCore, Endpoint]]:
    """An engine that says `f` for ever, one turn at a time, behind a server."""
    write_tokenizer(directory, ["<a>", *"bcdefgh"])
    config = fields.pop("config", {})
    core = ScriptedCore(forever, manifest(max_seq_len=10_000), turns=threading.Semaphore(0))
    for name, value in fields.items():
        setattr(core, name, value)
    with llm_of(core, directory, **config) as llm, serving(llm) as made:
        try:
            yield core, made
        finally:
            assert core.turns is not None
            core.turns.release(100_000)


@contextlib.contextmanager
def streaming(endpoint: Endpoint, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Events of a streamed completion; leaving closes the connection."""
    values = {"model": MODEL, "stream": True, **body}
    url = f"{endpoint.url}/v1/completions"
    with httpx.stream("POST", url, json=values, timeout=DEADLINE_S) as response:
        yield events_of(response)


def events_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_full_queue_is_429_and_says_when_to_try_again(tmp_path: Path) -> None:
    limits = {"num_slots": 1, "max_waiting": 1, "config": {"max_waiting": 1}}
    with scripted(tmp_path, **limits) as (core, made), ThreadPoolExecutor() as pool:
        assert core.turns is not None

        def ask(**fields: Any) -> httpx.Response:
            return made.post("completions", prompt="b", max_tokens=3000, **fields)

        running = pool.submit(ask)
        step_until(core, lambda: core.stats()["num_running"] == 1)
        waiting = pool.submit(ask)
        step_until(core, lambda: core.stats()["num_waiting"] == 1)
        for number, stream in enumerate((False, True), start=1):
            third = pool.submit(ask, stream=stream)
            step_until(core, lambda expected=number: core.num_refused == expected)  # type: ignore[misc]
            refused = third.result(DEADLINE_S)
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert not running.done()
        core.turns.release(100_000)
        assert running.result(DEADLINE_S).status_code == 200
        assert waiting.result(DEADLINE_S).status_code == 200


def test_client_that_leaves_a_stream_aborts_its_requests(tmp_path: Path) -> None:
    with scripted(tmp_path) as (core, made):
        assert core.turns is not None
        core.turns.release()
        with streaming(made, prompt=["b", "c"], n=2, max_tokens=9000) as events:
            next(events)
        step_until(core, lambda: len(set(core.aborted)) == 4)
        wait_until(lambda: made.server.front.num_running == 0, "the response to end")  # type: ignore[union-attr]
        assert core.num_steps < 9000


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_before_anything_came_aborts_its_request(
    tmp_path: Path, stream: bool
) -> None:
    with scripted(tmp_path) as (core, made):
        with asking(made, prompt="b", max_tokens=9000, stream=stream):
            wait_until(lambda: len(core.seen) == 1, "the request")
        step_until(core, lambda: len(core.aborted) == 1)
        assert core.num_steps < 9000


def test_units_of_a_client_that_left_come_back(endpoint: Endpoint) -> None:
    aborted = endpoint.figure("looptrt_requests_total", finish_reason="abort")
    with streaming(endpoint, n=4, **LONG) as events:
        next(events)
        assert endpoint.figure("looptrt_kv_units", state="used") > 0
    wait_until(
        lambda: endpoint.figure("looptrt_kv_units", state="used") == 0, "the units to come back"
    )
    assert endpoint.figure("looptrt_requests_total", finish_reason="abort") == aborted + 4


def test_32_streams_at_once_get_what_each_would_alone(endpoint: Endpoint, ouro: LLM) -> None:
    prompts = [f"a={digit};b=a;c={digit};d=5;e=b;f=2;?{q}>" for digit in "0123" for q in QUERIES]
    expected = [o.outputs[0].text for o in ouro.generate(prompts, SamplingParams(max_tokens=8))]
    client = endpoint.client()

    def ask(prompt: str) -> str:
        stream = client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=8, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == expected


QUERIES = ("abc", "bca", "cab", "abe", "eba", "bde", "dab", "fab")


def test_slow_reader_gets_everything_in_the_end(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<a>", "b" * 50_000])
    core = ScriptedCore(lambda request: [1] * 200, manifest(max_seq_len=10_000))
    with llm_of(core, tmp_path) as llm, serving(llm) as made, asking(made, **MUCH) as sock:
        wait_until(lambda: core.num_steps >= 200, "the engine to finish without the reader")
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):
            piece = sock.recv(2**20)
            assert piece
            received += piece
        assert received.count(b"b") >= 200 * 50_000


def test_reader_that_stopped_is_cut_off(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<a>", "b" * 50_000])
    core = ScriptedCore(lambda request: [1] * 200, manifest(max_seq_len=10_000))
    with (
        llm_of(core, tmp_path) as llm,
        serving(llm, io_timeout_s=0.5) as made,
        asking(made, **MUCH),
    ):
        assert made.server is not None
        front = made.server.front
        wait_until(lambda: core.num_steps > 0, "the request to run")
        wait_until(lambda: front.num_running == 0, "the connection to be reset")


@contextlib.contextmanager
def asking(endpoint: Endpoint, **body: Any) -> Iterator[socket.socket]:
    """A connection that has asked and reads nothing; leaving closes it."""
    host, port = endpoint.url.removeprefix("http://").split(":")
    content = json.dumps({"model": MODEL, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(DEADLINE_S)
        sock.connect((host, int(port)))
        sock.sendall(head.encode() + content)
        yield sock


def test_draining_server_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    with scripted(tmp_path) as (core, made), ThreadPoolExecutor() as pool:
        assert core.turns is not None
        assert made.server is not None
        running = pool.submit(made.post, "completions", prompt="b", max_tokens=3)
        wait_until(lambda: len(core.seen) == 1, "the request to arrive")
        made.server.drain()
        wait_until(lambda: httpx.get(f"{made.url}/health").status_code == 503, "draining")
        refused = made.post("completions", prompt="b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        core.turns.release(3)
        assert running.result(DEADLINE_S).json()["choices"][0]["text"] == "fff"
        wait_until(lambda: made.server.should_exit, "the end")  # type: ignore[union-attr]


def test_draining_again_and_after_the_end_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), scripted(tmp_path) as (core, made):
        assert made.server is not None
        with ThreadPoolExecutor() as pool:
            running = pool.submit(made.post, "completions", prompt="b", max_tokens=3)
            wait_until(lambda: len(core.seen) == 1, "the request to arrive")
            for _ in range(3):
                made.server.drain()
            assert core.turns is not None
            core.turns.release(3)
            assert running.result(DEADLINE_S).status_code == 200
    made.server.drain()
    assert caplog.text.count("draining:") == 1


def test_requests_beyond_the_drain_timeout_get_an_error(ouro_dir: Path) -> None:
    with (
        LLM(ouro_dir, EngineConfig(num_threads=1), in_process=True) as llm,
        serving(llm, drain_timeout_s=0.0) as made,
        streaming(made, n=8, **LONG) as events,
    ):
        next(events)
        assert made.server is not None
        made.server.drain()
        *_, last = events
    assert last["error"]["message"] == "the engine was shut down"
    assert last["error"]["code"] == "engine_ended"


def test_sigterm_drains_and_exits_0(ouro_dir: Path) -> None:
    flags = ("--num_threads", "1", "--drain_timeout", "100")
    with serving_process(ouro_dir, *flags) as made:
        assert made.process is not None
        with streaming(made, **{**LONG, "max_tokens": 100}) as events:
            next(events)
            made.process.send_signal(signal.SIGTERM)
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert made.process.wait(DEADLINE_S) == 0


def test_collections_in_a_server_leave_out_what_was_loaded(ouro_dir: Path) -> None:
    """They would stop every stream for as long as they look at the whole HTTP stack."""
    program = (
        "import atexit, gc, sys; from looptrt.cli import main\n"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count()))\n"
        "sys.exit(main())\n"
    )
    with serving_process(ouro_dir, "--num_threads", "1", program=program) as made:
        assert made.process is not None
        assert made.process.stdout is not None
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(DEADLINE_S) == 0
        name, count = made.process.stdout.read().split()
    assert name == "frozen"
    assert int(count) > 20_000


def test_killed_engine_is_a_503_that_says_why(ouro_dir: Path) -> None:
    with LLM(ouro_dir, EngineConfig(num_threads=1)) as llm, serving(llm) as made:
        assert isinstance(llm._client, ProcessClient)
        assert httpx.get(f"{made.url}/health").json() == {"status": "ok"}
        with streaming(made, n=8, **LONG) as events:
            next(events)
            os.kill(llm._client.pid, signal.SIGKILL)
            *_, last = events
        assert "was killed by SIGKILL" in last["error"]["message"]
        health = httpx.get(f"{made.url}/health")
        assert health.status_code == 503
        assert "was killed by SIGKILL" in health.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="SIGKILL") as caught:
            made.client().completions.create(model=MODEL, prompt="a")
        assert caught.value.status_code == 503
        assert made.figure("looptrt_engine_up") == 0
        assert made.figure("looptrt_generated_tokens_total") > 0


def test_answer_whose_logits_are_not_finite_is_a_server_error(tmp_path: Path) -> None:
    says = {"script": lambda _: [1, 2], "error_token": 2}
    with scripted(tmp_path, **says) as (core, made):
        assert core.turns is not None
        core.turns.release(3)
        whole = made.post("completions", prompt="b")
        assert (whole.status_code, "not finite" in whole.text) == (500, True)
        with streaming(made, prompt="b") as events:
            assert next(events)["choices"][0]["text"] == "b"
            core.turns.release()
            *_, last = events
        assert "not finite" in last["error"]["message"]
        assert last["error"]["type"] == "server_error"
