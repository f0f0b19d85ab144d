"""The next token from logits, with randomness that depends on (seed, position) alone.

Owns temperature, top-k, top-p, min-p and the draw; leaves stop conditions to the
scheduler. Invariant: a row's token depends on its own logits and parameters, never on
its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from looptrt.plugins.noise import mix64
from looptrt.runtime.request import SamplerParams
from looptrt.runtime.step_plan import Int32Array, SlotStart, StepPlan, StepResult

# Separates the sampling draws from the noise of the same seed and position.
_SAMPLING_STREAM = np.uint64(0xA54FF53A5F1D36F1)


class Sampler:
    """Per-slot sampling parameters and the draw itself.

    Args:
        max_slots: slots of the scheduler.
    """

    def __init__(self, max_slots: int) -> None:
        self._params = [SamplerParams()] * max_slots

    def start(self, slot_starts: Iterable[SlotStart]) -> None:
        """Take the parameters of newly filled slots."""
        for start in slot_starts:
            self._params[start.slot] = start.sampler

    def sample(self, logits: torch.Tensor, plan: StepPlan) -> StepResult:
        """Choose one token for each of the plan's samples.

        Args:
            logits: [num_samples + num_prompt_rows, vocab], rows of plan.logit_rows, then
                those of plan.prompt_rows.
            plan: whose samples and prompt rows these are; the token of a row at position p
                goes to position p + 1.
        """
        logits = logits[: len(plan.logit_rows)]
        tokens = logits.argmax(dim=-1).to(torch.int32).cpu().numpy()
        params = [self._params[slot] for slot in plan.sample_slots.tolist()]
        drawn = [row for row, p in enumerate(params) if p.temperature > 0]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            seeds = np.array([params[row].seed for row in drawn], np.uint64)
            uniforms = uniform(seeds, plan.positions[plan.logit_rows[drawn]])
            tokens[drawn] = draw(logits[rows], [params[row] for row in drawn], uniforms)
        return StepResult.at_planned_depths(plan, tokens)


def uniform(seeds: np.ndarray, positions: Int32Array) -> np.ndarray:
    """[n] float64 numbers in [0, 1), one for each (seed, position)."""
    with np.errstate(over="ignore"):
        hashed = mix64(mix64(seeds ^ _SAMPLING_STREAM) ^ mix64(positions.astype(np.uint64)))
    result: np.ndarray = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def draw(logits: torch.Tensor, params: list[SamplerParams], uniforms: np.ndarray) -> Int32Array:
    """Draw from each row's filtered distribution by inversion, most likely tokens first.

    Args:
        logits: [n, vocab].
        params: n parameter sets with temperature above 0.
        uniforms: [n] numbers in [0, 1).
    """
    kept, order = filtered_probabilities(logits, params)
    cumulative = kept.cumsum(dim=-1)
    target = torch.from_numpy(uniforms).to(kept.device)[:, None] * cumulative[:, -1:]
    index = (cumulative <= target).sum(dim=-1, keepdim=True)
    last = (kept > 0).sum(dim=-1, keepdim=True) - 1
    token: Int32Array = (
        order.gather(1, torch.minimum(index, last))[:, 0].to(torch.int32).cpu().numpy()
    )
    return token


def filtered_probabilities(
    logits: torch.Tensor, params: list[SamplerParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities after temperature, top-k, top-p and min-p, not renormalised.

    Returns:
        kept [n, vocab] float64 in descending order, 0 where dropped, and the token ids in
        that order; equal probabilities are ordered by token id.
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scaled = logits.double() / column([p.temperature for p in params])
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    probs, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    rank = torch.arange(vocab, device=logits.device)
    kept = probs * (rank < column([p.top_k or vocab for p in params]))
    before = kept.cumsum(dim=-1) - kept
    kept = kept * (before < column([p.top_p for p in params]) * kept.sum(dim=-1, keepdim=True))
    return kept * (kept >= column([p.min_p for p in params]) * kept[:, :1]), order
