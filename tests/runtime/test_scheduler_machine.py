"""Random schedules: no unit leaks, is owned twice or is reachable under another key."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from looptrt.runtime.request import ExitKv, ExitParams, ExitRule, Request
from tests.runtime.test_scheduler import answer
from tests.support.tiny import Engine, engine, request

EXITS = st.sampled_from([ExitParams()] * 4 + [ExitParams(ExitRule.STEP, 1, kv) for kv in ExitKv])
PROMPTS = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=26)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps and aborts at random over a pool that is often too small.

    The simulated executor checks that every query of every step reads the right plane of
    the right context; equal prompts, salts and depths come up often enough to share pages.
    """

    kv: Engine

    @initialize(
        num_units=st.sampled_from([37, 41, 60, 200]),
        budget=st.sampled_from([7, 9, 16]),
        grid=st.sampled_from([None, None, 4]),
        cache=st.sampled_from([True, True, False]),
        share=st.booleans(),
        packed=st.sampled_from([True, True, False]),
        draft_loops=st.sampled_from([None, 1, 2]),
        runs_ahead=st.booleans(),
    )
    def start(
        self,
        num_units: int,
        budget: int,
        grid: int | None,
        cache: bool,
        share: bool,
        packed: bool,
        draft_loops: int | None,
        runs_ahead: bool,
    ) -> None:
        self.kv = engine(
            num_units=num_units,
            max_num_tokens=budget,
            prefix_grid=grid,
            enable_prefix_cache=cache,
            prefill_share=share,
            packed_prefill=packed,
            draft_loops=draft_loops,
            runs_ahead=runs_ahead,
        )
        self.prompts: dict[int, tuple[list[int], int, tuple[int, ...]]] = {}
        self.aborted: set[int] = set()
        self.requests: list[Request] = []

    @rule(
        prompt=PROMPTS,
        count=st.integers(1, 9),
        depths=st.sampled_from([(3, 3), (3, 1), (3, 2), (1, 1), (2, 2)]),
        salt=st.sampled_from([None, None, b""]),
        noise_seed=st.sampled_from([0, 0, 1]),
        priority=st.sampled_from([0, 0, 1]),
        num_forks=st.sampled_from([0, 0, 0, 2]),
        stop_token_ids=st.sampled_from([(), (), (3,), (3, 5)]),
        exit_params=EXITS,
    )
    def add(
        self,
        prompt: list[int],
        count: int,
        depths: tuple[int, int],
        salt: bytes | None,
        noise_seed: int,
        priority: int,
        num_forks: int,
        stop_token_ids: tuple[int, ...],
        exit_params: ExitParams,
    ) -> None:
        parent = len(self.prompts)
        loops, prefill_loops = depths
        for request_id in range(parent, parent + 1 + num_forks):
            self.prompts[request_id] = (prompt, count, stop_token_ids)
            new = self.kv.add(
                request(
                    request_id,
                    prompt,
                    count,
                    loops=loops,
                    prefill_loops=prefill_loops,
                    cache_salt=salt,
                    noise_seed=noise_seed,
                    priority=priority,
                    stop_token_ids=stop_token_ids,
                    exit=exit_params,
                    fork_of=None if request_id == parent else parent,
                )
            )
            self.requests.append(new)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.kv.step()

    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        if self.prompts:
            request_id = data.draw(st.sampled_from(sorted(self.prompts)))
            if request_id not in self.kv.finished:
                self.aborted.add(request_id)
            if in_flight:
                self.kv.step(abort_in_flight=(request_id,))
            else:
                self.kv.scheduler.abort(request_id)

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "kv"):
            self.kv.scheduler.check_integrity()

    @invariant()
    def no_page_outlives_the_page_before_it(self) -> None:
        """A published page whose beginning is gone could never be found again."""
        if not hasattr(self, "kv") or self.kv.scheduler.config.prefix_at_least:
            return
        find = self.kv.scheduler.kv.pool.cache.find
        for known in self.requests:
            for before, key in itertools.pairwise(known.page_keys):
                assert find(key) is None or find(before) is not None

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.drain()
        assert set(self.kv.finished) == set(self.prompts)
        for request_id, (prompt, count, stop_ids) in self.prompts.items():
            tokens, expected = self.kv.tokens[request_id], answer(prompt, count)
            ends = [index + 1 for index, token in enumerate(expected) if token in stop_ids]
            expected = expected[: min(ends, default=count)]
            if request_id in self.aborted:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
        pool = self.kv.scheduler.kv.pool
        assert pool.num_available == pool.units.num_units - 1


class AtLeastMachine(SchedulerMachine):
    """The same with deeper pages shared: never shallower ones, never another's context."""

    @initialize(
        num_units=st.sampled_from([37, 41, 60]),
        budget=st.sampled_from([4, 16]),
        runs_ahead=st.booleans(),
        draft_loops=st.sampled_from([None, 1]),
    )
    def start(  # type: ignore[override]
        self, num_units: int, budget: int, runs_ahead: bool, draft_loops: int | None
    ) -> None:
        self.kv = engine(
            num_units=num_units,
            max_num_tokens=budget,
            prefix_at_least=True,
            runs_ahead=runs_ahead,
            draft_loops=draft_loops,
        )
        self.prompts = {}
        self.aborted = set()
        self.requests = []


class RingMachine(SchedulerMachine):
    """The same where planes are overwritten: all pages reserved, nothing shared."""

    @initialize(num_units=st.sampled_from([30, 60]), budget=st.sampled_from([4, 16]))
    def start(self, num_units: int, budget: int) -> None:  # type: ignore[override]
        self.kv = engine(
            strategy="compress-s4",
            num_units=num_units,
            max_num_tokens=budget,
            recomputable=False,
        )
        self.prompts = {}
        self.aborted = set()
        self.requests = []

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "kv"):
            assert all(done.num_preemptions == 0 for done in self.kv.finished.values())


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAtLeast = AtLeastMachine.TestCase
TestAtLeast.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
