"""What Triton costs on top of the Python API: time to first token and throughput, in one run.

The same prompts at the same number of streams through the Python API (the engine in its own
process), `tensorrt_llm` and `ensemble` over streaming gRPC, and generate_stream over HTTP.
Closed loop: each stream asks its next prompt when the last one is answered, so that throughput
shows; there a way in that is longer by any time misses the next step of the engine, and waits a
whole one. Open loop: requests arrive at the same random times for every way, at a share of the
round's own rate of the Python API at 32 streams; there times to the first token are compared at the
same load. The ways take turns, in another order each round. A way is compared with the Python API
of the same round, as machines change their pace; the first round is left out, the figures are
medians of the others.

    python benchmarks/triton_overhead.py [--out benchmarks/results/triton.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from looptrt import LLM, SamplingParams  # noqa: E402
from looptrt.bench.results import source_commit  # noqa: E402
from looptrt.runtime.config import EngineConfig  # noqa: E402
from looptrt.runtime.triton.server_env import SERVER_REQUIREMENT  # noqa: E402
from running_server import RunningServer, running_server  # noqa: E402 - found by the line above

PROMPT = "n=5;a=0;y=s;m=7;f=2;s=m;p=y;t=y;?mft>"
NEW_TOKENS = 32
LOADS = {1: 6, 8: 32, 32: 128}  # streams, and requests of a round
SHARES = {0.25: 48, 0.5: 96}  # of the Python API's rate, and requests of a round
CLOSED = {f"{load} streams": load for load in LOADS}
FULL = f"{max(LOADS)} streams"
OPEN = {f"{share:.0%} of the rate": share for share in SHARES}
TIMEOUT_S = 120.0
STAMPS = ("arrival_time_ns", "first_token_time_ns")
INFER_RESPONSE = b"\x12"  # what a response that is no error begins with
MAX_TTFT_MORE_S = 0.005
MIN_THROUGHPUT_SHARE = 0.9


@dataclass(frozen=True)
class EngineTimes:
    """Seconds of CLOCK_MONOTONIC at which a request came to the engine and got its first token."""

    arrival_s: float
    first_token_s: float


# A request: yields when something of the answer has come, at its end the engine's times.
Ask = Callable[[int], AsyncIterator[EngineTimes | None]]


@dataclass(frozen=True)
class Answered:
    """One request: time to its first token, and how much of that was spent on the way.

    Attributes:
        in_s: from the caller to the engine's queue.
        out_s: from the end of the engine's step with the first token to the caller.
    """

    ttft_s: float
    in_s: float
    out_s: float


@dataclass(frozen=True)
class Round:
    """One way at one load: medians over the requests.

    Attributes:
        ttft_s, in_s, out_s: see `Answered`; the rest of the first is the engine's.
        tokens_per_s: of all streams together.
    """

    ttft_s: float
    in_s: float
    out_s: float
    tokens_per_s: float


async def run_round(ask: Ask, num_streams: int, num_requests: int) -> Round:
    """Closed loop: each stream takes the next prompt until none is left."""
    numbers = iter(range(num_requests))
    answered: list[Answered] = []

    async def stream() -> None:
        for number in numbers:
            answered.append(await answer(ask, number))

    return await timed([stream() for _ in range(num_streams)], answered)


async def run_open_round(ask: Ask, arrivals_s: Sequence[float]) -> Round:
    """Open loop: requests arrive at these times, whatever became of the ones before."""
    answered: list[Answered] = []

    async def arrive(number: int, at_s: float) -> None:
        await asyncio.sleep(at_s)
        answered.append(await answer(ask, number))

    return await timed([arrive(*one) for one in enumerate(arrivals_s)], answered)


async def answer(ask: Ask, number: int) -> Answered:
    """Run one request."""
    start_s = time.monotonic()
    first_s = times = None
    async for of_engine in ask(number):
        first_s = first_s or time.monotonic()
        times = times or of_engine
    assert first_s is not None
    assert times is not None
    return Answered(first_s - start_s, times.arrival_s - start_s, first_s - times.first_token_s)


async def timed(work: Sequence[Coroutine[Any, Any, None]], answered: list[Answered]) -> Round:
    """Run streams side by side; `answered` is what they fill."""
    start_s = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*work)
    wall_s = time.monotonic() - start_s
    return Round(
        ttft_s=statistics.median(one.ttft_s for one in answered),
        in_s=statistics.median(one.in_s for one in answered),
        out_s=statistics.median(one.out_s for one in answered),
        tokens_per_s=len(answered) * NEW_TOKENS / wall_s,
    )


def arrivals(num_requests: int, rate: float) -> list[float]:
    """Seconds at which requests of a Poisson process arrive, always the same ones."""
    gaps = np.random.default_rng(0).exponential(1 / rate, num_requests)
    return np.cumsum(gaps).tolist()


# ---- the ways


def of_python(llm: LLM, prompt_ids: Sequence[int]) -> Ask:
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)

    async def ask(_number: int) -> AsyncIterator[EngineTimes | None]:
        async for output in llm.generate_async(list(prompt_ids), params):
            metrics = output.metrics
            if metrics is None:
                yield None
                continue
            assert output.outputs[0].num_tokens == NEW_TOKENS
            assert metrics.first_token_s is not None
            yield EngineTimes(metrics.arrival_s, metrics.first_token_s)

    return ask


def of_grpc(channel: grpc.aio.Channel, request: service_pb2.ModelInferRequest) -> Ask:
    """Responses stay bytes, as with the other ways: the load must not be the client's."""
    call = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
    )

    async def ask(_number: int) -> AsyncIterator[EngineTimes | None]:
        async for response in call(iter([request]), timeout=TIMEOUT_S):
            if not response.startswith(INFER_RESPONSE):
                raise RuntimeError(service_pb2.ModelStreamInferResponse.FromString(response))
            yield times_of(response) if b"finish_reason" in response else None

    return ask


