"""Engines on a GPU: the end-to-end tests again, and what only a GPU has."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from looptrt.cli import main
from looptrt.errors import EngineError
from looptrt.plugins import launch, reference
from looptrt.runtime import engine_core
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.llm import LLM
from looptrt.runtime.request import SamplerParams
from looptrt.runtime.sampling_params import SamplingParams
from tests.e2e import test_engine_oracle, test_exits
from tests.e2e.test_engine_oracle import MAKERS, Build, assert_all, prompt_of
from tests.support.engines import Harness
from tests.support.gpu_on_cpu import counted

pytestmark = pytest.mark.gpu

# Every test there, with its fixtures, runs here once more on the GPU (see `on_the_gpu`).
globals().update(
    {
        name: value
        for module in (test_engine_oracle, test_exits)
        for name, value in vars(module).items()
        if name.startswith("test_") or name in ("engine_of", "engines")
    }
)


@pytest.fixture(autouse=True)
def on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Engines of a Harness run on the GPU; verdicts on its kernels are kept for the session."""
    # The sampler of a step that is one graph cannot be listened to: parts are graphs here.
    cache_dir = str(tmp_path_factory.getbasetemp() / "cache")
    config = {"device": "cuda", "cuda_graphs": "loop", "cache_dir": cache_dir}
    monkeypatch.setattr(Harness, "CONFIG", {**config, "kv_cache_bytes": 2**26})
    return config


def run(harness: Harness, sampled: bool) -> list[list[int]]:
    """Tokens of a batch with mixed depths, a prefix hit and every kind of sampling."""
    loops = harness.core.manifest.spec.num_loops
    drawn = [
        SamplerParams(temperature=0.9, seed=3),
        SamplerParams(temperature=1.2, seed=4, top_k=20, top_p=0.9, min_p=0.01),
        SamplerParams(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1),
        SamplerParams(temperature=0.7, seed=5, logprobs=3),
    ]
    for repeat in range(2):
        for seed, shallow in enumerate([loops, 1, 2, loops]):
            sampler = drawn[seed] if sampled else SamplerParams()
            harness.add(prompt_of(11 + 9 * seed, seed), 10, prefill_loops=shallow, sampler=sampler)
        harness.drain()
        assert len(harness.answers) == 4 * (repeat + 1)
    return [answer.token_ids for answer in harness.answers.values()]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("model", MAKERS)
def test_tokens_are_those_of_the_cpu(engine_of: Build, model: str, sampled: bool) -> None:
    engine_dir, oracle = engine_of(model)
    on_gpu, on_cpu = Harness(engine_dir), Harness(engine_dir, device="cpu")
    assert run(on_gpu, sampled) == run(on_cpu, sampled)
    for one, other in zip(on_gpu.answers.values(), on_cpu.answers.values(), strict=True):
        torch.testing.assert_close(
            torch.stack(one.logits), torch.stack(other.logits), rtol=1e-4, atol=1e-4
        )
    assert on_gpu.answers[4].finished is not None
    assert on_gpu.answers[4].finished.num_cached_tokens > 0
    if not sampled:
        assert_all(oracle, on_gpu)


