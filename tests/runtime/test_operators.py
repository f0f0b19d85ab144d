"""Operators of an engine: which are kernels, what a failed check replaces, and for whom."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from looptrt.bench import ladder, left_out
from looptrt.bench.changes import CHANGES
from looptrt.bench.ladder import Ladder, broken_promises
from looptrt.bench.offline import OfflineEngine
from looptrt.bench.setup import Setup
from looptrt.builder.build import BuildConfig, build
from looptrt.errors import EngineError
from looptrt.plugins import launch, reference
from looptrt.runtime import engine_core
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams
from tests.e2e.test_engine_oracle import Build, assert_all, engine_of, prompt_of
from tests.support.checkpoints import INTERMEDIATE, tiny_ouro
from tests.support.engines import Harness
from tests.support.gpu_on_cpu import counted, gpu_on_cpu
from tests.support.watched import Ask, Engine

__all__ = ["engine_of"]

CONFIG: dict[str, Any] = {"device": "cuda", "kv_cache_bytes": 2**22}
ASKS = [Ask(prompt_of(9), 4), Ask(prompt_of(5, 1), 4, prefill_loops=1)]
SILU, ATTENTION = "fenced_silu_mul", "packed_plane_attention"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    with gpu_on_cpu(monkeypatch) as counts:
        yield counts


def run(engine: Engine, launches: Counter[str]) -> tuple[list[list[int]], set[str]]:
    """Tokens of the same two requests, and the operators that were kernels meanwhile."""
    launches.clear()
    tokens = engine.run(ASKS)
    return tokens, {*launches}


@pytest.mark.parametrize("graphs", ["off", "loop", "step"])
@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["fused 1st", "fused 2nd"])
def test_engines_of_one_process_run_fused_or_not_as_each_was_asked(
    engine_of: Build, launches: Counter[str], graphs: str, order: tuple[bool, bool]
) -> None:
    """Fails where the newest engine's setting holds for all, or stays when it has closed."""
    engine_dir, _ = engine_of("ouro")
    config = {**CONFIG, "cuda_graphs": graphs}
    engines = {fused: Engine(engine_dir, **config, fused_kernels=fused) for fused in order}
    fused, unfused = engines[True], engines[False]
    tokens, kernels = run(fused, launches)
    assert {ATTENTION, SILU, "fenced_rope"} <= kernels
    for _ in range(2):
        assert run(unfused, launches) == (tokens, {ATTENTION})
        assert run(fused, launches) == (tokens, kernels)
    unfused.core.close()
    assert run(fused, launches) == (tokens, kernels)
    again = Engine(engine_dir, **config, fused_kernels=False)
    fused.core.close()
    assert run(again, launches) == (tokens, {ATTENTION})
    assert run(Engine(engine_dir, **config), launches) == (tokens, kernels)


