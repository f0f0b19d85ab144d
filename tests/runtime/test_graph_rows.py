"""`max_graph_rows`: which steps are graphs, and what engines with large graphs answer.

Without a GPU all is the product's but for the stand-ins of `graphs_on_cpu`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import EngineError, PluginError
from looptrt.manifest import BuildLimits, Manifest
from looptrt.plugins import launch
from looptrt.runtime.config import MAX_GRAPH_ROWS, EngineConfig
from looptrt.runtime.device import scratch_bytes
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.executor.graph_cache import graphs_kept, memory_for
from looptrt.runtime.executor.step_graphs import StepGraphs
from looptrt.runtime.padding import StepShape, usual_shapes
from looptrt.runtime.pool_size import step_bytes
from tests.e2e.test_engine_oracle import MAKERS, engine_dirs, prompt_of
from tests.support.graphs_on_cpu import device, use_graphs_on_cpu
from tests.support.watched import LOOPS, Ask, Engine

__all__ = ["device"]

# 1,260 rows in one step; as few filling rows as max_seq_len bears on the CPU.
PROMPTS = [prompt_of(105, index) for index in range(12)]


@pytest.fixture(scope="module")
def engine_dir_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("graph_rows")
    return engine_dirs(root, max_batch_size=12, max_num_tokens=2048)


def answers(engine_dir: Path, asks: list[Ask], **config: object) -> tuple[list, dict]:
    """Tokens of every request, and the engine's figures at the end."""
    settings = {"kv_cache_bytes": 2**24, "cache_dir": str(engine_dir.parent / "cache"), **config}
    engine = Engine(engine_dir, **settings)
    tokens = engine.run(asks)
    stats = engine.core.stats()
    engine.core.close()
    return tokens, stats


@pytest.mark.parametrize(
    ("model", "prefill_loops"),
    [
        pytest.param("ouro", LOOPS, id="ouro_whole"),
        pytest.param("huginn", 2, id="huginn_parts"),
        pytest.param("huginn", LOOPS, id="huginn_whole", marks=pytest.mark.full),
        pytest.param("ouro", 2, id="ouro_parts", marks=pytest.mark.full),
    ],
)
def test_steps_up_to_the_limit_are_graphs_and_answers_stay(
    engine_dir_of: Callable[[str], Path], device: str, model: str, prefill_loops: int
) -> None:
    """Fails where a loop of many rows has no size, or filling rows touch others."""
    asks = [Ask(prompt, 3, prefill_loops=prefill_loops) for prompt in PROMPTS]
    expected, _ = answers(engine_dir_of(model), asks, device=device, cuda_graphs="off")
    for max_graph_rows, is_graph in ((2048, True), (1260, True), (1024, False)):
        settings = {"device": device, "max_graph_rows": max_graph_rows}
        tokens, stats = answers(engine_dir_of(model), asks, **settings)
        assert tokens == expected, max_graph_rows
        assert stats["graph_hits"] > 0
        if device == "cpu":  # on a GPU parts run without a graph the first time
            assert (stats["graph_eager_steps"] == 0) is is_graph


def test_the_largest_graphs_are_captured_first_and_the_steps_of_most_use_last(
    engine_dir_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller ones then lie in the largest one's memory, and the cache gives them up later."""
    use_graphs_on_cpu(monkeypatch)
    captured: list[StepShape] = []
    whole = StepGraphs._whole

    def noting(self: StepGraphs, shape: StepShape, num_loops: int, is_read: bool) -> Any:
        captured.append(shape)
        return whole(self, shape, num_loops, is_read)

    monkeypatch.setattr(StepGraphs, "_whole", noting)
    config = EngineConfig(device="cpu", kv_cache_bytes=2**24, max_graph_rows=1500)
    EngineCore(engine_dir_of("ouro"), config).close()
    assert captured == usual_shapes(12, 1536)[::-1]
    assert (captured[0].rows, captured[-1]) == (1536, StepShape(1, 1, 1))


@pytest.mark.parametrize(("slots", "rows", "more"), [(12, 1024, 0), (256, 8192, 3), (600, 1024, 2)])
def test_every_usual_step_is_captured_ahead_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, rows: int, more: int
) -> None:
    """Cut at 64 the large packed ones were captured while serving, in the place of others."""
    use_graphs_on_cpu(monkeypatch)
    limits = {"max_batch_size": slots, "max_num_tokens": 8192, "tokens_per_block": 8}
    MAKERS["ouro"](tmp_path / "c")
    build(BuildConfig(tmp_path / "c", tmp_path / "e", **limits))
    config = EngineConfig(device="cpu", kv_cache_bytes=2**24, max_graph_rows=rows)
    core = EngineCore(tmp_path / "e", config)
    graphs: Any = core.executor
    cache, num_usual = graphs._graphs.cache, len(usual_shapes(slots, rows))
    core.close()
    assert cache.counters.captures == num_usual
    assert num_usual >= 64 + more if more else num_usual < 48
    # Room for at least 16 of other depths, of read logits or of parts of steps.
    assert cache.max_graphs == max(64, num_usual + 16)


