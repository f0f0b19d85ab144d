"""When prompts take whole steps from running answers, and for how long."""

from __future__ import annotations

from typing import Any

from looptrt.runtime.step_plan import StepPlan
from tests.runtime.test_scheduler import answer
from tests.support.tiny import Engine, engine, request


def with_a_backlog(num_prompts: int = 3, num_tokens: int = 30, **config: Any) -> Engine:
    """One answer that runs, then prompts of `num_tokens` tokens that wait; steps of 16 rows."""
    kv = engine(**{"num_units": 400, **config})
    kv.add(request(0, [1, 2, 3], 12))
    kv.step()
    for request_id in range(1, num_prompts + 1):
        kv.add(request(request_id, [request_id] * num_tokens, 2))
    return kv


def steps_of(kv: Engine) -> list[tuple[int, bool]]:
    """(prompt rows, whether request 0's answer runs) of every step until its end."""
    steps: list[tuple[int, bool]] = []
    execute = kv.executor.execute

    def record(plan: StepPlan) -> Any:
        ids = kv.scheduler.slots.request_id[plan.seq_slots].tolist()
        steps.append((kv.scheduler.stats().num_context_tokens, 0 in ids))
        return execute(plan)

    kv.executor.execute = record  # type: ignore[method-assign]
    while 0 not in kv.finished:
        kv.step()
    return steps


def test_a_backlog_takes_up_to_s_whole_steps_between_steps_with_answers() -> None:
    kv = with_a_backlog()
    steps = steps_of(kv)
    # 90 prompt rows: three steps without answers, one beside the two that run by then, the rest.
    expected = [(16, False)] * 3 + [(14, True), (16, False), (12, True), (0, True)]
    assert steps[:7] == expected
    assert kv.scheduler.stats().num_prefill_only_steps == 4
    kv.drain()
    assert kv.tokens[0] == answer([1, 2, 3], 12)
    assert all(kv.tokens[i] == answer([i] * 30, 2) for i in (1, 2, 3))


def test_the_deepest_running_answer_says_how_many_steps() -> None:
    for loops, waits in [(1, 1), (2, 2), (3, 3)]:
        kv = engine(num_units=400)
        kv.add(request(0, [1, 2, 3], 12, loops=loops))
        kv.step()
        for request_id in range(1, 4):
            kv.add(request(request_id, [request_id] * 36, 2))
        steps = steps_of(kv)
        assert [has_answer for _, has_answer in steps[: waits + 1]] == [False] * waits + [True]
        assert {rows for rows, has_answer in steps[: waits + 1] if not has_answer} == {16}


def test_prompts_that_fit_beside_the_answers_run_with_them() -> None:
    kv = with_a_backlog(num_prompts=1, num_tokens=15)
    assert steps_of(kv)[0] == (15, True)
    assert kv.scheduler.stats().num_prefill_only_steps == 0


def test_without_the_share_every_step_has_the_answers() -> None:
    kv = with_a_backlog(prefill_share=False)
    steps = steps_of(kv)
    assert all(has_answer for _, has_answer in steps)
    assert steps[:3] == [(15, True), (15, True), (14, True)]
    assert kv.scheduler.stats().num_prefill_only_steps == 0


def test_prompts_that_lack_units_or_slots_hold_nobody() -> None:
    for limits in ({"num_units": 33}, {"max_batch_size": 1}):
        kv = engine(enable_prefix_cache=False, **limits)
        kv.add(request(0, [9] * 22, 8))  # 24 of 32 units; a prompt's first chunk needs 16
        while not kv.tokens[0]:
            kv.step()
        for request_id in (1, 2):
            kv.add(request(request_id, [request_id] * 30, 2))
        assert all(has_answer for _, has_answer in steps_of(kv))
        kv.drain()
        assert kv.tokens[1] == answer([1] * 30, 2)


def test_the_last_row_of_a_prompt_is_not_held_back() -> None:
    """It gives a first token: a prompt of 17 rows is a chunk of 16 and a row that decodes."""
    kv = engine(num_units=400)
    kv.add(request(0, [1, 2, 3], 12))
    kv.step()
    kv.add(request(1, [7] * 17, 4))
    for request_id in (2, 3):
        kv.add(request(request_id, [request_id] * 36, 2))
    kv.step()
    assert kv.scheduler.stats().num_prefill_only_steps == 1
    kv.step()
    assert kv.scheduler.stats().num_prefill_only_steps == 2
    assert len(kv.tokens[1]) == 1


def test_without_packing_a_step_runs_one_prompt() -> None:
    for packed in (True, False):
        kv = engine(num_units=400, packed_prefill=packed)
        for request_id in range(4):
            kv.add(request(request_id, [request_id] * 5, 3))
        at_once, execute = [], kv.executor.execute

        def record(plan: StepPlan) -> Any:
            at_once.append(kv.scheduler.stats().num_context)  # noqa: B023 - within the iteration
            return execute(plan)  # noqa: B023

        kv.executor.execute = record  # type: ignore[method-assign]
        kv.drain()
        assert (max(at_once) > 1) is packed
        assert all(kv.tokens[i] == answer([i] * 5, 3) for i in range(4))
