"""Servers that are short of something: shared memory, or speed in the last model of an ensemble."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams
from running_server import RunningServer, running_server
from tests.support.scripted import is_running, wait_until
from tests.triton.clients import (
    arrays,
    ask_grpc,
    figure,
    generate,
    grpc_stream,
    post,
    wait_until_idle,
)

ASKED = {"text_input": "a prompt", "max_tokens": 5}
LONG = {"text_input": "a prompt", "max_tokens": 110, "end_id": -1, "stream": True}
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
PREFIX = "looptrt_shortage_"
SHM_BYTES = 6 * 2**20  # the first regions of four models, and two steps of growth
EXIT_TIMEOUT_S = 120  # twice what a test waits for a server's end
SLOW_S = 0.02

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("server_env")]


def shared_bytes(server: RunningServer) -> int:
    """What the server holds in its own /dev/shm."""
    (child, *_) = psutil.Process(server.pid).children()
    regions = Path(f"/proc/{child.pid}/root/dev/shm").glob(f"{PREFIX}*")
    return sum(region.stat().st_blocks * 512 for region in regions)


def answer(llm: LLM, max_tokens: int) -> str:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return llm.generate(["a prompt"], params)[0].outputs[0].text


@pytest.fixture
def in_small_memory() -> tuple[str, ...]:
    """What gives a command a /dev/shm of its own, with hardly any room."""
    mount = f'mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm && exec "$@"'
    inside = ("unshare", "--mount", "sh", "-c", mount, "sh")
    tried: subprocess.CompletedProcess[bytes] | None = None
    with contextlib.suppress(OSError):
        tried = subprocess.run([*inside, "true"], capture_output=True, timeout=10)
    if tried is None or tried.returncode:
        pytest.skip("needs a mount namespace, which this machine does not allow")
    return inside


def test_request_beyond_shared_memory_fails_alone_and_the_server_ends_in_time(
    engine_dir: Path, tmp_path: Path, in_small_memory: tuple[str, ...], llm: LLM
) -> None:
    flags = (f"--shm_prefix={PREFIX}", "--num_threads=1", f"--exit_timeout_s={EXIT_TIMEOUT_S}")
    with running_server(engine_dir, tmp_path / "log", *flags, inside=in_small_memory) as server:
        before = shared_bytes(server)
        for model in TEXT_MODELS:
            with grpc_stream(server) as stream:
                stream.ask(model, arrays(model, **LONG))
                first, _, error = stream.next()
                assert error is None
                assert first is not None
                for _ in range(3):
                    beyond = ask_grpc(server, model, text_input="a" * 3_000_000, max_tokens=1)
                    assert beyond.error is not None
                    assert "shared memory" in beyond.error
                    assert (beyond.responses, beyond.num_final) == ([], 1)
                rest = stream.reply()
            assert rest.error is None
            assert first["text_output"].item().decode() + rest.text() == answer(llm, 110)
            for other in TEXT_MODELS:
                assert generate(server, other, **ASKED).text() == answer(llm, 5)
        wait_until_idle(server)
        assert shared_bytes(server) == before <= SHM_BYTES
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: not is_running(server.pid), "the server's end")
    assert not list(Path("/dev/shm").glob(f"{PREFIX}*"))


def test_slow_last_model_of_an_ensemble_holds_back_its_callers_and_no_memory(
    engine_dir: Path, tmp_path: Path, llm: LLM
) -> None:
    flags = ("--num_threads=1", "--model_control_mode=explicit", "--load_model=preprocessing")
    prefix = f"--shm_prefix={PREFIX}"
    with running_server(engine_dir, tmp_path / "log", *flags, prefix) as server:
        _slow_down(server)
        status, reason = post(server, "/v2/repository/models/ensemble/load")
        assert status == 200, reason
        text = answer(llm, 110)
        assert ask_grpc(server, "ensemble", **LONG).text() == text  # memory has its size
        shm_bytes, rss_bytes = shared_bytes(server), _rss_bytes(server)
        with contextlib.ExitStack() as open_streams:
            streams = [open_streams.enter_context(grpc_stream(server)) for _ in range(4)]
            for stream in streams:
                stream.ask("ensemble", arrays("ensemble", **LONG))
            wait_until(lambda: _num_done(server) == 5, "the engine's end of all answers")
            assert sum(stream.num_left() for stream in streams) < 4 * 110  # it is ahead
            assert shared_bytes(server) <= shm_bytes + 2**20
            # At most max_seq_len responses a request wait, of a kilobyte or two each.
            assert _rss_bytes(server) <= rss_bytes + 32 * 2**20
            replies = [stream.reply() for stream in streams]
        assert [(one.text(), one.error, one.num_final) for one in replies] == [(text, None, 1)] * 4
        wait_until_idle(server)


def _slow_down(server: RunningServer) -> None:
    """Make `postprocessing` of a server's own repository slow, before it is loaded."""
    words = [
        word
        for process in psutil.Process(server.pid).children(recursive=True)
        for word in process.cmdline()
    ]
    (loaded,) = {Path(word) for word in words if word.endswith("/preprocessing/1/model.py")}
    model = loaded.parents[2] / "postprocessing" / "1" / "model.py"
    call = "return self._model.execute(requests)"
    fast = model.read_text()
    assert call in fast
    model.write_text(fast.replace(call, f"__import__('time').sleep({SLOW_S}); {call}"))


def _num_done(server: RunningServer) -> float | None:
    return figure(server, "looptrt_requests_total", 'finish_reason="length"')


def _rss_bytes(server: RunningServer) -> int:
    processes = psutil.Process(server.pid).children(recursive=True)
    return int(sum(process.memory_info().rss for process in processes))
