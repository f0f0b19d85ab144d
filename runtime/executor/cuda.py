"""The PyTorch executor on a GPU: the same modules, replayed as CUDA graphs where a step is small.

Owns the KV pool in device memory, the transfers of a step and which way it runs; leaves
the order of a step to `Executor`, phases to `TorchExecutor` and graphs to `StepGraphs`. Invariant:
everything runs on torch's current stream of its own GPU, which need not be the current one, and
nothing waits for the GPU but the sampler's result and host memory that a step still reads.

A step whose rows all run the same loops is one graph from the table updates to the sampled
tokens; where requests read their logits it leaves those too, and the host finishes their rows.
Other small steps are chained graphs, one for the prelude and one for each loop, with plane copies
and exits between them. Steps of more rows than `EngineConfig.max_graph_rows` are launched kernel by
kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from looptrt.errors import EngineError
from looptrt.loop_spec import InitialState, NoiseMode
from looptrt.manifest import Manifest
from looptrt.plugins import launch
from looptrt.plugins.products import Products
from looptrt.runtime.batch import LoopRows
from looptrt.runtime.config import CudaGraphs
from looptrt.runtime.executor.base import Tensors
from looptrt.runtime.executor.cuda_sampler import CudaSampler
from looptrt.runtime.executor.device_memory import DeviceMemory
from looptrt.runtime.executor.graph_cache import memory_for
from looptrt.runtime.executor.staging import Staging
from looptrt.runtime.executor.step_graphs import StepGraphs
from looptrt.runtime.executor.torch import TorchExecutor
from looptrt.runtime.padding import StepShape
from looptrt.runtime.step_plan import PlaneCopies, StepPlan, StepResult

_logger = logging.getLogger(__name__)


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

    num_null_slots = 1

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
        self._held = ExitStack()  # of the process, until this executor is closed
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
        self._cuda_sampler = CudaSampler(max_slots, self._staging, manifest.spec.vocab_size)
        self.sampler = self._cuda_sampler
        self._max_slots, self._max_seq_len = max_slots, max_seq_len
        self._graphs: StepGraphs | None = None
        self._shape: StepShape | None = None  # of the running step, where its parts are graphs
        self._whole_step: StepPlan | None = None  # the newest whose tokens are on the GPU

    def use_products(self, products: Products) -> None:
        """See `Executor.use_products`; small kernels start early beside our own products."""
        super().use_products(products)
        if products.max_skinny_rows:
            self._held.enter_context(launch.overlapping_kernels(products.max_skinny_rows))

    def use_graphs(self, mode: CudaGraphs, max_rows: int) -> None:
        """See `Executor.use_graphs`; captures the steps that are sure to come."""
        manifest = self.manifest
        if mode == "off":
            return
        if manifest.spec.initial_state is InitialState.RANDOM and (reason := self._why_on_host()):
            # A state drawn on the CPU comes as a tensor of its own, which no graph holds.
            if mode != "auto":
                raise EngineError(f"cuda_graphs: expected auto or off, got {mode}: {reason}")
            _logger.info("cuda_graphs auto: no step is a CUDA graph: %s", reason)
            return
        with memory_for("what CUDA graphs read and write", self.device):
            self._graphs = StepGraphs(
                self._model,
                manifest.layout,
                self._kv,
                null_slot=self._max_slots,
                sampler=self._cuda_sampler,
                max_rows=max_rows,
                max_seq_len=self._max_seq_len,
                logits_dtype=getattr(torch, manifest.logits_dtype),
                whole_steps=mode != "loop",
            )
            self._graphs.capture_ahead()

    def _why_on_host(self) -> str | None:
        """Why a random initial state is drawn on the CPU; None if it is not."""
        if self.manifest.noise_mode is NoiseMode.SEQUENTIAL:
            return f"noise {self.manifest.noise_mode} is drawn on the host"
        if "position_keyed_noise" in self._model.prelude.operators.unfused:
            return "the kernel position_keyed_noise failed its check, so noise is drawn on the host"
        return None

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

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Enqueue the step if it is one graph; others run when their result is asked for."""
        pending, graphs = super().submit(plan), self._graphs
        shape = None if graphs is None else graphs.whole_shape(plan)
        if graphs is None or shape is None:
            return pending
        if self._cuda_sampler.serves(plan):
            self._whole_step = plan
        self._copy(plan.copies.due(0, 1))
        updates = plan.table_updates
        if graphs.has_room(updates, shape):
            return graphs.submit_whole(plan, shape, updates)
        self.update_table(plan)
        return graphs.submit_whole(plan, shape, None)

    def runs_ahead(self, plan: StepPlan) -> bool:
        """Whether the step was submitted as one graph that leaves its tokens to the next one."""
        return plan is self._whole_step

    def run_phase(self, phase: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Run a phase by its graph if the step's parts are graphs, else its module."""
        graphs, shape = self._graphs, self._shape
        if graphs is None or shape is None or phase == "coda":
            return super().run_phase(phase, tensors)
        if phase == "prelude":
            return graphs.run_prelude(shape)
        return {"next_state": graphs.run_loop(len(tensors["rows"]), shape, tensors["plane"])}

    def initial_tensors(self, plan: StepPlan) -> Tensors:
        """Noise seeds a row, which graphs have with their other inputs, or drawn states."""
        return {} if self._shape is not None else super().initial_tensors(plan)

    def _step_tensors(self, plan: StepPlan) -> Tensors:
        graphs = self._graphs
        self._shape = None if graphs is None else graphs.part_shape(plan)
        if graphs is None or self._shape is None:
            if graphs is not None:
                graphs.cache.counters.eager_steps += 1
            return super()._step_tensors(plan)
        logit_rows = self.to_device(np.concatenate([plan.logit_rows, plan.prompt_rows]))
        tensors = graphs.step_tensors(plan, self._shape)
        return {**tensors, "logit_rows": logit_rows, "plane": self._plane(0), **self.kv_tensors()}

    def _loop_tensors(self, rows: LoopRows) -> Tensors:
        if self._graphs is None or self._shape is None:
            return super()._loop_tensors(rows)
        return self._graphs.loop_tensors(rows, self._shape)

    def stats(self) -> dict[str, int | float]:
        """Counters of CUDA graphs."""
        if self._graphs is None:
            return {}
        counters = asdict(self._graphs.cache.counters)
        return {f"graph_{name}": value for name, value in counters.items()}

    def close(self) -> None:
        """Give graphs and the pool's memory back, once the GPU is done with them."""
        super().close()
        self._held.close()
        if self._graphs is not None:
            torch.cuda.synchronize(self.device)
            self._graphs.close()
            self._graphs = None
        if self._memory is not None:
            self._memory.free()
