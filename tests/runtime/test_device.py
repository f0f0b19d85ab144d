"""Where an engine runs, how large its pool is, and how arrays get there."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import EngineError
from looptrt.manifest import WEIGHTS_NAME, Manifest
from looptrt.plugins import launch, reference
from looptrt.plugins.probe import OpCall, Verdict
from looptrt.plugins.schema import Exactness
from looptrt.runtime import engine_core
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.device import choose_device, why_no_gpu
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.executor.cuda import CudaExecutor
from looptrt.runtime.executor.staging import Staging
from looptrt.runtime.executor.step_graphs import StepGraphs
from looptrt.runtime.executor.torch import TorchExecutor
from looptrt.runtime.kernel_checks import act_on
from looptrt.runtime.padding import StepShape
from looptrt.runtime.pool_size import pool_units, step_bytes
from looptrt.runtime.request import ExitParams, ExitRule, SamplerParams
from looptrt.runtime.step_plan import StepPlan, StepResult
from tests.support.checkpoints import tiny_ouro
from tests.support.engines import Harness
from tests.support.graphs_on_cpu import use_graphs_on_cpu

no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine")
    tiny_ouro(root / "c")
    build(BuildConfig(root / "c", root / "e", tokens_per_block=8, max_batch_size=4))
    return root / "e"


# ---- the device


@no_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_gpu_that_was_asked_for_is_never_replaced(engine_dir: Path, device: str) -> None:
    with pytest.raises(EngineError, match=f"device {device}: torch .* is built without CUDA"):
        EngineCore(engine_dir, EngineConfig(device=device))


@no_cuda
def test_auto_says_in_one_line_why_it_took_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_device("auto").type == "cpu"
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert str(why_no_gpu()) in record.getMessage()
    assert "running on the CPU" in record.getMessage()


def test_the_cpu_that_was_asked_for_needs_no_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_device("cpu").type == "cpu"
    assert not caplog.records


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:-1", "cuda:1000", "cpu:0", None, 0])
def test_other_devices_are_refused(device: object) -> None:
    with pytest.raises(EngineError, match="device: expected auto, cpu, cuda or cuda:N"):
        EngineConfig(device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0, -0.5, 1.01, True, "0.9", float("nan")])
def test_other_shares_are_refused(share: object) -> None:
    with pytest.raises(EngineError, match="kv_cache_free_gpu_memory_fraction: expected"):
        EngineConfig(kv_cache_free_gpu_memory_fraction=share)  # type: ignore[arg-type]


# ---- the pool


def test_a_gpus_pool_is_the_share_of_what_weights_and_a_step_leave(engine_dir: Path) -> None:
    manifest = Manifest.load(engine_dir)
    unit = manifest.layout.unit_bytes
    config = EngineConfig(kv_cache_free_gpu_memory_fraction=0.5)
    taken = manifest.files[WEIGHTS_NAME][1] + step_bytes(manifest, config, manifest.limits)
    free = taken + 1000 * unit
    assert pool_units(manifest, config, manifest.limits, free) == 500
    exact = replace(config, kv_cache_bytes=1000 * unit)
    assert pool_units(manifest, exact, manifest.limits, free) == 1000


@pytest.mark.parametrize("config", [EngineConfig(), EngineConfig(kv_cache_bytes=2**40)])
def test_a_gpu_with_too_little_memory_is_refused_with_the_numbers(
    engine_dir: Path, config: EngineConfig
) -> None:
    manifest = Manifest.load(engine_dir)
    taken = manifest.files[WEIGHTS_NAME][1] + step_bytes(manifest, config, manifest.limits)
    for left in (manifest.layout.unit_bytes, 0):
        message = f"of {taken + left} free bytes on the GPU, .* leaves {left} bytes"
        with pytest.raises(EngineError, match=message):
            pool_units(manifest, config, manifest.limits, taken + left)


def test_units_of_tiny_models_stay_countable(engine_dir: Path) -> None:
    manifest = Manifest.load(engine_dir)
    assert pool_units(manifest, EngineConfig(), manifest.limits, 2**45) == 2**20


# ---- transfers


def test_staged_arrays_keep_values_shapes_and_dtypes() -> None:
    arrays = {
        "a": np.array([3, -1, 2**31 - 1], np.int32),
        "empty": np.zeros(0, np.int32),
        "columns": np.arange(6, dtype=np.int32).reshape(2, 3).T,
        "b": np.array([-(2**63), 2**63 - 1], np.int64),
        "no_rows": np.zeros((0, 4), np.int32),
    }
    staged = Staging(torch.device("cpu")).stage(arrays)
    assert staged.keys() == arrays.keys()
    for name, array in arrays.items():
        assert staged[name].is_contiguous()
        assert staged[name].dtype == torch.from_numpy(array).dtype
        np.testing.assert_array_equal(staged[name].numpy(), array)
    arrays["a"][0] = 7
    assert staged["a"][0] == 3
    assert Staging(torch.device("cpu")).stage({"": arrays["empty"]})[""].shape == (0,)


# ---- what follows from a verdict


def verdict(op: str, level: Exactness, mismatches: int) -> Verdict:
    call = OpCall(op, (("H", 8),), (), "bfloat16", "bfloat16")
    first = "case: 1 of 8 differ" if mismatches else ""
    return Verdict(call, level, "PyTorch's operators", [1], 8, mismatches, first)


def test_exactness_that_is_required_and_missing_is_an_error() -> None:
    sound = verdict("fenced_rope", Exactness.EQUALS_TORCH, 0)
    assert act_on([sound], require_exact=True) == frozenset()
    for level in (Exactness.EQUALS_TORCH, Exactness.BATCH_INVARIANT):
        failed = verdict("fenced_silu_mul", level, 1)
        with pytest.raises(EngineError, match=f"require_exact: fenced_silu_mul .{level}.*1 of 8"):
            act_on([sound, failed], require_exact=True)


def test_a_failed_kernel_is_replaced_and_named(caplog: pytest.LogCaptureFixture) -> None:
    uneven = verdict("packed_plane_attention", Exactness.BATCH_INVARIANT, 1)
    sound, failed = (
        verdict(op, Exactness.EQUALS_TORCH, wrong)
        for op, wrong in (("fenced_rope", 0), ("fenced_silu_mul", 1))
    )
    assert act_on([sound, failed, uneven], require_exact=False) == {"fenced_silu_mul"}
    assert "replaced by torch's operators: fenced_silu_mul (equals_torch" in caplog.text
    assert "still used: packed_plane_attention (batch_invariant" in caplog.text


# ---- the GPU's executor, its kernels played by their CPU twins


class HostExecutor(CudaExecutor):
    """All of it but the memory, whose place no CPU has."""

    def allocate_pool(self, num_bytes: int) -> torch.Tensor:
        return TorchExecutor.allocate_pool(self, num_bytes)


@pytest.mark.parametrize("graphs", ["off", "loop", "step"])
def test_the_transfers_of_a_gpu_step_leave_nothing_out(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    """Mixed depths, pages copied plane by plane, exits, samples of every kind: as on the host."""
    use_graphs_on_cpu(monkeypatch)
    monkeypatch.setattr(launch, "plane_copy", reference.plane_copy)
    samplers = [
        SamplerParams(),
        SamplerParams(temperature=0.9, seed=2**63 + 5, top_k=30, top_p=0.9, min_p=0.01),
        SamplerParams(temperature=0.8, seed=4, logprobs=2, prompt_logprobs=1),
        SamplerParams(repetition_penalty=1.4, logprobs=1),
    ]
    answers, reports = [], []
    for executor in (TorchExecutor, HostExecutor):
        monkeypatch.setattr(engine_core, "TorchExecutor", executor)
        harness = Harness(engine_dir, cuda_graphs=graphs)
        assert type(harness.core.executor) is executor
        reported: list[object] = []
        execute = harness.core.executor.execute

        def spy(plan: StepPlan) -> StepResult:
            result = execute(plan)  # noqa: B023 - called within the iteration
            reported.append((result.logprobs, result.prompt_logprobs, result.failed))  # noqa: B023
            return result

        harness.core.executor.execute = spy  # type: ignore[method-assign]
        for seed, shallow in enumerate([4, 1, 2, 4]):
            prompt = [(7 * i + seed) % 256 for i in range(9 + 5 * seed)]
            exit_params = ExitParams(ExitRule.STEP, 2) if seed == 2 else ExitParams()
            sampler = samplers[seed]
            harness.add(prompt, 6, prefill_loops=shallow, exit=exit_params, sampler=sampler)
        harness.drain()
        if executor is HostExecutor:
            assert (harness.core.executor.stats().get("graph_hits", 0) > 0) is (graphs != "off")
        answers.append([(a.token_ids, a.logits) for a in harness.answers.values()])
        reports.append(reported)
    if graphs == "off":
        assert reports[0] == reports[1]
    else:  # products of other sizes round their sums differently
        for one, other in zip(*reports, strict=True):
            assert one[0].keys() == other[0].keys()
            assert len(one[1]) == len(other[1])
            assert one[2] == other[2]
    assert any(prompt for _, prompt, _ in reports[0])
    for (tokens, logits), (other_tokens, other_logits) in zip(*answers, strict=True):
        assert tokens == other_tokens
        if graphs == "off":
            assert torch.equal(torch.stack(logits), torch.stack(other_logits))


def test_graphs_are_of_no_more_loops_than_the_engine_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where the model's own loop count is captured: planes beyond the layout's."""
    use_graphs_on_cpu(monkeypatch)
    captured: list[int] = []
    capture = StepGraphs._whole

    def whole(self: StepGraphs, shape: StepShape, num_loops: int, is_read: bool) -> Any:
        captured.append(num_loops)
        return capture(self, shape, num_loops, is_read)

    monkeypatch.setattr(StepGraphs, "_whole", whole)
    tiny_ouro(tmp_path / "c")
    build(BuildConfig(tmp_path / "c", tmp_path / "e", tokens_per_block=8, max_loops=2))
    harness = Harness(tmp_path / "e", cuda_graphs="step")
    assert captured
    assert set(captured) == {2}
    harness.add([1, 2, 3], 4, loops=2)
    harness.drain()
    assert len(harness.answers[0].token_ids) == 4
