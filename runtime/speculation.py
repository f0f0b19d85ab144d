"""Self-speculation: guesses made at a shallow depth, verified at full depth in one step.

Owns how many guesses, for whom, and which of them a verification keeps; leaves rows and
pages to the scheduler. Invariant: a kept token is the one that its row's own logits and
random number give at full depth, so the answer is the same with and without guesses.

Why guesses cost nothing but time: a draft writes the planes below its depth and the boundary
units of positions that no committed token occupies. Drafts read the planes up to their own
loop, which earlier drafts and all known tokens have; the verification writes every plane of
the same positions again before anyone reads them; what a rejected guess wrote lies beyond the
known tokens and is overwritten by the tokens that come there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from looptrt.runtime.slots import Slots
from looptrt.runtime.step_plan import Int32Array, StepPlan

_MOST_DRAFTS = 4
_MOST_ROWS = 8  # of a verification: beyond, its rows cost more than they save
MOST_REQUESTS = _MOST_ROWS // 2  # that run at once and guess: two rows of each are verified
_NOBODY: NDArray[np.intp] = np.empty(0, np.intp)


def draft_budget(num_running: int, max_num_tokens: int) -> int:
    """Guesses a request for so many running requests: max(0, min(4, 8 // N - 1)).

    Fewer where a verification would not fit into `max_num_tokens` rows.
    """
    rows = min(_MOST_ROWS, max_num_tokens)
    return max(0, min(_MOST_DRAFTS, rows // max(num_running, 1) - 1))


def drafting_slots(slots: Slots, draft_loops: int, max_num_tokens: int) -> NDArray[np.intp]:
    """Slots that make one more guess before the next verification.

    Nobody does while a prompt runs, or while a request runs whose tokens need more than their
    rows' logits, may stop early or run no deeper than a guess: it would wait for its
    neighbours' guesses and gain nothing.
    """
    running = np.flatnonzero(slots.active)
    budget = draft_budget(len(running), max_num_tokens)
    if not len(running) or not budget or not _may_speculate(slots, running, draft_loops):
        return _NOBODY
    known, drafts = slots.num_tokens[running], slots.num_drafts[running]
    newest = slots.token_ids[running, known + drafts - 1]
    ends = (slots.stop_ids[running] == newest[:, None]).any(axis=1)
    room = slots.limit[running] - known - 1
    drafting: NDArray[np.intp] = running[(drafts < np.minimum(budget, room)) & ~ends]
    return drafting


def _may_speculate(slots: Slots, running: NDArray[np.intp], draft_loops: int) -> bool:
    """Whether every running request only decodes, in the way that guesses allow."""
    decodes = slots.num_tokens[running] - slots.num_computed[running] == 1
    answers = slots.num_tokens[running] > slots.num_prompt[running]
    plain = slots.draws_alone[running] & ~slots.may_exit[running]
    return bool((decodes & answers & plain & (slots.loops[running] > draft_loops)).all())


def reached_samples(
    plan: StepPlan, token_ids: Int32Array, is_last: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Samples whose row ran a token that the answer holds.

    Args:
        plan: of a step; the samples of one slot are adjacent, first row first.
        token_ids: [num_samples] tokens sampled.
        is_last: [num_samples] samples after which the answer ends, if they are reached.

    Returns:
        [num_samples] True for the first sample of a slot, and for a guess that equals what
        the row before it gave, until one does not or the answer has ended.
    """
    reached = np.ones(len(token_ids), np.bool_)
    slots, inputs = plan.sample_slots, plan.input_ids[plan.logit_rows]
    for row in (np.flatnonzero(slots[1:] == slots[:-1]) + 1).tolist():
        before = row - 1
        reached[row] = reached[before] and not is_last[before] and token_ids[before] == inputs[row]
    return reached
