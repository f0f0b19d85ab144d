"""Runs a `tritonserver` on a model repository, in the foreground, from start to clean end.

Owns its command line, signals and what it leaves in shared memory; leaves the server to
`server_env` and the models to `repository`. Invariant: when `run_server` returns, the server
and all that it started have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import logging
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from looptrt.errors import LooptrtError
from looptrt.runtime.triton.server_env import TritonServer

_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1
_KILL_AFTER_S = 30.0  # beyond what the server itself allows running requests
_LOOK_S = 0.1
_IDLE_S = 0.6  # more than twice as old as figures can be
_STUCK_S = 10.0  # the same of a model from the one that ended before it; both were idle
_ALONE_S = 3.0  # far longer than a server takes from the end of its last model to its own
_METRICS_TIMEOUT_S = 2.0
_ANY_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_logger = logging.getLogger(__name__)

LOG_LEVELS = ("error", "warning", "info", "verbose")
CONTROL_MODES = ("none", "poll", "explicit")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the server runs.

    Attributes:
        shm_prefix: of its regions in shared memory; servers of one machine need different ones.
        load_models: loaded at the start in control mode `explicit`.
        exit_on_error: end when a model cannot be loaded, instead of serving the others.
        exit_timeout_s: how long running requests may go on after a signal.
        arguments: further arguments for the server.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    shm_prefix: str
    log_level: str = "info"
    model_control_mode: str = "none"
    load_models: tuple[str, ...] = ()
    exit_on_error: bool = True
    exit_timeout_s: int = 30
    arguments: tuple[str, ...] = ()


def check_ports(options: ServerOptions) -> None:
    """Try the ports before anything is started.

    Raises:
        LooptrtError: two are the same, or one is taken or may not be used.
    """
    ports = {
        "http_port": options.http_port,
        "grpc_port": options.grpc_port,
        "metrics_port": options.metrics_port,
    }
    if len(set(ports.values())) < len(ports):
        raise LooptrtError(f"ports: expected three different ones, got {[*ports.values()]}")
    for name, port in ports.items():
        if not 0 < port < 2**16:
            raise LooptrtError(f"{name}: expected from 1 to 65535, got {port}")
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                options.host, port, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind, protocol) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
        except OSError as error:
            raise LooptrtError(f"{name}: cannot listen on {options.host}:{port}: {error}") from None


def command_of(server: TritonServer, repository: Path, options: ServerOptions) -> list[str]:
    """The server's command line."""
    level = LOG_LEVELS.index(options.log_level)
    backends = [] if server.backends is None else [f"--backend-directory={server.backends}"]
    return [
        str(server.binary),
        f"--model-repository={repository}",
        *backends,
        f"--backend-config=python,shm-region-prefix-name={options.shm_prefix}",
        *(f"--{kind}-address={options.host}" for kind in ("http", "grpc", "metrics")),
        f"--http-port={options.http_port}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-port={options.metrics_port}",
        f"--model-control-mode={options.model_control_mode}",
        *(f"--load-model={name}" for name in options.load_models),
        f"--exit-on-error={'true' if options.exit_on_error else 'false'}",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        *(
            f"--log-{name}={'true' if level >= LOG_LEVELS.index(name) else 'false'}"
            for name in ("error", "warning", "info")
        ),
        f"--log-verbose={1 if options.log_level == 'verbose' else 0}",
        *options.arguments,
    ]


