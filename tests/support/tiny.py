"""Builders of tiny layouts, schedulers and requests for tests without torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from looptrt.kv_layout import PlaneLayout, PlaneStrategy
from looptrt.runtime.kv.prefix_cache import CacheIdentity
from looptrt.runtime.outputs import FinishedRequest
from looptrt.runtime.request import Request
from looptrt.runtime.scheduler import Scheduler, SchedulerConfig
from looptrt.runtime.step_plan import StepPlan, StepResult
from tests.support.kv_sim import SimExecutor

VOCAB = 11
IDENTITY = CacheIdentity(model=("model", "float32"), uses_noise=True)


def layout(strategy: str = "latest", *, page_size: int = 4, max_loops: int = 3) -> PlaneLayout:
    """Two core layers, one prelude and one coda layer: one boundary unit a page."""
    return PlaneLayout(
        unit_slots=2,
        prelude_layers=1,
        coda_layers=1,
        max_loops=max_loops,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=2,
        dtype="float32",
        strategy=PlaneStrategy.parse(strategy, 2),
    )


def request(request_id: int, prompt: list[int], max_new_tokens: int = 4, **fields: Any) -> Request:
    """A request that runs 3 loops at every token unless told otherwise."""
    loops = fields.pop("loops", 3)
    return Request(
        request_id=request_id,
        prompt=np.array(prompt, np.int32),
        max_new_tokens=max_new_tokens,
        stop_token_ids=fields.pop("stop_token_ids", ()),
        loops=loops,
        prefill_loops=fields.pop("prefill_loops", loops),
        **fields,
    )


@dataclass
class Engine:
    """A scheduler with the simulated executor, and what came out of it.

    Attributes:
        runs_ahead: whether a step is run before the tokens of the one before it are taken.
    """

    scheduler: Scheduler
    executor: SimExecutor
    runs_ahead: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishedRequest] = field(default_factory=dict)
    in_flight: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    waits: dict[int, int] = field(default_factory=dict)

    def add(self, new: Request) -> Request:
        """Queue a request."""
        self.scheduler.add(new)
        self.tokens[new.request_id] = []
        return new

    def step(self, abort_in_flight: tuple[int, ...] = ()) -> bool:
        """Take the tokens of one step, running it first; returns whether there was one."""
        if not self.in_flight:
            self._run(self.scheduler.schedule())
        if not self.in_flight:
            self._take(self.scheduler.take_ended())
            return False
        if self.runs_ahead:
            self._run(self.scheduler.schedule_ahead())
        for request_id in abort_in_flight:
            self.scheduler.abort(request_id)
        output = self.scheduler.commit(*self.in_flight.popleft())
        for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
            self.tokens[request_id].append(token)
        self._take(output.finished)
        self.scheduler.check_integrity()
        return True

    def _run(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self._count_waits(plan)
            self.in_flight.append((plan, self.executor.execute(plan)))

    def _count_waits(self, plan: StepPlan) -> None:
        """No answer waits for longer than its neighbours' guesses and S steps of prompts."""
        slots = self.scheduler.slots
        has_run = set(plan.seq_slots.tolist())
        for slot in np.flatnonzero(slots.active & (slots.num_tokens > slots.num_prompt)).tolist():
            waited = 0 if slot in has_run else self.waits.get(slot, 0) + 1
            self.waits[slot] = waited
            assert waited <= self.scheduler.kv.layout.max_loops + 4

    def drain(self, max_steps: int = 2000) -> None:
        """Step until nothing is left; fails when that takes too long."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"not drained after {max_steps} steps")

    def _take(self, finished: list[FinishedRequest]) -> None:
        for entry in finished:
            assert entry.request_id not in self.finished, "a request ended twice"
            self.finished[entry.request_id] = entry


def engine(
    *,
    strategy: str = "latest",
    num_units: int = 200,
    uses_noise: bool = True,
    runs_ahead: bool = False,
    clock: Callable[[], float] = lambda: 0.0,
    **config: Any,
) -> Engine:
    """A scheduler over a small pool, its executor checking all that the config promises."""
    geometry = layout(strategy)
    settings = {"max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 40, **config}
    check = "written" if geometry.strategy.overwrites else "exact"
    if settings.get("prefix_at_least"):
        check = "at_least"
    identity = CacheIdentity(model=("model", "float32"), uses_noise=uses_noise)
    scheduler = Scheduler(
        SchedulerConfig(num_units=num_units, **settings), geometry, identity, clock
    )
    executor = SimExecutor(scheduler, geometry, vocab=VOCAB, check=check)
    return Engine(scheduler, executor, runs_ahead)
