"""From how many rows on a step of prompts gains nothing from being a CUDA graph.

Two engines of one process run the same prompts, packed into one step of R rows, by turns: one
replays steps of any size as graphs, one launches every kernel. Times are of whole steps, with
their scheduling and their tokens. Beside them is when the host had launched all of a step but the
choice of its tokens: about the whole time where the GPU waits for launches, and also where it is
so far behind that its queue is full. A graph is timed at its own size, its best case: steps in
between are filled up, above 1,024 rows by a third at most. Prints a table; figures go to a JSON
file.

Run: python benchmarks/graph_rows.py Ouro-1.4B --workdir DIR [--out graph_rows.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import serving

from looptrt.bench.results import machine, markdown_table, write_json
from looptrt.bench.workload import random_prompts
from looptrt.errors import LooptrtError
from looptrt.manifest import Manifest
from looptrt.runtime.config import MAX_GRAPH_ROWS, EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.padding import PACKED_SIZES
from looptrt.runtime.request import Request

ROWS = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PROMPT_TOKENS = 512
# A launched step may be this much slower than the graph before the graph is worth having.
SLACK = 1.02
_POOL_SHARE = 0.3
_MOST_REQUESTS = 32
_MOST_REPEATS = 9
_LEAST_REPEATS = 2  # of those that count
_HEADERS = ("rows", "graph, ms", "launched, ms", "all launched after, ms", "launched / graph")


@dataclass
class StepClock:
    """An engine, and the times of its steps in milliseconds.

    Attributes:
        is_graph: whether its steps are graphs.
        steps: whole steps.
        launches: from a step's start until its sampler was called, all else being enqueued;
            nothing of a graph.
    """

    core: EngineCore
    is_graph: bool
    steps: list[float] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    _sampled_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        sampler = self.core.executor.sampler
        sample: Callable[..., Any] = sampler.sample

        def noting(*arguments: Any) -> Any:  # noqa: ANN401 - of the sampler's own
            self._sampled_s = time.perf_counter()
            return sample(*arguments)

        sampler.sample = noting  # type: ignore[method-assign]

    def run(self, prompts: Sequence[Sequence[int]]) -> None:
        """Time the one step that answers each prompt with one token.

        Raises:
            LooptrtError: it was no single step, or did not run as it should.
        """
        core, loops = self.core, self.core.manifest.layout.max_loops
        for request_id, prompt in enumerate(prompts):
            core.add_request(
                Request(
                    request_id=request_id,
                    prompt=np.array(prompt, np.int32),
                    max_new_tokens=1,
                    stop_token_ids=(),
                    loops=loops,
                    prefill_loops=loops,
                )
            )
        hits, self._sampled_s = self._graph_hits(), None
        begin_s = time.perf_counter()
        num_tokens = len(core.step().token_ids)
        end_s = time.perf_counter()
        ran_graph = self._graph_hits() > hits and self._sampled_s is None
        if num_tokens != len(prompts) or core.has_work():
            raise LooptrtError(f"{len(prompts)} prompts gave {num_tokens} tokens in one step")
        if ran_graph != self.is_graph:
            kinds = {True: "one graph", False: "launched"}
            raise LooptrtError(
                f"a step of {sum(map(len, prompts))} rows: expected {kinds[self.is_graph]}, "
                f"ran {kinds[ran_graph]}"
            )
        self.steps.append(1e3 * (end_s - begin_s))
        if self._sampled_s is not None:
            self.launches.append(1e3 * (self._sampled_s - begin_s))

    def _graph_hits(self) -> float:
        return self.core.stats().get("graph_hits", 0)


def timed(clocks: Sequence[StepClock], rows: int, budget_s: float) -> dict[str, Any]:
    """Times of a step of that many rows in both engines, by turns, the first of each dropped.

    Args:
        clocks: that of graphs, then the other.
        rows: of the step.
        budget_s: seconds after which the fewest repeats are enough.
    """
    vocab_size = clocks[0].core.manifest.spec.vocab_size
    end_s = time.perf_counter() + budget_s
    for clock in clocks:
        clock.steps.clear()
        clock.launches.clear()
    for repeat in range(_MOST_REPEATS + 1):
        if repeat > _LEAST_REPEATS and time.perf_counter() > end_s:
            break
        full, rest = divmod(rows, PROMPT_TOKENS)
        prompts = random_prompts(full, PROMPT_TOKENS, vocab_size, rows, repeat)
        prompts += random_prompts(int(rest > 0), rest, vocab_size, rows, repeat, "rest")
        for clock in clocks if repeat % 2 == 0 else reversed(clocks):
            clock.run(prompts)
    graph, launched = (clock.steps[1:] for clock in clocks)
    return {
        "rows": rows,
        "graph_ms": statistics.median(graph),
        "launched_ms": statistics.median(launched),
        "host_ms": statistics.median(clocks[1].launches[1:]),
        "repeats": {"graph_ms": graph, "launched_ms": launched},
    }


def threshold(cells: Sequence[Mapping[str, Any]]) -> int | None:
    """The fewest measured rows from which on no graph is faster by more than `SLACK`."""
    found = None
    for cell in sorted(cells, key=lambda cell: cell["rows"], reverse=True):
        if cell["launched_ms"] > SLACK * cell["graph_ms"]:
            break
        found = cell["rows"]
    return found


def measure(
    engine_dir: Path,
    rows: Sequence[int],
    commit: str | None,
    budget_s: float,
    **config: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Times at every number of rows that the engine takes.

    Args:
        engine_dir: written by `looptrt build`.
        rows: of steps; those above the engine's limit are left out.
        commit: see `machine`.
        budget_s: see `timed`.
        config: settings of both engines.

    Raises:
        LooptrtError: a step did not run as it should, or all of them are too large.
    """
    manifest = Manifest.load(engine_dir)
    possible = [count for count in rows if count <= manifest.limits.max_num_tokens]
    if not possible:
        raise LooptrtError(f"a step has at most {manifest.limits.max_num_tokens} rows")
    settings = {
        "kv_cache_free_gpu_memory_fraction": _POOL_SHARE,
        "max_batch_size": min(_MOST_REQUESTS, manifest.limits.max_batch_size),
        "enable_prefix_cache": False,
        **config,
    }
    clocks = []
    try:
        for is_graph in (True, False):
            mode = {"max_graph_rows": MAX_GRAPH_ROWS} if is_graph else {"cuda_graphs": "off"}
            core = EngineCore(engine_dir, EngineConfig(**{**settings, **mode}))
            clocks.append(StepClock(core, is_graph))
        cells = [timed(clocks, count, budget_s) for count in possible]
        graphs = clocks[0].core.stats()
    finally:
        for clock in clocks:
            clock.core.close()
    return {
        "format": 1,
        "kind": "graph_rows",
        "machine": machine(commit),
        "engine": manifest.fingerprint,
        "architecture": manifest.spec.architecture,
        "prompt_tokens": PROMPT_TOKENS,
        "slack": SLACK,
        "graph_captures": graphs["graph_captures"],
        "graph_capture_s": graphs["graph_capture_s"],
        "cells": cells,
        "threshold_rows": threshold(cells),
    }


