"""The PyTorch executor: the family's own modules over a KV pool in host memory.

Owns the pool, the device block table and, in sequential noise mode, a generator per slot;
leaves the order of a step to `Executor`. Invariant: the pool is one allocation whose
address never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from looptrt.loop_spec import InitialState, NoiseMode
from looptrt.manifest import Manifest
from looptrt.models.weights import load_model
from looptrt.plugins.reference import plane_copy, update_tables
from looptrt.runtime.executor.base import Executor, Tensors
from looptrt.runtime.step_plan import PlaneCopies, StepPlan


class TorchExecutor(Executor):
    """Runs the phases as torch modules on the CPU.

    Args:
        engine_dir: engine directory to load weights from.
        manifest: its verified manifest.
        max_slots: sequences the block table has room for.
        max_seq_len: tokens of the longest sequence.
        num_units: units of the KV pool, the null unit included.

    Attributes:
        pool: [num_units * unit_bytes] uint8, the KV memory.
    """

    def __init__(
        self,
        engine_dir: Path,
        manifest: Manifest,
        *,
        max_slots: int,
        max_seq_len: int,
        num_units: int,
    ) -> None:
        super().__init__(manifest, max_slots=max_slots, num_units=num_units)
        layout = manifest.layout
        self._model = load_model(engine_dir, manifest)
        self._phases = {name: getattr(self._model, name) for name in manifest.phases}
        # NumPy's zeros are untouched memory: units take up RAM when they are first written.
        self.pool = torch.from_numpy(np.zeros(num_units * layout.unit_bytes, np.uint8))
        self._dtype = getattr(torch, manifest.dtype)
        self._table = torch.zeros(
            (max_slots, layout.num_rows, layout.num_pages(max_seq_len)), dtype=torch.int32
        )
        self._kv = {
            "block_table": self._table,
            "kv_pool": torch.tensor([self.pool.data_ptr(), num_units], dtype=torch.int64),
        }
        self._generators: dict[int, torch.Generator] = {}

    @torch.inference_mode()
    def run_phase(self, phase: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Run a phase's module."""
        module = self._phases[phase]
        outputs = module(*(tensors[name] for name in module.input_names))
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        return dict(zip(module.output_names, outputs, strict=True))

    def update_table(self, plan: StepPlan) -> None:
        """Apply the plan's block-table updates."""
        updates = plan.table_updates
        if len(updates.slots):
            update_tables(
                self._table,
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
            dtype=self._dtype,
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
        gate: torch.nn.Linear = self._model.core.exit_gate  # type: ignore[assignment]

        def logit(state: torch.Tensor) -> torch.Tensor:
            weight, bias = gate.weight.to(state.dtype), gate.bias.to(state.dtype)
            return F.linear(state, weight, bias)[0]

        return logit

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
        return {"initial_state": torch.cat(states)}

    def _draw_state(self, num_rows: int, generator: torch.Generator) -> torch.Tensor:
        """[num_rows, hidden] drawn as the reference draws: a normal sample, then cut ones."""
        spec = self.manifest.spec
        state = torch.empty(num_rows, spec.hidden_size, dtype=self._dtype)
        state.normal_(generator=generator)
        std = spec.state_std
        if std == 0:
            return state.zero_()
        torch.nn.init.trunc_normal_(state, 0.0, std, -3 * std, 3 * std, generator=generator)
        return state * spec.state_scale
