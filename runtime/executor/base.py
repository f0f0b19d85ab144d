"""The step every backend runs: prelude, loops over shrinking rows, coda, sampling.

Owns the order of phases, table updates and plane copies; leaves how a phase runs and where
its tensors live to a backend. Invariant: a plane copy is done before the first loop that
may read it, and the block table holds every update of a plan before its first phase.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch

from looptrt.manifest import Manifest
from looptrt.runtime.batch import LoopRows, loop_rows
from looptrt.runtime.sampler import Sampler
from looptrt.runtime.step_plan import Int32Array, PlaneCopies, StepPlan

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

    @abstractmethod
    def kv_tensors(self) -> Tensors:
        """`block_table` [slots, rows, pages] and `kv_pool` [2] (address, units)."""

    @abstractmethod
    def initial_tensors(self, plan: StepPlan) -> Tensors:
        """What the prelude needs for the initial state: seeds or a drawn state."""

    def execute(self, plan: StepPlan) -> Int32Array:
        """Run one step.

        Returns:
            [num_samples] sampled tokens in the order of plan.logit_rows.
        """
        self.sampler.set_slots(plan.slot_params)
        self.update_table(plan)
        step = self._step_tensors(plan)
        self._run_copies(plan.copies, 0, 1)
        state = self.run_phase("prelude", {**step, **self.initial_tensors(plan)})
        num_loops = 0
        staged: tuple[LoopRows, Tensors] | None = None
        for loop_idx, rows in loop_rows(plan):
            if staged is None or staged[0] is not rows:
                staged = rows, self._loop_tensors(rows)
            if loop_idx:
                self._run_copies(plan.copies, loop_idx, loop_idx + 1)
            plane = {"plane": self._plane(self.manifest.layout.strategy.plane(loop_idx))}
            looped = self.run_phase("core", {**step, **state, **staged[1], **plane})
            state["state"] = looped["next_state"]
            num_loops = loop_idx + 1
        self._run_copies(plan.copies, num_loops, None)
        logits = self.run_phase("coda", {**step, **state})["logits"]
        positions = plan.positions[plan.logit_rows]
        return self.sampler.sample(logits, plan.sample_slots, positions)

    def _step_tensors(self, plan: StepPlan) -> Tensors:
        return {
            "input_ids": self.to_device(plan.input_ids),
            "positions": self.to_device(plan.positions),
            "cu_seqlens": self.to_device(plan.cu_seqlens),
            "seq_slots": self.to_device(plan.seq_slots),
            "logit_rows": self.to_device(plan.logit_rows),
            "plane": self._plane(0),
            **self.kv_tensors(),
        }

    def _loop_tensors(self, rows: LoopRows) -> Tensors:
        return {
            "rows": self.to_device(rows.rows),
            "positions": self.to_device(rows.positions),
            "cu_seqlens": self.to_device(rows.cu_seqlens),
        }

    def _plane(self, plane: int) -> torch.Tensor:
        return self.to_device(np.array([plane], np.int32))

    def _run_copies(self, copies: PlaneCopies, begin: int, end: int | None) -> None:
        """Run the copies due before the loops begin..end-1 (all later ones for None)."""
        if not len(copies.before_loop):
            return
        due = copies.before_loop >= begin
        if end is not None:
            due &= copies.before_loop < end
        if due.any():
            self.copy_planes(
                PlaneCopies(
                    copies.before_loop[due],
                    copies.src_units[due],
                    copies.dst_units[due],
                    copies.token_begin[due],
                    copies.token_end[due],
                )
            )
