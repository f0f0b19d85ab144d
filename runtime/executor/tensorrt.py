"""The TensorRT executor: phases are compiled engines, everything else is as on CUDA.

Owns the way from a step's tensors to the engines; leaves engines to `tensorrt_engine`, memory and
transfers to `CudaExecutor` and the order of a step to `Executor`. Invariant: one stream, torch's
current one, carries engines, plane copies and the sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from looptrt.errors import ManifestError
from looptrt.manifest import WEIGHTS_NAME, Manifest
from looptrt.plugins.ops import Operators
from looptrt.plugins.products import Products
from looptrt.runtime.config import CudaGraphs
from looptrt.runtime.executor.base import Tensors
from looptrt.runtime.executor.cuda import CudaExecutor
from looptrt.runtime.executor.tensorrt_engine import PhaseEngine

_GATE = "core.exit_gate"


class TensorRtExecutor(CudaExecutor):
    """Runs the phases as TensorRT engines on one GPU.

    Args:
        engines: of all phases, on `device`.
        engine_dir: engine directory; of its weights only the exit gate's are loaded.
        manifest: its verified manifest.
        max_slots: sequences the block table has room for.
        max_seq_len: tokens of the longest sequence.
        num_units: units of the KV pool, the null unit included.
        device: a CUDA device with an index.

    Raises:
        EngineError: the pool does not fit.
    """

    num_null_slots = 0  # no graph, no row to fill up; profiles have room for the sequences' only

    def __init__(
        self,
        engines: Mapping[str, PhaseEngine],
        engine_dir: Path,
        manifest: Manifest,
        *,
        max_slots: int,
        max_seq_len: int,
        num_units: int,
        device: torch.device,
    ) -> None:
        self._engines = dict(engines)
        super().__init__(
            engine_dir,
            manifest,
            max_slots=max_slots,
            max_seq_len=max_seq_len,
            num_units=num_units,
            device=device,
        )

    def load(self, engine_dir: Path) -> None:
        """Load what is outside the engines: the exit gate."""
        if self.manifest.spec.exit_gate:
            self._gate = _read_gate(engine_dir / WEIGHTS_NAME, self.device)

    def gate_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, hidden] weight and [1] bias of the exit gate."""
        return self._gate

    def run_phase(self, phase: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Run a phase's engine."""
        engine = self._engines[phase]
        if phase == "coda" and not len(tensors["logit_rows"]):
            # No profile takes a size of 0: the logits of row 0 are computed and left out.
            first = self._first_row()
            return {"logits": engine.run({**tensors, "logit_rows": first})["logits"][:0]}
        return engine.run(tensors)

    def use_products(self, products: Products) -> None:
        """Nothing: an engine's products are its own."""

    def use_operators(self, operators: Operators) -> None:
        """Nothing: a compiled engine's operators are plugins in it."""

    def use_graphs(self, mode: CudaGraphs, max_rows: int) -> None:
        """Nothing: an engine's enqueue is not captured."""

    def _first_row(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    def close(self) -> None:
        """Give engines, pool and their memory back."""
        torch.cuda.synchronize(self.device)
        self._engines.clear()
        super().close()


def _read_gate(path: Path, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return file.get_tensor(f"{_GATE}.weight"), file.get_tensor(f"{_GATE}.bias")
    except (OSError, SafetensorError) as error:
        raise ManifestError(f"{path}: the exit gate cannot be read: {error}") from error
