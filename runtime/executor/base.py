"""The step every backend runs: prelude, loops over shrinking rows, coda, sampling.

Owns the order of phases, table updates and plane copies; leaves how a phase runs and where
its tensors live to a backend. Invariant: a plane copy is done before the first loop that
may read it, and the block table holds every update of a plan before its first phase.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from looptrt.manifest import Manifest
from looptrt.plugins.ops import Operators
from looptrt.plugins.products import Products
from looptrt.runtime.batch import LoopRows, loop_rows, select_rows
from looptrt.runtime.config import CudaGraphs
from looptrt.runtime.exits import ExitStep
from looptrt.runtime.request import ExitParams
from looptrt.runtime.sampler import Sampler
from looptrt.runtime.step_plan import Int32Array, PlaneCopies, StepPlan, StepResult

Tensors = dict[str, torch.Tensor]


class Executor(ABC):
    """Runs step plans against one KV pool.

    Args:
        manifest: what was built.
        max_slots: sequences the block table has room for.
        num_units: units of the KV pool, the null unit included.
    """

    def __init__(self, manifest: Manifest, *, max_slots: int, num_units: int) -> None:
        self.manifest = manifest
        self.num_units = num_units
        self.sampler = Sampler(max_slots)
        self._planes: dict[int, torch.Tensor] = {}
        self._exit_params = [ExitParams()] * max_slots

    @abstractmethod
    def run_phase(self, phase: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Run a phase on the tensors it declares as inputs; returns its outputs by name."""

    @abstractmethod
    def update_table(self, plan: StepPlan) -> None:
        """Apply the plan's block-table updates."""

    @abstractmethod
    def copy_planes(self, copies: PlaneCopies) -> None:
        """Copy token ranges between units."""

    @abstractmethod
    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Stage a host array for the phases."""

    def stage(self, arrays: Mapping[str, np.ndarray]) -> Tensors:
        """Stage host arrays that are needed together; a backend may move them in one piece."""
        return {name: self.to_device(array) for name, array in arrays.items()}

    @abstractmethod
    def kv_tensors(self) -> Tensors:
        """`block_table` [slots, rows, pages] and `kv_pool` [2] (address, units)."""

    @abstractmethod
    def initial_tensors(self, plan: StepPlan) -> Tensors:
        """What the prelude needs for the initial state: seeds or a drawn state."""

    @abstractmethod
    def exit_gate(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """[hidden] state to its exit gate's logit in the state's dtype; None without a gate."""

    def close(self) -> None:
        """Release device memory; nothing runs after it."""
        self._planes.clear()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        return self.submit(plan)()

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a step; what is returned waits for its result and is called once.

        A backend may leave all of the work to that call.
        """
        self._start_slots(plan)
        return partial(self._run_phases, plan)

    @abstractmethod
    def use_products(self, products: Products) -> None:
        """Compute matrix products so, in graphs too; called before `use_graphs`."""

    @abstractmethod
    def use_operators(self, operators: Operators) -> None:
        """Call these operators, in graphs too; called before `use_graphs`."""

    @abstractmethod
    def use_graphs(self, mode: CudaGraphs, max_rows: int) -> None:
        """Run small steps as CUDA graphs from now on, where the backend has any.

        Args:
            mode: see `EngineConfig.cuda_graphs`.
            max_rows: rows of the largest step that may be one, at most 8192.

        Raises:
            EngineError: there is no memory for them; has the numbers.
        """

    def runs_ahead(self, plan: StepPlan) -> bool:
        """Whether a step that needs this one's tokens may be submitted before they are known."""
        return False

    def stats(self) -> dict[str, int | float]:
        """Figures of this backend by name."""
        return {}

    def _run_phases(self, plan: StepPlan) -> StepResult:
        self.update_table(plan)
        step = self._step_tensors(plan)
        self._copy(plan.copies.due(0, 1))
        carried = self.run_phase("prelude", {**step, **self.initial_tensors(plan)})
        exits = self._exit_step(plan, carried["state"])
        depths = plan.depths if exits is None else exits.depths
        staged: Tensors = {}
        for loop_idx in range(plan.num_loops):
            if loop_idx == 0 or (depths == loop_idx).any():
                rows = loop_rows(plan, depths, loop_idx)
                if not len(rows.rows):
                    break
                staged = self._loop_tensors(rows)
            if loop_idx:
                self._copy(plan.copies.due(loop_idx, loop_idx + 1))
            plane = {"plane": self._plane(self.manifest.layout.strategy.plane(loop_idx))}
            looped = self.run_phase("core", {**step, **carried, **staged, **plane})
            carried["state"] = looped["next_state"]
            if exits is not None:
                exits.after_loop(
                    loop_idx, carried["state"], partial(self._head, plan, step, carried)
                )
        self._copy(plan.copies.due(int(depths.max())))
        if exits is not None:
            self._copy(exits.copies(self.manifest.layout).due(0))
        logits = self._coda(step, carried, exits)
        result = self.sampler.sample(logits, plan)
        return result if exits is None else exits.adjust(result)

    def _start_slots(self, plan: StepPlan) -> None:
        self.sampler.start(plan.slot_starts)
        for start in plan.slot_starts:
            self._exit_params[start.slot] = start.exit

    def _exit_step(self, plan: StepPlan, state: torch.Tensor) -> ExitStep | None:
        if plan.exits is None:
            return None
        params = [self._exit_params[slot] for slot in plan.exits.slots.tolist()]
        return ExitStep(plan, params, state, self.exit_gate())

    def _coda(self, step: Tensors, carried: Tensors, exits: ExitStep | None) -> torch.Tensor:
        """[n, vocab] logits of the rows that are sampled or scored."""
        final = carried["state"] if exits is None else exits.final_state(carried["state"])
        logits = self.run_phase("coda", {**step, **carried, "state": final})["logits"]
        if final is not carried["state"] and self.manifest.spec.coda_layers:
            # Rows that stopped while their loops went on: their KV is of the recorded depth.
            self.run_phase("coda", {**step, **carried})
        return logits

    def _head(
        self, plan: StepPlan, step: Tensors, carried: Tensors, rows: Int32Array
    ) -> torch.Tensor:
        """[n, vocab] float32 logits of some rows as they are now; their coda KV is rewritten."""
        chosen = self.stage({**vars(select_rows(plan, rows)), "seq_slots": plan.seq_slots})
        state = carried["state"][chosen["rows"].long()]
        every = self.to_device(np.arange(len(rows), dtype=np.int32))
        coda = {**step, **chosen, "state": state, "logit_rows": every}
        return self.run_phase("coda", coda)["logits"].float()

    def _step_tensors(self, plan: StepPlan) -> Tensors:
        staged = self.stage(
            {
                "input_ids": plan.input_ids,
                "positions": plan.positions,
                "cu_seqlens": plan.cu_seqlens,
                "seq_slots": plan.seq_slots,
                "logit_rows": np.concatenate([plan.logit_rows, plan.prompt_rows]),
            }
        )
        return {**staged, "plane": self._plane(0), **self.kv_tensors()}

    def _loop_tensors(self, rows: LoopRows) -> Tensors:
        return self.stage(vars(rows))

    def _plane(self, plane: int) -> torch.Tensor:
        """[1] int32 on the device, staged once for each plane."""
        if plane not in self._planes:
            self._planes[plane] = self.to_device(np.array([plane], np.int32))
        return self._planes[plane]

    def _copy(self, copies: PlaneCopies | None) -> None:
        if copies is not None:
            self.copy_planes(copies)