def table(result: Mapping[str, Any]) -> str:
    """The times as Markdown, and what follows from them."""
    lines = []
    for cell in result["cells"]:
        graph, launched = cell["graph_ms"], cell["launched_ms"]
        times = [f"{value:.2f}" for value in (graph, launched, cell["host_ms"])]
        lines.append([f"{cell['rows']:,}", *times, f"{launched / graph:.3f}"])
    rows = result["threshold_rows"]
    if rows is None:
        told = "Graphs were faster at the largest step."
    else:
        told = f"Graphs gained at most {100 * (SLACK - 1):.0f} % from {rows:,} rows on."
    return f"{markdown_table(_HEADERS, lines)}\n{told}\n"


def _engine_dir(options: argparse.Namespace) -> Path:
    if options.engine in serving.MODELS:
        if options.workdir is None:
            sys.exit(f"graph_rows: {options.engine}: name the --workdir of its engine directory")
        options.workdir.mkdir(parents=True, exist_ok=True)
        return serving.Bench(options.workdir, False, 3, options.commit).engine_dir(options.engine)
    return Path(options.engine)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ", ".join(serving.MODELS)
    parser.add_argument("engine", help=f"an engine directory, or a model to build: {models}")
    parser.add_argument("--workdir", type=Path, help="where benchmarks/serving.py builds models")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument(
        "--rows", default=",".join(map(str, ROWS)), help="of steps; sizes of graphs"
    )
    parser.add_argument("--budget-s", type=float, default=1.5, help="of each size (default: 1.5)")
    parser.add_argument("--commit", help="recorded where git cannot tell it")
    options = parser.parse_args()
    rows = sorted({int(count) for count in options.rows.split(",")})
    if unknown := [count for count in rows if count not in PACKED_SIZES]:
        parser.error(f"--rows: {unknown}: expected some of {PACKED_SIZES}")
    try:
        engine_dir = _engine_dir(options)
        result = measure(engine_dir, rows, options.commit, options.budget_s, device="cuda")
    except LooptrtError as error:
        sys.exit(f"graph_rows: {error}")
    if options.out:
        write_json(result, options.out)
    print(table(result), end="")


if __name__ == "__main__":
    main()
