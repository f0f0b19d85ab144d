"""Which sampled rows stop after a loop: the exit gate and the exit criteria.

Owns the rules and what they remember of a row from loop to loop; leaves running loops and
phases to the executor. Invariant: a row's decision depends on its own state and logits,
never on its neighbours (case B6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.request import ExitKv, ExitParams, ExitRule
from looptrt.runtime.step_plan import Int32Array, PlaneCopies, StepPlan, StepResult


class Rule(Protocol):
    """One row's way to decide; made anew for every generated token."""

    def stops(self, state: Tensor, logits: Callable[[], Tensor]) -> bool:
        """Whether the row stops after the loop that gave `state`, [hidden].

        Args:
            state: after this loop.
            logits: makes the row's logits, [vocab] float32, when a rule needs them.
        """


class Step:
    """Stop after a fixed number of loops."""

    def __init__(self, loops: float) -> None:
        self._left = int(loops)

    def stops(self, state: Tensor, logits: Callable[[], Tensor]) -> bool:
        """Count down."""
        self._left -= 1
        return self._left <= 0


class Gate:
    """Stop when the cumulative exit probability reaches the threshold.

    p_t = λ_t · Π (1 − λ_i), λ_t = sigmoid(gate(state_t)); a threshold of 1 or more never
    stops. In the reference's form the sums are in the model dtype and every threshold counts.

    Source: Ouro's `early_exit_gate` (models.md §1).
    """

    def __init__(
        self, gate: Callable[[Tensor], Tensor], threshold: float, dtype: torch.dtype
    ) -> None:
        self._gate = gate
        self._threshold = threshold
        self._survival = torch.ones((), dtype=dtype)
        self._cumulative = torch.zeros((), dtype=dtype)

    def stops(self, state: Tensor, logits: Callable[[], Tensor]) -> bool:
        """Add this loop's exit probability."""
        exit_now = torch.sigmoid(self._gate(state.to(self._survival.dtype)))
        self._cumulative = self._cumulative + exit_now * self._survival
        self._survival = self._survival * (1 - exit_now)
        return bool(self._cumulative >= self._threshold)


class LatentDiff:
    """Stop when the state moves by less than a share of its norm."""

    def __init__(self, initial: Tensor, threshold: float) -> None:
        self._previous, self._threshold = initial.clone(), threshold  # the state's memory is reused

    def stops(self, state: Tensor, logits: Callable[[], Tensor]) -> bool:
        """Compare with the state of the loop before."""
        moved = (state - self._previous).norm() / state.norm()
        self._previous = state.clone()
        return bool(moved < self._threshold)


class EntropyDiff:
    """Stop when the entropy of the output distribution changes by less than the threshold."""

    def __init__(self, threshold: float) -> None:
        self._previous, self._threshold = math.inf, threshold

    def stops(self, state: Tensor, logits: Callable[[], Tensor]) -> bool:
        """Compare with the entropy of the loop before."""
        log_probs = logits().log_softmax(-1)
        entropy = float(-(log_probs.exp() * log_probs).nan_to_num().sum())
        change, self._previous = abs(entropy - self._previous), entropy
        return change < self._threshold


class KlDivergence:
    """Stop when the output distribution diverges from the one before by less than the threshold.

    The first loop is compared with the uniform distribution.
    """

    def __init__(self, threshold: float) -> None:
        self._previous: Tensor | None = None
        self._threshold = threshold

    def stops(self, state: Tensor, logits: Callable[[], Tensor]) -> bool:
        """KL(before || now), in nats."""
        log_probs = logits().log_softmax(-1)
        before = self._previous
        if before is None:
            before = torch.full_like(log_probs, -math.log(len(log_probs)))
        self._previous = log_probs
        return bool((before.exp() * (before - log_probs)).nan_to_num().sum() < self._threshold)


class ArgmaxStability:
    """Stop when the best token has stayed the same for a number of loops."""

    def __init__(self, threshold: float) -> None:
        self._best, self._stable, self._threshold = -1, 0, threshold

    def stops(self, state: Tensor, logits: Callable[[], Tensor]) -> bool:
        """Count loops with the same best token."""
        best = int(logits().argmax())
        self._stable = self._stable + 1 if best == self._best else 0
        self._best = best
        return self._stable >= self._threshold


