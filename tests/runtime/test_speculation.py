"""Guesses and their verification over the simulated executor, which checks every read."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from looptrt.runtime.outputs import FinishedRequest, StepOutput, TokenLogprobs
from looptrt.runtime.protocol import parts_of
from looptrt.runtime.request import ExitParams, ExitRule, FinishReason, SamplerParams
from looptrt.runtime.sampler import filtered_probabilities
from looptrt.runtime.speculation import MOST_REQUESTS, draft_budget
from looptrt.runtime.step_plan import StepPlan, StepResult
from tests.runtime.test_scheduler import answer
from tests.support.table import TableCore
from tests.support.tiny import Engine, engine, request


def guessing(good_guesses: int = 7, **config: Any) -> Engine:
    """An engine that guesses after one loop; so many of ten guesses are right."""
    kv = engine(**{"draft_loops": 1, "num_units": 400, **config})
    kv.executor.good_guesses = good_guesses
    return kv


def plans_of(kv: Engine) -> list[StepPlan]:
    """The plans that will run, in a list that grows."""
    plans: list[StepPlan] = []
    execute = kv.executor.execute

    def record(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return execute(plan)

    kv.executor.execute = record  # type: ignore[method-assign]
    return plans


def test_the_budget_is_the_issue_s_formula() -> None:
    assert [draft_budget(n, 512) for n in range(1, 10)] == [4, 3, 1, 1, 0, 0, 0, 0, 0]
    assert [draft_budget(n, 4) for n in range(1, 4)] == [3, 1, 0]
    assert draft_budget(0, 512) == 4
    assert draft_budget(MOST_REQUESTS, 512) > draft_budget(MOST_REQUESTS + 1, 512) == 0


@pytest.mark.parametrize("good_guesses", [0, 3, 7, 10])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 4])
def test_guesses_never_change_an_answer(good_guesses: int, num_requests: int) -> None:
    kv = guessing(good_guesses)
    prompts = [[request_id, 2, 5] * (request_id + 1) for request_id in range(num_requests)]
    for request_id, prompt in enumerate(prompts):
        kv.add(request(request_id, prompt, 20, prefill_loops=1 + request_id % 3))
    kv.drain()
    for request_id, prompt in enumerate(prompts):
        assert kv.tokens[request_id] == answer(prompt, 20)
    stats = kv.scheduler.stats()
    assert stats.num_draft_tokens > 0
    if good_guesses in (0, 10):
        assert stats.num_accepted_tokens == stats.num_draft_tokens * good_guesses // 10
    else:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    ended = kv.finished.values()
    assert stats.num_draft_tokens == sum(end.num_draft_tokens for end in ended)
    assert stats.num_accepted_tokens == sum(end.num_accepted_tokens for end in ended)


def test_four_right_guesses_give_five_tokens_in_one_deep_step() -> None:
    kv = guessing(10)
    plans = plans_of(kv)
    kv.add(request(0, [1, 2], 12))
    kv.drain()
    shapes = [(plan.num_rows, plan.num_loops, len(plan.logit_rows)) for plan in plans]
    round_ = [(1, 1, 1)] * 4 + [(5, 3, 5)]
    # The prompt gives one token and two rounds ten; the last token needs no guess.
    assert shapes == [(2, 3, 1), *round_, *round_, (1, 3, 1)]
    assert kv.tokens[0] == answer([1, 2], 12)


def test_a_stop_token_among_the_kept_guesses_ends_the_answer_there() -> None:
    prompt = [4, 4, 1]
    expected = answer(prompt, 20)
    for stop in sorted(set(expected)):
        kv = guessing(10)
        kv.add(request(0, prompt, 20, stop_token_ids=(stop,)))
        kv.drain()
        cut = expected.index(stop) + 1
        assert kv.tokens[0] == expected[:cut]
        assert (kv.finished[0].reason, kv.finished[0].stop_token_id) == (FinishReason.STOP, stop)
        assert kv.finished[0].num_generated_tokens == cut


def test_the_length_limit_is_not_overrun() -> None:
    for count in range(1, 12):
        kv = guessing(10)
        kv.add(request(0, [3, 1], count))
        kv.drain()
        assert kv.tokens[0] == answer([3, 1], count)
        assert kv.finished[0].reason is FinishReason.LENGTH
    kv = guessing(10, max_seq_len=16)
    kv.add(request(0, [3] * 9, 99))
    kv.drain()
    assert kv.tokens[0] == answer([3] * 9, 7)


def test_pages_of_rejected_guesses_are_never_published() -> None:
    """Every page found later holds what the answer's own tokens wrote at full depth."""
    kv = guessing(5)
    prompt = [2, 2, 9]
    kv.add(request(0, prompt, 25))
    kv.drain()
    turn = prompt + kv.tokens[0]
    kv.add(request(1, turn, 5))
    kv.drain()
    assert kv.finished[1].num_cached_tokens == 24
    assert kv.tokens[1] == answer(turn, 5)


