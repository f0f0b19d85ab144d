"""The launcher around programs that stand in for a server: commands, signals, leftovers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from looptrt.errors import LooptrtError
from looptrt.runtime.triton import launcher
from looptrt.runtime.triton.launcher import ServerOptions, check_ports, command_of, run_server
from looptrt.runtime.triton.server_env import TritonServer
from tests.support.scripted import DEADLINE_S, is_running, wait_until

OPTIONS = ServerOptions(shm_prefix="looptrt_test_", http_port=1, grpc_port=2, metrics_port=3)


def program(path: Path, text: str) -> TritonServer:
    """A server whose whole behaviour is a Python script."""
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    path.chmod(0o755)
    return TritonServer(path)


def test_command_has_what_the_options_say(tmp_path: Path) -> None:
    options = ServerOptions(
        host="127.0.0.2",
        shm_prefix="p_",
        log_level="warning",
        model_control_mode="explicit",
        load_models=("a", "b"),
        exit_on_error=False,
        exit_timeout_s=7,
        arguments=("--model-load-thread-count=1",),
    )
    server = TritonServer(Path("/bin/server"), backends=Path("/backends"))
    command = command_of(server, tmp_path, options)
    assert command[0] == "/bin/server"
    assert {
        f"--model-repository={tmp_path}",
        "--backend-directory=/backends",
        "--backend-config=python,shm-region-prefix-name=p_",
        "--http-address=127.0.0.2",
        "--grpc-address=127.0.0.2",
        "--metrics-address=127.0.0.2",
        "--http-port=8000",
        "--load-model=a",
        "--load-model=b",
        "--exit-on-error=false",
        "--exit-timeout-secs=7",
        "--log-warning=true",
        "--log-info=false",
        "--log-verbose=0",
        "--model-load-thread-count=1",
    } <= set(command)
    assert "--backend-directory" not in " ".join(
        command_of(TritonServer(Path("/bin/server")), tmp_path, options)
    )


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ((1, 1, 2), "expected three different ones"),
        ((0, 1, 2), "http_port: expected from 1 to 65535, got 0"),
        ((70000, 1, 2), "http_port: expected from 1 to 65535, got 70000"),
    ],
)
def test_impossible_ports_are_refused(ports: tuple[int, int, int], message: str) -> None:
    http, grpc, metrics = ports
    options = ServerOptions(shm_prefix="p", http_port=http, grpc_port=grpc, metrics_port=metrics)
    with pytest.raises(LooptrtError, match=message):
        check_ports(options)


def test_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ServerOptions(shm_prefix="p", http_port=port)
        with pytest.raises(LooptrtError, match=rf"http_port: cannot listen on 127.0.0.1:{port}"):
            check_ports(options)


def test_exit_code_is_the_servers_and_its_variables_come_first(tmp_path: Path) -> None:
    server = program(
        tmp_path / "server",
        """
        import os, sys
        assert os.environ["PATH"] == "/needed:/mine", os.environ["PATH"]
        assert os.environ["LD_LIBRARY_PATH"] == "/lib"
        sys.exit(7)
        """,
    )
    needed = {"PATH": "/needed", "LD_LIBRARY_PATH": "/lib"}
    server = TritonServer(server.binary, environment=needed)
    assert run_server(server, tmp_path / "models", OPTIONS, {"PATH": "/mine"}) == 7


def test_program_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LooptrtError, match="cannot be started"):
        run_server(TritonServer(tmp_path / "absent"), tmp_path, OPTIONS, {})


def test_regions_of_a_killed_server_are_removed_and_no_others(tmp_path: Path) -> None:
    prefix = f"looptrt_test_{os.getpid()}_"
    other = Path(f"/dev/shm/other_{os.getpid()}")
    other.touch()
    server = program(
        tmp_path / "server",
        f"""
        import os, pathlib, signal
        pathlib.Path("/dev/shm/{prefix}region").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    options = ServerOptions(shm_prefix=prefix)
    try:
        assert run_server(server, tmp_path, options, dict(os.environ)) == 128 + signal.SIGKILL  # noqa: TID251
        assert other.exists()
        assert not Path(f"/dev/shm/{prefix}region").exists()
    finally:
        other.unlink()


