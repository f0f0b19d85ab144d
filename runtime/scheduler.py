"""Which tokens run in the next step: continuous batching with chunked prefill.

Owns the waiting queue, admission, preemption and the ends of requests; leaves pages to
`runtime.kv` and the arithmetic to the executor, to which only a StepPlan passes.
Invariant: a request is waiting, running or ended, and holds pages only while running.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from looptrt.errors import EngineError, InvariantError, QueueFullError, RequestError
from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.kv.page_pool import Page
from looptrt.runtime.kv.prefix_cache import CacheIdentity
from looptrt.runtime.kv.sequence_kv import PrefixPolicy, SequenceKv
from looptrt.runtime.outputs import FinishedRequest, StepOutput, TokenLogprobs
from looptrt.runtime.request import FinishReason, Int32Array, Request, RequestState
from looptrt.runtime.slots import Slots
from looptrt.runtime.step_plan import ExitRows, PlaneCopies, SlotStart, StepPlan, StepResult

_NO_ROWS: Int32Array = np.empty(0, np.int32)


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


@dataclass(frozen=True)
class SchedulerStats:
    """Counts since start, and the state of the queues and the pool now.

    Attributes:
        num_cached_units: published units that nobody uses, which can be had like free ones.
        num_scheduled, num_context: requests in the latest step, and those of them whose
            prompt (or what a preemption lost) ran; 0 once no request is left.
        num_context_tokens: rows of the latter.
        num_paused: preempted requests that wait.
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


