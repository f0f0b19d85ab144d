"""Steps as graphs without a GPU: the product's sizes, filling rows, arenas and look-ahead.

Owns stand-ins for what only CUDA has: capture, mapped memory, events, the sampling kernel. A
graph is its work, done anew at each replay. What stays untested is what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch

from looptrt.plugins import launch, reference
from looptrt.runtime import engine_core
from looptrt.runtime.executor import arena, step_graphs
from looptrt.runtime.executor.cuda import CudaExecutor
from looptrt.runtime.executor.graph_cache import GraphCounters
from looptrt.runtime.executor.torch import TorchExecutor
from looptrt.runtime.request import SamplerParams
from looptrt.runtime.sampler import draw, uniform


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where engines with graphs run: played on the CPU, and a GPU."""
    if request.param == "cpu":
        use_graphs_on_cpu(monkeypatch)
    return str(request.param)


class GraphsOnCpu(CudaExecutor):
    """`CudaExecutor` in host memory."""

    allocate_pool = TorchExecutor.allocate_pool
    update_table = TorchExecutor.update_table
    copy_planes = TorchExecutor.copy_planes


class _Cache:
    def __init__(self, device: torch.device, max_graphs: int) -> None:
        self.counters = GraphCounters()
        self.max_graphs = max_graphs
        self._known: set[Hashable] = set()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        self.counters.hits += key in self._known
        self._known.add(key)
        work()

    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        # Filling rows of an empty step lie beyond the longest sequence, which only kernels bear.
        self.counters.captures += 1
        self._known.add(key)

    def clear(self) -> None:
        self._known.clear()


class HostMemory:
    """Memory of the host alone, where mapped memory is of the GPU too."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8)

    def array(self) -> np.ndarray:
        return self._memory.numpy()

    def tensor(self) -> torch.Tensor:
        return self._memory


class _Event:
    """Of a GPU that is done with everything at once."""

    def record(self, stream: torch.device) -> None:
        pass

    def synchronize(self) -> None:
        pass


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See `launch.sample`."""
    failed = ~logits.isfinite().all(dim=-1)
    scores = logits.masked_fill(failed[:, None], 0.0)
    tokens = scores.argmax(dim=-1)
    drawn = (temperatures > 0).nonzero()[:, 0]
    if len(drawn):
        columns = (temperatures, top_ks, top_ps, min_ps)
        rows = zip(*(column[drawn].tolist() for column in columns), strict=True)
        params = [SamplerParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in rows]
        uniforms = uniform(seeds[drawn].numpy().view(np.uint64), positions[drawn].numpy())
        chosen = draw(scores[drawn].double(), params, uniforms)
        tokens[drawn] = torch.from_numpy(chosen).long()
    tokens[failed] = 0
    return torch.stack((tokens.int(), failed.int()))


def use_graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on the CPU run as `cuda_graphs` says from now on."""
    patches: list[tuple[Any, str, Any]] = [
        (engine_core, "TorchExecutor", GraphsOnCpu),
        (step_graphs, "GraphCache", _Cache),
        (arena, "MappedMemory", HostMemory),
        (arena, "_event", _Event),
        (launch, "sample", sample),
        (launch, "update_tables", reference.update_tables),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "current_stream", lambda device: device),
        # A kernel leaves the null unit alone; the reference may write there, and nowhere else.
        (reference._Attention, "_check_units", _check_units),
    ]
    for holder, name, stand_in in patches:
        monkeypatch.setattr(holder, name, stand_in)


def _check_units(self: Any, units: np.ndarray) -> None:
    reference._check_range("packed_plane_attention", "block_table unit", units, 0, len(self.pool))
