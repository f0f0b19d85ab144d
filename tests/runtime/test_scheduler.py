"""The scheduler against the simulated executor: what runs, what is shared, what is freed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from looptrt.errors import EngineError, InvariantError, QueueFullError, RequestError
from looptrt.runtime.kv import prefix_cache
from looptrt.runtime.request import ExitParams, ExitRule, FinishReason, RequestState
from looptrt.runtime.scheduler import SchedulerConfig
from tests.support.kv_sim import exit_loops, next_token
from tests.support.tiny import VOCAB, Engine, engine, layout, request


def answer(prompt: list[int], count: int) -> list[int]:
    """What the simulated model answers, computed without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def run_alone(prompt: list[int], count: int, **fields: object) -> tuple[Engine, list[int]]:
    alone = engine()
    alone.add(request(0, prompt, count, **fields))
    alone.drain()
    return alone, alone.tokens[0]


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33])
@pytest.mark.parametrize(("loops", "prefill_loops"), [(3, 3), (3, 1), (2, 1), (3, 2), (1, 1)])
def test_every_query_reads_the_deepest_plane(
    num_prompt: int, loops: int, prefill_loops: int
) -> None:
    prompt = [i % VOCAB for i in range(num_prompt)]
    alone, tokens = run_alone(prompt, 6, loops=loops, prefill_loops=prefill_loops)
    assert tokens == answer(prompt, 6)
    assert alone.scheduler.kv.pool.num_available == 199


@pytest.mark.parametrize("chunk", [4, 5, 7, 16])
def test_chunks_do_not_change_the_answer(chunk: int) -> None:
    prompt = [i * i % VOCAB for i in range(30)]
    small = engine(max_num_tokens=chunk, max_batch_size=2)
    small.add(request(0, prompt, 5, loops=3, prefill_loops=2))
    small.add(request(1, prompt[3:], 5))
    small.drain()
    assert small.tokens == {0: answer(prompt, 5), 1: answer(prompt[3:], 5)}


def test_pages_of_shallow_prompts_own_fewer_units() -> None:
    deep, shallow = engine(), engine()
    prompt = [1] * 17
    deep.add(request(0, prompt, 1))
    shallow.add(request(0, prompt, 1, prefill_loops=1))
    deep.drain()
    shallow.drain()
    unit = layout().unit_bytes
    # 4 full prompt pages and the last prompt token's: boundary unit + planes.
    assert deep.finished[0].kv_bytes == unit * 5 * (1 + 3)
    assert shallow.finished[0].kv_bytes == unit * (4 * (1 + 1) + (1 + 3))


def test_prefix_hits_skip_rows_and_never_cover_the_last_token() -> None:
    shared = engine()
    for request_id, num_prompt in enumerate([16, 16, 17, 15]):
        prompt = list(range(10)) + [3] * (num_prompt - 10)
        shared.add(request(request_id, prompt, 3))
        shared.drain()
        assert shared.tokens[request_id] == answer(prompt, 3)
    cached = [shared.finished[i].num_cached_tokens for i in range(4)]
    assert cached == [0, 12, 16, 12]


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": b"X"},
        {"cache_salt": b""},
        {"cache_salt": b"\0"},
        {"noise_seed": 1},
        {"loops": 2},
        {"prefill_loops": 2},
    ],
    ids=lambda fields: "-".join(map(str, fields.items())),
)
def test_no_hit_across_different_settings(other: dict[str, object]) -> None:
    """Case C1: salts, seeds and depths separate pages, absent from empty included."""
    prompt = [5] * 20
    shared = engine(max_seq_len=40)
    shared.add(request(0, prompt))
    shared.drain()
    shared.add(request(1, prompt, **other))
    shared.drain()
    assert shared.finished[1].num_cached_tokens == 0
    shared.add(request(2, prompt, **other))
    shared.drain()
    assert shared.finished[2].num_cached_tokens == 16


