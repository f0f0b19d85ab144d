"""Requests from their arrival to their end, and when the ended ones' slots and pages come back.

Owns the ends of requests and the account of each; leaves why a request ends to the scheduler
and `step_results`. Invariant: a request ends once, and its slot and pages come back when no
step in flight runs it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from looptrt.errors import InvariantError
from looptrt.runtime.kv.sequence_kv import SequenceKv
from looptrt.runtime.outputs import FinishedRequest
from looptrt.runtime.request import FinishReason, Request, RequestState
from looptrt.runtime.slots import Slots
from looptrt.runtime.step_plan import StepPlan


class LiveRequests:
    """Waiting and running requests, and what is left of those that ended.

    Attributes:
        by_id: every live request.
    """

    def __init__(
        self,
        slots: Slots,
        kv: SequenceKv,
        in_flight: Collection[StepPlan],
        clock: Callable[[], float],
    ) -> None:
        self.by_id: dict[int, Request] = {}
        self._num_arrived = 0
        self._slots, self._kv, self._in_flight, self._clock = slots, kv, in_flight, clock
        self._aborted: list[tuple[Request, FinishReason]] = []
        self._retired: list[int] = []  # slots of ended requests that a plan in flight still runs
        self._ended: list[FinishedRequest] = []

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` would report anything."""
        return bool(self._ended)

    @property
    def aborted_slots(self) -> list[int | None]:
        """Slots of requests that were aborted and end with the oldest step in flight."""
        return [request.slot for request, _ in self._aborted]

    def add(self, request: Request) -> None:
        """Take in a request, with its rank and time of arrival."""
        request.arrival, request.arrival_s = self._num_arrived, self._clock()
        self._num_arrived += 1
        self.by_id[request.request_id] = request

    def abort(self, request: Request, reason: FinishReason) -> None:
        """End a running request: now, or with the commit of the oldest step in flight."""
        if self._in_flight:
            request.state = RequestState.ABORTED
            self._aborted.append((request, reason))
        else:
            self.end(request, reason)

    def end_aborted(self) -> None:
        """End the requests that were aborted while the step was in flight."""
        aborted, self._aborted = self._aborted, []
        for request, reason in aborted:
            self.end(request, reason)

    def end(self, request: Request, reason: FinishReason, stop_id: int | None = None) -> None:
        """The one place where a request ends; its pages go back once no step uses them."""
        kv_bytes = sum(len(page.units) for page in request.pages) * self._kv.layout.unit_bytes
        if request.slot is not None:
            self._give_back(request.slot)
        aborted = reason is FinishReason.ABORT
        request.state = RequestState.ABORTED if aborted else RequestState.FINISHED
        del self.by_id[request.request_id]
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

    def free_retired(self) -> None:
        """Give back slots and pages that no step in flight uses any more."""
        retired, self._retired = self._retired, []
        for slot in retired:
            self._give_back(slot)

    def take_ended(self) -> list[FinishedRequest]:
        """Requests ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self) -> None:
        """Raise InvariantError where a request is not where it says."""
        running = [request for request in self._slots.requests if request is not None]
        for request in self.by_id.values():
            if (request.slot is None) is not (request not in running):
                raise InvariantError(f"request {request.request_id} is not where it says")

    def _give_back(self, slot: int) -> None:
        """Free a slot and its pages, or retire it while a step in flight uses them."""
        if any((plan.seq_slots == slot).any() for plan in self._in_flight):
            if self._slots.active[slot]:
                self._slots.retire(slot)
            self._retired.append(slot)
        else:
            self._kv.release(slot)
            self._slots.free(slot)
