"""The next token from logits, with randomness that depends on (seed, position) alone.

Owns what a request does to its logits, the draw and log-probabilities; leaves stop conditions
to the scheduler. Invariant: a row's token depends on its own logits, parameters and earlier
tokens, never on its neighbours.

Order of operations: embedding bias, bad words, the min_tokens mask, repetition, frequency and
presence penalty; then temperature, top-k, top-p, min-p, renormalise, draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from looptrt.plugins.noise import mix64
from looptrt.runtime.outputs import TokenLogprobs
from looptrt.runtime.request import LogprobsMode, SamplerParams
from looptrt.runtime.step_plan import Int32Array, SlotStart, StepPlan, StepResult

# Separates the sampling draws from the noise of the same seed and position.
_SAMPLING_STREAM = np.uint64(0xA54FF53A5F1D36F1)


class Sampler:
    """Chooses tokens for the running requests, slot by slot.

    Args:
        max_slots: slots of the scheduler.
    """

    def __init__(self, max_slots: int) -> None:
        self._slots = [LogitEditor(SamplerParams(), 0, [])] * max_slots

    def start(self, slot_starts: Iterable[SlotStart]) -> None:
        """Take the parameters and the known tokens of newly filled slots."""
        for start in slot_starts:
            token_ids = start.token_ids.tolist()
            self._slots[start.slot] = LogitEditor(start.sampler, start.num_prompt, token_ids)

    def slot(self, index: int) -> LogitEditor:
        """What the request in a slot does to its logits."""
        return self._slots[index]

    def sample(self, logits: Tensor, plan: StepPlan) -> StepResult:
        """Choose one token for each of the plan's samples.

        Args:
            logits: [num_samples + num_prompt_rows, vocab], rows of plan.logit_rows, then
                those of plan.prompt_rows.
            plan: whose samples and prompt rows these are; the token of a row at position p
                goes to position p + 1.
        """
        num_samples = len(plan.logit_rows)
        slots = [self._slots[slot] for slot in plan.sample_slots.tolist()]
        failed = _not_finite(logits[:num_samples])
        if failed:
            logits = logits.clone()
            logits[list(failed)] = 0.0
        edited = {row: slot.edit(logits[row]) for row, slot in enumerate(slots) if slot.has_edits}
        tokens = _choose(logits[:num_samples], edited, [slot.params for slot in slots], plan)
        for row in edited:
            slots[row].append(int(tokens[row]))
        logprobs = {
            row: _report(logits[row], edited.get(row), slot.params, int(tokens[row]))
            for row, slot in enumerate(slots)
            if slot.params.logprobs is not None
        }
        scored = self._score(logits[num_samples:], plan)
        result = StepResult.at_planned_depths(plan, tokens)
        return replace(result, logprobs=logprobs, prompt_logprobs=scored, failed=failed)

    def _score(self, logits: Tensor, plan: StepPlan) -> list[TokenLogprobs]:
        """Raw log-probabilities of the prompt tokens that follow the plan's prompt rows."""
        scored = []
        positions = plan.positions[plan.prompt_rows].tolist()
        for row, slot_idx in enumerate(plan.prompt_slots.tolist()):
            slot = self._slots[slot_idx]
            following = slot.token_ids[positions[row] + 1]
            scored.append(
                ranked(raw_logprobs(logits[row]), following, slot.params.prompt_logprobs or 0)
            )
        return scored


def _not_finite(logits: Tensor) -> tuple[int, ...]:
    """Rows of [n, vocab] logits that hold NaN or infinity."""
    rows: list[int] = (~torch.isfinite(logits).all(dim=-1)).nonzero()[:, 0].tolist()
    return tuple(rows)


