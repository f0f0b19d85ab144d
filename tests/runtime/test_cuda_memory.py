"""Memory of a GPU that is too small, at load and when a graph is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from looptrt.errors import EngineError
from looptrt.runtime.executor.cuda import CudaExecutor
from looptrt.runtime.executor.graph_cache import GraphCache
from tests.e2e.test_engine_oracle import prompt_of
from tests.runtime.test_cuda_cases import EngineDirOf, engine_dir_of
from tests.support.watched import LOOPS, Ask, Engine

__all__ = ["engine_dir_of"]

pytestmark = pytest.mark.gpu


def test_a_capture_without_memory_is_an_error_with_the_numbers() -> None:
    """The cache and the device are of use after it."""
    device = torch.device("cuda", torch.cuda.current_device())
    cache, inputs = GraphCache(device), torch.zeros(8, device=device)
    free_bytes, _ = torch.cuda.mem_get_info(device)

    def too_much() -> None:
        inputs.add_(1)
        torch.empty(2 * free_bytes, dtype=torch.uint8, device=device)

    def add_one() -> None:
        inputs.add_(1)

    with pytest.raises(EngineError, match=r"CUDA graph of .*: \d+ of \d+ bytes"):
        cache.capture("too much", too_much)
    cache.capture("fits", add_one)
    before = inputs.clone()
    cache.run("fits", add_one)
    assert torch.equal(inputs, before + 1)
    assert (cache.counters.captures, cache.counters.hits) == (1, 1)


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterable[Callable[[int], None]]:
    """Makes this process see, and get, a GPU of fewer bytes; others on it are not disturbed."""
    real, made = torch.cuda.mem_get_info, []
    _, total_bytes = real()

    def limit(num_bytes: int) -> None:
        torch.cuda.empty_cache()
        start, most = torch.cuda.memory_reserved(), num_bytes

        def info(device: object = None) -> tuple[int, int]:
            used = torch.cuda.memory_reserved() - start + sum(made)
            return max(0, most - used), most

        monkeypatch.setattr(torch.cuda, "mem_get_info", info)
        torch.cuda.set_per_process_memory_fraction((start + most) / total_bytes)

        def allocate(self: Any, size: int) -> torch.Tensor:
            pool = real_allocate(self, size)
            made.append(size)
            torch.cuda.set_per_process_memory_fraction((start + most - size) / total_bytes)
            return pool

        real_allocate = CudaExecutor.allocate_pool
        monkeypatch.setattr(CudaExecutor, "allocate_pool", allocate)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("graphs", ["off", "loop", "step"])
@pytest.mark.parametrize("mebibytes", [16, 500, 600, 1200])
def test_a_pool_that_takes_all_that_is_left_leaves_enough_for_every_step(
    engine_dir_of: EngineDirOf,
    small_gpu: Callable[[int], None],
    tmp_path_factory: pytest.TempPathFactory,
    graphs: str,
    mebibytes: int,
) -> None:
    """Refused with the numbers, or every step up to the limits runs and is captured."""
    engine_dir = engine_dir_of("ouro")
    cache_dir = str(tmp_path_factory.getbasetemp().parent / "cache")
    Engine(
        engine_dir, device="cuda", cache_dir=cache_dir, kv_cache_bytes=2**24
    ).core.close()  # kernels checked
    small_gpu(mebibytes * 2**20)
    config = {"device": "cuda", "cache_dir": cache_dir, "cuda_graphs": graphs}
    if mebibytes < 550:
        with pytest.raises(EngineError, match=r"kv_cache_free_gpu_memory_fraction: of \d+ free"):
            Engine(engine_dir, kv_cache_free_gpu_memory_fraction=1.0, **config)
        return
    engine = Engine(engine_dir, kv_cache_free_gpu_memory_fraction=1.0, **config)
    for depth in range(1, LOOPS + 1):
        asks = [Ask(prompt_of(100, seed), 20, loops=depth) for seed in range(8)]
        for _ in range(3):
            engine.run(asks)
    engine.core.close()
