"""Which tokens run in the next step: continuous batching with chunked prefill.

Owns the order of planning, the rows of running requests and preemption; leaves starts to
`slot_starts`, prompts' rows to `prompt_budget`, results to `step_results`, ends to
`live_requests` and pages to `runtime.kv`. Invariant: a request is waiting, running or ended,
and holds pages only while it runs or a step with its rows is in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looptrt.errors import InvariantError, QueueFullError, RequestError
from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.kv.prefix_cache import CacheIdentity
from looptrt.runtime.kv.sequence_kv import PrefixPolicy, SequenceKv
from looptrt.runtime.live_requests import LiveRequests
from looptrt.runtime.outputs import FinishedRequest, StepOutput
from looptrt.runtime.planning import (
    chunk_copies,
    decode_runs,
    plan_ahead,
    plan_drafts,
    plan_step,
)
from looptrt.runtime.prompt_budget import PromptBudget
from looptrt.runtime.request import FinishReason, Request, RequestState
from looptrt.runtime.scheduler_config import SchedulerConfig, check_fits
from looptrt.runtime.slot_starts import SlotStarts
from looptrt.runtime.slots import Slots
from looptrt.runtime.speculation import drafting_slots
from looptrt.runtime.step_plan import StepPlan, StepResult
from looptrt.runtime.step_results import StepResults
from looptrt.runtime.waiting_queue import WaitingQueue

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]


@dataclass(frozen=True)
class SchedulerStats:
    """Counts since start, and the state of the queues and the pool now.

    Attributes:
        num_cached_units: published units that nobody uses, which can be had like free ones.
        num_scheduled, num_context: requests in the latest step, and those of them whose
            prompt (or what a preemption lost) ran; 0 once no request is left.
        num_context_tokens: rows of the latter.
        num_paused: preempted requests that wait.
        num_prefill_only_steps: steps in which running answers waited for prompts.
        num_draft_steps: steps that made guesses.
        num_draft_tokens, num_accepted_tokens: guesses that were verified; those kept.
    """

    num_waiting: int
    num_running: int
    num_units: int
    num_free_units: int
    num_cached_units: int
    num_preemptions: int
    num_evictions: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_steps: int
    num_scheduled: int
    num_context: int
    num_context_tokens: int
    num_paused: int
    num_prefill_only_steps: int
    num_draft_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int


class Scheduler:
    """Plans steps and takes their results back.

    Calls alternate: `schedule`, run the plan, `commit` with its tokens. `add` and `abort`
    may come at any time, also between the two. While a step is in flight, `schedule_ahead`
    may plan the one after it; plans are committed in the order in which they were made.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        layout: PlaneLayout,
        identity: CacheIdentity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.slots = Slots(config.max_batch_size, config.max_seq_len)
        policy = PrefixPolicy(
            enabled=config.enable_prefix_cache and config.recomputable,
            at_least=config.prefix_at_least,
            grid=config.prefix_grid,
        )
        self.kv = SequenceKv(layout, config.num_units, self.slots, identity, policy)
        self._in_flight: deque[StepPlan] = deque()
        self._queue = WaitingQueue()
        self._live = LiveRequests(self.slots, self.kv, self._in_flight, clock)
        self._budget = PromptBudget(config, self.slots)
        self._starts = SlotStarts(
            config, self.slots, self.kv, self._queue, self._live.by_id, self._budget, clock
        )
        self._results = StepResults(self.slots, self.kv, self._live, clock)
        self._num_steps = self._num_draft_steps = self._num_preemptions = 0
        self._num_scheduled = self._num_context = self._num_context_tokens = 0

    # ---- requests in and out

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the request could never run here; nothing was queued.
            QueueFullError: the waiting queue is full.
        """
        if request.request_id in self._live.by_id:
            raise RequestError(f"request_id: {request.request_id} is already running")
        check_fits(self.config, self.kv, request)
        if self._queue.num_new >= self.config.max_waiting:
            raise QueueFullError(
                f"the waiting queue is full ({self.config.max_waiting} requests); try again later"
            )
        self._live.add(request)
        self._queue.push(request)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request now, for this reason; unknown and ended ids are harmless.

        A request whose step is in flight keeps its pages until the commit of that step.
        """
        request = self._live.by_id.get(request_id)
        if request is None or request.state is RequestState.ABORTED:
            return
        if request.state is RequestState.WAITING:
            self._queue.remove(request)
            self._live.end(request, reason)
        else:
            self._live.abort(request, reason)

    def take_ended(self) -> list[FinishedRequest]:
        """Requests ended since the last call or commit."""
        return self._live.take_ended()

    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._live.by_id or self._live.has_ended or self._in_flight)

    # ---- one step

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None when no request can run.

        Raises:
            InvariantError: the previous step was not committed.
        """
        if self._in_flight:
            raise InvariantError("schedule was called before the commit of the previous step")
        drafting = self._drafting()
        if drafting.size:
            assert self.config.draft_loops is not None
            self._num_draft_steps += 1
            return self._send(plan_drafts(self.slots, self.kv, drafting, self.config.draft_loops))
        preempted_before = self._num_preemptions
        decodes, chunks, budget = self._schedule_running()
        if self._num_preemptions == preempted_before or self.slots.num_active == 0:
            self._starts.start_waiting(chunks, budget)
        if not decodes.size and not chunks:
            if self._queue and self.slots.num_active == 0:
                raise InvariantError("requests wait, nothing runs and none can be admitted")
            return None
        decodes = self._budget.hold_answers(decodes, chunks)
        starts, copies = self._starts.take()
        copies += chunk_copies(self.slots, self.kv, chunks)
        runs = decode_runs(self.slots, decodes, chunks)
        plan = plan_step(self.slots, self.kv, runs, copies=copies, slot_starts=starts)
        return self._send(plan, chunks)

    def schedule_ahead(self) -> StepPlan | None:
        """Plan the step after the one in flight, whose tokens are not known yet.

        The plan runs one row for each request that the step in flight gives a token and that
        its length limit lets go on. A request that turns out to have stopped runs once more in
        vain: its token is dropped, its slot and pages come back at the commit of that plan.

        Returns:
            None where the next step needs the tokens, or has other rows than those: then it
            is for `schedule` to plan, after the commit.
        """
        if len(self._in_flight) != 1 or self._starts.may_start() or self._drafting().size:
            return None
        slots, flying = self.slots, self._in_flight[0]
        going = flying.sample_slots.astype(np.intp)
        going = going[slots.active[going]]
        one_each = flying.num_rows == len(flying.sample_slots) == len(flying.seq_slots)
        is_plain = one_each and flying.exits is None and not flying.is_draft
        if not is_plain or len(going) != np.count_nonzero(slots.active):
            return None
        for slot in self._live.aborted_slots:
            going = going[going != slot]
        going = going[slots.num_tokens[going] + 1 < slots.limit[going]]
        ends = slots.num_tokens[going] + 1
        for slot, end in zip(going.tolist(), ends.tolist(), strict=True):
            if slots.capacity[slot] < end and not self.kv.grow(slot, end):
                return None
        return self._send(plan_ahead(slots, self.kv, going)) if going.size else None

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take the result of the oldest step in flight."""
        if not self._in_flight or plan is not self._in_flight[0]:
            raise InvariantError("commit of a step that is not the oldest in flight")
        self._in_flight.popleft()
        if plan.is_draft:
            return self._results.take_guesses(plan, result)
        return self._results.take(plan, result)

    def _send(self, plan: StepPlan, chunks: dict[int, int] | None = None) -> StepPlan:
        """Put a plan in flight and count it."""
        self._in_flight.append(plan)
        self._num_steps += 1
        self._num_scheduled, self._num_context = len(plan.seq_slots), len(chunks or ())
        self._num_context_tokens = sum((chunks or {}).values())
        return plan

    # ---- rows of running requests

    def _drafting(self) -> NDArray[np.intp]:
        """Slots that guess one more token in the next step, with room for its verification."""
        draft_loops, slots = self.config.draft_loops, self.slots
        if draft_loops is None or self._starts.may_start():
            return np.empty(0, np.intp)
        wanting = drafting_slots(slots, draft_loops, self.config.max_num_tokens)
        ends = slots.num_tokens[wanting] + slots.num_drafts[wanting] + 1
        has_room = [
            slots.capacity[slot] >= end or self.kv.grow(slot, end)
            for slot, end in zip(wanting.tolist(), ends.tolist(), strict=True)
        ]
        return wanting[has_room]

    def _schedule_running(self) -> tuple[NDArray[np.intp], dict[int, int], int]:
        """Rows of running requests: decode slots, {prefill slot: rows}, budget left."""
        slots = self.slots
        remaining = slots.num_tokens - slots.num_computed
        decodes = np.flatnonzero(slots.active & (remaining == 1))
        prefills = np.flatnonzero(slots.active & (remaining > 1))
        has_prompts = prefills.size > 0 or self._starts.may_start()
        budget = self._budget.rows(decodes, has_prompts=has_prompts)
        chunks: dict[int, int] = {}
        short = decodes[slots.num_computed[decodes] >= slots.capacity[decodes]]
        if not short.size and not prefills.size:
            return decodes, chunks, budget
        for slot in slots.by_rank(np.concatenate([short, prefills])):
            if not slots.active[slot]:
                continue  # preempted for one before it
            if remaining[slot] == 1:
                self._grow_or_preempt(slot, int(slots.num_tokens[slot]))
            elif rows := self._grow_chunk(slot, budget):
                chunks[slot] = rows
                budget = self._budget.left(budget, rows)
        return decodes[slots.active[decodes]], chunks, budget

    def _grow_chunk(self, slot: int, budget: int) -> int:
        """Make room for the next chunk of a running prefill; returns its rows."""
        computed = int(self.slots.num_computed[slot])
        rows = self._budget.chunk(computed, int(self.slots.num_tokens[slot]), budget)
        if rows == 0 or self.kv.grow(slot, computed + rows):
            return rows
        whole = self.config.prefix_grid is not None
        if whole or self.slots.capacity[slot] <= computed:
            target = computed + (rows if whole else 1)
            if not self._grow_or_preempt(slot, target):
                return 0
        return min(rows, int(self.slots.capacity[slot]) - computed)

    def _grow_or_preempt(self, slot: int, num_tokens: int) -> bool:
        """Make room by preempting the lowest rank, at worst the request itself."""
        while not self.kv.grow(slot, num_tokens):
            victim = self.slots.by_rank(np.flatnonzero(self.slots.active))[-1]
            self._preempt(victim)
            if victim == slot:
                return False
        return True

    def _preempt(self, slot: int) -> None:
        """Give up the slot and pages; the recorded depths say how to recompute."""
        if not self.config.recomputable:
            raise InvariantError("a request that cannot be recomputed ran out of reserved pages")
        self.kv.release(slot)
        request = self.slots.free(slot)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._queue.push(request)

    # ---- figures

    def stats(self) -> SchedulerStats:
        """Queue, pool and cache figures."""
        pool, num_live, num_waiting = self.kv.pool, len(self._live.by_id), len(self._queue)
        return SchedulerStats(
            num_waiting=num_waiting,
            num_running=num_live - num_waiting,
            num_units=pool.units.num_units - 1,
            num_free_units=pool.units.num_free,
            num_cached_units=pool.cache.idle_units,
            num_preemptions=self._num_preemptions,
            num_evictions=pool.num_evictions,
            num_prompt_tokens=self._starts.num_prompt_tokens,
            num_hit_tokens=self._starts.num_hit_tokens,
            num_steps=self._num_steps,
            num_scheduled=self._num_scheduled if num_live else 0,
            num_context=self._num_context if num_live else 0,
            num_context_tokens=self._num_context_tokens if num_live else 0,
            num_paused=num_waiting - self._queue.num_new,
            num_prefill_only_steps=self._budget.num_prefill_only_steps,
            num_draft_steps=self._num_draft_steps,
            num_draft_tokens=self._results.num_draft_tokens,
            num_accepted_tokens=self._results.num_accepted_tokens,
        )

    def check_integrity(self) -> None:
        """Compare all books with each other; raises InvariantError on a difference."""
        running = [request for request in self.slots.requests if request is not None]
        self.kv.pool.check_integrity([page for request in running for page in request.pages])
        self._live.check_integrity()
