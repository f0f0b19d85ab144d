"""Plans made before the tokens of the step in flight are known."""

from __future__ import annotations

from typing import Any

import pytest

from looptrt.errors import InvariantError
from looptrt.runtime.request import ExitParams, ExitRule, FinishReason
from looptrt.runtime.step_plan import StepPlan, StepResult
from tests.runtime.test_scheduler import answer
from tests.support.tiny import Engine, engine, request


def ahead_of(kv: Engine) -> StepPlan | None:
    """Put the next step in flight and ask for the one after it."""
    plan = kv.scheduler.schedule()
    assert plan is not None
    kv.in_flight.append((plan, kv.executor.execute(plan)))
    return kv.scheduler.schedule_ahead()


def count_ahead(kv: Engine) -> list[StepPlan]:
    """The plans that will run with tokens unknown, in a list that grows."""
    plans: list[StepPlan] = []
    execute = kv.executor.execute

    def record(plan: StepPlan) -> StepResult:
        if (plan.input_ids < 0).any():
            plans.append(plan)
        return execute(plan)

    kv.executor.execute = record  # type: ignore[method-assign]
    return plans


def test_a_plan_ahead_continues_every_request_by_one_unknown_token() -> None:
    kv = engine()
    for request_id, loops in enumerate([3, 2]):
        kv.add(request(request_id, [request_id + 1] * 5, 9, loops=loops))
    kv.step()
    ahead = ahead_of(kv)
    assert ahead is not None
    plan, _ = kv.in_flight[0]
    assert ahead.seq_slots.tolist() == plan.seq_slots.tolist() == ahead.sample_slots.tolist()
    assert ahead.positions.tolist() == [6, 6]
    assert ahead.depths.tolist() == plan.depths.tolist() == [3, 2]
    assert ahead.input_ids.tolist() == [-1, -1]
    assert ahead.cu_seqlens.tolist() == [0, 1, 2]
    assert ahead.logit_rows.tolist() == [0, 1]


@pytest.mark.parametrize("num_requests", [1, 3, 4])
def test_answers_are_those_without_looking_ahead(num_requests: int) -> None:
    kv = engine(runs_ahead=True)
    plans = count_ahead(kv)
    prompts = [[request_id, 7] * (request_id + 2) for request_id in range(num_requests)]
    for request_id, prompt in enumerate(prompts):
        kv.add(request(request_id, prompt, 10 + request_id, prefill_loops=2))
    kv.drain()
    for request_id, prompt in enumerate(prompts):
        assert kv.tokens[request_id] == answer(prompt, 10 + request_id)
        assert kv.finished[request_id].num_generated_tokens == 10 + request_id
    assert len(plans) >= 8
    assert kv.scheduler.kv.pool.num_available == 199


def test_a_stop_found_late_drops_one_token_and_then_frees_the_pages() -> None:
    prompt = [3, 1, 4]
    expected = answer(prompt, 12)
    stop = expected[5]
    cut = expected.index(stop) + 1
    kv = engine(runs_ahead=True, enable_prefix_cache=False)
    kv.add(request(0, prompt, 12, stop_token_ids=(stop,)))
    kv.add(request(1, [9, 9], 12))
    while 0 not in kv.finished:
        kv.step()
    assert kv.tokens[0] == expected[:cut]
    assert kv.finished[0].num_generated_tokens == cut
    assert kv.finished[0].reason is FinishReason.STOP
    (extra, _) = kv.in_flight[0]
    assert len(extra.seq_slots) == 2, "the stopped request runs once more"
    held = kv.scheduler.stats().num_free_units
    assert kv.scheduler.stats().num_running == 1
    kv.step()
    assert kv.tokens[0] == expected[:cut]
    assert kv.scheduler.stats().num_free_units > held
    kv.drain()
    assert kv.tokens[1] == answer([9, 9], 12)
    assert kv.scheduler.kv.pool.num_available == 199


def test_the_slot_of_a_stopped_request_is_not_taken_while_its_row_is_in_flight() -> None:
    expected = answer([3, 1, 4], 12)
    kv = engine(runs_ahead=True, max_batch_size=1)
    kv.add(request(0, [3, 1, 4], 12, stop_token_ids=(expected[2],)))
    kv.add(request(1, [8, 8], 5))
    while 0 not in kv.finished:
        kv.step()
    assert kv.scheduler.slots.num_free == 0
    kv.drain()
    assert kv.tokens[1] == answer([8, 8], 5)


