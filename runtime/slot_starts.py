"""How a waiting request gets a slot: prefix hits, a fork's shared pages, room for a chunk.

Owns the start of a request and what a plan must say about it; leaves the order of the queue to
`waiting_queue` and who gives way to the scheduler. Invariant: a request starts with room for
its first chunk or not at all, and whoever follows the head of the queue waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from looptrt.errors import InvariantError
from looptrt.runtime.kv.page_pool import Page
from looptrt.runtime.kv.sequence_kv import SequenceKv
from looptrt.runtime.planning import CopyEntry
from looptrt.runtime.prompt_budget import PromptBudget
from looptrt.runtime.request import Request, RequestState
from looptrt.runtime.scheduler_config import SchedulerConfig
from looptrt.runtime.slots import Slots
from looptrt.runtime.step_plan import SlotStart
from looptrt.runtime.waiting_queue import WaitingQueue


class SlotStarts:
    """Moves requests from the queue to slots.

    Attributes:
        num_prompt_tokens, num_hit_tokens: tokens of the prompts that ever started, and those
            of them found in shared pages at that time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        slots: Slots,
        kv: SequenceKv,
        queue: WaitingQueue,
        live: Mapping[int, Request],
        budget: PromptBudget,
        clock: Callable[[], float],
    ) -> None:
        self.num_prompt_tokens = self.num_hit_tokens = 0
        self._config, self._slots, self._kv = config, slots, kv
        self._queue, self._live, self._budget = queue, live, budget
        self._clock = clock
        self._refused: tuple[Request, int] | None = None  # who lacked units, and what there was
        self._starts: list[SlotStart] = []
        self._fork_copies: list[CopyEntry] = []

    def may_start(self) -> bool:
        """Whether a waiting request may start: not the one that still lacks units."""
        if not self._queue or not self._slots.num_free:
            return False
        if self._refused is None or self._refused[0] is not self._queue.head:
            return True
        return self._kv.pool.num_available > self._refused[1]

    def start_waiting(self, chunks: dict[int, int], budget: int) -> None:
        """Start requests while budget, slots and units last, and add their rows to `chunks`."""
        while self._queue and self._slots.num_free and budget > 0:
            request = self._queue.head
            rows = self._try_start(request, budget)
            if rows == 0 and self._slots.num_active == 0 and request.use_prefix_cache:
                request.use_prefix_cache = False  # shared pages too deep to leave room
                rows = self._try_start(request, budget)
            if rows == 0:
                return
            self._queue.pop()
            assert request.slot is not None
            chunks[request.slot] = rows
            budget = self._budget.left(budget, rows)

    def take(self) -> tuple[list[SlotStart], list[CopyEntry]]:
        """Slots taken since the last call, and the copies of units that their requests need."""
        starts, self._starts = self._starts, []
        copies, self._fork_copies = self._fork_copies, []
        return starts, copies

    def _try_start(self, request: Request, budget: int) -> int:
        """Start a request if its first chunk fits; returns the chunk's rows, 0 if not."""
        parent = self._running_parent(request)
        if parent is not None:
            return self._try_fork(request, parent)
        hits = self._kv.find_prefix(request)
        num_cached = len(hits) * self._kv.layout.page_size
        rows = self._budget.chunk(num_cached, len(request.token_ids), budget)
        if rows == 0 or self._start(request, hits, num_cached, num_cached + rows) is None:
            return 0
        return rows

    def _running_parent(self, request: Request) -> Request | None:
        """The request whose prompt pages a new fork shares, while it holds them."""
        if request.fork_of is None or request.num_preemptions or not self._config.recomputable:
            return None
        parent = self._live.get(request.fork_of)
        return None if parent is None or parent.slot is None else parent

    def _try_fork(self, request: Request, parent: Request) -> int:
        """Share the parent's full pages, copy the partial one, run the last prompt token."""
        assert parent.slot is not None
        num_shared = request.num_prompt - 1
        if self._slots.num_computed[parent.slot] < num_shared:
            return 0
        full, partial = divmod(num_shared, self._kv.layout.page_size)
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
            sources = self._kv.table.units[parent.slot, : len(targets), full].tolist()
            units = zip(sources, targets, strict=True)
            self._fork_copies += [(0, source, target, 0, partial) for source, target in units]
        self._slots.num_computed[slot] = num_shared
        return 1

    def _start(
        self, request: Request, shared: list[Page], num_cached: int, num_tokens: int
    ) -> int | None:
        """Give a waiting request a slot, shared pages and room for `num_tokens`, or nothing."""
        if not self._config.recomputable:
            num_tokens = min(request.max_total_tokens, self._config.max_seq_len)
        if not self._kv.has_room(request, shared, num_tokens):
            self._refused = request, self._kv.pool.num_available
            return None
        slot = self._slots.take(request)
        self._kv.share(slot, shared)
        if not self._kv.grow(slot, num_tokens):
            raise InvariantError("a request that had room did not get it")
        request.state = RequestState.RUNNING
        self._starts.append(
            SlotStart(slot, request.sampler, request.exit, request.num_prompt, request.token_ids)
        )
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            request.num_cached_tokens = num_cached
            request.num_reused_pages = len(shared)
            num_pages = self._kv.layout.num_pages(request.num_prompt)
            request.num_missed_pages = num_pages - len(shared)
            self.num_prompt_tokens += request.num_prompt
            self.num_hit_tokens += num_cached
        return slot