def times_of(response: bytes) -> EngineTimes:
    """The times in the last response of a gRPC stream."""
    answer = service_pb2.ModelStreamInferResponse.FromString(response).infer_response
    raw = zip(answer.outputs, answer.raw_output_contents, strict=True)
    outputs = {tensor.name: content for tensor, content in raw}
    assert outputs["finish_reason"].endswith(b"length")
    stamps = (int.from_bytes(outputs[name], "little", signed=True) for name in STAMPS)
    return EngineTimes(*(stamp / 1e9 for stamp in stamps))


def of_http(address: str, body: Mapping[str, Any]) -> Ask:
    host, _, port = address.partition(":")
    payload = json.dumps(body).encode()
    head = f"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: {address}\r\n"
    head += f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"

    async def ask(_number: int) -> AsyncIterator[EngineTimes | None]:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + payload)
        times = None
        while times is None and (line := await reader.readline()):
            if not line.startswith(b"data: "):
                continue
            if b'"finish_reason":"length"' in line:
                last = json.loads(line.removeprefix(b"data: "))
                times = EngineTimes(*(last[name] / 1e9 for name in STAMPS))
            yield times
        writer.close()

    return ask


def request_of(
    model: str, inputs: Mapping[str, tuple[str, Any]], outputs: Sequence[str]
) -> service_pb2.ModelInferRequest:
    """A gRPC request, made once and sent many times."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, (datatype, value) in inputs.items():
        array = np.atleast_2d(np.array(value))
        tensor = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        field = {"BYTES": "bytes", "BOOL": "bool", "INT32": "int"}[datatype] + "_contents"
        getattr(tensor.contents, field).extend(array.reshape(-1).tolist())
    for name in outputs:
        request.outputs.add(name=name)
    return request


def ways_of(
    llm: LLM, server: RunningServer, channel: grpc.aio.Channel, prompt_ids: Sequence[int]
) -> dict[str, Ask]:
    ids = {
        "input_ids": ("INT32", prompt_ids),
        "input_lengths": ("INT32", len(prompt_ids)),
        "request_output_len": ("INT32", NEW_TOKENS),
        "end_id": ("INT32", -1),
        "streaming": ("BOOL", True),
        "return_perf_metrics": ("BOOL", True),
    }
    text = {
        "text_input": ("BYTES", PROMPT.encode()),
        "max_tokens": ("INT32", NEW_TOKENS),
        "end_id": ("INT32", -1),
        "stream": ("BOOL", True),
        "return_perf_metrics": ("BOOL", True),
    }
    ends = ("finish_reason", *STAMPS)
    outputs = (*ends, "output_ids"), (*ends, "text_output")
    body = {
        **{"text_input": PROMPT, "max_tokens": NEW_TOKENS, "end_id": -1, "stream": True},
        "return_perf_metrics": True,
    }
    return {
        "python": of_python(llm, prompt_ids),
        "tensorrt_llm": of_grpc(channel, request_of("tensorrt_llm", ids, outputs[0])),
        "ensemble": of_grpc(channel, request_of("ensemble", text, outputs[1])),
        "generate_stream": of_http(server.http, body),
    }


# ---- the run

Rounds = dict[str, dict[str, list[Round]]]


async def measure(llm: LLM, server: RunningServer, num_rounds: int, loads: Sequence[str]) -> Rounds:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        ways = ways_of(llm, server, channel, tokenizer.encode(PROMPT))
        rounds: Rounds = {way: {load: [] for load in loads} for way in ways}
        for number in range(num_rounds):
            # Whoever comes after whom changes too, not only who comes first.
            first = number // 2 % len(ways)
            order = [*ways, *ways][first : first + len(ways)][:: -1 if number % 2 else 1]
            for load in rounds["python"]:
                for way in order:
                    ask = ways[way]
                    if load in CLOSED:
                        streams = CLOSED[load]
                        result = await run_round(ask, streams, LOADS[streams])
                    else:
                        full = rounds["python"][FULL][-1].tokens_per_s / NEW_TOKENS
                        share = OPEN[load]
                        at_s = arrivals(SHARES[share], share * full)
                        result = await run_open_round(ask, at_s)
                    rounds[way][load].append(result)
                    print(f"round {number}, {load:15}, {way:15}: {shown(result)}", flush=True)
    return rounds


def shown(result: Round) -> str:
    ttft_ms, in_ms, out_ms = (s * 1e3 for s in (result.ttft_s, result.in_s, result.out_s))
    ttft = f"TTFT {ttft_ms:6.2f} ms (in {in_ms:5.2f}, out {out_ms:5.2f})"
    return f"{ttft}, {result.tokens_per_s:7.1f} tokens/s"


def summary(rounds: Rounds) -> dict[str, Any]:
    """Medians without the first round, and what each way costs over the Python API."""
    return {
        way: {
            load: {**medians(results[1:]), **costs(results[1:], rounds["python"][load][1:])}
            for load, results in loads.items()
        }
        for way, loads in rounds.items()
    }


def medians(results: Sequence[Round]) -> dict[str, float]:
    """Of every figure, times in milliseconds."""
    ttft_s, in_s, out_s, tokens_per_s = (
        statistics.median(getattr(one, field.name) for one in results) for field in fields(Round)
    )
    times = {"ttft_ms": ttft_s, "in_ms": in_s, "out_ms": out_s}
    in_ms = {name: round(seconds * 1e3, 2) for name, seconds in times.items()}
    return {**in_ms, "tokens_per_s": round(tokens_per_s, 1)}


def costs(results: Sequence[Round], of_python: Sequence[Round]) -> dict[str, Any]:
    """Against the Python API of the same round: medians, and all rounds' differences."""
    pairs = list(zip(results, of_python, strict=True))
    more_ms = [round((one.ttft_s - other.ttft_s) * 1e3, 2) for one, other in pairs]
    shares = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
    return {
        "ttft_more_ms": round(statistics.median(more_ms), 2),
        "ttft_more_ms_of_rounds": more_ms,
        "throughput_share": round(statistics.median(shares), 3),
        "throughput_share_of_rounds": [round(share, 3) for share in shares],
    }