def test_engines_on_two_threads_run_fused_or_not_at_the_same_time(
    engine_of: Build, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_dir, _ = engine_of("ouro")
    threads: dict[str, set[int]] = {SILU: set(), ATTENTION: set()}
    for name, seen in threads.items():
        kernel = launch.OPERATORS[name]

        def note(*operands: Any, kernel: Any = kernel, seen: set[int] = seen, **attrs: Any) -> Any:
            seen.add(threading.get_ident())
            return kernel(*operands, **attrs)

        monkeypatch.setitem(launch.OPERATORS, name, note)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    configs = [EngineConfig(**CONFIG, fused_kernels=fused) for fused in (True, False)]
    with ExitStack() as stack:
        llms = [stack.enter_context(LLM(engine_dir, one, in_process=True)) for one in configs]
        for seen in threads.values():
            seen.clear()  # of the starts
        streams = [llm.stream(prompt_of(9), params) for llm in llms for _ in range(2)]
        answers = [[*stream][-1].outputs[0].token_ids for stream in streams]
    assert answers == answers[:1] * 4
    assert (len(threads[SILU]), len(threads[ATTENTION])) == (1, 2)


def test_a_start_that_fails_leaves_the_other_engines_as_they_are(
    engine_of: Build, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_dir, _ = engine_of("ouro")
    engine = Engine(engine_dir, **CONFIG)
    before = run(engine, launches)
    with pytest.raises(EngineError, match="prefix_grid: expected a multiple"):
        EngineCore(engine_dir, EngineConfig(**CONFIG, fused_kernels=False, prefix_grid=3))
    assert run(engine, launches) == before
    monkeypatch.setitem(launch.OPERATORS, SILU, lambda x: 2 * reference.fenced_silu_mul(x))
    with pytest.raises(EngineError, match=f"require_exact: {SILU}"):
        EngineCore(engine_dir, EngineConfig(**CONFIG, require_exact=True))


def test_a_failed_kernel_is_replaced_in_the_engines_it_fails_for_and_in_no_other(
    tmp_path: Path,
    engine_of: Build,
    launches: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A kernel that is wrong at one model's width is right at the other's."""
    wide = 2 * INTERMEDIATE
    tiny_ouro(tmp_path / "c", intermediate_size=wide)
    build(BuildConfig(tmp_path / "c", tmp_path / "e", tokens_per_block=8, max_batch_size=4))
    (sound_dir, _), failed_dir = engine_of("ouro"), tmp_path / "e"
    expected = run(Engine(failed_dir, **CONFIG), launches)
    assert SILU in expected[1]

    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        y = reference.fenced_silu_mul(gate_up)
        return 1.01 * y if y.shape[1] == wide else y

    monkeypatch.setitem(launch.OPERATORS, SILU, counted(SILU, launches, wrong))
    first = Engine(sound_dir, **CONFIG)
    sound = run(first, launches)
    assert SILU in sound[1]
    assert not caplog.text.count("kernel replaced")
    failed = Engine(failed_dir, **CONFIG)
    assert caplog.text.count("kernel replaced by torch's operators") == 1
    second = Engine(sound_dir, **CONFIG)
    for _ in range(2):
        assert run(failed, launches) == (expected[0], expected[1] - {SILU})
        assert run(first, launches) == run(second, launches) == sound


@pytest.mark.parametrize(("model", "graphs"), [("ouro", "loop"), ("huginn", "auto")])
def test_an_engine_without_any_kernel_gives_the_oracles_tokens(
    engine_of: Build,
    launches: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    graphs: str,
) -> None:
    engine_dir, oracle = engine_of(model)
    monkeypatch.setattr(engine_core, "settle_kernels", lambda *_: frozenset(launch.OPERATORS))
    harness = Harness(engine_dir, **CONFIG, cuda_graphs=graphs)
    for index in range(3):
        harness.add(prompt_of(5 + index, index), 6, prefill_loops=1 + index)
    harness.drain()
    assert_all(oracle, harness)
    assert not launches


def test_graphs_are_given_up_where_the_noise_is_drawn_on_the_host_and_nowhere_else(
    engine_of: Build, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_dir, _ = engine_of("huginn")
    with monkeypatch.context() as context:
        noise = "position_keyed_noise"
        context.setitem(launch.OPERATORS, noise, lambda like, *_, **__: torch.zeros_like(like))
        failed = Engine(engine_dir, **CONFIG)
    sound = Engine(engine_dir, **CONFIG)
    (failed_tokens, failed_kernels), (tokens, kernels) = (
        run(engine, launches) for engine in (failed, sound)
    )
    assert kernels - failed_kernels == {noise}
    assert failed_tokens == tokens
    assert "graph_captures" not in failed.core.executor.stats()
    assert sound.core.executor.stats()["graph_captures"] > 0
    with monkeypatch.context() as context:
        context.setitem(launch.OPERATORS, noise, lambda like, *_, **__: torch.zeros_like(like))
        for asked in ("step", "loop"):
            message = f"cuda_graphs: expected auto or off, got {asked}: the kernel {noise} failed"
            with pytest.raises(EngineError, match=message):
                Engine(engine_dir, **CONFIG, cuda_graphs=asked)


def test_a_ladder_in_one_process_sees_a_kernel_that_is_wrong(
    engine_of: Build, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where the arm without kernels takes them from the arm with them."""
    engine_dir, _ = engine_of("ouro")
    (change,) = (change for change in CHANGES if change.name == "fused kernels")
    lengths = {"concurrency": (2,), "prompt_tokens": 9, "output_tokens": 8}
    workload = Ladder(changes=(change,), **lengths)
    config = EngineConfig(**CONFIG)
    setup = Setup(engine_dir, config, repeats=1, in_process=True)
    result = ladder.measure(setup, workload)
    assert result["left_out"] == {}
    assert result["arms"][change.name]["cells"][0]["identical"] == 4
    assert not broken_promises(result)
    monkeypatch.setattr(engine_core, "settle_kernels", lambda *_: frozenset())  # a blind check
    monkeypatch.setitem(launch.OPERATORS, SILU, lambda x: -reference.fenced_silu_mul(x))
    assert broken_promises(ladder.measure(setup, workload)) == {
        change.name: "answers differ at equal batches"
    }


@pytest.mark.usefixtures("launches")
def test_a_ladder_leaves_out_what_a_compiled_engine_lacks_before_it_measures_anything(
    engine_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TensorRT engine refuses the switches of its kernels, which lost what was measured."""
    engine_dir, _ = engine_of("ouro")
    changes = tuple(change for change in CHANGES if change.gpu_only)
    setup = Setup(engine_dir, EngineConfig(**CONFIG), repeats=1, in_process=True)
    monkeypatch.setattr(left_out, "TENSORRT_BACKENDS", ("pytorch",))
    with pytest.raises(EngineError, match=r"nothing to compare.*TensorRT.*: fused kernels, "):
        ladder.measure(setup, Ladder(changes, (2,), prompt_tokens=9, output_tokens=8))


def test_whether_an_engine_is_on_a_gpu_is_its_devices_word(
    engine_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure of its memory may be 0 on a GPU, or be counted otherwise one day."""
    engine_dir, _ = engine_of("ouro")
    stats = EngineCore.stats
    for gpu_bytes in (0, 7):
        monkeypatch.setattr(
            EngineCore, "stats", lambda core, n=gpu_bytes: {**stats(core), "gpu_memory_bytes": n}
        )
        engine = OfflineEngine(engine_dir, EngineConfig(device="cpu"))
        assert not engine.facts.on_gpu
        engine.close()
        with monkeypatch.context() as context, gpu_on_cpu(context):
            engine = OfflineEngine(engine_dir, EngineConfig(**CONFIG))
            assert engine.facts.on_gpu
            engine.close()