@pytest.mark.parametrize("num_units", [29, 33, 41])
@pytest.mark.parametrize("good_guesses", [3, 10])
def test_preemption_between_guesses_loses_and_repeats_nothing(
    num_units: int, good_guesses: int
) -> None:
    kv = guessing(good_guesses, num_units=num_units, enable_prefix_cache=False)
    prompts = [[5, 6, 7, 8, 9], [1, 2, 3]]
    for request_id, prompt in enumerate(prompts):
        kv.add(request(request_id, prompt, 20))
    kv.drain(max_steps=400)
    for request_id, prompt in enumerate(prompts):
        assert kv.tokens[request_id] == answer(prompt, 20)
    preempted = sum(end.num_preemptions for end in kv.finished.values())
    assert preempted > 0
    assert kv.scheduler.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("after", range(1, 7))
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_between_guesses_gives_everything_back(after: int, in_flight: bool) -> None:
    kv = guessing(10)
    kv.add(request(0, [1, 2, 3], 20))
    kv.add(request(1, [4, 5], 20))
    for _ in range(after):
        kv.step()
    if in_flight:
        kv.step(abort_in_flight=(0,))
    else:
        kv.scheduler.abort(0)
    before = list(kv.tokens[0])
    kv.drain()
    assert kv.tokens[0] == before == answer([1, 2, 3], 20)[: len(before)]
    assert kv.finished[0].reason is FinishReason.ABORT
    assert kv.tokens[1] == answer([4, 5], 20)
    assert kv.scheduler.kv.pool.num_available == 399


def test_a_new_request_does_not_wait_for_guesses() -> None:
    kv = guessing(10)
    plans = plans_of(kv)
    kv.add(request(0, [1, 2], 20))
    for _ in range(3):
        kv.step()
    assert [plan.is_draft for plan in plans] == [False, True, True]
    kv.add(request(1, [7] * 5, 4))
    kv.step()
    # The two guesses are verified beside the prompt.
    assert (plans[-1].num_rows, len(plans[-1].logit_rows)) == (3 + 5, 3 + 1)
    assert len(kv.tokens[0]) == 1 + 3
    kv.drain()
    assert kv.tokens == {0: answer([1, 2], 20), 1: answer([7] * 5, 4)}


@pytest.mark.parametrize(
    "other",
    [
        {"sampler": SamplerParams(logprobs=0)},
        {"sampler": SamplerParams(repetition_penalty=1.5)},
        {"sampler": SamplerParams(min_tokens=3, end_ids=(1,))},
        {"sampler": SamplerParams(bad_words=((3,),))},
        {"sampler": SamplerParams(embedding_bias=np.zeros(11, "<f4").tobytes())},
        {"exit": ExitParams(ExitRule.STEP, 2.0)},
        {"loops": 1},
    ],
    ids=["logprobs", "penalty", "min_tokens", "bad_words", "bias", "exit", "shallow"],
)
def test_nobody_guesses_beside_a_request_that_cannot(other: dict[str, Any]) -> None:
    kv = guessing(10)
    plans = plans_of(kv)
    kv.add(request(0, [1, 2], 30))
    kv.add(request(1, [7] * 5, 6, **other))
    while 1 not in kv.finished:
        kv.step()
    assert not any(plan.is_draft for plan in plans)
    kv.drain()
    assert any(plan.is_draft for plan in plans)
    assert kv.tokens[0] == answer([1, 2], 30)


def test_guesses_that_others_took_the_rows_of_are_forgotten() -> None:
    """Seven first tokens come while the prefill share holds five rows of a verification."""
    kv = guessing(10, max_batch_size=8, max_num_tokens=8)
    kv.add(request(0, [1, 2], 20))
    for _ in range(5):
        kv.step()
    assert kv.scheduler.slots.num_drafts.max() == 4
    for request_id in range(1, 8):
        kv.add(request(request_id, [request_id], 6))
    kv.step()
    assert kv.scheduler.stats().num_prefill_only_steps == 1
    kv.drain()
    assert kv.tokens[0] == answer([1, 2], 20)
    assert all(kv.tokens[i] == answer([i], 6) for i in range(1, 8))


def test_guesses_stop_where_the_pool_ends() -> None:
    """Room for the answer, none for guesses on the page after the next."""
    kv = guessing(10, num_units=17, enable_prefix_cache=False, max_batch_size=1)
    kv.add(request(0, [1, 2, 3], 13))  # 4 pages of 4 units: the whole pool
    kv.drain()
    assert kv.tokens[0] == answer([1, 2, 3], 13)
    assert kv.finished[0].num_preemptions == 0


@pytest.mark.parametrize("row", range(5))
def test_a_failed_row_of_a_verification_ends_the_answer_before_it(row: int) -> None:
    kv = guessing(10)
    kv.add(request(0, [1, 2], 20))
    kv.add(request(1, [5], 2))
    while 1 not in kv.finished:
        kv.step()
    plan = None
    while plan is None or plan.is_draft or plan.num_rows != 5:
        plan = kv.scheduler.schedule()
        assert plan is not None
        result = kv.executor.execute(plan)
        if plan.is_draft or plan.num_rows != 5:
            output = kv.scheduler.commit(plan, result)
            kv.tokens[0] += output.token_ids
    output = kv.scheduler.commit(plan, replace(result, failed=(row,)))
    kv.tokens[0] += output.token_ids
    (ended,) = output.finished
    assert ended.reason is FinishReason.ERROR
    assert ended.num_generated_tokens == len(kv.tokens[0])
    assert len(output.token_ids) == row
    assert kv.tokens[0] == answer([1, 2], 20)[: len(kv.tokens[0])]
    kv.scheduler.check_integrity()
    assert kv.scheduler.kv.pool.num_available == 399


