"""Thousands of mixed requests to a real Triton server: every one ends once, nothing grows.

Whole and streamed answers of `ensemble`, `tensorrt_llm_bls` and `tensorrt_llm` over gRPC and
HTTP, with random cancels, dropped connections, requests that are refused and answers with
log-probabilities of every token. Where the machine allows a mount namespace, the server's
/dev/shm has 64 MB. Shared memory, descriptors, threads, resident memory and KV units are read
after a warm-up, on the way and at the end, each time when nothing runs.

    python benchmarks/triton_soak.py [--requests 5000] [--out benchmarks/results/triton_soak.json]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import queue
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from looptrt import LLM, SamplingParams  # noqa: E402
from looptrt.runtime.triton.tensors import NUMPY_TYPES, DType  # noqa: E402
from running_server import RunningServer, running_server  # noqa: E402 - found by the line above
from triton_client import Question, generate  # noqa: E402

PROMPTS = ("n=5;a=0;y=s;m=7;f=2;s=m;p=y;t=y;?mft>", "n=5;m=7;f=2;?mfn>", "a=1;b=a;c=b;?abc>")
LOOPS = (2, 4)
MAX_TOKENS = 8
LONG_TOKENS = 96  # of answers with log-probabilities, which go on after their end
SHM_PREFIX = "looptrt_soak_"
SHM_LIMIT_BYTES = 64 * 2**20
SMALL_SHM = f'mount -t tmpfs -o size={SHM_LIMIT_BYTES} tmpfs /dev/shm && exec "$@"'
TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 30.0
MAX_FAULTS = 20  # then the rest of the requests is not sent

Result = Any  # tritonclient's have no types
Input = Any


@dataclass(frozen=True)
class Case:
    """A prompt at a depth, and the Python API's answer to it."""

    prompt: str
    prompt_ids: tuple[int, ...]
    loops: int
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """What the server holds while nothing runs.

    Attributes:
        num_requests: answered so far.
        shm_files: regions of the server's prefix.
        shm_bytes: memory behind them.
        rss_bytes: of the server, its models and the engine together.
        units_used: plane units that requests hold.
        units_cached: plane units that only the prefix cache holds.
    """

    num_requests: int
    shm_files: int
    shm_bytes: int
    num_fds: int
    num_threads: int
    rss_bytes: int
    units_used: int
    units_cached: int


@dataclass
class Report:
    """What was seen.

    Attributes:
        shm_limit_bytes: size of the server's /dev/shm, None for the machine's own.
        outcomes: requests by kind and how they ended.
        faults: what must not be; empty when all is well.
    """

    num_requests: int
    seed: int
    shm_limit_bytes: int | None
    wall_s: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    usage: list[Usage] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Stream:
    """A gRPC stream that counts the final responses of each of its requests."""

    def __init__(self, url: str) -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._inbox: queue.SimpleQueue[tuple[Result, InferenceServerException | None]] = (
            queue.SimpleQueue()
        )
        self._client.start_stream(
            lambda result, error: self._inbox.put((result, error)), stream_timeout=TIMEOUT_S
        )

    def ask(self, model: str, inputs: list[Input], request_id: str) -> None:
        self._client.async_stream_infer(
            model, inputs, request_id=request_id, enable_empty_final_response=True
        )

    def next(self) -> tuple[Result, bool]:
        """The next response and whether it is final; raises the server's error."""
        result, error = self._inbox.get(timeout=2 * TIMEOUT_S)
        if error is not None:
            raise error
        return result, result.get_response().parameters["triton_final_response"].bool_param

    def close(self, *, cancel: bool) -> list[str]:
        """End the stream; returns what still came of it."""
        # Without cancelling it waits until the server has closed its side.
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()
        late = []
        while not self._inbox.empty():
            result, error = self._inbox.get()
            late.append(str(error) if error is not None else str(result.get_response().id))
        return [] if cancel else late


