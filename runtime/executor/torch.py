"""The PyTorch executor: the family's own modules over a KV pool in host memory.

Owns the pool, the block table and, in sequential noise mode, a generator per slot; leaves the
order of a step to `Executor` and a GPU's memory to `CudaExecutor`. Invariant: the pool is one
allocation whose address never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from looptrt.loop_spec import InitialState, NoiseMode
from looptrt.manifest import Manifest
from looptrt.models.blocks import Phase
from looptrt.models.weights import load_model
from looptrt.plugins.ops import Operators
from looptrt.plugins.products import Products
from looptrt.plugins.reference import plane_copy, update_tables
from looptrt.runtime.config import CudaGraphs
from looptrt.runtime.executor.base import Executor, Tensors
from looptrt.runtime.step_plan import PlaneCopies, StepPlan

_CPU = torch.device("cpu")


class TorchExecutor(Executor):
    """Runs the phases as torch modules on the CPU.

    Args:
        engine_dir: engine directory to load weights from.
        manifest: its verified manifest.
        max_slots: sequences the block table has room for.
        max_seq_len: tokens of the longest sequence.
        num_units: units of the KV pool, the null unit included.
        device: where weights, pool and phases are.

    Attributes:
        pool: [num_units * unit_bytes] uint8, the KV memory.
        block_table: [slots, num_rows, max_pages] int32 unit ids.
        dtype: of weights, activations and KV.
    """

    num_null_slots = 0  # rows of the block table beside the sequences', of null units

    def __init__(
        self,
        engine_dir: Path,
        manifest: Manifest,
        *,
        max_slots: int,
        max_seq_len: int,
        num_units: int,
        device: torch.device = _CPU,
    ) -> None:
        super().__init__(manifest, max_slots=max_slots, num_units=num_units)
        self.device = device
        self.dtype: torch.dtype = getattr(torch, manifest.dtype)
        self.load(engine_dir)
        layout = manifest.layout
        self.pool = self.allocate_pool(num_units * layout.unit_bytes)
        slots = max_slots + self.num_null_slots
        table_shape = slots, layout.num_rows, layout.num_pages(max_seq_len)
        self.block_table = torch.zeros(table_shape, dtype=torch.int32, device=device)
        address = torch.tensor([self.pool.data_ptr(), num_units], dtype=torch.int64, device=device)
        self._kv = {"block_table": self.block_table, "kv_pool": address}
        self._generators: dict[int, torch.Generator] = {}

    def load(self, engine_dir: Path) -> None:
        """Load what runs the phases."""
        self._model = load_model(engine_dir, self.manifest, str(self.device))
        self._phases = {name: getattr(self._model, name) for name in self.manifest.phases}

    def allocate_pool(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 for the KV."""
        # NumPy's zeros are untouched memory: units take up RAM when they are first written.
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))

    @torch.inference_mode()
    def run_phase(self, phase: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Run a phase's module."""
        module: Phase = self._phases[phase]
        return module.run(tensors)

    def use_products(self, products: Products) -> None:
        """See `Executor.use_products`."""
        self._model.use_products(products)

    def use_operators(self, operators: Operators) -> None:
        """See `Executor.use_operators`."""
        self._model.use_operators(operators)

    def use_graphs(self, mode: CudaGraphs, max_rows: int) -> None:
        """Nothing: a CPU has no graphs."""

    def update_table(self, plan: StepPlan) -> None:
        """Apply the plan's block-table updates."""
        updates = plan.table_updates
        if len(updates.slots):
            update_tables(
                self.block_table,
                torch.from_numpy(updates.slots),
                torch.from_numpy(updates.pages),
                torch.from_numpy(updates.units),
            )

    def copy_planes(self, copies: PlaneCopies) -> None:
        """Copy token ranges between units of the pool."""
        plane_copy(
            self._kv["kv_pool"],
            torch.from_numpy(copies.src_units),
            torch.from_numpy(copies.dst_units),
            torch.from_numpy(copies.token_begin),
            torch.from_numpy(copies.token_end),
            unit_shape=self.manifest.layout.unit_shape,
            dtype=self.dtype,
        )

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """View a host array as a tensor."""
        return torch.from_numpy(array)

    def kv_tensors(self) -> Tensors:
        """The block table and the pool's address."""
        return self._kv

    def exit_gate(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The checkpoint's gate, computed in the dtype of the state it is given."""
        if not self.manifest.spec.exit_gate:
            return None
        weight, bias = self.gate_tensors()

        def logit(state: torch.Tensor) -> torch.Tensor:
            return F.linear(state, weight.to(state.dtype), bias.to(state.dtype))[0]

        return logit

    def gate_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, hidden] weight and [1] bias of the exit gate."""
        gate: torch.nn.Linear = self._model.core.exit_gate  # type: ignore[assignment]
        return gate.weight, gate.bias

    def initial_tensors(self, plan: StepPlan) -> Tensors:
        """Noise seeds a row, or states drawn from each sequence's own generator."""
        if self.manifest.spec.initial_state is not InitialState.RANDOM:
            return {}
        if self.manifest.noise_mode is NoiseMode.POSITION:
            return {"noise_seeds": self.to_device(plan.noise_seeds)}
        new_slots = {start.slot for start in plan.slot_starts}
        states = []
        for seq, slot in enumerate(plan.seq_slots.tolist()):
            begin, end = plan.cu_seqlens[seq : seq + 2].tolist()
            if slot in new_slots:
                self._generators[slot] = torch.Generator().manual_seed(int(plan.noise_seeds[begin]))
            states.append(self._draw_state(end - begin, self._generators[slot]))
        return {"initial_state": torch.cat(states).to(self.device)}

    def _draw_state(self, num_rows: int, generator: torch.Generator) -> torch.Tensor:
        """[num_rows, hidden] drawn as the reference draws: a normal sample, then cut ones.

        On the CPU whatever the device, whose own generators give other numbers.
        """
        spec = self.manifest.spec
        state = torch.empty(num_rows, spec.hidden_size, dtype=self.dtype)
        state.normal_(generator=generator)
        std = spec.state_std
        if std == 0:
            return state.zero_()
        torch.nn.init.trunc_normal_(state, 0.0, std, -3 * std, 3 * std, generator=generator)
        return state * spec.state_scale
