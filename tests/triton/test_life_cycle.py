"""Servers from start to end: failures that are told, ends that leave nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from looptrt.manifest import Manifest, _checksum
from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams
from running_server import LOOPTRT, RunningServer, running_server
from tests.support.scripted import is_running, wait_until
from tests.triton.clients import (
    arrays,
    ask_grpc,
    figure,
    generate,
    generate_stream,
    grpc_stream,
    infer,
    opened_stream,
    post,
    wait_until_idle,
)

ASKED = {"text_input": "a prompt", "max_tokens": 5}

pytestmark = pytest.mark.usefixtures("server_env")

Start = Callable[..., RunningServer]


@pytest.fixture
def start(engine_dir: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts servers that end with the test."""
    with contextlib.ExitStack() as servers:
        logs = iter(range(9))

        def one(*flags: str, engine: Path = engine_dir) -> RunningServer:
            log = tmp_path / f"log{next(logs)}"
            return servers.enter_context(running_server(engine, log, "--num_threads=1", *flags))

        yield one


def descendants(pid: int) -> set[int]:
    """Processes below one."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            fields = Path(f"/proc/{int(entry)}/stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, below = set(), [pid]
    while below:
        new = children.get(below.pop(), [])
        found.update(new)
        below.extend(new)
    return found


def engine_pids(server: RunningServer) -> list[int]:
    def is_engine(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    return [pid for pid in descendants(server.pid) if is_engine(pid)]


def regions(server: RunningServer) -> set[str]:
    """Its regions of shared memory; other servers of this machine, which come and go, left out."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"looptrt_{server.pid}_")}


@pytest.mark.full
def test_two_servers_of_one_machine_answer_and_end_apart(start: Start, llm: LLM) -> None:
    text = llm.generate(["a prompt"], SamplingParams(max_tokens=5))[0].outputs[0].text
    first, second = start(), start()
    for server in (first, second, first):
        assert generate(server, "ensemble", **ASKED).text() == text
    os.kill(second.pid, signal.SIGTERM)
    wait_until(lambda: not is_running(second.pid), "the second server's end")
    assert generate(first, "ensemble", **ASKED).text() == text


@pytest.mark.full
def test_server_without_decoupled_mode_answers_plain_infer_once(start: Start, llm: LLM) -> None:
    server = start("--no-decoupled_mode")
    text = llm.generate(["a prompt"], SamplingParams(max_tokens=5))[0].outputs[0].text
    for model in ("ensemble", "tensorrt_llm_bls"):
        for over in ("grpc", "http"):
            reply = infer(server, model, over=over, **ASKED)
            assert (reply.text(), reply.error) == (text, None)
            refused = infer(server, model, over=over, **ASKED, stream=True)
            assert refused.error is not None
            assert "decoupled_mode" in refused.error
            wrong = infer(server, model, over=over, **ASKED, beam_width=2)
            assert wrong.error is not None
            assert "beam_width" in wrong.error
        assert generate(server, model, **ASKED).text() == text
    ids = infer(server, "tensorrt_llm", input_ids=[5, 6], input_lengths=2, request_output_len=4)
    assert ids.responses[0]["sequence_length"].item() == 4
    stop = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    assert infer(server, "tensorrt_llm", **stop).error is not None  # plain infer gives it no id
    wait_until_idle(server)


@pytest.mark.full
def test_engine_that_cannot_start_is_told_in_log_and_reply_and_the_server_stays(
    start: Start,
) -> None:
    broken = "--kv_cache_bytes=1"
    server = start(broken, "--model_control_mode=explicit", "--load_model=preprocessing")
    status, answer = post(server, "/v2/repository/models/tensorrt_llm/load")
    assert status == 400
    assert "kv_cache_bytes" in answer["error"]
    assert "kv_cache_bytes" in server.log.read_text(errors="replace")
    _, models = post(server, "/v2/repository/index")
    states = {one["name"]: (one.get("state"), one.get("reason", "")) for one in models}
    assert states["preprocessing"] == ("READY", "")
    assert states["tensorrt_llm"][0] == "UNAVAILABLE"
    assert "kv_cache_bytes" in states["tensorrt_llm"][1]
    ids = {"input_ids": [5], "input_lengths": 1, "request_output_len": 1}
    assert generate(server, "tensorrt_llm", **ids).status == 404
    assert engine_pids(server) == []
    with pytest.raises(RuntimeError, match="exit code 1"):
        start(broken)