def test_a_page_of_prompt_depth_serves_every_deeper_answer() -> None:
    shared = engine()
    for request_id, loops in enumerate([1, 2, 3]):
        shared.add(request(request_id, [4] * 20, loops=loops, prefill_loops=1))
        shared.drain()
        assert shared.finished[request_id].num_cached_tokens == (16 if request_id else 0)


def test_at_least_shares_deeper_pages_and_exact_does_not() -> None:
    for at_least, expected in [(True, 16), (False, 0)]:
        shared = engine(prefix_at_least=at_least)
        shared.add(request(0, [4] * 20, loops=3))
        shared.drain()
        shared.add(request(1, [4] * 20, loops=3, prefill_loops=1))
        shared.drain()
        assert shared.finished[1].num_cached_tokens == expected
        # A shallower page never serves a deeper prompt.
        shared.add(request(2, [6] * 20, loops=3, prefill_loops=1))
        shared.drain()
        shared.add(request(3, [6] * 20, loops=3))
        shared.drain()
        assert shared.finished[3].num_cached_tokens == 0


@pytest.mark.parametrize("at_least", [True, False])
def test_a_request_that_waits_is_hashed_once(
    at_least: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, hashed = prefix_cache._digest, []

    def count(fields: Iterable[bytes | None]) -> bytes:
        hashed.append(digest(fields))
        return hashed[-1]

    monkeypatch.setattr(prefix_cache, "_digest", count)
    tight = engine(num_units=25, prefix_at_least=at_least)
    prompt = [i % 5 for i in range(12)]
    tight.add(request(0, prompt, 12))
    tight.step()
    second = tight.add(request(1, [*prompt, *[7] * 9], 1, prefill_loops=2 if at_least else 3))
    counts = []
    while tight.scheduler.stats().num_waiting:
        hashed.clear()
        plan = tight.scheduler.schedule()
        counts.append(len(hashed))
        assert plan is not None
        tight.scheduler.commit(plan, tight.executor.execute(plan))
    # Three pages that are found and one that is not; it starts when the first one has ended.
    assert counts[0] >= 4
    assert counts[1:] == [0] * (len(counts) - 1)
    assert len(counts) > 10
    assert second.num_cached_tokens == 12


def test_a_request_that_waits_finds_pages_that_come_meanwhile() -> None:
    """Its keys follow the pages found now, not those found when it was hashed before."""
    shared = engine(prefix_at_least=True)
    prompt = [i % 5 for i in range(17)]
    kv, waiting = shared.scheduler.kv, request(9, prompt, prefill_loops=1)
    assert kv.find_prefix(waiting) == []
    deep = shared.add(request(0, prompt, 4))
    for _ in range(2):
        shared.step()
    assert kv.find_prefix(waiting) == deep.pages[:4]
    assert waiting.page_keys == deep.page_keys[:4]
    shallow = shared.add(request(1, prompt, 4, prefill_loops=1, use_prefix_cache=False))
    for _ in range(2):
        shared.step()
    assert kv.find_prefix(waiting) == shallow.pages[:4] != deep.pages[:4]
    assert waiting.page_keys == shallow.page_keys[:4]


def test_shared_pages_too_deep_for_the_pool_are_given_up() -> None:
    shared = engine(num_units=29, prefix_at_least=True)
    prompt = [i % 5 for i in range(24)]
    shared.add(request(0, prompt, 1, loops=3))
    shared.drain()
    # 26 units when computed at depth 1, 36 when five pages of depth 3 are shared.
    shallow = shared.add(request(1, prompt, 12, loops=3, prefill_loops=1))
    shared.drain(max_steps=60)
    assert shared.tokens[1] == answer(prompt, 12)
    # Its own pages are not known by the keys of those that it gave up.
    kv, fresh = shared.scheduler.kv, request(2, prompt, 1, prefill_loops=1)
    kv._extend_keys(fresh, fresh.token_ids, fresh.depths, 4)
    assert shallow.page_keys[:5] == fresh.page_keys


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 7, 9, 18])
@pytest.mark.parametrize("prefill_loops", [1, 3])
def test_forks_share_full_pages_and_copy_the_partial_one(
    num_prompt: int, prefill_loops: int
) -> None:
    prompt = [i % 9 for i in range(num_prompt)]
    forked = engine(max_batch_size=3, enable_prefix_cache=False)
    for request_id in range(3):
        parent = 0 if request_id else None
        forked.add(request(request_id, prompt, 6, prefill_loops=prefill_loops, fork_of=parent))
    rows = forked.executor.rows_run
    while any(len(tokens) < 1 for tokens in forked.tokens.values()):
        forked.step()
    # The prompt once, and its last token again for each fork, beside the answers' rows.
    assert forked.executor.rows_run - rows <= num_prompt + 2 + 2 * len(forked.tokens)
    forked.drain()
    assert all(tokens == answer(prompt, 6) for tokens in forked.tokens.values())
    assert [forked.finished[i].num_cached_tokens for i in range(3)] == [
        0,
        num_prompt - 1,
        num_prompt - 1,
    ]


