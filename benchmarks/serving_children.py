"""What benchmarks/serving.py does in processes of their own.

Each function but `in_child` runs in such a process, and its parts in one or in tests; they import
what only they need.
"""

from __future__ import annotations

import multiprocessing
import re
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from data_movement import calls, fill, queue, traced

from looptrt.bench.latency import StepClock
from looptrt.bench.offline import OfflineEngine
from looptrt.bench.workload import random_prompts
from looptrt.errors import LooptrtError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.step_plan import StepPlan, StepResult

_TIMEOUT_S = 540.0
# For the engine; what is measured beside it needs memory too.
_POOL_SHARE = 0.5
_BOUNDARIES = 32  # between two steps, in a measurement
_PROFILER_SETTLES = 4  # steps that may wait for a profiler that has just begun
_GRAPH_LAUNCH = re.compile(r"^(cuda|cu)GraphLaunch")
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def in_child(work: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """Run in a process of its own, whose memory and switches end with it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_TIMEOUT_S):
            raise LooptrtError(f"{work.__name__}: no result within {_TIMEOUT_S:g} s")
        error, result = ours.recv()
    except EOFError:
        raise LooptrtError(f"{work.__name__}: its process died") from None
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise LooptrtError(f"{work.__name__}: {error}")
    return result


def _child(connection: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:  # noqa: ANN401
    try:
        connection.send((None, work(*arguments)))
    except Exception as error:  # noqa: BLE001 - the parent tells it
        traceback.print_exc()
        connection.send((f"{type(error).__name__}: {error}", None))


def limits(batches: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Copy bandwidth, and for {model: batches} the matrix products of a decode step alone."""
    import torch  # noqa: PLC0415 - in the child alone

    from decode_step import CONFIGS, DecodeStep, products_of  # noqa: PLC0415
    from kernels import copy_bandwidth, graph_of, steady  # noqa: PLC0415
    from looptrt.plugins import launch  # noqa: PLC0415

    launch.load()
    gemm_ms: dict[str, dict[int, float]] = {}
    weight_bytes: dict[str, int] = {}
    for model, counts in batches.items():
        parse, config = CONFIGS["Huginn-0125" if model.startswith("Huginn") else "Ouro-1.4B"]
        if model == "Ouro-2.6B":
            config = config | {"num_hidden_layers": 48}
        built = None
        gemm_ms[model] = {}
        for count in counts:
            device = torch.device("cuda", 0)
            step = DecodeStep(parse(config, model), count, device, kv_length=32, model=built)
            built = step.model
            graph = graph_of(products_of(step))
            gemm_ms[model][count] = statistics.median(steady(graph.replay)) / 1e3
            del step, graph
        weight_bytes[model] = _weight_bytes_per_token(built)
        del built
        torch.cuda.empty_cache()
    speed = copy_bandwidth()
    return {
        "copy_gb_per_s": speed,
        "gemm_ms": gemm_ms,
        "weight_bytes_per_token": weight_bytes,
        "weights_over_bandwidth_ms": {
            model: num_bytes / speed / 1e6 for model, num_bytes in weight_bytes.items()
        },
    }


def _weight_bytes_per_token(model: Any) -> int:  # noqa: ANN401
    """Bytes of weights that one token reads: the core's in every loop."""
    core, coda, prelude = (
        sum(tensor.nbytes for tensor in part.parameters())
        for part in (model.core, model.coda, model.prelude.layers)
    )
    return core * model.spec.num_loops + coda + prelude


def plain(shape: str, batch: int, prompt_tokens: int, output_tokens: int) -> dict[str, float]:
    """A model of plain compiled PyTorch; see `plain_looped.measure`."""
    import plain_looped  # noqa: PLC0415 - in the child alone

    found: dict[str, float] = plain_looped.measure(
        getattr(plain_looped, shape), batch, prompt_tokens, output_tokens
    )
    return found


def exact_answers(engine_dir: Path, total: int, fused: bool) -> list[tuple[int, ...]]:
    """Token ids of `total` answers in batches of 32, by the kernels or PyTorch's operators."""
    config = EngineConfig(
        device="cuda",
        fused_kernels=fused,
        skinny_linear_rows=0,
        kv_cache_free_gpu_memory_fraction=_POOL_SHARE,
    )
    engine = OfflineEngine(engine_dir, config)
    params = [SamplingParams(max_tokens=32, ignore_eos=True)] * 32
    answers: list[tuple[int, ...]] = []
    for begin in range(0, total, 32):
        prompts = random_prompts(32, 128, engine.manifest.spec.vocab_size, "exact", begin)
        run = engine.answer(prompts, params, 120.0).run
        if run.failed:
            raise LooptrtError(f"exact: {run.failed[0].error}")
        answers += [record.token_ids for record in run.records]
    engine.close()
    return answers


def between_graphs(
    engine_dir: Path, count: int, prompt_tokens: int, output_tokens: int, repeats: int
) -> dict[str, Any]:
    """Decode steps of an engine alone, and how long the GPU is idle between two of their graphs.

    torch.profiler makes steps longer, on the host and on the GPU, and may add to the gaps itself;
    whether the host keeps ahead of the GPU without it, `num_early` tells.

    Returns:
        step_ms: see `step_ms`.
        idle_us: see `idle_between`; with torch.profiler, the first boundaries left out.
        events_us, num_early: see `event_gaps`; without the profiler.
    """
    core = EngineCore(
        engine_dir, EngineConfig(device="cuda", kv_cache_free_gpu_memory_fraction=_POOL_SHARE)
    )
    try:
        own_ms = step_ms(core, count, prompt_tokens, output_tokens, repeats)
        num_traced = _PROFILER_SETTLES + _BOUNDARIES + 1
        fill(core, count, prompt_tokens, _BOUNDARIES + 1 + num_traced)
        events_us, num_early = event_gaps(core, _BOUNDARIES + 1)
        trace, _ = traced(core, num_traced)
    finally:
        core.close()
    idle_us = idle_between(trace, num_traced)[_PROFILER_SETTLES:]
    return {"step_ms": own_ms, "idle_us": idle_us, "events_us": events_us, "num_early": num_early}


def step_ms(
    core: EngineCore, count: int, prompt_tokens: int, output_tokens: int, repeats: int
) -> float:
    """Median milliseconds of a step, clocked as `latency.measure` does for the same lengths.

    The same lengths, because a step of 32 requests of Ouro-1.4B takes some 6 µs longer for each
    token by which they grow (results/attention.json).
    """
    medians = []
    for repeat in range(repeats + 1):
        clock = StepClock()
        queue(core, count, prompt_tokens, output_tokens, repeat)
        while core.has_work():
            clock(core.step())
        medians.append(statistics.median(clock.steady_intervals(count)))
    return 1e3 * statistics.median(medians[1:])


def event_gaps(core: EngineCore, steps: int) -> tuple[list[float], int]:
    """µs between CUDA events after a step's graph and before the next one's, of `steps` steps.

    Beside the events' own few µs a lower bound of the GPU's idle time: where it waits for a graph
    to be launched, the event before the graph comes earlier.

    Returns:
        The times, and how many graphs had been launched before the one before them ended. No
        host time is on the critical path of those.

    Raises:
        LooptrtError: a step was not one graph.
    """
    import torch  # noqa: PLC0415 - in the child alone

    executor, submit = core.executor, core.executor.submit
    marks: list[tuple[Any, Any]] = []
    num_early = 0

    def marking(plan: StepPlan) -> Callable[[], StepResult]:
        nonlocal num_early
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = submit(plan)
        end.record()
        num_early += bool(marks) and not marks[-1][1].query()
        marks.append((begin, end))
        return result

    hits = core.stats().get("graph_hits", 0)
    executor.submit = marking
    try:
        for _ in range(steps):
            core.step()
    finally:
        executor.submit = submit
    torch.cuda.synchronize()
    hits = core.stats().get("graph_hits", 0) - hits
    if not len(marks) == hits == steps:
        raise LooptrtError(
            f"{steps} steps: expected one graph each, got {len(marks)} plans and {hits} graphs"
        )
    return [1e3 * end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(marks)], num_early


def idle_between(events: Sequence[Mapping[str, Any]], steps: int) -> list[float]:
    """µs from the end of a graph's last kernel to the start of the next one's first, on the GPU.

    What ran between them counts as idle: it is in no graph.

    Args:
        events: of `data_movement.traced`. All that a graph runs has its launch's correlation.
        steps: that were traced, each of them the same graph.

    Returns:
        [steps - 1] in the order of the steps.

    Raises:
        LooptrtError: the trace has not the same kernels in one graph for each step, or its
            graphs do not follow one another.
    """
    graphs: dict[int, list[Mapping[str, Any]]] = {
        call["args"]["correlation"]: []
        for call in calls(events)
        if _GRAPH_LAUNCH.match(str(call.get("name")))
    }
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in _GPU_WORK and correlation in graphs:
            graphs[correlation].append(event)
    sizes = {len(graph) for graph in graphs.values()}
    if len(graphs) != steps or len(sizes) != 1 or 0 in sizes:
        raise LooptrtError(
            f"a trace of {steps} steps: expected a graph each, all of as many kernels, "
            f"got {len(graphs)} graphs of {sorted(sizes)} kernels"
        )
    spans = sorted(
        (min(event["ts"] for event in graph), max(event["ts"] + event["dur"] for event in graph))
        for graph in graphs.values()
    )
    gaps = [begin - end for (_, end), (begin, _) in pairwise(spans)]
    if statistics.median(gaps) <= 0:
        raise LooptrtError(f"a trace of {steps} steps: its graphs overlap, gaps of {gaps} µs")
    return gaps