@pytest.mark.full
def test_damaged_engine_directory_is_told_by_the_engine(
    start: Start, engine_dir: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(engine_dir, damaged)
    weights = next(damaged.glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xff" * 8)
    with pytest.raises(RuntimeError, match="exit code 1"):
        start(engine=damaged)
    said = (tmp_path / "log0").read_text(errors="replace")
    assert f"{weights.name}: expected SHA-256" in said


@pytest.mark.full
def test_unload_and_reload_return_everything(start: Start) -> None:
    server = start("--model_control_mode=explicit", "--load_model=ensemble")
    text = generate(server, "ensemble", **ASKED).text()

    def usage() -> tuple[int, int, int]:
        pids = descendants(server.pid)
        descriptors = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                descriptors += len(os.listdir(f"/proc/{pid}/fd"))
        return len(pids), descriptors, len(regions(server))

    def reload() -> None:
        for action in ("unload", "load"):
            body = {"parameters": {"unload_dependents": True}} if action == "unload" else {}
            status, answer = post(server, f"/v2/repository/models/ensemble/{action}", body)
            assert status == 200, answer
            if action == "unload":
                wait_until(lambda: engine_pids(server) == [], "the engine's end")
        assert generate(server, "ensemble", **ASKED).text() == text

    reload()
    wait_until_idle(server)
    before = usage()  # a connection that is being closed may still count
    for _ in range(3):
        reload()
    wait_until_idle(server)
    more: list[int] = []

    def is_no_more() -> bool:
        more[:] = [now - then for now, then in zip(usage(), before, strict=True)]
        return max(more) <= 0

    with contextlib.suppress(AssertionError):  # the next line says what is left
        wait_until(is_no_more, "no more use than before")
    assert max(more) <= 0, f"processes, descriptors, regions: {more} more than {before}"


@pytest.mark.full
def test_model_loaded_anew_over_a_running_one_answers_and_keeps_its_figures(start: Start) -> None:
    server = start("--model_control_mode=explicit", "--load_model=tensorrt_llm")
    ids = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 3, "end_id": -1}
    (engine,) = engine_pids(server)
    for num_done in (1, 2):
        assert generate(server, "tensorrt_llm", **ids).error is None
        wait_until(
            lambda: figure(server, "looptrt_requests_total", '"length"') == num_done,  # noqa: B023
            "the count of answers",
        )
        assert post(server, "/v2/repository/models/ensemble/load")[0] == 200
        wait_until(lambda: engine not in engine_pids(server), "the first engine's end")
    assert generate(server, "ensemble", **ASKED).error is None
    wait_until(lambda: figure(server, "looptrt_engine_up") == 1, "the new engine's figure")


@pytest.mark.full
def test_engine_that_is_killed_fails_its_requests_once_and_reloads(start: Start) -> None:
    server = start(
        "--model_control_mode=explicit", "--load_model=ensemble", "--load_model=tensorrt_llm_bls"
    )
    (engine,) = engine_pids(server)
    values = {"text_input": "a prompt", "max_tokens": 110, "end_id": -1, "stream": True}
    models = ("ensemble", "tensorrt_llm_bls")
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(grpc_stream(server)) for _ in models]
        for model, stream in zip(models, streams, strict=True):
            stream.ask(model, arrays(model, **values))
        for stream in streams:
            assert stream.next()[2] is None
        os.kill(engine, signal.SIGKILL)
        of_ensemble, of_bls = (stream.reply() for stream in streams)
    assert of_ensemble.error is not None
    assert "killed by SIGKILL" in of_ensemble.error
    # Server 2.51 gives a model no error that follows a response of another one.
    assert of_bls.error == "the engine's answer has no end"
    late = generate(server, "tensorrt_llm_bls", **ASKED)
    assert late.status >= 400
    assert late.error is not None
    assert "SIGKILL" in late.error
    wait_until(
        lambda: (
            ("looptrt_engine_up", 0.0)
            in {(name.partition("{")[0], value) for name, value in server.figures().items()}
        ),
        "the figure of a dead engine",
    )
    assert post(server, "/v2/repository/models/tensorrt_llm/unload")[0] == 200
    wait_until(lambda: engine_pids(server) == [], "the end of the model")
    assert post(server, "/v2/repository/models/tensorrt_llm/load")[0] == 200
    assert generate(server, "tensorrt_llm_bls", **ASKED).error is None


@pytest.mark.full
def test_options_of_the_text_models_do_what_they_say(start: Start, llm: LLM) -> None:
    server = start("--bls_max_requests=1", "--accumulate_tokens", "--no-exclude_input_in_output")
    text = llm.generate(["a prompt"], SamplingParams(max_tokens=5))[0].outputs[0].text
    assert generate(server, "ensemble", **ASKED).text() == f"a prompt{text}"
    grown = ask_grpc(server, "tensorrt_llm_bls", **ASKED, stream=True)
    pieces = [response["text_output"].item().decode() for response in grown.responses]
    assert pieces[-1] == text
    assert all(later.startswith(before) for before, later in itertools.pairwise(pieces))
    long = {"text_input": "a prompt", "max_tokens": 110, "end_id": -1, "stream": True}
    with grpc_stream(server) as stream:
        stream.ask("tensorrt_llm_bls", arrays("tensorrt_llm_bls", **long))
        assert stream.next()[2] is None
        refused = generate(server, "tensorrt_llm_bls", **ASKED)
        assert refused.error == "bls_max_requests 1 are being carried"
    wait_until(
        lambda: generate(server, "tensorrt_llm_bls", **ASKED).error is None,
        "room for another request",
    )


