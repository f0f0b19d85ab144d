"""What a step's result does to the requests whose rows it ran.

Owns progress, new tokens, guesses that are kept and why an answer ends; leaves the end itself
to `live_requests`, and which guesses are kept to `speculation`. Invariant: a token enters an
answer once, in order, and none after the one that ends it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from looptrt.runtime.kv.sequence_kv import SequenceKv
from looptrt.runtime.live_requests import LiveRequests
from looptrt.runtime.outputs import StepOutput, TokenLogprobs
from looptrt.runtime.request import FinishReason
from looptrt.runtime.slots import Slots
from looptrt.runtime.speculation import reached_samples
from looptrt.runtime.step_plan import Int32Array, StepPlan, StepResult


class StepResults:
    """Takes the results of steps, oldest first.

    Attributes:
        num_draft_tokens, num_accepted_tokens: guesses that were verified; those kept.
    """

    def __init__(
        self, slots: Slots, kv: SequenceKv, live: LiveRequests, clock: Callable[[], float]
    ) -> None:
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self._slots, self._kv, self._live, self._clock = slots, kv, live, clock

    def take(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Append a step's tokens to their answers and end those that are complete."""
        slots, sampled, token_ids = self._slots, plan.sample_slots, result.token_ids
        if plan.exits is not None:
            slots.depths[sampled, plan.positions[plan.logit_rows]] = result.depths
        stopped = (slots.stop_ids[sampled] == token_ids[:, None]).any(axis=1)
        failed = np.zeros(len(sampled), np.bool_)
        failed[list(result.failed)] = True
        reached = reached_samples(plan, token_ids, stopped | failed)
        self._advance(plan, reached)
        request_ids = slots.request_id[sampled]
        alive = reached & slots.active[sampled]
        for slot in self._live.aborted_slots:
            alive &= sampled != slot
        self._live.end_aborted()
        failed &= alive
        alive &= ~failed
        self._append(sampled[alive], token_ids[alive])
        for row in np.flatnonzero(failed).tolist():
            self._live.end(slots.request(int(sampled[row])), FinishReason.ERROR)
        ended = alive & (stopped | (slots.num_tokens[sampled] >= slots.limit[sampled]))
        for row in np.flatnonzero(ended & _is_newest(sampled, alive)).tolist():
            reason = FinishReason.STOP if stopped[row] else FinishReason.LENGTH
            stop_id = int(token_ids[row]) if stopped[row] else None
            self._live.end(slots.request(int(sampled[row])), reason, stop_id)
        self._live.free_retired()
        return StepOutput(
            request_ids=request_ids[alive].tolist(),
            token_ids=token_ids[alive].tolist(),
            depths=result.loops[alive].tolist(),
            finished=self._live.take_ended(),
            logprobs={
                kept: result.logprobs[row]
                for kept, row in enumerate(np.flatnonzero(alive).tolist())
                if row in result.logprobs
            },
            prompt_logprobs=self._scored(plan, result),
        )

    def take_guesses(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Keep a step's guesses; one of logits that are not finite is as good as any other."""
        token_ids = result.token_ids.copy()
        token_ids[list(result.failed)] = 0
        self._slots.append_draft(plan.sample_slots, token_ids)
        self._live.end_aborted()
        return StepOutput(finished=self._live.take_ended())

    def _advance(self, plan: StepPlan, reached: NDArray[np.bool_]) -> None:
        """Count the rows of the answers' tokens as computed, publish the pages they filled."""
        slots, size, seq_slots = self._slots, self._kv.layout.page_size, plan.seq_slots
        num_rows = np.diff(plan.cu_seqlens)
        counts = num_rows.copy()
        if plan.num_rows > len(seq_slots) and len(reached) > 1:
            self._count_drafts(plan.sample_slots, reached)
            rejected = plan.logit_rows[~reached]
            seqs = np.searchsorted(plan.cu_seqlens, rejected, side="right") - 1
            np.subtract.at(counts, seqs, 1)
        before = slots.num_computed[seq_slots]
        after = before + counts * slots.active[seq_slots]
        slots.num_computed[seq_slots] = after
        for seq in np.flatnonzero(after // size > before // size).tolist():
            begin, end = int(before[seq]), int(after[seq])
            self._kv.publish(int(seq_slots[seq]), begin, end, int(num_rows[seq]))

    def _count_drafts(self, sampled: Int32Array, reached: NDArray[np.bool_]) -> None:
        """Count and forget the guesses that a step verified."""
        slots = self._slots
        verified = np.flatnonzero(sampled[1:] == sampled[:-1]) + 1
        kept = verified[reached[verified]]
        np.add.at(slots.num_drafted, sampled[verified], 1)
        np.add.at(slots.num_accepted, sampled[kept], 1)
        slots.num_drafts[sampled] = 0
        self.num_draft_tokens += len(verified)
        self.num_accepted_tokens += len(kept)

    def _append(self, sampled: Int32Array, token_ids: Int32Array) -> None:
        """Append tokens, of which a slot may have several, in order."""
        slots, now = self._slots, self._clock()
        is_first_of_slot = np.ones(len(sampled), np.bool_)
        is_first_of_slot[1:] = sampled[1:] != sampled[:-1]
        slots.append(sampled[is_first_of_slot], token_ids[is_first_of_slot])
        for row in np.flatnonzero(~is_first_of_slot).tolist():
            slots.append(sampled[row : row + 1], token_ids[row : row + 1])
        slots.last_token_s[sampled] = now
        has_one = slots.num_tokens[sampled] == slots.num_prompt[sampled] + 1
        for slot in sampled[has_one].tolist():
            slots.request(slot).first_token_s = now

    def _scored(self, plan: StepPlan, result: StepResult) -> list[tuple[int, int, TokenLogprobs]]:
        """(request, position, log-probabilities) of the prompt tokens that the step scored."""
        positions = (plan.positions[plan.prompt_rows] + 1).tolist()
        requests = self._slots.request_id[plan.prompt_slots].tolist()
        return list(zip(requests, positions, result.prompt_logprobs, strict=True))


def _is_newest(sampled: Int32Array, alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Samples whose slot has no later one that is alive; those of a slot are adjacent."""
    newest = np.ones(len(sampled), np.bool_)
    newest[:-1] = (sampled[1:] != sampled[:-1]) | ~alive[1:]
    return newest