class Soak:
    """The load on one server."""

    def __init__(self, server: RunningServer, cases: Sequence[Case], report: Report) -> None:
        self._server = server
        self._cases = cases
        self._report = report
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()

    def run(self, num_requests: int, num_workers: int, start: int) -> None:
        """Send requests `start` to `start + num_requests`."""
        with ThreadPoolExecutor(num_workers) as pool:
            for _ in pool.map(self._one, range(start, start + num_requests)):
                pass
        self._report.outcomes = dict(sorted(self._outcomes.items()))

    def _one(self, number: int) -> None:
        if len(self._report.faults) > MAX_FAULTS:
            return
        rng = random.Random(f"{self._report.seed}/{number}")
        kinds, weights = zip(*_KINDS, strict=True)
        (kind,) = rng.choices(kinds, weights)
        try:
            outcome = kind(self, rng, rng.choice(self._cases), f"soak-{number}")
        except Exception as error:  # noqa: BLE001 - all of them are told at the end
            self._fault(f"request {number}, {kind.__name__}: {type(error).__name__}: {error}")
            outcome = "fault"
        with self._lock:
            self._outcomes[f"{kind.__name__}: {outcome}"] += 1

    def _fault(self, text: str) -> None:
        with self._lock:
            self._report.faults.append(text)

    # ---- kinds of requests; each returns how it ended

    def grpc_text(self, rng: random.Random, case: Case, name: str) -> str:
        """A text model's answer over a gRPC stream, whole or piece by piece."""
        inputs = _text_inputs(case, MAX_TOKENS, stream=rng.random() < 0.5)
        pieces = self._whole(rng.choice(TEXT_MODELS), inputs, name)
        got = "".join(_text(piece) for piece in pieces)
        want = case.text
        if got != want:
            raise AssertionError(f"answer {got!r}, expected {want!r}")
        return "answered"

    def grpc_ids(self, rng: random.Random, case: Case, name: str) -> str:
        """The same of `tensorrt_llm`, in token ids."""
        inputs = _id_inputs(case, MAX_TOKENS, stream=rng.random() < 0.5)
        pieces = self._whole("tensorrt_llm", inputs, name)
        got = [int(one) for piece in pieces for one in piece.as_numpy("output_ids").flat]
        want = list(case.token_ids)
        if got != want:
            raise AssertionError(f"answer {got}, expected {want}")
        return "answered"

    def log_probs(self, _rng: random.Random, case: Case, name: str) -> str:
        """Eight long answers in one request, with a log-probability for every token."""
        inputs = _id_inputs(case, LONG_TOKENS, stream=False)
        inputs += [
            _tensor("end_id", "INT32", -1),
            _tensor("num_return_sequences", "INT32", 8),
            _tensor("return_log_probs", "BOOL", True),
        ]
        pieces = self._whole("tensorrt_llm", inputs, name)
        shapes = [piece.as_numpy("output_log_probs").shape for piece in pieces]
        if shapes != [(1, 1, LONG_TOKENS)] * 8:
            raise AssertionError(f"log-probabilities of shapes {shapes}")
        return "answered"

    def http(self, rng: random.Random, case: Case, _name: str) -> str:
        """A text model's answer by generate or generate_stream."""
        question = Question(case.prompt, {"max_tokens": MAX_TOKENS, "loops": case.loops})
        stream = rng.random() < 0.5
        model = rng.choice(TEXT_MODELS)
        pieces = generate(self._server.http, model, question, stream=stream, timeout_s=TIMEOUT_S)
        answer = list(pieces)
        got, want = "".join(piece.text for piece in answer), case.text
        ends = sum(piece.finish_reason is not None for piece in answer)
        if got != want or ends != 1:
            raise AssertionError(f"answer {got!r}, expected {want!r}; {ends} ends")
        return "answered"

    def refused(self, rng: random.Random, case: Case, name: str) -> str:
        """A request that the server must refuse."""
        bad = rng.choice(("max_tokens", "beam_width", "prompt", "loops"))
        if bad == "prompt":
            case = replace(case, prompt=case.prompt * 40)
        elif bad == "loops":
            case = replace(case, loops=99)
        inputs = _text_inputs(case, 0 if bad == "max_tokens" else MAX_TOKENS, stream=True)
        if bad == "beam_width":
            inputs.append(_tensor("beam_width", "INT32", 4))
        try:
            self._whole(rng.choice(TEXT_MODELS), inputs, name)
        except InferenceServerException as error:
            if bad not in str(error):
                raise
            return f"refused for its {bad}"
        raise AssertionError(f"{bad}: was answered")

    def cancelled(self, rng: random.Random, case: Case, name: str) -> str:
        """A gRPC stream that is cancelled at any time."""
        model = rng.choice((*TEXT_MODELS, "tensorrt_llm"))
        make = _id_inputs if model == "tensorrt_llm" else _text_inputs
        inputs = make(case, LONG_TOKENS, stream=True)
        inputs.append(_tensor("end_id", "INT32", -1))
        stream = Stream(self._server.grpc)
        try:
            stream.ask(model, inputs, name)
            for _ in range(rng.choice((0, 0, 1, 3, 20))):
                _, is_final = stream.next()
                if is_final:  # responses left slower than steps ended
                    break
        finally:
            stream.close(cancel=True)
        return "cancelled"

    def dropped(self, rng: random.Random, case: Case, _name: str) -> str:
        """A connection that is gone before its answer is done."""
        stream = rng.random() < 0.7
        body = {"text_input": case.prompt, "max_tokens": LONG_TOKENS, "loops": case.loops}
        body |= {"end_id": -1, "stream": stream}
        verb = "generate_stream" if stream else "generate"
        model = rng.choice(TEXT_MODELS)
        connection = http.client.HTTPConnection(self._server.http, timeout=TIMEOUT_S)
        connection.connect()
        sock = connection.sock
        connection.request("POST", f"/v2/models/{model}/{verb}", json.dumps(body))
        if stream and rng.random() < 0.7:
            with connection.getresponse() as response:
                for _ in range(rng.choice((1, 5))):
                    response.readline()
                _reset(sock)
        else:
            _reset(sock)
        connection.close()
        return "dropped"

    def _whole(self, model: str, inputs: list[Input], name: str) -> list[Result]:
        """All responses of a request that hold something; there is one final one, the last."""
        stream = Stream(self._server.grpc)
        pieces = []
        try:
            stream.ask(model, inputs, name)
            is_final = False
            while not is_final:
                result, is_final = stream.next()
                if result.get_response().id != name:
                    raise AssertionError(f"a response of {result.get_response().id}")
                if result.get_response().outputs:
                    pieces.append(result)
        finally:
            late = stream.close(cancel=False)
            if late:
                self._fault(f"{name}: after the final response came {late}")
        return pieces


TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
_Kind = Callable[[Soak, random.Random, Case, str], str]
_KINDS: tuple[tuple[_Kind, float], ...] = (
    (Soak.grpc_text, 26),
    (Soak.grpc_ids, 18),
    (Soak.http, 20),
    (Soak.log_probs, 2),
    (Soak.refused, 10),
    (Soak.cancelled, 14),
    (Soak.dropped, 10),
)


def soak(
    engine_dir: Path,
    num_requests: int,
    *,
    seed: int = 0,
    num_workers: int = 24,
    num_warm_up: int | None = None,
) -> Report:
    """Run it on a server of its own.

    Args:
        engine_dir: one of the trained tiny models.
        num_requests: all of them.
        seed: of the requests.
        num_workers: requests at a time.
        num_warm_up: the first requests, whose growth does not count; None is a tenth.
    """
    num_warm_up = num_warm_up or num_requests // 10
    inside = _small_shm()
    report = Report(num_requests, seed, SHM_LIMIT_BYTES if inside else None)
    cases = _cases(engine_dir)
    flags = ("--shm_prefix", SHM_PREFIX + f"{os.getpid()}_", "--log_level", "warning")
    flags += ("--kv_cache_bytes", str(32 * 2**20))
    start_s = time.monotonic()
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with running_server(engine_dir, log, *flags, inside=inside) as server:
            load = Soak(server, cases, report)
            rest = num_requests - num_warm_up
            begin = 0
            for count in (num_warm_up, rest // 2, rest - rest // 2):
                load.run(count, num_workers, begin)
                begin += count
                report.usage.append(_settled(server, begin, report))
        report.faults += _bad_lines(log)
    left = list(Path("/dev/shm").glob(f"{flags[1]}*"))
    report.faults += [f"left in shared memory: {left}"] if left else []
    report.wall_s = round(time.monotonic() - start_s, 1)
    report.faults += growth(report.usage)
    return report


def _cases(engine_dir: Path) -> list[Case]:
    cases = []
    with LLM(engine_dir) as llm:
        for loops in LOOPS:
            params = SamplingParams(max_tokens=MAX_TOKENS, loops=loops)
            for prompt, output in zip(PROMPTS, llm.generate(list(PROMPTS), params), strict=True):
                one, ids = output.outputs[0], tuple(output.prompt_token_ids)
                cases.append(Case(prompt, ids, loops, one.text, tuple(one.token_ids)))
    return cases


def _small_shm() -> tuple[str, ...]:
    """What gives a command a /dev/shm of 64 MB; empty where the machine does not allow it."""
    inside = ("unshare", "--mount", "sh", "-c", SMALL_SHM, "sh")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([*inside, "true"], check=True, capture_output=True, timeout=10)
        return inside
    return ()


def _settled(server: RunningServer, num_requests: int, report: Report) -> Usage:
    """The usage once nothing runs; what still runs after a while is a fault."""
    end_s = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        figures = server.figures()
        active = _figure(figures, "nv_trt_llm_request_metrics", 'request_type="active"')
        used = _figure(figures, "looptrt_kv_units", 'state="used"')
        cached = _figure(figures, "looptrt_kv_units", 'state="cached"')
        usage = _usage(server, num_requests, used, cached)
        if not active and not used:
            return usage
        if time.monotonic() > end_s:
            report.faults.append(f"{active} requests still run, {used} units are held")
            return usage
        time.sleep(0.3)


def _usage(server: RunningServer, num_requests: int, used: int, cached: int) -> Usage:
    root = psutil.Process(server.pid)
    processes = root.children(recursive=True)
    # The server's own view of /dev/shm, in its mount namespace.
    regions = list(Path(f"/proc/{processes[0].pid}/root/dev/shm").glob(f"{SHM_PREFIX}*"))
    return Usage(
        num_requests=num_requests,
        shm_files=len(regions),
        shm_bytes=sum(one.stat().st_blocks * 512 for one in regions),
        num_fds=sum(one.num_fds() for one in processes),
        num_threads=sum(one.num_threads() for one in processes),
        rss_bytes=sum(one.memory_info().rss for one in processes),
        units_used=used,
        units_cached=cached,
    )


def _figure(figures: dict[str, float], name: str, label: str) -> int:
    return int(sum(v for k, v in figures.items() if k.startswith(f"{name}{{") and label in k))


def growth(usage: Sequence[Usage]) -> Iterator[str]:
    """What has grown since the warm-up, beyond what caches and thread pools may."""
    first, last = usage[0], usage[-1]
    for name, slack in (
        ("shm_files", 0),
        ("shm_bytes", 2**20),
        ("num_fds", 8),
        ("num_threads", 32),  # pools of threads grow with the load that they have seen
        ("rss_bytes", 64 * 2**20),
        ("units_used", 0),
    ):
        before, after = getattr(first, name), getattr(last, name)
        if after > before + slack:
            yield f"{name} grew from {before:,} after the warm-up to {after:,}"


def _bad_lines(log: Path) -> list[str]:
    """Lines of the server's log that tell of a fault of ours."""
    words = ("Traceback", "looptrt", "deadlock", "Segmentation", "stub process")
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines[1:] if any(word in line for word in words)]