class LogitEditor:
    """Bias, masks and penalties of one running request, and the tokens they look at.

    Args:
        params: of the request.
        num_prompt: tokens of the prompt.
        token_ids: all tokens known so far, prompt first.

    Attributes:
        token_ids: kept up to date only where `has_edits`.
        has_edits: whether the request changes its logits before temperature and filters.
        needs_logits: whether more than a token is made of the request's logits.
    """

    def __init__(self, params: SamplerParams, num_prompt: int, token_ids: list[int]) -> None:
        self.params = params
        self.token_ids = token_ids
        self._num_prompt = num_prompt
        self._bad_words: dict[int | None, list[tuple[int, ...]]] = {}
        for word in params.bad_words:
            before = word[-2] if len(word) > 1 else None
            self._bad_words.setdefault(before, []).append(word)
        self._bias: Tensor | None = None
        self._is_known: Tensor | None = None
        self._num_generated: Tensor | None = None
        self.has_edits = params.has_edits
        self.needs_logits = self.has_edits or params.logprobs is not None

    def edit(self, logits: Tensor) -> Tensor:
        """[vocab] logits to [vocab] float64 scores, -inf where a token must not come.

        Masks that leave no token at all do not apply to this token.
        """
        scores = logits.double()
        if self.params.embedding_bias is not None:
            scores = scores + self._bias_like(scores)
        masked = self._masked_ids()
        if masked:
            left = scores.clone()
            left[masked] = -math.inf
            scores = left if bool((left > -math.inf).any()) else scores
        return self._penalised(scores) if self.params.has_penalty else scores

    def append(self, token_id: int) -> None:
        """Take the token that was chosen."""
        self.token_ids.append(token_id)
        if self._is_known is not None and self._num_generated is not None:
            self._is_known[token_id] = True
            self._num_generated[token_id] += 1

    def _bias_like(self, scores: Tensor) -> Tensor:
        if self._bias is None:
            assert self.params.embedding_bias is not None
            values = np.frombuffer(self.params.embedding_bias, "<f4").astype(np.float64)
            self._bias = torch.from_numpy(values).to(scores.device)
        return self._bias

    def _masked_ids(self) -> list[int]:
        """Tokens that would complete a bad word, or end the answer before min_tokens."""
        known = self.token_ids
        ids = [word[-1] for word in self._bad_words.get(None, ())]
        for word in self._bad_words.get(known[-1], ()):
            if tuple(known[1 - len(word) :]) == word[:-1]:
                ids.append(word[-1])
        if len(known) - self._num_prompt < self.params.min_tokens:
            ids.extend(self.params.end_ids)
        return ids

    def _penalised(self, scores: Tensor) -> Tensor:
        if self._is_known is None or self._num_generated is None:
            self._is_known = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
            self._is_known[self.token_ids] = True
            generated = torch.tensor(self.token_ids[self._num_prompt :], dtype=torch.int64)
            counts = torch.bincount(generated, minlength=len(scores))
            self._num_generated = counts.to(scores.device, torch.float64)
        penalty = self.params.repetition_penalty
        repeated = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(self._is_known, repeated, scores)
        scores = scores - self.params.frequency_penalty * self._num_generated
        return scores - self.params.presence_penalty * (self._num_generated > 0)


# ---- the draw


def _choose(
    logits: Tensor, edited: Mapping[int, Tensor], params: list[SamplerParams], plan: StepPlan
) -> Int32Array:
    """[num_samples] tokens: the most likely one of a greedy row, else a drawn one.

    Args:
        logits: [num_samples, vocab].
        edited: {row: [vocab] scores} of the rows whose requests change their logits.
        params: of each row.
        plan: says the rows' positions.
    """
    tokens: Int32Array = logits.argmax(dim=-1).to(torch.int32).cpu().numpy()
    for row, scores in edited.items():
        tokens[row] = int(scores.argmax())
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if drawn:
        chosen = logits[torch.tensor(drawn, device=logits.device)].double()
        for index, row in enumerate(drawn):
            if row in edited:
                chosen[index] = edited[row]
        seeds = np.array([params[row].seed for row in drawn], np.uint64)
        uniforms = uniform(seeds, plan.positions[plan.logit_rows[drawn]])
        tokens[drawn] = draw(chosen, [params[row] for row in drawn], uniforms)
    return tokens