def make_rule(params: ExitParams, initial: Tensor, gate: Callable[[Tensor], Tensor] | None) -> Rule:
    """A fresh rule for one generated token.

    Args:
        params: what the request asked for; its rule is not NONE.
        initial: [hidden] state before the first loop.
        gate: [hidden] state to its gate logit, in the state's dtype; None without a gate.
    """
    match params.rule:
        case ExitRule.STEP:
            return Step(params.threshold)
        case ExitRule.GATE | ExitRule.GATE_REFERENCE:
            assert gate is not None
            exact = params.rule is ExitRule.GATE
            return Gate(gate, params.threshold, torch.float32 if exact else initial.dtype)
        case ExitRule.LATENT_DIFF:
            return LatentDiff(initial, params.threshold)
        case ExitRule.ENTROPY_DIFF:
            return EntropyDiff(params.threshold)
        case ExitRule.KL:
            return KlDivergence(params.threshold)
        case ExitRule.ARGMAX_STABILITY:
            return ArgmaxStability(params.threshold)
        case ExitRule.NONE:
            raise ValueError("a request without an exit rule has no exit rows")


class ExitStep:
    """The rows of one step that may stop early: asks their rules after every loop.

    Args:
        plan: a plan with `exits`.
        params: [n] what each exit row's request asked for.
        state: [num_rows, hidden] before the first loop.
        gate: see `make_rule`.

    Attributes:
        depths: [num_rows] loops each row of the step runs, lowered as rows stop.
    """

    def __init__(
        self,
        plan: StepPlan,
        params: Sequence[ExitParams],
        state: Tensor,
        gate: Callable[[Tensor], Tensor] | None,
    ) -> None:
        assert plan.exits is not None
        self._plan, self._exits, self._params = plan, plan.exits, params
        self._rows = plan.exits.rows.tolist()
        self._rules = [
            make_rule(one, state[row], gate) for one, row in zip(params, self._rows, strict=True)
        ]
        self.depths = plan.depths.copy()
        self._loops = plan.depths[plan.exits.rows].copy()
        self._undecided = list(range(len(self._rows)))
        self._early_states: dict[int, Tensor] = {}

    def after_loop(
        self, loop_idx: int, state: Tensor, logits_of: Callable[[Int32Array], Tensor]
    ) -> None:
        """Let undecided rows stop after loop `loop_idx`; the last loop decides itself.

        Args:
            loop_idx: from 0.
            state: [num_rows, hidden] after the loop.
            logits_of: logits [n, vocab] float32 of rows of the step, as if they stopped now.
        """
        asked = [i for i in self._undecided if self._loops[i] > loop_idx + 1]
        made: list[Tensor] = []

        def logits(index: int) -> Tensor:
            if not made:
                made.append(logits_of(self._exits.rows[asked]))
            return made[0][index]

        for index, i in enumerate(asked):
            row = self._rows[i]
            if self._rules[i].stops(state[row], partial(logits, index)):
                self._undecided.remove(i)
                self._loops[i] = loop_idx + 1
                if self._params[i].kv is ExitKv.LAST_EXITED:
                    self.depths[row] = loop_idx + 1
                else:
                    self._early_states[row] = state[row].clone()

    def final_state(self, state: Tensor) -> Tensor:
        """State for the coda: rows whose loops went on take the state they stopped at."""
        if not self._early_states:
            return state
        final = state.clone()
        for row, early in self._early_states.items():
            final[row] = early
        return final

    def copies(self, layout: PlaneLayout) -> PlaneCopies:
        """Copies of the rows that stopped to the planes of their page they did not write."""
        entries = []
        for i, row in enumerate(self._rows):
            written = layout.planes_of_depth(int(self.depths[row]))
            planned = layout.planes_of_depth(int(self._plan.depths[row]))
            units, token = self._exits.units[i], int(self._exits.token_index[i])
            for plane in range(written, planned):
                entries.append((0, units[written - 1], units[plane], token, token + 1))
        return PlaneCopies.of(entries)

    def adjust(self, result: StepResult) -> StepResult:
        """Put in the loops behind each token and the depths to record."""
        loops = result.loops.copy()
        loops[np.searchsorted(self._plan.logit_rows, self._exits.rows)] = self._loops
        return replace(result, loops=loops, depths=self.depths[self._plan.logit_rows])
