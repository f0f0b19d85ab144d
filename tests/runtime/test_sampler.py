"""The sampler against a plain NumPy reference, on logits that are known."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looptrt.runtime.llm import LLM
from looptrt.runtime.outputs import TokenLogprobs
from looptrt.runtime.request import ExitParams, LogprobsMode, SamplerParams
from looptrt.runtime.sampler import Sampler
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.step_plan import PlaneCopies, SlotStart, StepPlan, StepResult, TableUpdates
from tests.support.scripted import llm_of
from tests.support.table import TableCore

VOCAB = 12
NOWHERE = Path("/nonexistent")  # an engine directory without a tokenizer


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


# ---- the reference


def reference(
    logits: np.ndarray, p: SamplerParams, prompt: list[int], answer: list[int]
) -> np.ndarray:
    """[vocab] probabilities of the next token, by the rules as they are documented."""
    x = edited(logits.astype(np.float64), p, prompt, answer)
    if p.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    probs = np.exp((x - x.max()) / p.temperature)
    probs /= probs.sum()
    order = sorted(range(len(x)), key=lambda token: (-probs[token], token))
    kept = order[: p.top_k] if p.top_k else order
    total, before, nucleus = sum(probs[token] for token in kept), 0.0, []
    for token in kept:
        if before < p.top_p * total:
            nucleus.append(token)
        before += probs[token]
    result = np.zeros(len(x))
    for token in nucleus:
        if probs[token] >= p.min_p * probs[order[0]]:
            result[token] = probs[token]
    return result / result.sum()


def edited(x: np.ndarray, p: SamplerParams, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Bias, bad words, min_tokens, penalties."""
    if p.embedding_bias is not None:
        x = x + np.frombuffer(p.embedding_bias, np.float32)
    known, masked = prompt + answer, x.copy()
    for word in p.bad_words:
        if len(word) == 1 or known[-(len(word) - 1) :] == list(word[:-1]):
            masked[word[-1]] = -np.inf
    if len(answer) < p.min_tokens:
        masked[list(p.end_ids)] = -np.inf
    if np.isfinite(masked).any():
        x = masked
    for token in set(known):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token, count in Counter(answer).items():
        x[token] -= p.frequency_penalty * count + p.presence_penalty
    return x


# ---- a step of the sampler


def plan_of(
    positions: list[int], starts: list[SlotStart], prompt_rows: list[tuple[int, int]] = ()
) -> StepPlan:
    """A step that samples slot i at positions[i], and scores (slot, position) prompt rows."""
    num_rows = len(positions) + len(prompt_rows)
    slots = [*range(len(positions)), *(slot for slot, _ in prompt_rows)]
    rows = np.arange(num_rows, dtype=np.int32)
    none = np.empty(0, np.int32)
    return StepPlan(
        input_ids=np.zeros(num_rows, np.int32),
        positions=np.array([*positions, *(at for _, at in prompt_rows)], np.int32),
        depths=np.ones(num_rows, np.int32),
        noise_seeds=np.zeros(num_rows, np.int64),
        cu_seqlens=np.arange(num_rows + 1, dtype=np.int32),
        seq_slots=np.array(slots, np.int32),
        logit_rows=rows[: len(positions)],
        sample_slots=np.array(slots[: len(positions)], np.int32),
        prompt_rows=rows[len(positions) :],
        prompt_slots=np.array(slots[len(positions) :], np.int32),
        table_updates=TableUpdates(none, none, np.empty((0, 1), np.int32)),
        copies=PlaneCopies.of([]),
        slot_starts=tuple(starts),
    )


def start(slot: int, params: SamplerParams, prompt: list[int], answer: list[int]) -> SlotStart:
    return SlotStart(slot, params, ExitParams(), len(prompt), np.array(prompt + answer, np.int32))


def sample_one(
    logits: np.ndarray, params: SamplerParams, prompt: list[int], answer: list[int]
) -> StepResult:
    sampler = Sampler(1)
    begin = start(0, params, prompt, answer)
    sampler.start([begin])
    return sampler.sample(torch.tensor(logits)[None], plan_of([len(prompt + answer) - 1], [begin]))


def dense(scored: TokenLogprobs) -> np.ndarray:
    """[vocab] probabilities; tokens that are not reported have none."""
    assert len(set(scored.token_ids)) == len(scored.token_ids)
    probs = np.zeros(VOCAB)
    probs[scored.token_ids] = np.exp(scored.logprobs)
    return probs


