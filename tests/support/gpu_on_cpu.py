"""An engine told to run on a GPU, played in host memory: which operators reach their kernels.

Owns the stand-ins for device, kernels and memory beside those of `graphs_on_cpu`. Operators take
the way they take on CUDA, dispatcher and operand checks included, up to the launchers, which are
their counted CPU twins. What stays untested is what runs on a GPU.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from looptrt.plugins import launch, ops, reference, schema
from looptrt.plugins.probe import Clock
from looptrt.plugins.products import Products
from looptrt.runtime import engine_core, kernel_checks
from tests.support.graphs_on_cpu import GraphsOnCpu, use_graphs_on_cpu

_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)
_ROWS = [1, 17]


class _HostExecutor(GraphsOnCpu):
    """`CudaExecutor` where a played GPU's memory is: the host's."""

    def __init__(self, *args: Any, device: torch.device, **sizes: Any) -> None:
        assert device == _GPU
        super().__init__(*args, device=_CPU, **sizes)


@contextmanager
def gpu_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Engines told `device="cuda"` start and run within the block.

    Their kernels are probed as on a GPU, at fewer rows and attention's bits left out; verdicts
    are not kept.

    Yields:
        Launches of every operator's kernel, by the operator's name.
    """
    use_graphs_on_cpu(monkeypatch)
    launches: Counter[str] = Counter()
    for op in schema.OPS:
        monkeypatch.setitem(launch.OPERATORS, op.name, counted(op.name, launches))
    probe_rows = kernel_checks.probe_rows

    def probed(_question: object, probe: Callable[[Clock], Any], *_: object) -> Any:
        with torch.inference_mode():
            return probe(Clock(None))

    def at_few_rows(calls: Any, _rows: object, _gpu: object, operators: Any, clock: Clock) -> Any:
        return probe_rows(calls, _ROWS, _CPU, operators, clock)

    patches: list[tuple[Any, str, Any]] = [
        (engine_core, "choose_device", lambda _asked: _GPU),
        (engine_core, "CudaExecutor", _HostExecutor),
        (engine_core, "settle_products", lambda *_: Products()),
        (engine_core, "free_beside_scratch", lambda *_: 2**31),
        (kernel_checks, "recalled", probed),
        (kernel_checks, "probe_rows", at_few_rows),
        (kernel_checks, "probe_attention", lambda *_: []),
    ]
    for holder, name, stand_in in patches:
        monkeypatch.setattr(holder, name, stand_in)
    with torch.library._scoped_library(schema.NAMESPACE, "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for op in schema.OPS:
                library.impl(op.name, ops._launched(op), "CPU")
        yield launches


def counted(
    name: str, launches: Counter[str], twin: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """What stands in for a launcher: the operator's CPU twin, or another, and a count."""
    function = twin or getattr(reference, name)

    def launched(*operands: torch.Tensor, **attributes: Any) -> Any:
        launches[name] += 1
        return function(*operands, **attributes)

    return launched