def test_a_fork_copies_from_a_page_that_was_computed_again_with_fewer_planes() -> None:
    """The parent's tokens stop early, so after a preemption its page is a shallower one."""
    prompt, count = [7] * 6, 20
    known = prompt + answer(prompt, count)
    assert max(exit_loops(known[: place + 1], 3) for place in (5, 6, 7)) == 2
    forked = engine(max_batch_size=2, num_units=36, max_num_tokens=40, enable_prefix_cache=False)
    forked.add(request(0, [1, 2], 28, priority=1))
    early = {"prefill_loops": 1, "exit": ExitParams(ExitRule.STEP, 1)}
    parent = forked.add(request(1, prompt, count, **early))
    fork = forked.add(request(2, prompt, count, fork_of=1, **early))
    while not parent.num_preemptions:
        forked.step()
    forked.scheduler.abort(0)
    while not fork.pages:
        forked.step()
    assert (parent.pages[1].depth, fork.pages[1].depth) == (2, 3)
    forked.drain()
    assert forked.tokens[1] == forked.tokens[2] == answer(prompt, count)
    assert forked.finished[2].num_cached_tokens == 5


def test_pages_of_a_fork_are_named_after_the_deeper_pages_that_it_shares() -> None:
    """Computed over a deeper context, they must not be known by a shallow one's keys."""
    prompt = [1, 2, 3, 4] * 2 + [5]
    shared = engine(prefix_at_least=True)
    deep = shared.add(request(0, prompt, 1))
    shared.drain()
    parent = shared.add(request(1, prompt, 9, prefill_loops=1))
    fork = shared.add(request(2, prompt, 9, prefill_loops=1, fork_of=1))
    shared.drain()
    assert deep.page_keys == parent.page_keys[:2] == fork.page_keys[:2]
    assert parent.page_keys == fork.page_keys
    assert len(fork.page_keys) == 4


def test_forks_whose_parent_is_gone_run_on_their_own() -> None:
    forked = engine(max_batch_size=1)
    forked.add(request(0, [1] * 9, 2))
    forked.add(request(1, [1] * 9, 4, fork_of=0))
    forked.drain()
    assert forked.tokens[1] == answer([1] * 9, 4)
    assert forked.finished[1].num_cached_tokens == 8


def test_answers_are_reused_by_the_next_turn() -> None:
    shared = engine()
    prompt = [2] * 9
    shared.add(request(0, prompt, 8))
    shared.drain()
    shared.add(request(1, prompt + shared.tokens[0] + [1, 2], 2))
    shared.drain()
    assert shared.finished[1].num_cached_tokens == 16


def test_grid_cuts_hits_and_cold_runs_alike() -> None:
    prompt = [i % 7 for i in range(22)]
    shared = engine(prefix_grid=8, max_num_tokens=64)
    shared.add(request(0, prompt, 1))
    rows = []
    while shared.scheduler.has_work():
        before = shared.executor.rows_run
        shared.step()
        rows.append(shared.executor.rows_run - before)
    assert rows == [8, 8, 6]
    shared.add(request(1, prompt, 1))
    shared.step()
    assert shared.finished[1].num_cached_tokens == 16