tokens = st.integers(0, VOCAB - 1)
numbers = st.floats(-3, 3, allow_nan=False).map(lambda x: round(x, 3))
sampler_params = st.builds(
    SamplerParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.just(VOCAB),
    logprobs_mode=st.just(LogprobsMode.PROCESSED),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    min_tokens=st.integers(0, 4),
    end_ids=st.lists(tokens, max_size=VOCAB).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    embedding_bias=st.none()
    | st.lists(numbers, min_size=VOCAB, max_size=VOCAB).map(
        lambda values: np.array(values, "<f4").tobytes()
    ),
)
prompts = st.lists(tokens, min_size=1, max_size=6)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(sampler_params, prompts), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
)
def test_every_step_draws_from_the_reference_distribution(
    requests: list[tuple[SamplerParams, list[int]]], seed: int, restart_at: int
) -> None:
    """Several requests in a batch; at `restart_at` all come back as after preemption."""
    random, sampler = np.random.default_rng(seed), Sampler(len(requests))
    answers: list[list[int]] = [[] for _ in requests]
    for step in range(6):
        starts = [
            start(slot, params, prompt, answer)
            for slot, ((params, prompt), answer) in enumerate(zip(requests, answers, strict=True))
        ]
        sampler.start(starts if step in (0, restart_at) else [])
        logits = random.normal(size=(len(requests), VOCAB)).astype(np.float32) * 2
        logits[:, 3] = logits[:, 7]
        known = [
            len(prompt) + len(answer) for (_, prompt), answer in zip(requests, answers, strict=True)
        ]
        result = sampler.sample(torch.tensor(logits), plan_of([n - 1 for n in known], []))
        for slot, (params, prompt) in enumerate(requests):
            token, expected = (
                int(result.token_ids[slot]),
                reference(logits[slot], params, prompt, answers[slot]),
            )
            assert expected[token] > 0
            assert result.logprobs[slot].token_ids[0] == token
            np.testing.assert_allclose(dense(result.logprobs[slot]), expected, atol=1e-12)
            alone = sample_one(logits[slot], params, prompt, answers[slot])
            assert int(alone.token_ids[0]) == token
            assert alone.logprobs[0] == result.logprobs[slot]
            answers[slot].append(token)


@pytest.mark.parametrize(
    "params",
    [
        SamplerParams(temperature=1.0),
        SamplerParams(temperature=0.7, top_k=6, top_p=0.9),
        SamplerParams(temperature=1.5, min_p=0.1, repetition_penalty=1.4),
        SamplerParams(temperature=1.0, presence_penalty=0.8, frequency_penalty=0.5),
        SamplerParams(temperature=1.0, bad_words=((4,), (1, 2)), min_tokens=9, end_ids=(5, 6)),
    ],
)
def test_draws_of_many_seeds_pass_a_chi_square_test(params: SamplerParams) -> None:
    count, prompt, answer = 6000, [3, 8, 8], [2, 2, 5, 1]
    logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32)
    expected = reference(logits, params, prompt, answer)
    sampler = Sampler(count)
    sampler.start(
        start(slot, SamplerParams(**{**vars(params), "seed": slot}), prompt, answer)
        for slot in range(count)
    )
    rows = torch.tensor(logits).expand(count, -1)
    drawn = sampler.sample(rows, plan_of([6] * count, [])).token_ids
    observed = np.bincount(drawn, minlength=VOCAB)
    assert not observed[expected == 0].any()
    possible = expected > 0
    assert scipy.stats.chisquare(observed[possible], expected[possible] * count).pvalue > 1e-3


# ---- edges


def test_masks_that_leave_no_token_do_not_apply() -> None:
    logits = np.arange(VOCAB, dtype=np.float32)
    nothing_left = SamplerParams(bad_words=tuple((token,) for token in range(VOCAB)))
    assert sample_one(logits, nothing_left, [0], []).token_ids[0] == VOCAB - 1


def test_bad_word_is_masked_only_where_all_before_its_end_has_come() -> None:
    logits = np.arange(VOCAB, dtype=np.float32)
    params = SamplerParams(bad_words=((7, 8, VOCAB - 1),))
    best, second = VOCAB - 1, VOCAB - 2
    for prompt, answer, token in (
        ([7], [8], second),
        ([7, 8], [], second),
        ([8], [], best),
        ([8], [7], best),
        ([8, 7], [8], second),
        ([7, 9], [8], best),
    ):
        assert sample_one(logits, params, prompt, answer).token_ids[0] == token