@pytest.mark.parametrize("rows", [0, -1, MAX_GRAPH_ROWS + 1, True, "1024", 1024.0, None])
def test_other_numbers_of_rows_are_refused(rows: object) -> None:
    with pytest.raises(EngineError, match="max_graph_rows: expected an integer from 1 to 8192"):
        EngineConfig(max_graph_rows=rows)  # type: ignore[arg-type]


def test_the_memory_of_graphs_is_reckoned_by_their_largest_size(
    engine_dir_of: Callable[[str], Path],
) -> None:
    manifest = Manifest.load(engine_dir_of("ouro"))

    def taken(rows: int) -> int:
        return step_bytes(manifest, EngineConfig(max_graph_rows=rows), manifest.limits)

    # Of 2,048 rows a step at most, and no more in a graph.
    assert taken(MAX_GRAPH_ROWS) == taken(2048) == taken(1600)
    row_bytes = (taken(2048) - taken(1024)) // 1024
    assert row_bytes > 0
    assert taken(1100) - taken(1024) == 256 * row_bytes
    # What is captured runs without a graph first, at the size that a step is filled up to.
    limits = dataclasses.replace(manifest.limits, max_num_tokens=2100)
    two = step_bytes(manifest, EngineConfig(max_graph_rows=2100), limits)
    assert two - taken(2048) == 2 * (2560 - 2048) * row_bytes


def test_every_graph_that_is_kept_is_reckoned(engine_dir_of: Callable[[str], Path]) -> None:
    manifest = Manifest.load(engine_dir_of("ouro"))

    def taken(slots: int, vocab_size: int) -> int:
        limits = dataclasses.replace(manifest.limits, max_batch_size=slots)
        spec = dataclasses.replace(manifest.spec, vocab_size=vocab_size)
        return step_bytes(dataclasses.replace(manifest, spec=spec), EngineConfig(), limits)

    samples = [taken(slots, 2) - taken(slots, 1) for slots in (12, 1024)]
    beside = [taken(slots, 1) - sample for slots, sample in zip((12, 1024), samples, strict=True)]
    kept = [graphs_kept(len(usual_shapes(slots, 1024))) for slots in (12, 1024)]
    assert kept == [64, 85]
    assert beside[1] - beside[0] == (85 - 64) * 4 * 2**20


@pytest.mark.parametrize("slots", [12, 129, 513])
def test_the_logits_of_filled_up_steps_are_reckoned(
    engine_dir_of: Callable[[str], Path], slots: int
) -> None:
    """A graph of 129 requests samples 513 rows: as many as it has room for."""
    manifest = Manifest.load(engine_dir_of("ouro"))
    limits = dataclasses.replace(manifest.limits, max_batch_size=slots)
    shapes = usual_shapes(slots, 1024)
    most = max(shape.samples for shape in shapes)

    def taken(vocab_size: int) -> int:
        spec = dataclasses.replace(manifest.spec, vocab_size=vocab_size)
        return step_bytes(dataclasses.replace(manifest, spec=spec), EngineConfig(), limits)

    # Twice in the model's dtype and in two copies of the logits', all float32 here.
    assert taken(2) - taken(1) >= 2 * most * 3 * 4


def test_the_scratch_of_attention_is_reckoned_for_steps_and_once_more_for_graphs(
    engine_dir_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its bound for (rows, sequences), here their product; graphs round both up."""
    monkeypatch.setattr(launch, "attention_workspace_bytes", lambda rows, seqs, *_: rows * seqs)
    manifest = Manifest.load(engine_dir_of("ouro"))
    limits = BuildLimits(
        max_batch_size=256, max_input_len=100, max_seq_len=100, max_num_tokens=2100
    )

    def scratch(**config: Any) -> int:
        return scratch_bytes(manifest, EngineConfig(**config), limits)

    of_step = 2100 * 256
    assert scratch(cuda_graphs="off") == of_step
    assert scratch(max_graph_rows=500) == of_step + 512 * 513
    # Its work runs once without a graph, and is larger than any step.
    assert scratch(max_graph_rows=2100) == 2 * 2560 * 513


@pytest.mark.parametrize(
    "shortage",
    [
        torch.OutOfMemoryError(),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        PluginError("fenced_rms_norm: cudaErrorMemoryAllocation: out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_without_memory_for_graphs_every_setting_that_would_help_is_named(
    monkeypatch: pytest.MonkeyPatch, shortage: Exception
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (5, 70))
    with (
        pytest.raises(EngineError, match=r"no memory for graphs: 5 of 70 bytes are free") as told,
        memory_for("graphs", torch.device("cuda", 0)),
    ):
        raise shortage
    settings = ("kv_cache_free_gpu_memory_fraction", "kv_cache_bytes", "max_graph_rows")
    assert all(name in str(told.value) for name in (*settings, "cuda_graphs to off"))


@pytest.mark.parametrize(
    "other", [RuntimeError("CUDA error: an illegal memory access"), KeyError()]
)
def test_another_error_than_a_shortage_stays_what_it_is(other: Exception) -> None:
    with pytest.raises(type(other)) as told, memory_for("graphs", torch.device("cuda", 0)):
        raise other
    assert told.value is other
