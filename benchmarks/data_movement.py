"""What moves for each output token while an engine decodes: copies, waits, copy kernels.

Fills an engine of this process with requests, waits until their prompts are in, and counts in a
window of decode steps what torch.profiler sees: host-device copies and their bytes, pageable
ones, calls that block the host, kernels that only move or cast, kernels, launches and event
records. What a step reads and writes in host memory that the GPU maps is no copy of the driver's:
it counts with the kernels that move. One arm without CUDA graphs, one with them. Prints a table;
figures go to a JSON file.

Run: python benchmarks/data_movement.py ENGINE_DIR [--out data_movement.json] [--requests 1,32]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from looptrt.bench.results import machine, markdown_table, write_json
from looptrt.bench.workload import random_prompts
from looptrt.errors import LooptrtError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.request import FinishReason, Request

ARMS: dict[str, dict[str, Any]] = {"no graphs": {"cuda_graphs": "off"}, "default": {}}
_MOST_STEPS = 2000
_SETTLING_STEPS = 8
WINDOW = "the steps that are counted"  # a range in the trace
# Device kernels that move or convert elements and compute nothing.
_COPIES = re.compile(r"copy|CatArray|cast|convert|compact|indexSelect|gather", re.IGNORECASE)
_BLOCKING = re.compile(r"(cuda|cu)(Stream|Event|Device|Ctx)Synchronize|cudaMemcpy$")
_LAUNCHES = re.compile(r"^(cuda|cu)(LaunchKernel|GraphLaunch|LaunchCooperativeKernel)")
_RECORDS = re.compile(r"^(cuda|cu)EventRecord")
_HEADERS = (
    *("arm", "requests", "tokens", "H2D", "D2H", "D2H bytes", "D2D", "pageable", "waits"),
    *("copy kernels", "kernels", "launches", "records"),
)


def counted(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Totals of a profiler's trace; of calls, those within its range `WINDOW`.

    Args:
        events: `traceEvents` of a Chrome trace that torch.profiler wrote.
    """
    totals: Counter[str] = Counter(waits=0)
    events = list(events)
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind == "gpu_memcpy":
            _count_copy(totals, name, int(event.get("args", {}).get("bytes", 0)))
        elif kind == "kernel":
            totals["kernels"] += 1
            totals["copy_kernels"] += bool(_COPIES.search(name))
    for name in (str(event.get("name")) for event in calls(events)):
        totals["waits"] += bool(_BLOCKING.search(name))
        totals["launches"] += bool(_LAUNCHES.match(name))
        totals["records"] += bool(_RECORDS.match(name))
    return dict(totals)