def test_end_ids_may_come_after_exactly_min_tokens() -> None:
    logits = np.arange(VOCAB, dtype=np.float32)
    params = SamplerParams(min_tokens=2, end_ids=(VOCAB - 1, VOCAB - 2))
    drawn = [sample_one(logits, params, [1], [0] * n).token_ids[0] for n in range(4)]
    assert drawn == [VOCAB - 3, VOCAB - 3, VOCAB - 1, VOCAB - 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 1e30])
def test_values_at_the_ends_of_their_ranges_stay_finite(temperature: float) -> None:
    logits = np.linspace(-80, 80, VOCAB).astype(np.float32)
    bias = np.full(VOCAB, 1e30, "<f4")
    bias[::2] = -1e30
    for repetition in (1e-30, 1e30):
        for penalty in (-1e30, 1e30):
            params = SamplerParams(
                temperature=temperature,
                repetition_penalty=repetition,
                presence_penalty=penalty,
                frequency_penalty=penalty,
                embedding_bias=bias.tobytes(),
                logprobs=VOCAB,
                logprobs_mode=LogprobsMode.PROCESSED,
            )
            result = sample_one(logits, params, [1, 2], [3, 3, 4])
            assert math.isfinite(result.logprobs[0].logprobs[0])
            assert dense(result.logprobs[0]).sum() == pytest.approx(1)


def test_a_neighbour_changes_no_bit() -> None:
    random = np.random.default_rng(3)
    logits = torch.tensor(random.normal(size=(3, 4000)).astype(np.float32))
    params = SamplerParams(
        temperature=0.8, top_p=0.7, seed=42, logprobs=50, logprobs_mode=LogprobsMode.PROCESSED
    )
    batch = Sampler(3)
    batch.start([start(0, params, [1], []), start(1, SamplerParams(), [1], [])])
    batch.start([start(2, SamplerParams(temperature=2.0, seed=7), [1], [])])
    together = batch.sample(logits, plan_of([0, 0, 0], []))
    alone = sample_one(logits[0].numpy(), params, [1], [])
    assert together.token_ids[0] == alone.token_ids[0]
    assert together.logprobs == alone.logprobs


@pytest.mark.parametrize("value", [2**63, 10**30, 2**62, 1])
def test_integers_are_numbers_of_any_size_that_is_allowed(table: torch.Tensor, value: int) -> None:
    """Regression: 2**63 became a uint64 that torch does not mix with other types."""
    names = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
    with llm_of(TableCore(table), NOWHERE) as llm:
        for name in names:
            params = SamplingParams(**{name: value, "max_tokens": 4})
            assert llm.generate([1], params)[0].finished


# ---- log-probabilities (case C15)


C15 = {"temperature": 0.6, "top_p": 0.5, "repetition_penalty": 1.3, "seed": 5}


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB + 50])
def test_raw_logprobs_are_the_float32_log_softmax_of_unmodified_logits(
    table: torch.Tensor, num_top: int
) -> None:
    core = TableCore(table)
    with llm_of(core, NOWHERE) as llm:
        params = SamplingParams(max_tokens=20, logprobs=num_top, **C15)
        (answer,) = llm.generate([3, 4], params)[0].outputs
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 20
    ranks = set()
    for last, token, at in zip(
        [4, *answer.token_ids], answer.token_ids, answer.logprobs, strict=False
    ):
        expected = table[last].log_softmax(-1)
        order = expected.argsort(descending=True, stable=True).tolist()
        assert at.token_ids[0] == token
        assert at.token_ids[1:] == [other for other in order[:num_top] if other != token]
        assert at.logprobs == expected[at.token_ids].tolist()
        assert at.ranks == [order.index(one) + 1 for one in at.token_ids]
        if num_top > VOCAB:
            assert sum(map(math.exp, at.logprobs)) == pytest.approx(1, abs=1e-6)
        ranks.add(at.ranks[0])
    assert max(ranks) > 1
    assert answer.cumulative_logprob == sum(at.logprobs[0] for at in answer.logprobs)


def test_processed_logprobs_are_the_distribution_that_was_drawn_from(table: torch.Tensor) -> None:
    core = TableCore(table)
    with llm_of(core, NOWHERE) as llm:
        params = SamplingParams(max_tokens=20, logprobs=99, logprobs_mode="processed", **C15)
        (answer,) = llm.generate([3, 4], params)[0].outputs
        greedy = SamplingParams(max_tokens=3, logprobs=2, logprobs_mode="processed")
        (best,) = llm.generate([3, 4], greedy)[0].outputs
    assert answer.logprobs is not None
    sampler = core.seen[0].sampler
    for index, at in enumerate(answer.logprobs):
        so_far = answer.token_ids[:index]
        expected = reference(table[[4, *so_far][-1]].numpy(), sampler, [3, 4], so_far)
        np.testing.assert_allclose(dense(at), expected, atol=1e-12)
        assert sum(map(math.exp, at.logprobs)) == pytest.approx(1, abs=1e-12)
    assert best.logprobs == [TokenLogprobs([token], [0.0], [1]) for token in best.token_ids]


