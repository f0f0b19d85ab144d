"""Which tokens run in the next step: continuous batching with chunked prefill.

Owns the waiting queue, admission, preemption and the ends of requests; leaves pages to
`runtime.kv`, a plan's arrays to `planning`, guesses to `speculation` and the arithmetic to the
executor, to which only a StepPlan passes. Invariant: a request is waiting, running or ended,
and holds pages only while it runs or a step with its rows is in flight.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from looptrt.errors import EngineError, InvariantError, QueueFullError, RequestError
from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.kv.page_pool import Page
from looptrt.runtime.kv.prefix_cache import CacheIdentity
from looptrt.runtime.kv.sequence_kv import PrefixPolicy, SequenceKv
from looptrt.runtime.outputs import FinishedRequest, StepOutput, TokenLogprobs
from looptrt.runtime.planning import (
    CopyEntry,
    chunk_copies,
    decode_runs,
    plan_ahead,
    plan_drafts,
    plan_step,
)
from looptrt.runtime.request import FinishReason, Int32Array, Request, RequestState
from looptrt.runtime.slots import Slots
from looptrt.runtime.speculation import drafting_slots, reached_samples
from looptrt.runtime.step_plan import SlotStart, StepPlan, StepResult


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a scheduler.

    Attributes:
        max_batch_size: running requests at most.
        max_num_tokens: rows of a step at most; at least max_batch_size.
        max_seq_len: prompt and answer of a request at most.
        num_units: units of the KV pool, the null unit included.
        max_waiting: requests in the waiting queue at most, preempted ones not counted.
        enable_prefix_cache: whether finished pages are shared.
        prefix_at_least: share pages deeper than asked.
        prefix_grid: tokens; chunks and hits end at its multiples; then max_num_tokens must
            leave room for a whole chunk beside the other requests' rows.
        recomputable: False where KV depends on the chunk schedule: then all pages are
            reserved at admission, and there is neither preemption nor a prefix cache.
        prefill_share: whether prompts that do not fit beside the running answers' rows may
            have whole steps: after each step with answers up to S of them, S being the loops
            of the deepest answer.
        packed_prefill: whether a step may run rows of several prompts.
        draft_loops: loops of guesses that full depth verifies; None makes none.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    num_units: int
    max_waiting: int = 1024
    enable_prefix_cache: bool = True
    prefix_at_least: bool = False
    prefix_grid: int | None = None
    recomputable: bool = True
    prefill_share: bool = True
    packed_prefill: bool = True
    draft_loops: int | None = None


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
        grid = config.prefix_grid
        least = config.max_batch_size + (grid or 1) - 1
        if config.max_num_tokens < least:
            raise EngineError(
                f"max_num_tokens: expected at least {least}, so that max_batch_size "
                f"{config.max_batch_size} requests fit a step and all but one leave room for a "
                f"chunk of prefix_grid {grid}, got {config.max_num_tokens}"
            )
        self.config = config
        self.slots = Slots(config.max_batch_size, config.max_seq_len)
        policy = PrefixPolicy(
            enabled=config.enable_prefix_cache and config.recomputable,
            at_least=config.prefix_at_least,
            grid_pages=1 if grid is None else grid // layout.page_size,
        )
        self.kv = SequenceKv(layout, config.num_units, self.slots, identity, policy)
        self._clock = clock
        self._waiting: list[tuple[int, int, Request]] = []  # a heap
        self._num_waiting = 0
        self._live: dict[int, Request] = {}
        self._ended: list[FinishedRequest] = []
        self._slot_starts: list[SlotStart] = []
        self._fork_copies: list[CopyEntry] = []
        self._in_flight: deque[StepPlan] = deque()
        self._aborted_in_flight: list[tuple[Request, FinishReason]] = []
        self._retired: list[int] = []  # slots of ended requests that a plan in flight still runs
        self._refused: tuple[Request, int] | None = None  # who lacked units, and what there was
        self._num_held = 0  # steps in a row that held answers back
        self._num_arrived = self._num_steps = 0
        self._num_scheduled = self._num_context = self._num_context_tokens = 0
        self._num_preemptions = self._num_prompt_tokens = self._num_hit_tokens = 0
        self._num_prefill_only_steps = self._num_draft_steps = 0
        self._num_draft_tokens = self._num_accepted_tokens = 0

    # ---- requests in and out

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the request could never run here; nothing was queued.
            QueueFullError: the waiting queue is full.
        """
        self._check_fits(request)
        if self._num_waiting >= self.config.max_waiting:
            raise QueueFullError(
                f"the waiting queue is full ({self.config.max_waiting} requests); try again later"
            )
        request.arrival = self._num_arrived
        request.arrival_s = self._clock()
        self._num_arrived += 1
        self._live[request.request_id] = request
        self._push_waiting(request)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request now, for this reason; unknown and ended ids are harmless.

        A request whose step is in flight keeps its pages until the commit of that step.
        """
        request = self._live.get(request_id)
        if request is None or request.state is RequestState.ABORTED:
            return
        if request.state is RequestState.WAITING:
            self._waiting.remove(_queue_entry(request))
            heapq.heapify(self._waiting)
            self._num_waiting -= request.num_preemptions == 0
        elif self._in_flight:
            request.state = RequestState.ABORTED
            self._aborted_in_flight.append((request, reason))
            return
        self._end(request, reason, None)

    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._live or self._ended or self._in_flight)

    def stats(self) -> SchedulerStats:
        """Queue, pool and cache figures."""
        pool, is_busy = self.kv.pool, bool(self._live)
        return SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(self._live) - len(self._waiting),
            num_units=pool.units.num_units - 1,
            num_free_units=pool.units.num_free,
            num_cached_units=pool.cache.idle_units,
            num_preemptions=self._num_preemptions,
            num_evictions=pool.num_evictions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_steps=self._num_steps,
            num_scheduled=self._num_scheduled if is_busy else 0,
            num_context=self._num_context if is_busy else 0,
            num_context_tokens=self._num_context_tokens if is_busy else 0,
            num_paused=len(self._waiting) - self._num_waiting,
            num_prefill_only_steps=self._num_prefill_only_steps,
            num_draft_steps=self._num_draft_steps,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def check_integrity(self) -> None:
        """Compare all books with each other; raises InvariantError on a difference."""
        running = [request for request in self.slots.requests if request is not None]
        self.kv.pool.check_integrity([page for request in running for page in request.pages])
        for request in self._live.values():
            if (request.slot is None) is not (request not in running):
                raise InvariantError(f"request {request.request_id} is not where it says")

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
            self._admit(chunks, budget)
        if not decodes.size and not chunks:
            if self._waiting and self.slots.num_active == 0:
                raise InvariantError("requests wait, nothing runs and none can be admitted")
            return None
        decodes = self._hold_answers(decodes, chunks)
        copies, self._fork_copies = self._fork_copies, []
        copies += chunk_copies(self.slots, self.kv, chunks)
        starts, self._slot_starts = self._slot_starts, []
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
        if len(self._in_flight) != 1 or self._may_admit() or self._drafting().size:
            return None
        slots, flying = self.slots, self._in_flight[0]
        going = flying.sample_slots.astype(np.intp)
        going = going[slots.active[going]]
        one_each = flying.num_rows == len(flying.sample_slots) == len(flying.seq_slots)
        is_plain = one_each and flying.exits is None and not flying.is_draft
        if not is_plain or len(going) != np.count_nonzero(slots.active):
            return None
        for request, _ in self._aborted_in_flight:
            going = going[going != request.slot]
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
            return self._commit_drafts(plan, result)
        slots, sampled, token_ids = self.slots, plan.sample_slots, result.token_ids
        if plan.exits is not None:
            slots.depths[sampled, plan.positions[plan.logit_rows]] = result.depths
        stopped = (slots.stop_ids[sampled] == token_ids[:, None]).any(axis=1)
        failed = np.zeros(len(sampled), np.bool_)
        failed[list(result.failed)] = True
        reached = reached_samples(plan, token_ids, stopped | failed)
        self._advance(plan, reached)
        request_ids = slots.request_id[sampled]
        alive = reached & slots.active[sampled]
        for request, _ in self._aborted_in_flight:
            alive &= sampled != request.slot
        self._end_aborted()
        failed &= alive
        alive &= ~failed
        self._append(sampled[alive], token_ids[alive])
        for row in np.flatnonzero(failed).tolist():
            self._end(slots.request(int(sampled[row])), FinishReason.ERROR, None)
        ended = alive & (stopped | (slots.num_tokens[sampled] >= slots.limit[sampled]))
        for row in np.flatnonzero(ended & _is_newest(sampled, alive)).tolist():
            reason = FinishReason.STOP if stopped[row] else FinishReason.LENGTH
            stop_id = int(token_ids[row]) if stopped[row] else None
            self._end(slots.request(int(sampled[row])), reason, stop_id)
        self._free_retired()
        return StepOutput(
            request_ids=request_ids[alive].tolist(),
            token_ids=token_ids[alive].tolist(),
            depths=result.loops[alive].tolist(),
            finished=self.take_ended(),
            logprobs={
                kept: result.logprobs[row]
                for kept, row in enumerate(np.flatnonzero(alive).tolist())
                if row in result.logprobs
            },
            prompt_logprobs=self._scored(plan, result),
        )

    def take_ended(self) -> list[FinishedRequest]:
        """Requests ended since the last call or commit."""
        ended, self._ended = self._ended, []
        return ended

    # ---- planning

    def _schedule_running(self) -> tuple[np.ndarray, dict[int, int], int]:
        """Rows of running requests: decode slots, {prefill slot: rows}, budget left."""
        slots = self.slots
        remaining = slots.num_tokens - slots.num_computed
        decodes = np.flatnonzero(slots.active & (remaining == 1))
        prefills = np.flatnonzero(slots.active & (remaining > 1))
        budget = self._prompt_budget(decodes, prefills.size > 0)
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
                budget = self._left(budget, rows)
        return decodes[slots.active[decodes]], chunks, budget

    def _prompt_budget(self, decodes: np.ndarray, has_prefills: bool) -> int:
        """Rows that prompts may take: what decodes leave, or more where answers may be held."""
        slots, budget = self.slots, self.config.max_num_tokens - len(decodes)
        num_drafts = int(slots.num_drafts[decodes].sum())
        if num_drafts > budget:
            slots.num_drafts[decodes] = num_drafts = 0  # others took their room
        if not self.config.prefill_share or not (has_prefills or self._may_admit()):
            return budget - num_drafts
        answers = self._answers(decodes)
        if not answers.size or self._num_held >= slots.loops[answers].max():
            return budget - num_drafts
        return budget + len(answers)

    def _answers(self, decodes: np.ndarray) -> np.ndarray:
        """Those of the decoding slots that have given a token."""
        has_answer = self.slots.num_tokens[decodes] > self.slots.num_prompt[decodes]
        answers: np.ndarray = decodes[has_answer]
        return answers

    def _hold_answers(self, decodes: np.ndarray, chunks: dict[int, int]) -> np.ndarray:
        """Leave answers out of a step whose prompts need their rows (the prefill share).

        `_prompt_budget` gives prompts those rows only while fewer than S steps in a row did
        without the answers, so none waits for longer than S steps.
        """
        num_drafts = int(self.slots.num_drafts[decodes].sum())
        num_rows = len(decodes) + num_drafts + sum(chunks.values())
        if num_rows <= self.config.max_num_tokens:
            self._num_held = 0
            return decodes
        self._num_held += 1
        self._num_prefill_only_steps += 1
        return np.setdiff1d(decodes, self._answers(decodes))

    def _drafting(self) -> np.ndarray:
        """Slots that guess one more token in the next step, with room for its verification."""
        draft_loops, slots = self.config.draft_loops, self.slots
        if draft_loops is None or self._may_admit():
            return np.empty(0, np.intp)
        wanting = drafting_slots(slots, draft_loops, self.config.max_num_tokens)
        ends = slots.num_tokens[wanting] + slots.num_drafts[wanting] + 1
        has_room = [
            slots.capacity[slot] >= end or self.kv.grow(slot, end)
            for slot, end in zip(wanting.tolist(), ends.tolist(), strict=True)
        ]
        return wanting[has_room]

    def _chunk_rows(self, num_computed: int, num_tokens: int, budget: int) -> int:
        """Rows of a chunk under the token budget and the grid; 0 when it must wait."""
        rows = num_tokens - num_computed
        grid = self.config.prefix_grid
        if grid is None:
            return min(rows, budget)
        rows = min(rows, grid - num_computed % grid)
        return rows if rows <= budget else 0

    def _grow_chunk(self, slot: int, budget: int) -> int:
        """Make room for the next chunk of a running prefill; returns its rows."""
        computed = int(self.slots.num_computed[slot])
        rows = self._chunk_rows(computed, int(self.slots.num_tokens[slot]), budget)
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
        self._push_waiting(request)

    def _may_admit(self) -> bool:
        """Whether a waiting request may start: not the one that still lacks units."""
        if not self._waiting or not self.slots.num_free:
            return False
        if self._refused is None or self._refused[0] is not self._waiting[0][2]:
            return True
        return self.kv.pool.num_available > self._refused[1]

    def _admit(self, chunks: dict[int, int], budget: int) -> None:
        """Move waiting requests to slots while budget, slots and units last."""
        while self._waiting and self.slots.num_free and budget > 0:
            request = self._waiting[0][2]
            rows = self._try_admit(request, budget)
            if rows == 0 and self.slots.num_active == 0 and request.use_prefix_cache:
                request.use_prefix_cache = False  # shared pages too deep to leave room
                rows = self._try_admit(request, budget)
            if rows == 0:
                return
            heapq.heappop(self._waiting)
            assert request.slot is not None
            chunks[request.slot] = rows
            budget = self._left(budget, rows)

    def _left(self, budget: int, rows: int) -> int:
        """Rows that further prompts may take in a step after one with so many."""
        return budget - rows if self.config.packed_prefill else 0

    def _try_admit(self, request: Request, budget: int) -> int:
        """Start a request if its first chunk fits; returns the chunk's rows, 0 if not."""
        parent = self._running_parent(request)
        if parent is not None:
            return self._try_fork(request, parent)
        hits = self.kv.find_prefix(request)
        num_cached = len(hits) * self.kv.layout.page_size
        rows = self._chunk_rows(num_cached, len(request.token_ids), budget)
        if rows == 0 or self._start(request, hits, num_cached, num_cached + rows) is None:
            return 0
        return rows

    def _running_parent(self, request: Request) -> Request | None:
        """The request whose prompt pages a new fork shares, while it holds them."""
        if request.fork_of is None or request.num_preemptions or not self.config.recomputable:
            return None
        parent = self._live.get(request.fork_of)
        return None if parent is None or parent.slot is None else parent

    def _try_fork(self, request: Request, parent: Request) -> int:
        """Share the parent's full pages, copy the partial one, run the last prompt token."""
        assert parent.slot is not None
        num_shared = request.num_prompt - 1
        if self.slots.num_computed[parent.slot] < num_shared:
            return 0
        full, partial = divmod(num_shared, self.kv.layout.page_size)
        slot = self._start(request, parent.pages[:full], num_shared, request.num_prompt)
        if slot is None:
            return 0
        # What follows is named after these pages, whatever depths they were computed at.
        request.page_keys[:] = parent.page_keys[:full]
        request.token_keys[:] = parent.token_keys[:full]
        if partial:
            # The parent's column, not its page: that has fewer planes where its tokens stopped
            # early and a preemption made it compute them again.
            targets = request.pages[full].units
            sources = self.kv.table.units[parent.slot, : len(targets), full].tolist()
            units = zip(sources, targets, strict=True)
            self._fork_copies += [(0, source, target, 0, partial) for source, target in units]
        self.slots.num_computed[slot] = num_shared
        return 1

    def _start(
        self, request: Request, shared: list[Page], num_cached: int, num_tokens: int
    ) -> int | None:
        """Give a waiting request a slot, shared pages and room for `num_tokens`, or nothing."""
        if not self.config.recomputable:
            num_tokens = min(request.max_total_tokens, self.config.max_seq_len)
        if not self.kv.has_room(request, shared, num_tokens):
            self._refused = request, self.kv.pool.num_available
            return None
        slot = self.slots.take(request)
        self.kv.share(slot, shared)
        if not self.kv.grow(slot, num_tokens):
            raise InvariantError("a request that had room did not get it")
        self._num_waiting -= request.num_preemptions == 0
        request.state = RequestState.RUNNING
        self._slot_starts.append(
            SlotStart(slot, request.sampler, request.exit, request.num_prompt, request.token_ids)
        )
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            request.num_cached_tokens = num_cached
            request.num_reused_pages = len(shared)
            num_pages = self.kv.layout.num_pages(request.num_prompt)
            request.num_missed_pages = num_pages - len(shared)
            self._num_prompt_tokens += request.num_prompt
            self._num_hit_tokens += num_cached
        return slot

    def _send(self, plan: StepPlan, chunks: dict[int, int] | None = None) -> StepPlan:
        """Put a plan in flight and count it."""
        self._in_flight.append(plan)
        self._num_steps += 1
        self._num_scheduled, self._num_context = len(plan.seq_slots), len(chunks or ())
        self._num_context_tokens = sum((chunks or {}).values())
        return plan

    # ---- results

    def _advance(self, plan: StepPlan, reached: np.ndarray) -> None:
        """Count the rows of the answers' tokens as computed, publish the pages they filled."""
        slots, size, seq_slots = self.slots, self.kv.layout.page_size, plan.seq_slots
        counts = np.diff(plan.cu_seqlens)
        if plan.num_rows > len(seq_slots) and len(reached) > 1:
            self._count_drafts(plan.sample_slots, reached)
            rejected = plan.logit_rows[~reached]
            seqs = np.searchsorted(plan.cu_seqlens, rejected, side="right") - 1
            np.subtract.at(counts, seqs, 1)
        before = slots.num_computed[seq_slots]
        after = before + counts * slots.active[seq_slots]
        slots.num_computed[seq_slots] = after
        first, end = before // size, after // size
        for seq in np.flatnonzero(end > first).tolist():
            self.kv.publish(int(seq_slots[seq]), int(first[seq]), int(end[seq]))

    def _count_drafts(self, sampled: Int32Array, reached: np.ndarray) -> None:
        """Count and forget the guesses that a step verified."""
        slots = self.slots
        verified = np.flatnonzero(sampled[1:] == sampled[:-1]) + 1
        kept = verified[reached[verified]]
        np.add.at(slots.num_drafted, sampled[verified], 1)
        np.add.at(slots.num_accepted, sampled[kept], 1)
        slots.num_drafts[sampled] = 0
        self._num_draft_tokens += len(verified)
        self._num_accepted_tokens += len(kept)

    def _commit_drafts(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Keep a step's guesses; one of logits that are not finite is as good as any other."""
        token_ids = result.token_ids.copy()
        token_ids[list(result.failed)] = 0
        self.slots.append_draft(plan.sample_slots, token_ids)
        self._end_aborted()
        return StepOutput(finished=self.take_ended())

    def _append(self, sampled: Int32Array, token_ids: Int32Array) -> None:
        """Append tokens, of which a slot may have several, in order."""
        now = self._clock()
        follows = np.flatnonzero(sampled[1:] == sampled[:-1]) + 1
        self.slots.append(np.delete(sampled, follows), np.delete(token_ids, follows))
        for row in follows.tolist():
            self.slots.append(sampled[row : row + 1], token_ids[row : row + 1])
        self.slots.last_token_s[sampled] = now
        is_first = self.slots.num_tokens[sampled] == self.slots.num_prompt[sampled] + 1
        for slot in sampled[is_first].tolist():
            self.slots.request(slot).first_token_s = now

    def _scored(self, plan: StepPlan, result: StepResult) -> list[tuple[int, int, TokenLogprobs]]:
        """(request, position, log-probabilities) of the prompt tokens that the step scored."""
        positions = (plan.positions[plan.prompt_rows] + 1).tolist()
        requests = self.slots.request_id[plan.prompt_slots].tolist()
        return list(zip(requests, positions, result.prompt_logprobs, strict=True))

    def _end_aborted(self) -> None:
        aborted, self._aborted_in_flight = self._aborted_in_flight, []
        for request, reason in aborted:
            self._end(request, reason, None)

    def _free_retired(self) -> None:
        """Give back slots and pages that no step in flight uses any more."""
        retired, self._retired = self._retired, []
        for slot in retired:
            self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        """Free a slot and its pages, or retire it while a step in flight uses them."""
        if any((plan.seq_slots == slot).any() for plan in self._in_flight):
            if self.slots.active[slot]:
                self.slots.retire(slot)
            self._retired.append(slot)
        else:
            self.kv.release(slot)
            self.slots.free(slot)

    def _end(self, request: Request, reason: FinishReason, stop_id: int | None) -> None:
        """The one place where a request ends; its pages go back once no step uses them."""
        kv_bytes = sum(len(page.units) for page in request.pages) * self.kv.layout.unit_bytes
        if request.slot is not None:
            self._give_back(request.slot)
        aborted = reason is FinishReason.ABORT
        request.state = RequestState.ABORTED if aborted else RequestState.FINISHED
        del self._live[request.request_id]
        self._ended.append(
            FinishedRequest(
                request_id=request.request_id,
                reason=reason,
                stop_token_id=stop_id,
                num_cached_tokens=request.num_cached_tokens or 0,
                kv_bytes=kv_bytes,
                num_preemptions=request.num_preemptions,
                arrival_s=request.arrival_s,
                first_scheduled_s=request.first_scheduled_s,
                first_token_s=request.first_token_s,
                finished_s=self._clock(),
                last_token_s=request.last_token_s,
                num_prompt_tokens=request.num_prompt,
                num_generated_tokens=len(request.token_ids) - request.num_prompt,
                num_allocated_pages=request.num_allocated_pages,
                num_reused_pages=request.num_reused_pages,
                num_missed_pages=request.num_missed_pages,
                num_draft_tokens=request.num_draft_tokens,
                num_accepted_tokens=request.num_accepted_tokens,
            )
        )

    def _push_waiting(self, request: Request) -> None:
        self._num_waiting += request.num_preemptions == 0
        heapq.heappush(self._waiting, _queue_entry(request))

    def _check_fits(self, request: Request) -> None:
        if request.request_id in self._live:
            raise RequestError(f"request_id: {request.request_id} is already running")
        if not 1 <= request.num_prompt < self.config.max_seq_len:
            raise RequestError(
                f"prompt: expected 1 to {self.config.max_seq_len - 1} tokens, "
                f"got {request.num_prompt}"
            )
        max_loops = self.kv.layout.max_loops
        if not 1 <= request.prefill_loops <= request.loops <= max_loops:
            raise RequestError(
                f"loops: expected 1 <= prefill_loops <= loops <= {max_loops}, "
                f"got prefill_loops {request.prefill_loops}, loops {request.loops}"
            )
        needed, held = self.kv.units_needed(request), self.config.num_units - 1
        if needed > held:
            raise RequestError(
                f"prompt and max_tokens: {request.num_prompt} + {request.max_new_tokens} tokens at "
                f"depth {request.loops} need {needed} KV units, the pool has {held}"
            )


def _is_newest(sampled: Int32Array, alive: np.ndarray) -> np.ndarray:
    """Samples whose slot has no later one that is alive; those of a slot are adjacent."""
    newest = np.ones(len(sampled), np.bool_)
    newest[:-1] = (sampled[1:] != sampled[:-1]) | ~alive[1:]
    return newest


def _queue_entry(request: Request) -> tuple[int, int, Request]:
    """Heap entry; arrival is unique, so requests are never compared."""
    return -request.priority, request.arrival, request
