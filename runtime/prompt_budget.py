"""How many rows of a step prompts may take, and when answers are held back for them.

Owns the arithmetic of chunks and the prefill share; leaves pages, and whose prompt comes
first, to the scheduler. Invariant: a step has at most max_num_tokens rows, and answers are
held back for at most S steps in a row, S being the loops of the deepest answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from looptrt.runtime.scheduler_config import SchedulerConfig
from looptrt.runtime.slots import Slots


class PromptBudget:
    """Shares the rows of a step between running answers and prompts.

    Attributes:
        num_prefill_only_steps: steps in which running answers waited for prompts.
    """

    def __init__(self, config: SchedulerConfig, slots: Slots) -> None:
        self.num_prefill_only_steps = 0
        self._config = config
        self._slots = slots
        self._num_held = 0  # steps in a row that held answers back

    def rows(self, decodes: NDArray[np.intp], *, has_prompts: bool) -> int:
        """Rows that prompts may take: what decodes leave, or more where answers may be held.

        Guesses that do not fit beside the decodes are dropped.

        Args:
            decodes: slots that run their last token.
            has_prompts: whether a prompt runs or may start.
        """
        slots, budget = self._slots, self._config.max_num_tokens - len(decodes)
        num_drafts = int(slots.num_drafts[decodes].sum())
        if num_drafts > budget:
            slots.num_drafts[decodes] = num_drafts = 0  # others took their room
        if not self._config.prefill_share or not has_prompts:
            return budget - num_drafts
        answers = self._answers(decodes)
        if not answers.size or self._num_held >= slots.loops[answers].max():
            return budget - num_drafts
        return budget + len(answers)

    def chunk(self, num_computed: int, num_tokens: int, budget: int) -> int:
        """Rows of a prompt's next chunk under the budget and the grid; 0 when it must wait."""
        rows = num_tokens - num_computed
        grid = self._config.prefix_grid
        if grid is None:
            return min(rows, budget)
        rows = min(rows, grid - num_computed % grid)
        return rows if rows <= budget else 0

    def left(self, budget: int, rows: int) -> int:
        """Rows that further prompts may take in a step after one with so many."""
        return budget - rows if self._config.packed_prefill else 0

    def hold_answers(self, decodes: NDArray[np.intp], chunks: dict[int, int]) -> NDArray[np.intp]:
        """Leave answers out of a step whose prompts need their rows (the prefill share).

        `rows` gives prompts those rows only while fewer than S steps in a row did without the
        answers, so none waits for longer than S steps.

        Args:
            decodes: slots that run their last token.
            chunks: {slot: rows} of the step's prompts.

        Returns:
            The decodes that stay.
        """
        num_drafts = int(self._slots.num_drafts[decodes].sum())
        num_rows = len(decodes) + num_drafts + sum(chunks.values())
        if num_rows <= self._config.max_num_tokens:
            self._num_held = 0
            return decodes
        self._num_held += 1
        self.num_prefill_only_steps += 1
        return np.setdiff1d(decodes, self._answers(decodes))

    def _answers(self, decodes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Those of the decoding slots that have given a token."""
        has_answer = self._slots.num_tokens[decodes] > self._slots.num_prompt[decodes]
        answers: NDArray[np.intp] = decodes[has_answer]
        return answers
