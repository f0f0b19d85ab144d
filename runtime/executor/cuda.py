"""The PyTorch executor on a GPU: the same modules, their operators in the plugin library.

Owns the KV pool in device memory and the transfers of a step; leaves the order of a step to
`Executor` and phases to `TorchExecutor`. Invariant: everything runs on torch's current stream,
and nothing waits for the GPU but the sampler's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from looptrt.manifest import Manifest
from looptrt.plugins import launch
from looptrt.runtime.executor.base import Tensors
from looptrt.runtime.executor.cuda_sampler import CudaSampler
from looptrt.runtime.executor.device_memory import DeviceMemory
from looptrt.runtime.executor.staging import Staging
from looptrt.runtime.executor.torch import TorchExecutor
from looptrt.runtime.step_plan import PlaneCopies, StepPlan


class CudaExecutor(TorchExecutor):
    """Runs the phases as torch modules on one GPU.

    Args:
        engine_dir: engine directory to load weights from.
        manifest: its verified manifest.
        max_slots: sequences the block table has room for.
        max_seq_len: tokens of the longest sequence.
        num_units: units of the KV pool, the null unit included.
        device: a CUDA device with an index.

    Attributes:
        pool: [num_units * unit_bytes] uint8 on the device, of its own cudaMalloc.

    Raises:
        EngineError: the pool does not fit.
    """

    def __init__(
        self,
        engine_dir: Path,
        manifest: Manifest,
        *,
        max_slots: int,
        max_seq_len: int,
        num_units: int,
        device: torch.device,
    ) -> None:
        self._memory: DeviceMemory | None = None
        self._staging = Staging(device)
        super().__init__(
            engine_dir,
            manifest,
            max_slots=max_slots,
            max_seq_len=max_seq_len,
            num_units=num_units,
            device=device,
        )
        self.sampler = CudaSampler(max_slots, self._staging)

    def allocate_pool(self, num_bytes: int) -> torch.Tensor:
        """One cudaMalloc; its content is whatever the memory held."""
        self._memory = DeviceMemory(num_bytes, self.device, "KV pool")
        return self._memory.tensor(self.device)

    def stage(self, arrays: Mapping[str, np.ndarray]) -> Tensors:
        """Copy host arrays to the GPU in one transfer."""
        return self._staging.stage(arrays)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy a host array to the GPU."""
        return self._staging.stage({"": array})[""]

    def update_table(self, plan: StepPlan) -> None:
        """Apply the plan's block-table updates on the GPU."""
        if len(plan.table_updates.slots):
            updates = self.stage(vars(plan.table_updates))
            launch.update_tables(self.block_table, **updates)

    def copy_planes(self, copies: PlaneCopies) -> None:
        """Copy token ranges between units of the pool."""
        ranges = self.stage(
            {name: column for name, column in vars(copies).items() if name != "before_loop"}
        )
        launch.plane_copy(
            self.kv_tensors()["kv_pool"],
            **ranges,
            unit_shape=self.manifest.layout.unit_shape,
            dtype=self.dtype,
        )

    def close(self) -> None:
        """Give the pool's memory back, once the GPU is done with it."""
        super().close()
        if self._memory is not None:
            self._memory.free()
