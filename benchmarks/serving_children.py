"""What benchmarks/serving.py does in processes of their own.

Each function but `in_child` runs in such a process and imports what only it needs.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from looptrt.bench.offline import OfflineEngine
from looptrt.bench.workload import random_prompts
from looptrt.errors import LooptrtError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.sampling_params import SamplingParams

_TIMEOUT_S = 540.0
# For the engine; what is measured beside it needs memory too.
_POOL_SHARE = 0.5


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


def graph_and_step(engine_dir: Path, count: int, prompt_tokens: int) -> dict[str, float]:
    """Median milliseconds of an engine's decode steps, and of the same graph back to back."""
    import torch  # noqa: PLC0415 - in the child alone
    from data_movement import fill  # noqa: PLC0415

    from kernels import steady  # noqa: PLC0415

    window = 64
    core = EngineCore(
        engine_dir, EngineConfig(device="cuda", kv_cache_free_gpu_memory_fraction=_POOL_SHARE)
    )
    fill(core, count, prompt_tokens, window)
    times = []
    for _ in range(window):
        begin_s = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin_s)
    torch.cuda.synchronize()
    # The graph that ran last, on its last inputs: it writes what it wrote before.
    graphs = core.executor._graphs.cache._graphs
    graph = graphs[next(reversed(graphs))]
    graph_ms = statistics.median(steady(graph.replay, repeats=4, in_a_row=20)) / 1e3
    core.close()
    return {"graph_ms": graph_ms, "step_ms": 1e3 * statistics.median(times)}