def misses(figures: Mapping[str, Any]) -> list[str]:
    """Targets that were not met: time to first token at the same load, throughput at the largest.

    One stream is the same load for all, and so are the open loops.
    """
    missed = []
    for way in ("tensorrt_llm", "ensemble"):
        for load in ("1 streams", *OPEN):
            if load not in figures[way]:
                continue
            more_ms = figures[way][load]["ttft_more_ms"]
            if more_ms > MAX_TTFT_MORE_S * 1e3:
                missed.append(f"{way}, {load}: TTFT {more_ms} ms more")
        share = figures[way][FULL]["throughput_share"]
        if share < MIN_THROUGHPUT_SHARE:
            missed.append(f"{way}, {FULL}: {share:.0%} of the throughput")
    return missed


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine_dir", type=Path, default=ROOT / "out" / "tiny-ouro")
    parser.add_argument("--rounds", type=int, default=8, help="the first is left out")
    parser.add_argument(
        "--without", default="", help=f"loads to leave out, of {', '.join((*CLOSED, *OPEN))}"
    )
    parser.add_argument("--commit", help="of the tree; default: git says")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "triton.json")
    args = parser.parse_args()
    left_out = [name.strip() for name in args.without.split(",") if name.strip()]
    if unknown := set(left_out) - {*CLOSED, *OPEN}:
        parser.error(f"--without: there is no load {', '.join(sorted(unknown))}")
    if args.rounds < 2:
        parser.error(f"--rounds: expected at least 2, got {args.rounds}: the first is left out")
    loads = [load for load in (*CLOSED, *OPEN) if load not in left_out]
    if FULL not in loads:
        parser.error(f"--without: {FULL} gives the rate of the others")
    load_before, num_cpus = os.getloadavg(), len(os.sched_getaffinity(0))
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        flags = ("--num_threads", "1", "--log_level", "warning")
        with (
            running_server(args.engine_dir, log, *flags) as server,
            LLM(args.engine_dir, EngineConfig(num_threads=1)) as llm,
        ):
            rounds = asyncio.run(measure(llm, server, args.rounds, loads))
    figures = summary(rounds)
    result = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": args.commit or source_commit(),
        "machine": f"{cpu_model()}, {num_cpus} CPUs, shared by client, server and engine",
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "tritonclient": version("tritonclient"),
            "grpcio": version("grpcio"),
            "server": SERVER_REQUIREMENT,
        },
        "engine": args.engine_dir.name,
        "new_tokens": NEW_TOKENS,
        "requests_of_a_round": {
            **dict(zip(CLOSED, LOADS.values(), strict=True)),
            **dict(zip(OPEN, SHARES.values(), strict=True)),
        },
        "rounds": args.rounds,
        "figures": figures,
        "missed_targets": misses(figures),
    }
    text = json.dumps(result, indent=2)
    print(text)
    args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
