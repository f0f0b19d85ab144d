"""What steps' graphs read and write: missing when they are made, given back at the end.

Without a GPU the graphs are those of `graphs_on_cpu`.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import EngineError
from looptrt.runtime.executor import arena as arena_module
from looptrt.runtime.executor.arena import Arena
from looptrt.runtime.executor.cuda import CudaExecutor
from looptrt.runtime.executor.graph_cache import GraphCache
from looptrt.runtime.executor.step_graphs import StepGraphs
from tests.e2e.test_engine_oracle import prompt_of
from tests.support.checkpoints import tiny_ouro
from tests.support.graphs_on_cpu import device
from tests.support.watched import Ask, Engine

__all__ = ["device"]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("memory")
    tiny_ouro(root / "c")
    limits = {"tokens_per_block": 8, "max_batch_size": 4, "max_num_tokens": 128}
    build(BuildConfig(root / "c", root / "e", **limits))
    return root / "e"


def start(engine_dir: Path, device: str, graphs: str) -> Engine:
    fields = {"device": device, "cache_dir": str(engine_dir.parent / "cache")}
    return Engine(engine_dir, kv_cache_bytes=2**22, cuda_graphs=graphs, **fields)


class FullGpu:
    """Stands for `torch` where arenas are made: nothing of theirs fits on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *_: object, **__: object) -> torch.Tensor:
        self._monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (3, 70))
        raise torch.OutOfMemoryError("torch's own words")


@pytest.mark.parametrize("graphs", ["loop", "step"])
def test_an_arena_without_memory_is_one_error_at_the_start_and_in_a_step(
    engine_dir: Path, device: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps have theirs at the start, chained ones when the first step is made."""
    monkeypatch.setattr(arena_module, "torch", FullGpu(monkeypatch))
    no_memory = pytest.raises(
        EngineError, match="no memory for the inputs of steps: 3 of 70 bytes are free; lower"
    )
    if graphs == "step":
        with no_memory:
            start(engine_dir, device, graphs)
        return
    engine = start(engine_dir, device, graphs)
    engine.add(Ask(prompt_of(5)))
    with no_memory:
        engine.step()
    engine.core.close()


def test_work_that_runs_before_its_capture_has_the_same_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (3, 70))
    cache = GraphCache(torch.device("cpu"))

    def too_much() -> None:
        raise torch.OutOfMemoryError("torch's own words")

    with pytest.raises(EngineError, match="for the first run of step: 3 of 70 bytes are free"):
        cache.run("step", too_much)


def test_close_gives_back_what_a_step_in_flight_holds_and_ends_the_engine(
    engine_dir: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core itself lives on, as where its owner has not let it go yet."""
    made: list[weakref.ref[object]] = []
    for kind in (Arena, StepGraphs):
        init = kind.__init__

        def noted(self: object, *args: Any, init: Any = init, **fields: Any) -> None:
            made.append(weakref.ref(self))
            init(self, *args, **fields)

        monkeypatch.setattr(kind, "__init__", noted)
    core = start(engine_dir, device, "step").core
    assert isinstance(core.executor, CudaExecutor)
    core.add_request(Ask(prompt_of(5), 20).request(0))
    core.step()
    core.step()
    assert core.has_work()
    assert {type(one()) for one in made} == {Arena, StepGraphs}
    core.close()
    gc.collect()
    assert [one() for one in made if one() is not None] == []
    for _ in range(2):
        with pytest.raises(EngineError, match="the engine was shut down"):
            core.step()
    core.close()
