"""What of a step is a CUDA graph: all of it, or its prelude and each of its loops.

Owns the graphs, the memory they read and write and the sizes they are captured for; leaves plane
copies, exits and steps without a graph to the executor. Invariant: rows that fill a step up to a
captured size touch no unit of the pool but the null unit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from looptrt.kv_layout import PlaneLayout
from looptrt.models.blocks import LoopedModel
from looptrt.plugins import launch
from looptrt.runtime.batch import LoopRows
from looptrt.runtime.executor.arena import Arena
from looptrt.runtime.executor.base import Tensors
from looptrt.runtime.executor.cuda_sampler import COLUMNS, CudaSampler
from looptrt.runtime.executor.graph_cache import GraphCache, graphs_kept
from looptrt.runtime.padding import (
    LOOP_SIZES,
    MAX_READ_SAMPLES,
    StepShape,
    filled,
    filled_rows,
    filled_step,
    graph_rows,
    size_for,
    step_shape,
    usual_shapes,
)
from looptrt.runtime.step_plan import PlaneCopies, StepPlan, StepResult, TableUpdates

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)


class StepGraphs:
    """Graphs over one model and one KV pool.

    Args:
        model: on a GPU.
        layout: the KV geometry.
        kv: `block_table` [slots, num_rows, pages], `kv_pool` [2].
        null_slot: row of the block table that holds null units only.
        sampler: of the executor.
        max_rows: rows of the largest step that is a graph.
        max_seq_len: tokens of the longest sequence.
        logits_dtype: of the coda.
        whole_steps: whether a step may be one graph; False captures loops alone.
    """

    def __init__(
        self,
        model: LoopedModel,
        layout: PlaneLayout,
        kv: Mapping[str, torch.Tensor],
        *,
        null_slot: int,
        sampler: CudaSampler,
        max_rows: int,
        max_seq_len: int,
        logits_dtype: torch.dtype,
        whole_steps: bool,
    ) -> None:
        table = kv["block_table"]
        self._model, self._layout, self._kv, self._sampler = model, layout, dict(kv), sampler
        self._null_slot, self._whole_steps = null_slot, whole_steps
        self._max_seq_len = max_seq_len
        self._device = table.device
        self._max_rows = graph_rows(max_rows)
        self._usual = usual_shapes(null_slot, self._max_rows)
        self.cache = GraphCache(self._device, graphs_kept(len(self._usual)))
        planes = range(layout.num_planes)
        self._planes = [
            torch.tensor([plane], dtype=torch.int32, device=self._device) for plane in planes
        ]
        self._plane_now = torch.zeros(1, dtype=torch.int32, device=self._device)
        # The last row is the filling rows' own.
        stream = self._max_rows + 1, model.spec.hidden_size
        dtype = getattr(torch, layout.dtype)
        self._state = torch.zeros(stream, dtype=dtype, device=self._device)
        self._injection = torch.zeros_like(self._state) if model.spec.adapter else None
        self._arenas: dict[StepShape, Arena] = {}
        self._loop_arenas: dict[tuple[int, int], Arena] = {}
        # By slot, so that a step can run before the host has seen the tokens of the one before.
        self._newest = torch.zeros(null_slot + 1, dtype=torch.int32, device=self._device)
        # Of whole steps with a request that reads them; by row, then token.
        sizes = [shape.samples for shape in self._usual]
        kept = max(size for size in sizes if size <= MAX_READ_SAMPLES) if whole_steps else 0
        vocab = kept, model.spec.vocab_size
        self._logits = torch.zeros(vocab, dtype=logits_dtype, device=self._device)

    # ---- whole steps

    def whole_shape(self, plan: StepPlan) -> StepShape | None:
        """The shape of the one graph that is this step; None if it is not one."""
        if not self._whole_steps or plan.exits is not None or plan.copies.due(1) is not None:
            return None
        if (plan.depths != plan.depths[0]).any() or not self._sampler.fits(plan):
            return None
        shape = self._within_limit(plan, shrinks=False)
        if shape is None or self._sampler.serves(plan) or shape.samples <= len(self._logits):
            return shape
        return None

    def has_room(self, updates: TableUpdates, shape: StepShape) -> bool:
        """Whether a whole step takes these table updates along."""
        return len(updates.slots) <= shape.samples

    def submit_whole(
        self, plan: StepPlan, shape: StepShape, updates: TableUpdates | None
    ) -> Callable[[], StepResult]:
        """Enqueue a whole step; what is returned waits for its tokens.

        Rows of requests that read their logits are finished on the host then, before another
        step is submitted.

        Args:
            plan: the step, its plane copies done. Where every sequence has one row, a token
                below 0 stands for the one sampled last for its slot.
            shape: from `whole_shape`.
            updates: applied at the step's start; None where that is done.
        """
        arena = self._fill(plan, shape, updates)
        is_read, count = not self._sampler.serves(plan), len(plan.logit_rows)
        self.cache.run(*self._whole(shape, plan.num_loops, is_read))
        wait = arena.submitted()

        def result() -> StepResult:
            tokens, failed = wait()[:, :count]
            if is_read:
                return self._sampler.read(self._logits[:count], plan, tokens, failed)
            return self._sampler.result(plan, tokens, failed)

        return result

    def capture_ahead(self) -> None:
        """Capture the usual steps of requests that ask for no depth; the cache has room for all."""
        if not self._whole_steps:
            return
        begin = time.monotonic()
        num_loops = min(self._model.spec.num_loops, self._layout.max_loops)
        # The largest first: smaller ones find room in its memory, and are kept longer.
        for shape in reversed(self._usual):
            self._fill(_EMPTY, shape, None)
            key, work = self._whole(shape, num_loops, False)
            self.cache.capture(key, work)
        torch.cuda.synchronize(self._device)
        for arena in self._arenas.values():
            arena.start_over()
        count = self.cache.counters.captures
        _logger.info("%d CUDA graphs captured in %.1f s", count, time.monotonic() - begin)

    def _fill(self, plan: StepPlan, shape: StepShape, updates: TableUpdates | None) -> Arena:
        """Hand a step's inputs to the graph that loads them."""
        size = shape.samples
        slots = np.full(size, self._null_slot, np.int32)  # null units again where there are none
        pages, units = np.zeros(size, np.int32), np.zeros((size, self._layout.num_rows), np.int32)
        if updates is not None:
            count = len(updates.slots)
            slots[:count], pages[:count] = updates.slots, updates.pages
            units[:count] = updates.units
        arena = self._arena(shape)
        arena.fill(
            {
                **filled_step(plan, shape, self._null_slot, self._max_seq_len),
                **_as_sampled(self._sampler.columns(plan, size)),
                "sample_slots": filled(plan.sample_slots.astype(np.int64), size, self._null_slot),
                "slots": slots,
                "pages": pages,
                "units": units,
            }
        )
        return arena

    def _whole(
        self, shape: StepShape, num_loops: int, is_read: bool
    ) -> tuple[Hashable, Callable[[], None]]:
        key = "step", shape, num_loops, is_read
        return key, partial(self._run_whole, shape, num_loops, is_read)

    @torch.inference_mode()
    def _run_whole(self, shape: StepShape, num_loops: int, is_read: bool) -> None:
        """Table updates, prelude, loops, coda and sampler; logits that are read are kept."""
        arena = self._arena(shape)
        arena.load()
        tensors = arena.tensors
        table = self._kv["block_table"]
        launch.update_tables(table, *(tensors[name] for name in ("slots", "pages", "units")))
        inputs = {**tensors, **self._kv, "plane": self._planes[0]}
        if shape.rows == shape.seqs:
            known, newest = tensors["input_ids"], self._newest.index_select(0, tensors["seq_slots"])
            inputs["input_ids"] = torch.where(known < 0, newest, known)
        carried = self._model.prelude.run(inputs)
        state, injection = carried["state"], carried.get("injection")
        for loop_idx in range(num_loops):
            plane = self._planes[self._layout.strategy.plane(loop_idx)]
            state = self._model.core.loop(state, injection, {**inputs, "plane": plane})
        logits = self._model.coda.run({**inputs, "state": state})["logits"]
        if is_read:
            self._logits[: shape.samples].copy_(logits)
        columns = {name: tensors[f"sampled_{name}"] for name in COLUMNS}
        chosen = launch.sample(logits, **columns)
        self._newest.index_copy_(0, tensors["sample_slots"], chosen[0])
        arena.store(chosen)

    # ---- preludes and loops

    def part_shape(self, plan: StepPlan) -> StepShape | None:
        """The shape of a step that runs as several graphs; None if it is too large."""
        return self._within_limit(plan, shrinks=True)

    def step_tensors(self, plan: StepPlan, shape: StepShape) -> Tensors:
        """Inputs of the step's prelude, which its graph loads."""
        return self._fill(plan, shape, None).tensors

    def run_prelude(self, shape: StepShape) -> Tensors:
        """Run the prelude on `step_tensors`; [rows, hidden] state and injection, ours."""
        self.cache.run(("prelude", shape), partial(self._run_prelude, shape))
        self._arena(shape).submitted()
        return self._carried(shape)

    def loop_tensors(self, rows: LoopRows, shape: StepShape) -> Tensors:
        """Inputs of the next loops of a step of that shape, on their way to the GPU."""
        count = size_for(len(rows.rows), LOOP_SIZES)
        assert count is not None
        loop_shape = StepShape(count, shape.seqs, 0)
        arena = self._loop_arena(loop_shape)
        arena.fill(filled_rows(rows, loop_shape, self._max_rows, self._max_seq_len))
        arena.load()  # not in the loop's graph, which runs once for each loop with these rows
        arena.submitted()
        return arena.tensors

    def run_loop(self, count: int, shape: StepShape, plane: torch.Tensor) -> torch.Tensor:
        """Run one loop on the `count` rows of `loop_tensors`; [rows, hidden] state, ours."""
        self._plane_now.copy_(plane, non_blocking=True)
        self.cache.run(("loop", count, shape), partial(self._run_loop, count, shape))
        return self._carried(shape)["state"]

    @torch.inference_mode()
    def _run_prelude(self, shape: StepShape) -> None:
        arena = self._arena(shape)
        arena.load()
        inputs = {**arena.tensors, **self._kv, "plane": self._planes[0]}
        carried = self._model.prelude.run(inputs)
        self._state[: shape.rows].copy_(carried["state"])
        if self._injection is not None:
            self._injection[: shape.rows].copy_(carried["injection"])

    @torch.inference_mode()
    def _run_loop(self, count: int, shape: StepShape) -> None:
        seq_slots = self._arena(shape).tensors["seq_slots"]
        tensors = self._loop_arena(StepShape(count, shape.seqs, 0)).tensors
        inputs = {**tensors, **self._kv, "seq_slots": seq_slots, "plane": self._plane_now}
        rows = tensors["rows"]
        injection = None if self._injection is None else self._injection.index_select(0, rows)
        state = self._model.core.loop(self._state.index_select(0, rows), injection, inputs)
        self._state.index_copy_(0, rows, state)

    def _carried(self, shape: StepShape) -> Tensors:
        carried = {"state": self._state[: shape.rows]}
        if self._injection is not None:
            carried["injection"] = self._injection[: shape.rows]
        return carried

    # ---- memory

    def _within_limit(self, plan: StepPlan, *, shrinks: bool) -> StepShape | None:
        shape = step_shape(plan, shrinks=shrinks, max_slots=self._null_slot)
        return shape if shape is not None and shape.rows <= self._max_rows else None

    def _arena(self, shape: StepShape) -> Arena:
        """A step's inputs, and the tokens of one that is a single graph."""
        if shape not in self._arenas:
            rows, seqs, samples = shape
            int32, num_rows = torch.int32, self._layout.num_rows
            columns = _as_sampled({name: (dtype, (samples,)) for name, dtype in COLUMNS.items()})
            self._arenas[shape] = Arena(
                {
                    "input_ids": (int32, (rows,)),
                    "positions": (int32, (rows,)),
                    "noise_seeds": (torch.int64, (rows,)),
                    "cu_seqlens": (int32, (seqs + 1,)),
                    "seq_slots": (int32, (seqs,)),
                    "logit_rows": (int32, (samples,)),
                    "sample_slots": (torch.int64, (samples,)),
                    "slots": (int32, (samples,)),
                    "pages": (int32, (samples,)),
                    "units": (int32, (samples, num_rows)),
                    **columns,
                },
                (2, samples),
                self._device,
            )
        return self._arenas[shape]

    def _loop_arena(self, shape: StepShape) -> Arena:
        key = shape.rows, shape.seqs
        if key not in self._loop_arenas:
            fields = {
                "rows": (torch.int64, (shape.rows,)),
                "positions": (torch.int32, (shape.rows,)),
                "cu_seqlens": (torch.int32, (shape.seqs + 1,)),
            }
            self._loop_arenas[key] = Arena(fields, (0,), self._device)
        return self._loop_arenas[key]

    def close(self) -> None:
        """Give all graphs up; the GPU must be done with them."""
        self.cache.clear()


def _as_sampled(columns: Mapping[str, _T]) -> dict[str, _T]:
    """The sampler's columns under names that a step's own inputs do not have."""
    return {f"sampled_{name}": column for name, column in columns.items()}


_NONE = np.zeros(0, np.int32)
_EMPTY = StepPlan(
    input_ids=_NONE,
    positions=_NONE,
    depths=_NONE,
    noise_seeds=np.zeros(0, np.int64),
    cu_seqlens=np.zeros(1, np.int32),
    seq_slots=_NONE,
    logit_rows=_NONE,
    sample_slots=_NONE,
    prompt_rows=_NONE,
    prompt_slots=_NONE,
    table_updates=TableUpdates(_NONE, _NONE, _NONE.reshape(0, 0)),
    copies=PlaneCopies.of([]),
)