@pytest.mark.parametrize("after", range(1, 5))
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_takes_effect_with_two_steps_in_flight(after: int, in_flight: bool) -> None:
    kv = engine(runs_ahead=True, enable_prefix_cache=False)
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
    assert kv.scheduler.kv.pool.num_available == 199


def test_what_a_dropped_token_wrote_is_never_published() -> None:
    """The row ahead fills the page with a token that the aborted answer does not hold."""
    kv = engine()
    kv.add(request(0, [1, 2], 9))
    kv.step()
    ahead = ahead_of(kv)
    assert ahead is not None
    assert ahead.positions.tolist() == [3]
    kv.in_flight.append((ahead, kv.executor.execute(ahead)))
    kv.step(abort_in_flight=(0,))
    kv.drain()
    assert kv.scheduler.stats().num_cached_units == 0
    assert kv.scheduler.stats().num_free_units == 199


def test_an_aborted_request_runs_no_further_ahead() -> None:
    kv = engine()
    for request_id in range(2):
        kv.add(request(request_id, [1, request_id], 9))
    kv.step()
    plan = kv.scheduler.schedule()
    assert plan is not None
    kv.in_flight.append((plan, kv.executor.execute(plan)))
    kv.scheduler.abort(1)
    ahead = kv.scheduler.schedule_ahead()
    assert ahead is not None
    assert ahead.seq_slots.tolist() == plan.seq_slots[:1].tolist()
    kv.in_flight.append((ahead, kv.executor.execute(ahead)))
    kv.drain()
    assert kv.tokens[0] == answer([1, 0], 9)


def test_a_new_request_starts_one_step_later() -> None:
    kv = engine(runs_ahead=True)
    kv.add(request(0, [1, 2, 3], 30))
    for _ in range(3):
        kv.step()
    kv.add(request(1, [4, 5], 3))
    kv.step()  # one more was in flight
    kv.step()
    assert len(kv.tokens[1]) == 1


def test_a_request_that_lacks_units_does_not_end_looking_ahead() -> None:
    kv = engine(runs_ahead=True, num_units=33, enable_prefix_cache=False)
    plans = count_ahead(kv)
    kv.add(request(0, [1] * 20, 12))
    kv.step()
    kv.add(request(1, [2] * 20, 3))
    kv.drain()
    assert len(plans) > 8
    assert kv.tokens == {0: answer([1] * 20, 12), 1: answer([2] * 20, 3)}


@pytest.mark.parametrize("why", ["prefill", "exit", "last", "guesses"])
def test_no_plan_ahead_where_the_next_step_needs_the_tokens(why: str) -> None:
    config: dict[str, Any] = {"draft_loops": 1} if why == "guesses" else {}
    fields = {"exit": ExitParams(ExitRule.STEP, 2.0)} if why == "exit" else {}
    kv = engine(**config)
    kv.add(request(0, [1, 2, 3], 2 if why == "last" else 8, **fields))
    if why != "prefill":
        kv.step()
    assert ahead_of(kv) is None


def test_no_plan_ahead_past_a_request_that_could_start() -> None:
    kv = engine()
    kv.add(request(0, [1, 2, 3], 8))
    kv.step()
    plan = kv.scheduler.schedule()
    assert plan is not None
    kv.add(request(1, [4, 5, 6], 8))
    assert kv.scheduler.schedule_ahead() is None


def test_no_plan_ahead_where_a_page_is_missing() -> None:
    """Only `schedule` preempts, when nothing is in flight."""
    kv = engine(num_units=13, enable_prefix_cache=False)
    for request_id in range(2):
        kv.add(request(request_id, [request_id] * 3, 5))  # 2 pages each, the pool has 3
    kv.step()
    assert ahead_of(kv) is None
    kv.drain()
    assert kv.finished[1].num_preemptions == 1
    assert kv.tokens == {i: answer([i] * 3, 5) for i in range(2)}


def test_plans_are_committed_in_order() -> None:
    kv = engine()
    kv.add(request(0, [1, 2, 3], 8))
    kv.step()
    ahead = ahead_of(kv)
    assert ahead is not None
    plan, result = kv.in_flight[0]
    later = kv.executor.execute(ahead)
    with pytest.raises(InvariantError):
        kv.scheduler.commit(ahead, later)
    with pytest.raises(InvariantError):
        kv.scheduler.schedule()
    assert kv.scheduler.schedule_ahead() is None, "two are in flight"
    tokens = kv.scheduler.commit(plan, result).token_ids
    tokens += kv.scheduler.commit(ahead, later).token_ids
    assert tokens == answer([1, 2, 3], 3)[1:]
    assert kv.scheduler.schedule_ahead() is None, "nothing is in flight"
