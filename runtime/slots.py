"""Running requests as arrays, one slot each, so that a step's host cost is a few NumPy calls.

Owns the token, depth and progress arrays of running requests; leaves which request runs
to the scheduler. Invariant: a free slot is inactive, and an inactive slot's
arrays are never planned from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from looptrt.runtime.request import ExitRule, Request

NO_TOKEN = -1


class Slots:
    """Structure of arrays over `max_slots` running requests.

    Attributes:
        requests: [max_slots] request in each slot.
        active: [max_slots] whether the slot's request may be scheduled.
        token_ids: [max_slots, max_seq_len] known tokens: prompt, then generated.
        depths: [max_slots, max_seq_len] loops of each known token.
        num_prompt: [max_slots] tokens of the prompt.
        num_tokens, num_computed: [max_slots] known tokens; tokens whose KV is written.
        capacity: [max_slots] tokens that the pages held can take.
        limit: [max_slots] tokens at which the request ends.
        loops: [max_slots] S.
        priority, arrival: [max_slots] rank of the request.
        last_token_s: [max_slots] when the newest generated token came, NaN before the first.
        scores_prompt: [max_slots] whether the prompt's log-probabilities are wanted.
        may_exit: [max_slots] whether generated tokens may stop before S loops.
        draws_alone: [max_slots] whether a token is made of its own row's logits and nothing else.
        num_drafts: [max_slots] tokens beyond the known ones that are guesses to be verified;
            they lie behind the known ones in `token_ids` and `depths`.
        num_drafted, num_accepted: [max_slots] guesses verified so far, and those kept.
        stop_ids: [max_slots, width] ids that end the request, NO_TOKEN beyond them.
    """

    def __init__(self, max_slots: int, max_seq_len: int) -> None:
        self.requests: list[Request | None] = [None] * max_slots
        self.active, self.may_exit, self.scores_prompt, self.draws_alone = (
            np.zeros(max_slots, np.bool_) for _ in range(4)
        )
        self.token_ids: NDArray[np.int32] = np.zeros((max_slots, max_seq_len), np.int32)
        self.depths: NDArray[np.int16] = np.zeros((max_slots, max_seq_len), np.int16)
        self.num_prompt, self.num_tokens, self.num_computed = (
            np.zeros(max_slots, np.int32) for _ in range(3)
        )
        self.capacity, self.limit, self.loops = (np.zeros(max_slots, np.int32) for _ in range(3))
        self.num_drafts, self.num_drafted, self.num_accepted = (
            np.zeros(max_slots, np.int32) for _ in range(3)
        )
        self.noise_seed, self.request_id, self.priority, self.arrival = (
            np.zeros(max_slots, np.int64) for _ in range(4)
        )
        self.last_token_s: NDArray[np.float64] = np.full(max_slots, np.nan)
        self.stop_ids: NDArray[np.int32] = np.full((max_slots, 1), NO_TOKEN, np.int32)
        self._free = list(range(max_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def num_active(self) -> int:
        """Slots taken."""
        return len(self.requests) - len(self._free)

    def take(self, request: Request) -> int:
        """Put a request into a free slot and return the slot."""
        slot = self._free.pop()
        num_tokens = len(request.token_ids)
        self.requests[slot] = request
        self.active[slot] = True
        self.token_ids[slot, :num_tokens] = request.token_ids
        self.depths[slot, :num_tokens] = request.depths
        self.num_prompt[slot] = request.num_prompt
        self.num_tokens[slot] = num_tokens
        self.num_computed[slot] = self.capacity[slot] = 0
        self.limit[slot] = min(request.max_total_tokens, self.token_ids.shape[1])
        self.loops[slot] = request.loops
        self.noise_seed[slot] = request.noise_seed
        self.request_id[slot] = request.request_id
        self.priority[slot] = request.priority
        self.arrival[slot] = request.arrival
        self.last_token_s[slot] = np.nan if request.last_token_s is None else request.last_token_s
        self.scores_prompt[slot] = request.sampler.prompt_logprobs is not None
        self.may_exit[slot] = request.exit.rule is not ExitRule.NONE
        sampler = request.sampler
        self.draws_alone[slot] = not sampler.has_edits and sampler.logprobs is None
        self.num_drafts[slot] = 0
        self.num_drafted[slot] = request.num_draft_tokens
        self.num_accepted[slot] = request.num_accepted_tokens
        self._set_stop_ids(slot, request.stop_token_ids)
        request.slot = slot
        return slot

    def retire(self, slot: int) -> Request:
        """Stop scheduling a slot; its tokens and depths go back to the request."""
        request = self.request(slot)
        num_tokens = self.num_tokens[slot]
        request.token_ids = self.token_ids[slot, :num_tokens].copy()
        request.depths = self.depths[slot, :num_tokens].copy()
        request.num_draft_tokens = int(self.num_drafted[slot])
        request.num_accepted_tokens = int(self.num_accepted[slot])
        if num_tokens > request.num_prompt:
            request.last_token_s = float(self.last_token_s[slot])
        self.active[slot] = False
        return request

    def free(self, slot: int) -> Request:
        """Take the request, retired or not, out of a slot."""
        request = self.retire(slot) if self.active[slot] else self.request(slot)
        request.slot = None
        self.requests[slot] = None
        self._free.append(slot)
        return request

    def request(self, slot: int) -> Request:
        """Request in an active slot."""
        request = self.requests[slot]
        assert request is not None
        return request

    def by_rank(self, slots: NDArray[np.intp]) -> list[int]:
        """Slots from the first to be served to the first to be preempted."""
        order = np.lexsort((self.arrival[slots], -self.priority[slots]))
        ranked: list[int] = slots[order].tolist()
        return ranked

    def append(self, slots: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """Append generated tokens, of depth S, one to each of these different slots."""
        ends = self.num_tokens[slots]
        self.token_ids[slots, ends] = token_ids
        self.depths[slots, ends] = self.loops[slots]
        self.num_tokens[slots] = ends + 1

    def append_draft(self, slots: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """Append a guess, to run S loops when it is verified, to each of these slots."""
        ends = self.num_tokens[slots] + self.num_drafts[slots]
        self.token_ids[slots, ends] = token_ids
        self.depths[slots, ends] = self.loops[slots]
        self.num_drafts[slots] += 1

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