@pytest.mark.parametrize("num_units", [41, 45, 53])
@pytest.mark.parametrize("preempt_after", range(8))
def test_preemption_loses_and_repeats_nothing(num_units: int, preempt_after: int) -> None:
    """Case C4: a pool for one and a half requests."""
    tight = engine(num_units=num_units, max_num_tokens=16)
    prompts = [[1, 2, 3, 4, 5, 6, 7] * 2, [8, 9, 10, 1] * 3]
    for request_id, prompt in enumerate(prompts):
        tight.add(request(request_id, prompt, 24, loops=3, prefill_loops=1 + request_id))
        for _ in range(preempt_after):
            tight.step()
    tight.drain(max_steps=300)
    for request_id, prompt in enumerate(prompts):
        assert tight.tokens[request_id] == answer(prompt, 24)
    assert tight.scheduler.kv.pool.num_available == num_units - 1


def test_tight_pools_do_preempt() -> None:
    tight = engine(num_units=45, enable_prefix_cache=False)
    for request_id in range(3):
        tight.add(request(request_id, [request_id] * 12, 20))
    tight.drain(max_steps=300)
    assert sum(done.num_preemptions for done in tight.finished.values()) > 0
    assert tight.finished[0].num_preemptions == 0, "the oldest request is never the victim"


def test_priority_runs_first_and_is_preempted_last() -> None:
    tight = engine(num_units=45, max_batch_size=2)
    for request_id, priority in enumerate([0, 0, 5]):
        tight.add(request(request_id, [request_id] * 8, 20, priority=priority))
    order = []
    while tight.scheduler.has_work():
        tight.step()
        order += [i for i in tight.finished if i not in order]
    assert order[0] == 2
    assert tight.finished[2].num_preemptions == 0


def test_ring_strategies_reserve_everything_at_admission() -> None:
    ring = engine(strategy="compress-s4", num_units=31, recomputable=False)
    for request_id in range(3):
        ring.add(request(request_id, [request_id] * 9, 8))
    ring.step()
    # 17 tokens are 5 pages of 1 + 2 units: two requests fit 30 units, the third waits.
    assert ring.scheduler.stats().num_running == 2
    assert ring.scheduler.stats().num_free_units == 0
    ring.drain()
    assert all(done.num_preemptions == 0 for done in ring.finished.values())
    assert len(ring.finished) == 3


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "in_flight", "twice", "unknown"])
def test_abort_at_any_point_returns_every_unit(when: str) -> None:
    """Case C10."""
    one = engine(max_num_tokens=4, max_batch_size=1)
    one.add(request(0, [1] * 10, 6))
    bystander = request(1, [2] * 6, 3)
    one.add(bystander)
    steps = {"waiting": 0, "prefill": 1, "decode": 4}.get(when, 2)
    for _ in range(steps):
        one.step()
    if when == "in_flight":
        one.step(abort_in_flight=(0,))
    elif when == "unknown":
        one.scheduler.abort(99)
    else:
        one.scheduler.abort(0)
        if when == "twice":
            one.scheduler.abort(0)
    before = list(one.tokens[0])
    one.drain()
    if when != "unknown":
        assert one.finished[0].reason is FinishReason.ABORT
        assert one.tokens[0] == before, "a token came after the abort"
    assert one.tokens[1] == answer([2] * 6, 3)
    assert one.scheduler.kv.pool.num_available == 199
    assert bystander.state is RequestState.FINISHED


def test_stop_ids_end_a_request_with_the_token_named() -> None:
    prompt = [3, 1, 4]
    expected = answer(prompt, 10)
    one = engine()
    one.add(request(0, prompt, 10, stop_token_ids=(expected[4], 77)))
    one.drain()
    cut = expected.index(expected[4]) + 1
    assert one.tokens[0] == expected[:cut]
    assert one.finished[0].reason is FinishReason.STOP
    assert one.finished[0].stop_token_id == expected[4]