def calls(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """CUDA calls within a trace's range `WINDOW`."""
    (window,) = [
        event
        for event in events
        if (event.get("cat"), event.get("name")) == ("user_annotation", WINDOW)
    ]
    return [
        event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and 0 <= event["ts"] - window["ts"] <= window["dur"]
    ]


def _count_copy(totals: Counter[str], name: str, num_bytes: int) -> None:
    for direction in ("HtoD", "DtoH", "DtoD"):
        if direction in name:
            totals[direction] += 1
            totals[f"{direction}_bytes"] += num_bytes
    totals["pageable"] += "Pageable" in name


def profiled(core: EngineCore, count: int, window: int, prompt_tokens: int) -> dict[str, Any]:
    """Counts of a window of decode steps of `count` requests."""
    fill(core, count, prompt_tokens, window)
    events, tokens = traced(core, window)
    totals = counted(events)
    if not totals.get("kernels"):
        sys.exit("data_movement: torch.profiler saw no kernel; CUPTI does not work here")
    names = (event["name"] for event in events if event.get("cat") == "kernel")
    for request_id in range(count):
        core.abort_request(request_id, FinishReason.ABORT)
    while core.has_work():
        core.step()
    return {
        "requests": count,
        "steps": window,
        "tokens": tokens,
        "totals": totals,
        "per_token": {name: value / tokens for name, value in totals.items()},
        "kernel_names": dict(Counter(names).most_common(40)),
    }


def traced(core: EngineCore, window: int) -> tuple[list[dict[str, Any]], int]:
    """`traceEvents` of a window of steps, whose calls lie within its range `WINDOW`; their tokens.

    What the GPU still did at the start for the step before is in it too.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    tokens = 0
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function(WINDOW):
            for _ in range(window):
                tokens += len(core.step().token_ids)
        torch.cuda.synchronize()  # so that all kernels are in the trace
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return json.loads(trace.read_text(encoding="utf-8"))["traceEvents"], tokens


def queue(core: EngineCore, count: int, prompt_tokens: int, new_tokens: int, seed: int) -> None:
    """Queue requests 0 to count - 1 with random prompts, for answers of a fixed length."""
    loops, vocab_size = core.manifest.layout.max_loops, core.manifest.spec.vocab_size
    for request_id, prompt in enumerate(random_prompts(count, prompt_tokens, vocab_size, seed)):
        core.add_request(
            Request(
                request_id=request_id,
                prompt=np.array(prompt, np.int32),
                max_new_tokens=new_tokens,
                stop_token_ids=(),
                loops=loops,
                prefill_loops=loops,
            )
        )


def fill(core: EngineCore, count: int, prompt_tokens: int, window: int) -> None:
    """Queue requests and step until all of them decode, and their graphs are captured."""
    # Those that come first decode while the others' prompts run.
    queue(core, count, prompt_tokens, window + 2 * _SETTLING_STEPS + count, count)
    settled = 0
    for _ in range(_MOST_STEPS):
        settled = settled + 1 if len(core.step().token_ids) == count else 0
        if settled == _SETTLING_STEPS:
            return
    sys.exit(f"data_movement: {count} requests never decoded together in {_MOST_STEPS} steps")


def measure(
    engine_dir: Path, counts: list[int], window: int, prompt_tokens: int, commit: str | None
) -> dict[str, Any]:
    """Both arms at every number of requests."""
    arms: dict[str, Any] = {}
    for name, settings in ARMS.items():
        config = EngineConfig(device="cuda", kv_cache_free_gpu_memory_fraction=0.5, **settings)
        core = EngineCore(engine_dir, config)
        try:
            cells = [profiled(core, count, window, prompt_tokens) for count in counts]
        finally:
            core.close()
        arms[name] = {"config": settings, "cells": cells}
        torch.cuda.empty_cache()
    return {
        "machine": machine(commit),
        "engine": core.manifest.fingerprint,
        "architecture": core.manifest.spec.architecture,
        "prompt_tokens": prompt_tokens,
        "arms": arms,
    }


def table(result: dict[str, Any]) -> str:
    """The counts per output token, as Markdown."""
    rows = []
    for name, arm in result["arms"].items():
        for cell in arm["cells"]:
            of = cell["per_token"]
            shown = ("HtoD", "DtoH", "DtoH_bytes", "DtoD", "pageable", "waits", "copy_kernels")
            figures = [of.get(key, 0.0) for key in (*shown, "kernels", "launches", "records")]
            head = [name, str(cell["requests"]), str(cell["tokens"])]
            rows.append(head + [f"{figure:,.2f}" for figure in figures])
    return markdown_table(_HEADERS, rows)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--requests", default="1,32", help="comma-separated (default: 1,32)")
    parser.add_argument("--window", type=int, default=16, help="steps counted (default: 16)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="(default: 512)")
    parser.add_argument("--commit", help="recorded where git cannot tell it")
    options = parser.parse_args()
    counts = [int(count) for count in options.requests.split(",")]
    try:
        result = measure(
            options.engine_dir, counts, options.window, options.prompt_tokens, options.commit
        )
    except LooptrtError as error:
        sys.exit(f"data_movement: {error}")
    print(table(result), end="")
    if options.out:
        write_json(result, options.out)


if __name__ == "__main__":
    main()