def test_the_pool_is_plain_device_memory_that_close_gives_back(
    engine_of: Build, on_the_gpu: dict[str, Any]
) -> None:
    """Half of the free memory, so that other tests on the same GPU do not matter."""
    engine_dir, _ = engine_of("ouro")
    before, _ = torch.cuda.mem_get_info()
    core = EngineCore(engine_dir, EngineConfig(kv_cache_bytes=before // 2, **on_the_gpu))
    while_open, _ = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    core.close()
    after, _ = torch.cuda.mem_get_info()
    assert before - while_open > before // 4
    assert after - while_open > before // 4
    assert reserved < before // 100
    core.close()


def test_a_share_of_the_free_memory_makes_the_pool(
    engine_of: Build, on_the_gpu: dict[str, Any]
) -> None:
    engine_dir, _ = engine_of("ouro")
    core = EngineCore(engine_dir, EngineConfig(**on_the_gpu))
    assert core.executor.num_units == 2**20  # the books' limit: these units are tiny
    core.close()
    config = EngineConfig(kv_cache_free_gpu_memory_fraction=1e-4, **on_the_gpu)
    core = EngineCore(engine_dir, config)
    free_bytes, _ = torch.cuda.mem_get_info()
    assert 1e-5 * free_bytes < core.executor.pool.numel() < 2e-4 * free_bytes
    core.close()


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(
    engine_of: Build, on_the_gpu: dict[str, Any]
) -> None:
    engine_dir, _ = engine_of("ouro")
    with pytest.raises(EngineError, match=r"kv_cache_bytes: of \d+ free bytes on the GPU"):
        EngineCore(engine_dir, EngineConfig(kv_cache_bytes=2**45, **on_the_gpu))
    with pytest.raises(EngineError, match=r"there are \d GPUs, the first"):
        EngineCore(engine_dir, EngineConfig(**{**on_the_gpu, "device": "cuda:98"}))


def test_a_wrong_kernel_is_found_and_replaced(
    engine_of: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails without `act_on`: the tokens then come from the wrong kernel.

    An engine that started with the sound kernel keeps it.
    """
    engine_dir, oracle = engine_of("ouro")
    launches: Counter[str] = Counter()
    sound = counted("fenced_silu_mul", launches, launch.OPERATORS["fenced_silu_mul"])
    monkeypatch.setitem(launch.OPERATORS, "fenced_silu_mul", sound)
    first = Harness(engine_dir, cuda_graphs="off")

    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        return 1.01 * reference.fenced_silu_mul(gate_up)

    monkeypatch.setitem(launch.OPERATORS, "fenced_silu_mul", wrong)
    cold = {"cache_dir": str(engine_dir.parent / "cold")}
    with pytest.raises(EngineError, match="require_exact: fenced_silu_mul"):
        Harness(engine_dir, **Harness.CONFIG | cold | {"require_exact": True})
    harness = Harness(engine_dir, **Harness.CONFIG | cold)
    assert "kernel replaced by torch's operators: fenced_silu_mul" in caplog.text
    harness.add(prompt_of(9), 6)
    harness.drain()
    assert_all(oracle, harness)
    monkeypatch.setitem(launch.OPERATORS, "fenced_silu_mul", sound)
    launches.clear()
    first.add(prompt_of(9), 6)
    first.drain()
    assert_all(oracle, first)
    assert launches["fenced_silu_mul"] > 0


@pytest.mark.parametrize("model", ["ouro", "huginn", "olmo"])
def test_verify_is_content_with_sound_kernels_only(
    engine_of: Build,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine_dir, _ = engine_of(model)
    assert main(["verify", str(engine_dir), "--device", "cuda", "--strict", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"]["gpu"] == torch.cuda.get_device_name()
    checks = {(check["operator"], check["level"]): check for check in report["checks"]}
    assert len(checks[("fenced_silu_mul", "equals_torch")]["rows"]) > 256
    assert checks[("packed_plane_attention", "batch_invariant")]["elements"] > 10**5
    joined = report["joined_products"]
    assert len(joined) == (2 if model == "ouro" else 0)
    assert all(len(row["rows"]) > 256 and row["elements"] > 10**5 for row in joined)

    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        y = reference.fenced_silu_mul(gate_up)
        y[-1, -1] += len(y) == 77
        return y

    monkeypatch.setitem(launch.OPERATORS, "fenced_silu_mul", wrong)
    assert main(["verify", str(engine_dir), "--device", "cuda", "--strict"]) == 1
    assert "77" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_everything_unfused_gives_the_oracles_tokens(
    engine_of: Build, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What replaces kernels is right by itself, attention and noise included."""
    engine_dir, oracle = engine_of(model)
    monkeypatch.setattr(engine_core, "settle_kernels", lambda *_: frozenset(launch.OPERATORS))
    # Noise without its kernel is drawn on the host, which no graph can be part of.
    harness = Harness(engine_dir, cuda_graphs="loop" if model == "ouro" else "off")
    monkeypatch.setattr(launch, "OPERATORS", {})
    run(harness, sampled=False)
    assert_all(oracle, harness)


def test_auto_takes_the_gpu_in_the_engines_own_process(
    engine_of: Build, on_the_gpu: dict[str, Any]
) -> None:
    engine_dir, _ = engine_of("ouro")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    answers = {}
    for device in ("auto", "cpu"):
        config = EngineConfig(**{**on_the_gpu, "device": device}, kv_cache_bytes=2**24)
        with LLM(engine_dir, config) as llm:
            answers[device] = llm.generate([prompt_of(7)], params)[0].outputs[0].token_ids
            has_gpu_memory = llm.stats()["gpu_memory_bytes"] > 0
        assert has_gpu_memory == (device == "auto")
    assert answers["auto"] == answers["cpu"]