def test_a_full_queue_refuses_and_keeps_the_rest() -> None:
    one = engine(max_waiting=2)
    one.add(request(0, [1]))
    one.add(request(1, [1]))
    with pytest.raises(QueueFullError):
        one.scheduler.add(request(2, [1]))
    one.scheduler.abort(0)
    one.add(request(2, [1]))
    one.drain()
    assert set(one.finished) == {0, 1, 2}


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (lambda: request(0, []), "prompt"),
        (lambda: request(0, [1] * 40), "39"),
        (lambda: request(0, [1], loops=4), "loops"),
        (lambda: request(0, [1], loops=1, prefill_loops=2), "prefill_loops"),
        (lambda: request(0, [1] * 30, 10, loops=3), "units"),
    ],
)
def test_impossible_requests_are_refused_at_the_border(bad: object, match: str) -> None:
    """Case C7: nothing is queued and the next request runs."""
    one = engine(num_units=33)
    with pytest.raises(RequestError, match=match):
        one.scheduler.add(bad())  # type: ignore[operator]
    assert not one.scheduler.has_work()
    one.add(request(7, [1, 2], 2))
    one.drain()
    assert one.tokens[7] == answer([1, 2], 2)


def test_the_page_unused_for_longest_goes_first_and_ends_before_beginnings() -> None:
    shared = engine(num_units=61, max_batch_size=1)
    for request_id, token in enumerate([1, 2]):
        shared.add(request(request_id, [token] * 17, 1))  # 4 full pages of 4 units each
        shared.drain()
    shared.add(request(2, [1] * 17, 1))  # uses the first prompt's pages again
    shared.drain()
    assert shared.finished[2].num_cached_tokens == 16
    # 7 of 15 pages are free: 8 new ones cost the second prompt's last page, no other.
    shared.add(request(3, [3] * 29, 1))
    shared.drain()
    cached = []
    for request_id, token in [(4, 1), (5, 2)]:
        shared.add(request(request_id, [token] * 17, 1))
        shared.drain()
        cached.append(shared.finished[request_id].num_cached_tokens)
    assert cached == [16, 12]


def test_a_blocked_request_leaves_the_cache_alone() -> None:
    tight = engine(num_units=27, max_batch_size=2)
    tight.add(request(0, [1] * 9, 1))
    tight.drain()
    tight.add(request(1, [2] * 9, 8))
    tight.step()
    tight.add(request(2, [3] * 16, 4))  # needs 16 units at once: 6 are free and 8 cached
    for _ in range(3):
        tight.step()
        stats = tight.scheduler.stats()
        assert (stats.num_running, stats.num_cached_units, stats.num_evictions) == (1, 8, 0)
    tight.drain()
    assert tight.tokens[2] == answer([3] * 16, 4)


def test_preempted_requests_do_not_fill_the_queue() -> None:
    tight = engine(num_units=45, max_waiting=3, enable_prefix_cache=False)
    for round_idx in range(6):
        for i in range(3):
            tight.add(request(10 * round_idx + i, [i] * 12, 20))
        tight.drain()
    assert sum(done.num_preemptions for done in tight.finished.values()) > 6


def test_stop_ids_of_the_slot_s_last_request_are_gone() -> None:
    one = engine(max_batch_size=1)
    expected = answer([3, 1, 4], 6)
    one.add(request(0, [9], 1, stop_token_ids=(50, *expected)))
    one.add(request(1, [3, 1, 4], 6, stop_token_ids=(50,)))
    one.drain()
    assert one.tokens[1] == expected


def test_hits_are_counted_once_a_request() -> None:
    tight = engine(num_units=45)
    for request_id in range(3):
        tight.add(request(request_id, [request_id] * 12, 20))
    tight.drain()
    assert sum(done.num_preemptions for done in tight.finished.values()) > 0
    stats = tight.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_hit_tokens) == (36, 0)


def test_noise_seeds_separate_pages_only_where_noise_is_drawn() -> None:
    for uses_noise, cached in [(True, 0), (False, 16)]:
        shared = engine(uses_noise=uses_noise)
        if not uses_noise:
            shared.executor.check = "written"  # tags carry the seed
        for request_id in range(2):
            shared.add(request(request_id, [1] * 17, 1, noise_seed=request_id))
            shared.drain()
        assert shared.finished[1].num_cached_tokens == cached