@pytest.mark.full
def test_signal_lets_running_requests_end_and_leaves_nothing(start: Start, llm: LLM) -> None:
    server = start()
    assert regions(server)
    values = {"text_input": "a prompt", "max_tokens": 110, "end_id": -1}
    whole = llm.generate(["a prompt"], SamplingParams(max_tokens=110, ignore_eos=True))
    below = descendants(server.pid)
    with grpc_stream(server) as stream:
        stream.ask("ensemble", arrays("ensemble", **values, stream=True))
        first, _, error = stream.next()
        assert error is None
        os.kill(server.pid, signal.SIGTERM)
        reply = stream.reply()
    assert first is not None
    assert first["text_output"].item().decode() + reply.text() == whole[0].outputs[0].text
    wait_until(lambda: not is_running(server.pid), "the server's end")
    wait_until(lambda: not any(map(is_running, below)), "the end of all that it started")
    assert regions(server) == set()


@pytest.mark.full
def test_server_ends_with_a_launcher_that_is_killed(start: Start) -> None:
    server = start()
    below = descendants(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, below)), "the end of all that it started")


@pytest.mark.full
def test_64_streams_with_cancels_and_dropped_connections_disturb_nobody(
    start: Start, llm: LLM
) -> None:
    server = start()
    texts = []
    for seed in range(16):
        params = SamplingParams(max_tokens=30, temperature=1.0, seed=seed)
        texts.append(llm.generate([f"prompt {seed}"], params)[0].outputs[0].text)
    faults: list[str] = []

    def run(number: int) -> None:
        try:
            _one_of_64(server, number, texts)
        except Exception as error:  # noqa: BLE001 - told by the main thread
            faults.append(f"{number}: {type(error).__name__}: {error}")

    for _ in range(3):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert faults == []
    wait_until_idle(server)
    assert "Traceback" not in server.log.read_text(errors="replace")
    assert generate(server, "tensorrt_llm_bls", **ASKED).error is None


def _one_of_64(server: RunningServer, number: int, texts: list[str]) -> None:
    """A request to either text model; half of them are cancelled or dropped on the way."""
    model = ("ensemble", "tensorrt_llm_bls")[number // 4 % 2]
    seed = number % 16
    values = {"text_input": f"prompt {seed}", "temperature": 1.0, "seed": seed}
    long = {**values, "max_tokens": 100, "end_id": -1, "stream": True}
    match number % 4:
        case 0:
            with grpc_stream(server) as stream:
                stream.ask(model, arrays(model, **long))
                for _ in range(number % 7):
                    _, is_final, error = stream.next()
                    assert error is None
                    if is_final:
                        break
        case 1:
            with opened_stream(server, model, **long) as response:
                for _ in range(number % 5):
                    response.readline()
        case way:
            reply = ask_grpc(server, model, **values, max_tokens=30, stream=way == 2)
            assert (reply.error, reply.num_final) == (None, 1)
            assert reply.text() == texts[seed]


@pytest.mark.full
def test_engine_directory_without_a_tokenizer_serves_ids_alone(
    start: Start, engine_dir: Path, tmp_path: Path, llm: LLM
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(engine_dir, bare)
    _forget_tokenizer(bare)
    server = start(engine=bare)
    _, models = post(server, "/v2/repository/index")
    assert [one["name"] for one in models] == ["tensorrt_llm"]
    values = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 3, "streaming": True}
    reply = generate_stream(server, "tensorrt_llm", **values)
    whole = llm.generate([[5, 6]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids
    assert [one for got in reply.responses for one in np.ravel(got["output_ids"])] == whole


def _forget_tokenizer(directory: Path) -> None:
    """Take the tokenizer out of an engine directory and of its manifest."""
    config = json.loads((directory / "config.json").read_text())
    names = [name for name in config["looptrt"]["files"] if "token" in name or "chat" in name]
    for name in names:
        del config["looptrt"]["files"][name]
        (directory / name).unlink()
    config["looptrt"]["checksum"] = _checksum(config)
    (directory / "config.json").write_text(json.dumps(config))
    Manifest.load(directory)


def test_taken_port_is_told_before_anything_starts(engine_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = subprocess.run(
            [LOOPTRT, "triton", f"--engine_dir={engine_dir}", f"--http_port={port}"],
            capture_output=True,
            encoding="utf-8",
            timeout=60,
        )
    assert run.returncode == 2
    assert f"http_port: cannot listen on 127.0.0.1:{port}" in run.stderr