def test_a_failed_guess_is_a_guess_like_any_other() -> None:
    kv = guessing(10)
    kv.add(request(0, [1, 2], 9))
    kv.step()
    plan = kv.scheduler.schedule()
    assert plan is not None
    assert plan.is_draft
    result = kv.executor.execute(plan)
    nonsense = np.full(1, 2**30, np.int32)
    kv.scheduler.commit(plan, replace(result, token_ids=nonsense, failed=(0,)))
    kv.drain()
    assert kv.tokens[0] == answer([1, 2], 9)


def test_without_a_draft_depth_nobody_guesses() -> None:
    kv = engine()
    plans = plans_of(kv)
    kv.add(request(0, [1, 2], 9))
    kv.drain()
    assert not any(plan.is_draft for plan in plans)
    assert kv.scheduler.stats().num_draft_tokens == kv.finished[0].num_draft_tokens == 0


def test_a_request_s_end_comes_with_its_last_token_however_a_step_is_cut() -> None:
    scored = TokenLogprobs([1] * 2**19, [-1.0] * 2**19, [1] * 2**19)
    ended = FinishedRequest(7, FinishReason.STOP, 2, 0, 0, 0, 0.0, 0.0, 0.0, 1.0)
    step = StepOutput([7, 7, 8, 7], [5, 6, 1, 2], [3] * 4, [ended], {2: scored})
    parts = list(parts_of(step))
    assert [part.request_ids for part in parts] == [[7, 7], [8], [7]]
    assert [part.finished for part in parts] == [[], [], [ended]]


# ---- with a table for a model: the distribution of what is drawn


TABLE = torch.tensor(
    [[0.0, 1.0, -1.0, 0.5], [1.5, 0.0, 0.2, -0.4], [0.3, 0.3, 0.3, 0.3], [-2.0, 0.7, 1.1, 0.0]]
)
# What a guess thinks: right about the order of some rows, wrong about others.
SHALLOW = torch.tensor(
    [[0.0, 0.4, -0.4, 0.3], [-1.0, 0.5, 0.5, 1.0], [0.9, 0.1, 0.3, 0.3], [-1.0, 0.2, 0.9, 0.5]]
)


def drawn_by(core: TableCore, num_answers: int, **params: Any) -> list[tuple[int, ...]]:
    """Answers of 6 tokens to one prompt, two at a time, each with its own seed."""
    tokens: dict[int, list[int]] = {seed: [] for seed in range(num_answers)}
    for seed in tokens:
        sampler = SamplerParams(seed=seed, **params)
        core.add_request(request(seed, [0], 6, loops=4, sampler=sampler))
    while core.has_work():
        output = core.step()
        for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
            tokens[request_id].append(token)
    return [tuple(answered) for answered in tokens.values()]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        pytest.param({"temperature": 1.7, "top_k": 3}, marks=pytest.mark.full),
        pytest.param({"temperature": 0.6, "top_p": 0.9}, marks=pytest.mark.full),
    ],
    ids=["plain", "top_k", "top_p"],
)
def test_drawn_tokens_follow_the_deep_distribution(params: dict[str, Any]) -> None:
    """Chi-square of every token given the one before, over 250 answers with guesses."""
    limits: dict[str, Any] = {"max_batch_size": 2, "num_units": 200}
    core = TableCore(TABLE, shallow=SHALLOW, **limits)
    drawn = drawn_by(core, 250, **params)
    stats = core.scheduler.stats()
    assert 0.15 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95
    assert drawn[:50] == drawn_by(TableCore(TABLE, **limits), 50, **params)
    assert chi_square(drawn, TABLE, params) < 1
    # The same count against what the guesses alone would give: the test can tell.
    assert chi_square(drawn, SHALLOW, params) > 2


def chi_square(drawn: list[tuple[int, ...]], table: torch.Tensor, params: dict[str, Any]) -> float:
    """Of the tokens after each token but the first, over what one in 10,000 samples exceeds."""
    kept, order = filtered_probabilities(table, [SamplerParams(**params)] * len(table))
    shares = torch.zeros_like(kept).scatter_(1, order, kept / kept.sum(dim=1, keepdim=True))
    pairs = Counter(pair for tokens in drawn for pair in itertools.pairwise(tokens))
    statistic, cells = 0.0, 0
    for before, row in enumerate(shares.tolist()):
        total = sum(pairs[before, after] for after in range(len(row)))
        for after, share in enumerate(row):
            if share == 0:
                assert not pairs[before, after] or table is SHALLOW
                continue
            statistic += (pairs[before, after] - total * share) ** 2 / (total * share)
            cells += 1
    freedom = cells - len(shares)
    # Wilson and Hilferty's approximation of the quantile.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic / bound