def run_server(
    server: TritonServer, repository: Path, options: ServerOptions, environment: Mapping[str, str]
) -> int:
    """Run the server until it ends; SIGTERM, SIGINT and SIGHUP make it drain and end.

    While it drains, new requests are refused; it is asked to end once none is active, at the
    latest after `exit_timeout_s`. A second Ctrl-C ends it at once.

    Args:
        server: from `find_server`.
        repository: directory of models.
        options: how it runs.
        environment: of the server, before what it needs itself.

    Returns:
        Its exit code; 128 and the signal's number if it was killed.

    Raises:
        LooptrtError: it cannot be started.
    """
    try:
        process = subprocess.Popen(
            command_of(server, repository, options),
            env=_merged(environment, server.environment or {}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            preexec_fn=_ender_of(os.getpid()),  # no thread runs yet
        )
    except OSError as error:
        raise LooptrtError(f"{server.binary}: cannot be started: {error}") from error
    try:
        with _counted_signals() as asked:
            code = _watch(process, asked, options, drain_file(repository))
    finally:
        _kill_group(process)
        process.wait()
        _remove_regions(options.shm_prefix)
    return code if code >= 0 else 128 - code


def drain_file(repository: Path) -> Path:
    """The file whose existence tells the models of a repository to take nothing new."""
    return repository.with_name(f"{repository.name}.draining")


def _watch(
    process: subprocess.Popen[bytes], asked: Counter[int], options: ServerOptions, draining: Path
) -> int:
    """Wait for the server's end, and bring it about once that was asked for.

    A server of 2.51 that gets a signal stops the models of an ensemble that are idle just then,
    and the ensemble's running requests hang; so it gets the signal when nothing runs. One that
    was short of shared memory has lost requests and waits for them to its timeout, with all its
    models ended or with one of them still there: where nothing ran and its processes have
    stopped ending, it is ended here.
    """
    end_s: float | None = None  # of draining, then of the server's own end
    idle_s = 0.0  # since when nothing is active
    others: frozenset[int] = frozenset()  # processes of its models
    changed_s = 0.0  # when they last became other ones
    is_told = is_idle = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)
        now_s = time.monotonic()
        if is_told:
            before, others = others, _others(process.pid)
            changed_s = changed_s if others == before else now_s
            still_s = now_s - changed_s
            if still_s > _ALONE_S and (not others or (is_idle and still_s > _STUCK_S)):
                _logger.warning("nothing runs and the server does not end; ending it")
                _kill_group(process)
                process.wait()
                return 0
        if asked[signal.SIGINT] > 1 or (is_told and end_s is not None and now_s > end_s):
            _logger.warning("ending the server at once")
            _kill_group(process)
            return process.wait()
        if not asked.total() or is_told:
            continue
        if end_s is None:
            draining.touch()
            end_s, idle_s = now_s + options.exit_timeout_s, now_s
        if _is_active(options):
            idle_s = now_s
        if now_s > end_s or now_s - idle_s >= _IDLE_S:
            process.send_signal(signal.SIGTERM)
            others, changed_s = _others(process.pid), now_s
            is_idle = now_s - idle_s >= _IDLE_S
            is_told, end_s = True, now_s + options.exit_timeout_s + _KILL_AFTER_S


def _others(group: int) -> frozenset[int]:
    """Members of a process group beside its leader that have not ended."""
    members = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, found, *_ = status.read_text().rpartition(")")[2].split()
            if int(found) == group and status.parent.name != str(group) and state != "Z":
                members.add(int(status.parent.name))
    return frozenset(members)


def _is_active(options: ServerOptions) -> bool:
    """Whether the engine has requests; False where the figures cannot be had."""
    host = _ANY_HOSTS.get(options.host, options.host)
    connection = http.client.HTTPConnection(host, options.metrics_port, timeout=_METRICS_TIMEOUT_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            return False
    return any(
        line.startswith("nv_trt_llm_request_metrics{")
        and 'request_type="active"' in line
        and float(line.rpartition(" ")[2]) > 0
        for line in text.splitlines()
    )


def _merged(environment: Mapping[str, str], needed: Mapping[str, str]) -> dict[str, str]:
    """Variables of both; what is needed goes in front of a search path."""
    merged = {**environment, **needed}
    for name in _SEARCH_PATHS:
        values = [where[name] for where in (needed, environment) if where.get(name)]
        if values:
            merged[name] = os.pathsep.join(values)
    return merged


def _ender_of(parent_pid: int) -> Callable[[], None]:
    """What makes the kernel end the server when this process is killed."""
    libc = ctypes.CDLL(None)

    def set_up() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it was killed before the line above
            os._exit(1)

    return set_up


@contextmanager
def _counted_signals() -> Iterator[Counter[int]]:
    """Count the signals that ask for the end, instead of ending."""
    asked: Counter[int] = Counter()

    def count(number: int, _frame: FrameType | None) -> None:
        asked[number] += 1

    before = {number: signal.signal(number, count) for number in _SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the server and the stubs it started, those that outlive it included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _remove_regions(prefix: str) -> None:
    """Remove what a killed server left in shared memory."""
    for region in _SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