@pytest.mark.parametrize("other", [{"cache_salt": b"X"}, {"noise_seed": 1}])
def test_at_least_keeps_salts_and_seeds_apart(other: dict[str, object]) -> None:
    shared = engine(prefix_at_least=True)
    shared.add(request(0, [5] * 20))
    shared.drain()
    shared.add(request(1, [5] * 20, prefill_loops=1, **other))
    shared.drain()
    assert shared.finished[1].num_cached_tokens == 0


def test_pages_after_a_deeper_hit_are_not_found_as_the_request_s_own() -> None:
    """Their KV was computed over a deeper context: the exact key would lie."""
    shared = engine(prefix_at_least=True, num_units=200)
    prompt = [i % 7 for i in range(20)]
    shared.add(request(0, prompt[:9], 1))  # two pages at depth 3
    shared.drain()
    shared.add(request(1, prompt, 1, prefill_loops=1))  # hits them, adds two at depth 1
    shared.drain()
    assert shared.finished[1].num_cached_tokens == 8
    kv, fresh = shared.scheduler.kv, request(2, prompt, 1, prefill_loops=1)
    kv._extend_keys(fresh, fresh.token_ids, fresh.depths, 3)
    assert [kv.pool.cache.find(key) for key in fresh.page_keys] == [None] * 4


def test_the_deepest_page_answers_for_its_tokens() -> None:
    shared = engine(prefix_at_least=True)
    for request_id, (prefill_loops, cached) in enumerate([(1, 0), (3, 0), (2, 16)]):
        shared.add(request(request_id, [4] * 20, prefill_loops=prefill_loops))
        shared.drain()
        assert shared.finished[request_id].num_cached_tokens == cached


def test_a_grid_chunk_runs_beside_decodes() -> None:
    with pytest.raises(EngineError, match="at least 11"):
        engine(prefix_grid=8, max_num_tokens=10)
    mixed = engine(prefix_grid=8, max_num_tokens=11)
    for request_id in range(3):
        mixed.add(request(request_id, [request_id], 30))
    mixed.step()
    mixed.add(request(3, [7] * 20, 1))
    for _ in range(3):
        mixed.step()
    assert 3 in mixed.finished


def test_length_limit_is_reached_exactly() -> None:
    one = engine()
    one.add(request(0, [1] * 39, 5))
    one.drain()
    assert len(one.tokens[0]) == 1
    assert one.finished[0].reason is FinishReason.LENGTH


def test_plans_do_not_overlap() -> None:
    one = engine()
    one.add(request(0, [1, 2]))
    plan = one.scheduler.schedule()
    assert plan is not None
    with pytest.raises(InvariantError):
        one.scheduler.schedule()
    result = one.executor.execute(plan)
    one.scheduler.commit(plan, result)
    with pytest.raises(InvariantError):
        one.scheduler.commit(plan, result)


def test_a_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(EngineError, match="max_num_tokens"):
        SchedulerConfig(max_batch_size=8, max_num_tokens=4, max_seq_len=8, num_units=9)
    with pytest.raises(EngineError, match="prefix_grid 4"):
        engine(max_batch_size=4, max_num_tokens=6, prefix_grid=4)


def test_a_failed_row_ends_its_request_alone() -> None:
    one = engine()
    for request_id in range(2):
        one.add(request(request_id, [request_id + 1] * 6, 5))
    for _ in range(2):
        one.step()
    plan = one.scheduler.schedule()
    assert plan is not None
    result = replace(one.executor.execute(plan), failed=(0,))
    output = one.scheduler.commit(plan, result)
    one.scheduler.check_integrity()
    (ended,) = output.finished
    assert (ended.request_id, ended.reason) == (0, FinishReason.ERROR)
    assert output.request_ids == [1]
    one.tokens[1] += output.token_ids
    one.drain()
    assert one.tokens[1] == answer([2] * 6, 5)
    assert one.scheduler.kv.pool.num_available == 199