class Scheduler:
    """Plans steps and takes their results back.

    Calls alternate: `schedule`, run the plan, `commit` with its tokens. `add` and `abort`
    may come at any time, also between the two.
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
        self._waiting: list[tuple[int, int, Request]] = []
        self._num_waiting = 0
        self._live: dict[int, Request] = {}
        self._ended: list[FinishedRequest] = []
        self._slot_starts: list[SlotStart] = []
        self._fork_copies: list[tuple[int, int, int, int, int]] = []
        self._in_flight: StepPlan | None = None
        self._aborted_in_flight: list[tuple[Request, FinishReason]] = []
        self._num_arrived = self._num_steps = 0
        self._num_scheduled = self._num_context = self._num_context_tokens = 0
        self._num_preemptions = self._num_prompt_tokens = self._num_hit_tokens = 0

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
        elif self._in_flight is not None:
            request.state = RequestState.ABORTED
            self._aborted_in_flight.append((request, reason))
            return
        self._end(request, reason, None)

    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._live or self._ended)

    def stats(self) -> SchedulerStats:
        """Queue, pool and cache figures."""
        pool, is_busy = self.kv.pool, bool(self._live)
        return SchedulerStats(
            num_waiting=len(self._live) - self.slots.num_active,
            num_running=self.slots.num_active,
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
        if self._in_flight is not None:
            raise InvariantError("schedule was called before the commit of the previous step")
        preempted_before = self._num_preemptions
        decodes, chunks, budget = self._schedule_running()
        if self._num_preemptions == preempted_before or self.slots.num_active == 0:
            self._admit(chunks, budget)
        if not decodes.size and not chunks:
            if self._waiting and self.slots.num_active == 0:
                raise InvariantError("requests wait, nothing runs and none can be admitted")
            return None
        self._in_flight = self._plan(decodes, chunks)
        return self._in_flight

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take the result of a step."""
        if plan is not self._in_flight:
            raise InvariantError("commit of a step that is not in flight")
        self._in_flight = None
        slots, sampled, token_ids = self.slots, plan.sample_slots, result.token_ids
        if plan.exits is not None:
            slots.depths[sampled, plan.positions[plan.logit_rows]] = result.depths
        self._advance(plan)
        request_ids = slots.request_id[sampled]
        alive = np.ones(len(sampled), np.bool_)
        for request, reason in self._aborted_in_flight:
            alive &= sampled != request.slot
            self._end(request, reason, None)
        self._aborted_in_flight.clear()
        for row in result.failed:
            if alive[row]:
                alive[row] = False
                self._end(slots.request(int(sampled[row])), FinishReason.ERROR, None)
        slots.append(sampled[alive], token_ids[alive])
        stopped = (slots.stop_ids[sampled] == token_ids[:, None]).any(axis=1)
        ended = stopped | (slots.num_tokens[sampled] >= slots.limit[sampled])
        self._stamp_tokens(sampled[alive])
        for row in np.flatnonzero(ended & alive).tolist():
            reason = FinishReason.STOP if stopped[row] else FinishReason.LENGTH
            stop_id = int(token_ids[row]) if stopped[row] else None
            self._end(slots.request(int(sampled[row])), reason, stop_id)
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
        budget = self.config.max_num_tokens - len(decodes)
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
                budget -= rows
        return decodes[slots.active[decodes]], chunks, budget

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
            budget -= rows

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
        if partial:
            units = zip(parent.pages[full].units, request.pages[full].units, strict=True)
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

    def _plan(self, decodes: np.ndarray, chunks: dict[int, int]) -> StepPlan:
        slots = self.slots
        seq_slots = np.concatenate([decodes, np.fromiter(chunks, np.intp, len(chunks))])
        counts = np.ones(len(seq_slots), np.int32)
        counts[len(decodes) :] = list(chunks.values())
        cu_seqlens = np.zeros(len(seq_slots) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens[1:])
        begins = slots.num_computed[seq_slots]
        row_slots, positions = seq_slots, begins
        copies, self._fork_copies = self._fork_copies, []
        if chunks:
            row_slots = np.repeat(seq_slots, counts)
            offsets = np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(cu_seqlens[:-1], counts)
            positions = np.repeat(begins, counts) + offsets
            for slot, rows in chunks.items():
                begin = int(slots.num_computed[slot])
                copies.extend(self.kv.copies(slot, begin, begin + rows))
        prompt_rows = self._prompt_rows(row_slots, positions) if chunks else _NO_ROWS
        is_last = begins + counts == slots.num_tokens[seq_slots]
        logit_rows = (cu_seqlens[1:] - 1)[is_last]
        sample_slots = seq_slots[is_last].astype(np.int32)
        slot_starts, self._slot_starts = self._slot_starts, []
        self._num_steps += 1
        self._num_scheduled, self._num_context = len(seq_slots), len(chunks)
        self._num_context_tokens = sum(chunks.values())
        return StepPlan(
            input_ids=slots.token_ids[row_slots, positions],
            positions=positions,
            depths=slots.depths[row_slots, positions].astype(np.int32),
            noise_seeds=slots.noise_seed[row_slots],
            cu_seqlens=cu_seqlens,
            seq_slots=seq_slots.astype(np.int32),
            logit_rows=logit_rows,
            sample_slots=sample_slots,
            prompt_rows=prompt_rows,
            prompt_slots=row_slots[prompt_rows].astype(np.int32),
            table_updates=self.kv.table.take_updates(),
            copies=PlaneCopies.of(copies),
            slot_starts=tuple(slot_starts),
            exits=self._exit_rows(logit_rows, sample_slots, positions),
        )

    def _prompt_rows(self, row_slots: np.ndarray, positions: Int32Array) -> Int32Array:
        """Rows before the last of prompts that are to be scored and not answered yet."""
        slots = self.slots
        wanted = slots.scores_prompt[row_slots] & (positions < slots.num_prompt[row_slots] - 1)
        wanted &= slots.num_tokens[row_slots] == slots.num_prompt[row_slots]
        return np.flatnonzero(wanted).astype(np.int32)

    def _exit_rows(
        self, logit_rows: Int32Array, sample_slots: Int32Array, positions: Int32Array
    ) -> ExitRows | None:
        """Sampled rows whose request lets them stop early, with the units of their pages."""
        may_exit = self.slots.may_exit[sample_slots]
        if not may_exit.any():
            return None
        rows, slots = logit_rows[may_exit], sample_slots[may_exit]
        pages, token_index = np.divmod(positions[rows], self.kv.layout.page_size)
        units = self.kv.table.units[slots, self.kv.layout.boundary_units :, pages]
        return ExitRows(rows, slots, units, token_index.astype(np.int32))

    # ---- results

    def _advance(self, plan: StepPlan) -> None:
        """Count the step's rows as computed and publish the pages they filled."""
        slots, size = self.slots, self.kv.layout.page_size
        before = slots.num_computed[plan.seq_slots]
        after = before + np.diff(plan.cu_seqlens)
        slots.num_computed[plan.seq_slots] = after
        first, end = before // size, after // size
        for seq in np.flatnonzero(end > first).tolist():
            self.kv.publish(int(plan.seq_slots[seq]), int(first[seq]), int(end[seq]))

    def _scored(self, plan: StepPlan, result: StepResult) -> list[tuple[int, int, TokenLogprobs]]:
        """(request, position, log-probabilities) of the prompt tokens that the step scored."""
        positions = (plan.positions[plan.prompt_rows] + 1).tolist()
        requests = self.slots.request_id[plan.prompt_slots].tolist()
        return list(zip(requests, positions, result.prompt_logprobs, strict=True))

    def _stamp_tokens(self, sampled: Int32Array) -> None:
        now = self._clock()
        self.slots.last_token_s[sampled] = now
        is_first = self.slots.num_tokens[sampled] == self.slots.num_prompt[sampled] + 1
        for slot in sampled[is_first].tolist():
            self.slots.request(slot).first_token_s = now

    def _end(self, request: Request, reason: FinishReason, stop_id: int | None) -> None:
        """The one place where a request ends and its pages go back."""
        kv_bytes = sum(len(page.units) for page in request.pages) * self.kv.layout.unit_bytes
        if request.slot is not None:
            self.kv.release(request.slot)
            self.slots.free(request.slot)
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


def _queue_entry(request: Request) -> tuple[int, int, Request]:
    """Heap entry; arrival is unique, so requests are never compared."""
    return -request.priority, request.arrival, request