def uniform(seeds: np.ndarray, positions: Int32Array) -> np.ndarray:
    """[n] float64 numbers in [0, 1), one for each (seed, position)."""
    with np.errstate(over="ignore"):
        hashed = mix64(mix64(seeds ^ _SAMPLING_STREAM) ^ mix64(positions.astype(np.uint64)))
    result: np.ndarray = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def draw(scores: Tensor, params: list[SamplerParams], uniforms: np.ndarray) -> Int32Array:
    """Draw from each row's filtered distribution by inversion, most likely tokens first.

    Args:
        scores: [n, vocab].
        params: n parameter sets with temperature above 0.
        uniforms: [n] numbers in [0, 1).
    """
    kept, order = filtered_probabilities(scores, params)
    cumulative = kept.cumsum(dim=-1)
    target = torch.from_numpy(uniforms).to(kept.device)[:, None] * cumulative[:, -1:]
    index = (cumulative <= target).sum(dim=-1, keepdim=True)
    last = (kept > 0).sum(dim=-1, keepdim=True) - 1
    token: Int32Array = (
        order.gather(1, torch.minimum(index, last))[:, 0].to(torch.int32).cpu().numpy()
    )
    return token


def filtered_probabilities(scores: Tensor, params: list[SamplerParams]) -> tuple[Tensor, Tensor]:
    """Probabilities after temperature, top-k, top-p and min-p, not renormalised.

    Returns:
        kept [n, vocab] float64 in descending order, 0 where dropped, and the token ids in
        that order; equal probabilities are ordered by token id.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    scaled = scores.double() / column([p.temperature for p in params])
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    probs, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    vocab = scores.shape[-1]
    rank = torch.arange(vocab, device=scores.device)
    kept = probs * (rank < column([p.top_k or vocab for p in params]))
    # Running sums add in the same order whatever the number of rows; torch.sum need not.
    through = kept.cumsum(dim=-1)
    kept = kept * (through - kept < column([p.top_p for p in params]) * through[:, -1:])
    return kept * (kept >= column([p.min_p for p in params]) * kept[:, :1]), order


# ---- log-probabilities


def _report(
    logits: Tensor, edited: Tensor | None, params: SamplerParams, token_id: int
) -> TokenLogprobs:
    """Log-probabilities of one sample in the request's mode."""
    assert params.logprobs is not None
    if params.logprobs_mode is LogprobsMode.RAW:
        return ranked(raw_logprobs(logits), token_id, params.logprobs)
    scores = logits if edited is None else edited
    return ranked(processed_logprobs(scores, params, token_id), token_id, params.logprobs)


def raw_logprobs(logits: Tensor) -> Tensor:
    """[vocab] float32 log-softmax of the model's logits."""
    return logits.float().log_softmax(dim=-1)


def processed_logprobs(scores: Tensor, params: SamplerParams, token_id: int) -> Tensor:
    """[vocab] float64 logarithms of the distribution that the token was drawn from.

    A greedy answer's distribution is its token alone.
    """
    probs = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    if params.temperature == 0:
        probs[token_id] = 1.0
        return probs.log()
    kept, order = filtered_probabilities(scores[None], [params])
    probs[order[0]] = kept[0]
    return (probs / probs.sum()).log()


def ranked(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """A token, then the `num_top` most likely ones without it; impossible ones are left out.

    Args:
        logprobs: [vocab] of the whole vocabulary.
        token_id: reported first, whatever its rank.
        num_top: may exceed the vocabulary.
    """
    own = logprobs[token_id]
    is_before = (logprobs > own).sum() + (logprobs[:token_id] == own).sum()
    top = _most_likely(logprobs, min(num_top, len(logprobs)))
    others = [rank for rank, other in enumerate(top) if other != token_id]
    ids = [token_id, *(top[rank] for rank in others)]
    values: list[float] = logprobs[ids].tolist()
    return TokenLogprobs(ids, values, [int(is_before) + 1, *(rank + 1 for rank in others)])


def _most_likely(logprobs: Tensor, count: int) -> list[int]:
    """Ids of the `count` largest values above -inf, in order; equal ones ordered by id."""
    if count == 0:
        return []
    bound = logprobs.topk(count).values[-1]
    ids = ((logprobs >= bound) & (logprobs > -math.inf)).nonzero()[:, 0]
    order = logprobs[ids].sort(descending=True, stable=True).indices
    top: list[int] = ids[order[:count]].tolist()
    return top