@pytest.mark.parametrize("chunk", [3, 8, 64])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_prompt_logprobs_stand_at_their_tokens(table: torch.Tensor, chunk: int, mode: str) -> None:
    prompt = [1, 4, 4, 0, 11, 5, 2]
    with llm_of(TableCore(table, max_batch_size=2, max_num_tokens=chunk), NOWHERE) as llm:
        params = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs_mode=mode, **C15)
        outputs = [*llm.stream(prompt, params), *llm.generate([prompt, [3]], params)]
    assert outputs[-1].prompt_logprobs == [None]
    for output in outputs[:-1]:
        assert output.prompt_logprobs is not None
        first, *rest = output.prompt_logprobs
        assert first is None
        assert len(rest) == len(prompt) - 1
        for last, token, at in zip(prompt, prompt[1:], rest, strict=False):
            assert at is not None
            expected = table[last].log_softmax(-1)
            assert at.token_ids[0] == token
            assert at.logprobs == expected[at.token_ids].tolist()
            assert set(expected.topk(2).indices.tolist()) <= set(at.token_ids)
        assert output.outputs[0].logprobs is None


# ---- seeds (case C8) and n


def test_seeded_answer_is_the_same_among_any_neighbours(table: torch.Tensor) -> None:
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=16, frequency_penalty=0.3)
    others = [
        SamplingParams(temperature=0.8, max_tokens=9),
        SamplingParams(temperature=0.8, seed=7, max_tokens=16),
        SamplingParams(max_tokens=12),
    ]
    random, unseeded, seeded_answers = np.random.default_rng(0), set(), set()
    with llm_of(TableCore(table, max_batch_size=3), NOWHERE) as llm:
        for _ in range(20):
            order = random.permutation(4)
            outputs = llm.generate([[3, 4]] * 4, [[seeded, *others][i] for i in order])
            answers = {
                i: tuple(o.outputs[0].token_ids) for i, o in zip(order, outputs, strict=True)
            }
            seeded_answers.add(answers[0])
            unseeded.add(answers[1])
    assert len(seeded_answers) == 1
    assert len(unseeded) > 1


def test_seeds_at_the_ends_of_their_range_draw(table: torch.Tensor) -> None:
    with llm_of(TableCore(table), NOWHERE) as llm:
        params = [SamplingParams(temperature=1.0, seed=seed) for seed in (0, 1, 2**63 - 1)]
        answers = [tuple(o.outputs[0].token_ids) for o in llm.generate([[3]] * 3, params)]
    assert len(set(answers)) == 3


def test_answers_of_one_prompt_are_those_of_the_seeds_that_follow(table: torch.Tensor) -> None:
    last = 2**63 - 1
    with llm_of(TableCore(table), NOWHERE) as llm:
        params = SamplingParams(temperature=1.0, seed=last - 1, n=4, max_tokens=12)
        (output,) = llm.generate([[3, 4]], params)
        seeds = [last - 1, last, 0, 1]
        single = [SamplingParams(temperature=1.0, seed=s, max_tokens=12) for s in seeds]
        alone = [o.outputs[0].token_ids for o in llm.generate([[3, 4]] * 4, single)]
    assert [one.token_ids for one in output.outputs] == alone
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]


def count_first_tokens(llm: LLM, params: SamplingParams) -> np.ndarray:
    (output,) = llm.generate([[3, 4]], params)
    return np.bincount([one.token_ids[0] for one in output.outputs], minlength=VOCAB)


def test_many_answers_to_one_prompt_pass_a_chi_square_test(table: torch.Tensor) -> None:
    core = TableCore(table, max_batch_size=64)
    fields = {"temperature": 3.0, "repetition_penalty": 1.5, "min_p": 0.05}
    with llm_of(core, NOWHERE) as llm:
        params = SamplingParams(n=1000, seed=11, max_tokens=1, **fields)
        observed = count_first_tokens(llm, params)
    expected = reference(table[4].numpy(), core.seen[0].sampler, [3, 4], [])
    possible = expected > 0
    assert not observed[~possible].any()
    assert scipy.stats.chisquare(observed[possible], expected[possible] * 1000).pvalue > 1e-3
