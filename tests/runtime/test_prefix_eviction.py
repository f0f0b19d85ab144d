"""What stays in the prefix cache: beginnings longer than what follows, one copy of each page."""

from __future__ import annotations

import itertools

import pytest

from tests.runtime.test_scheduler import answer
from tests.support.tiny import engine, request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def test_equal_prompts_that_ran_together_end_up_on_the_same_pages() -> None:
    kv = engine(max_num_tokens=64)
    first = kv.add(request(0, PROMPT, 8))
    second = kv.add(request(1, PROMPT, 8))
    kv.step()
    assert [page.key for page in second.pages[:2]] == first.page_keys[:2]
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] is not first.pages[2]
    kv.drain()
    assert kv.tokens == {i: answer(PROMPT, 8) for i in range(2)}


@pytest.mark.parametrize("is_fork", [False, True])
def test_a_beginning_outlives_what_another_request_put_behind_it(is_fork: bool) -> None:
    """The first of two equal prompts ends; the second goes on behind the first one's pages."""
    kv = engine(num_units=41, max_num_tokens=64, max_batch_size=3)
    kv.add(request(0, PROMPT, 1))
    second = kv.add(request(1, PROMPT, 9, fork_of=0 if is_fork else None))
    kv.drain()
    assert len(second.page_keys) == 4
    # 10 pages in all, 4 published: 8 new ones take the two at the end.
    kv.add(request(2, [7] * 30, 1))
    kv.drain()
    cached = [kv.scheduler.kv.pool.cache.find(key) is not None for key in second.page_keys]
    assert cached == [True, True, False, False]


def test_a_shared_beginning_outlives_the_ends_of_all_who_share_it() -> None:
    system, turns = [1, 2] * 6, [[3] * 5, [4] * 5, [5] * 5]
    kv = engine(num_units=73, max_num_tokens=64, max_seq_len=80)
    requests = [kv.add(request(index, [*system, *turn], 4)) for index, turn in enumerate(turns)]
    kv.drain()
    shared = {key for one in requests for key in one.page_keys[:3]}
    ends = {key for one in requests for key in one.page_keys[3:]}
    assert (len(shared), len(ends)) == (3, 6)
    find = kv.scheduler.kv.pool.cache.find
    assert all(find(key) for key in shared | ends)
    for num_pages in itertools.count(10):
        kv.add(request(100 + num_pages, [9 + num_pages % 2] * (4 * num_pages - 1), 1))
        kv.drain()
        if not any(find(key) for key in ends):
            break
        assert all(find(key) for key in shared)
    assert num_pages > 10


def test_sessions_reuse_at_least_three_quarters_of_their_prompts() -> None:
    """The issue's workload at a sixteenth of its lengths: 16 sessions of 4 turns."""
    kv = engine(
        num_units=8000, max_num_tokens=512, max_batch_size=16, max_seq_len=160, max_waiting=64
    )
    histories = {session: [1, 2, 3, 4] * 16 for session in range(16)}
    for turn in range(4):
        for session, history in histories.items():
            history += [5 + (session + i * turn) % 6 for i in range(16)]
            kv.add(request(16 * turn + session, history, 4))
        kv.drain()
        for session, history in histories.items():
            history += kv.tokens[16 * turn + session]
    stats = kv.scheduler.stats()
    # The first turns arrive together: those of the first step compute the system prompt anew.
    assert stats.num_hit_tokens / stats.num_prompt_tokens >= 0.75
    assert stats.num_hit_tokens == sum(end.num_cached_tokens for end in kv.finished.values())
    pool = kv.scheduler.kv.pool
    assert len({page.units for page in pool.cache.pages()}) == len(pool.cache)