_LAUNCHER = """
import sys
from pathlib import Path
from looptrt.runtime.triton import launcher
from looptrt.runtime.triton.launcher import ServerOptions, run_server
from looptrt.runtime.triton.server_env import TritonServer
import os
launcher._STUCK_S = 4.0
options = ServerOptions(shm_prefix="looptrt_test_none_", exit_timeout_s=1,
    http_port=1, grpc_port=2, metrics_port=3)
sys.exit(run_server(TritonServer(Path(sys.argv[1])), Path(sys.argv[2]), options, dict(os.environ)))
"""


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    """A launcher in a process, the repository's path and the server's pid."""
    server = program(
        tmp_path / "server",
        f"""
        import os, pathlib, signal, subprocess, sys, time
        here = pathlib.Path({str(tmp_path)!r})
        def end(number, frame):
            draining = (here / "models.draining").exists()
            (here / "ended").write_text(f"{{number}} {{draining}}")
            if (here / "model").exists():
                subprocess.Popen(["sleep", "600"])
            elif not (here / "stubborn").exists():
                sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        (here / "pid.new").write_text(str(os.getpid()))
        (here / "pid.new").rename(here / "pid")
        while True:
            time.sleep(0.05)
        """,
    )
    command = [sys.executable, "-c", _LAUNCHER, str(server.binary), str(tmp_path / "models")]
    process = subprocess.Popen(command, encoding="utf-8")
    try:
        wait_until((tmp_path / "pid").exists, "the server's start")
        yield process, tmp_path, int((tmp_path / "pid").read_text())
    finally:
        process.kill()
        process.wait(DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_drains_and_then_ends_the_server_in_order(
    launched: tuple[subprocess.Popen[str], Path, int], number: int
) -> None:
    process, here, pid = launched
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == 0
    assert (here / "ended").read_text() == f"{int(signal.SIGTERM)} True"
    assert not is_running(pid)


def test_second_interrupt_ends_a_server_that_will_not(
    launched: tuple[subprocess.Popen[str], Path, int],
) -> None:
    process, here, pid = launched
    (here / "stubborn").touch()
    process.send_signal(signal.SIGINT)
    wait_until((here / "ended").exists, "the polite request")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert not is_running(pid)


def test_idle_server_whose_model_does_not_end_is_ended(
    launched: tuple[subprocess.Popen[str], Path, int],
) -> None:
    """After a shortage of shared memory server 2.51 sometimes waited out its whole timeout."""
    process, here, pid = launched
    (here / "model").touch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert (here / "ended").exists()
    assert not is_running(pid)


def test_server_ends_with_a_launcher_that_is_killed(
    launched: tuple[subprocess.Popen[str], Path, int],
) -> None:
    process, _, pid = launched
    process.kill()
    wait_until(lambda: not is_running(pid), "the server's end")


def test_activity_is_read_from_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        options = ServerOptions(host="0.0.0.0", shm_prefix="p", metrics_port=port)
        for value, expected in (("2", True), ("0", False)):
            lines.write_text(f'nv_trt_llm_request_metrics{{request_type="active"}} {value}\n')
            answer = subprocess.Popen(
                [sys.executable, "-c", _ANSWER, str(listening.fileno()), str(lines)],
                pass_fds=[listening.fileno()],
            )
            assert launcher._is_active(options) is expected
            assert answer.wait(DEADLINE_S) == 0
    assert not launcher._is_active(OPTIONS)


_ANSWER = """
import socket, sys
from pathlib import Path
with socket.socket(fileno=int(sys.argv[1])) as listening:
    connection, _ = listening.accept()
    with connection:
        connection.recv(10_000)
        body = Path(sys.argv[2]).read_text()
        head = f"HTTP/1.1 200 OK\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
        connection.sendall((head + body).encode())
"""