def _tensor(name: str, dtype: DType, value: object) -> Input:
    array = np.array([value] if isinstance(value, tuple) else [[value]], NUMPY_TYPES[dtype])
    tensor = grpcclient.InferInput(name, list(array.shape), dtype)
    tensor.set_data_from_numpy(array)
    return tensor


def _text_inputs(case: Case, max_tokens: int, *, stream: bool) -> list[Input]:
    return [
        _tensor("text_input", "BYTES", case.prompt.encode()),
        _tensor("max_tokens", "INT32", max_tokens),
        _tensor("loops", "INT32", case.loops),
        _tensor("stream", "BOOL", stream),
    ]


def _id_inputs(case: Case, max_tokens: int, *, stream: bool) -> list[Input]:
    return [
        _tensor("input_ids", "INT32", case.prompt_ids),
        _tensor("input_lengths", "INT32", len(case.prompt_ids)),
        _tensor("request_output_len", "INT32", max_tokens),
        _tensor("loops", "INT32", case.loops),
        _tensor("streaming", "BOOL", stream),
    ]


def _text(result: Result) -> str:
    return str(result.as_numpy("text_output").flat[0].decode())


def _reset(sock: socket.socket) -> None:
    """Drop a connection as a machine that has gone does: no polite end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine_dir", type=Path, default=ROOT / "out" / "tiny-huginn")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/triton_soak.json")
    args = parser.parse_args()
    report = soak(args.engine_dir, args.requests, seed=args.seed)
    result = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "load_average": os.getloadavg(),
        **asdict(report),
    }
    text = json.dumps(result, indent=2)
    print(text)
    args.out.write_text(text + "\n")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
