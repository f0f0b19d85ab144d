"""`looptrt triton` for as long as a block lasts, on free ports, with a deadline for everything.

Owns the child process and its log; leaves requests to its users, `demo.py` and the benchmarks.
Invariant: when the block is left, however it is left, the server has ended; it also ends when
this process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOPTRT = Path(sys.executable).with_name("looptrt")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0
_LOOK_S = 0.1
_CALL_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class RunningServer:
    """Where a server answers: host and port each.

    Attributes:
        pid: of `looptrt triton`; the server and its models are below it.
    """

    http: str
    grpc: str
    metrics: str
    pid: int
    log: Path

    def figures(self) -> dict[str, float]:
        """All figures of the metrics port, by name and labels as they are written there."""
        lines = _get(self.metrics, "/metrics").splitlines()
        parts = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in parts}


@contextmanager
def running_server(
    engine_dir: Path, log: Path, *flags: str, inside: Sequence[str] = ()
) -> Iterator[RunningServer]:
    """Start a server and wait until it is ready; end it with the block.

    Args:
        engine_dir: what it serves.
        log: file for what it says.
        flags: more of `looptrt triton`.
        inside: command that runs the command after it, such as `nice`.

    Raises:
        RuntimeError: it ended or is not ready in time; has the last lines of its log.
    """
    ports = _free_ports(3)
    names = ("--http_port", "--grpc_port", "--metrics_port")
    command = [*inside, str(LOOPTRT), "triton", f"--engine_dir={engine_dir}", *flags]
    command += [f"{name}={port}" for name, port in zip(names, ports, strict=True)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process, which ends the server in order
            preexec_fn=end_with_parent,
        )
        try:
            addresses = (f"127.0.0.1:{port}" for port in ports)
            server = RunningServer(*addresses, process.pid, log)
            _wait_until_ready(process, server)
            yield server
        finally:
            _stop(process)


def end_with_parent() -> None:
    """Have the kernel tell the child to end when this process is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(process: subprocess.Popen[bytes], server: RunningServer) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError, http.client.HTTPException):
            _get(server.http, "/v2/health/ready")
            return
        code = process.poll()
        if code is not None:
            raise RuntimeError(f"the server ended with exit code {code}: {_tail(server.log)}")
        time.sleep(_LOOK_S)
    raise RuntimeError(f"the server is not ready after {START_TIMEOUT_S:g} s: {_tail(server.log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel then ends the server, too
        process.wait()


def _get(address: str, path: str) -> str:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=_CALL_TIMEOUT_S)) as one:
        one.request("GET", path)
        response = one.getresponse()
        body = response.read().decode()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"{path}: status {response.status}")
        return body


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-5:])
