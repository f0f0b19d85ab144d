"""Steps' inputs and results in host memory that the GPU maps: whose is which, whoever is behind."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looptrt.errors import EngineError, InvariantError
from looptrt.runtime.executor import arena as arena_module
from looptrt.runtime.executor.arena import Arena
from looptrt.runtime.executor.device_memory import MappedMemory
from looptrt.runtime.executor.graph_cache import GraphCache
from tests.support.graphs_on_cpu import HostMemory

FIELDS = {
    "ids": (torch.int32, (3,)),
    "seeds": (torch.int64, (3,)),
    "units": (torch.int32, (3, 2)),
    "shares": (torch.float64, (1,)),
}
RESULT = (2, 3)
PLAYED = torch.device("cpu")


def inputs(number: int) -> dict[str, np.ndarray]:
    ids = np.arange(number, number + 3, dtype=np.int32)
    units = np.stack([ids, ids + 1], axis=1)
    seeds = ids.astype(np.int64) + 2**40
    return {"ids": ids, "seeds": seeds, "units": units, "shares": np.array([number / 2])}


def computed(there: dict[str, torch.Tensor]) -> torch.Tensor:
    """Something of every field."""
    of_seeds = (there["seeds"] - 2**40).int() + there["units"][:, 1]
    return torch.stack((there["ids"], of_seeds + (2 * there["shares"]).int()))


def expected(number: int) -> list[list[int]]:
    ids = range(number, number + 3)
    return [list(ids), [2 * index + 1 + number for index in ids]]


class Gpu:
    """Does what it is given in order, and not before somebody waits for it or lets it.

    It is not the current one: an event recorded without a stream is behind none of its work.
    """

    def __init__(self) -> None:
        self.given: deque[Callable[[], object]] = deque()
        self.num_given = self.num_done = self.num_waits = 0
        self.computed: list[tuple[int, list[list[int]]]] = []

    def enqueue(self, work: Callable[[], object]) -> None:
        self.given.append(work)
        self.num_given += 1

    def advance(self, num_done: int) -> None:
        while self.num_done < num_done:
            self.given.popleft()()
            self.num_done += 1

    def synchronize(self, _device: object = None) -> None:
        self.advance(self.num_given)

    def event(self) -> Event:
        return Event(self)

    def current_stream(self, device: object = None) -> object:
        return self if device == PLAYED else None


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._behind = gpu, 0

    def record(self, stream: object = None) -> None:
        self._behind = self._gpu.num_given if stream is self._gpu else 0

    def synchronize(self) -> None:
        self._gpu.num_waits += 1
        self._gpu.advance(self._behind)


@contextmanager
def played_gpu() -> Iterator[Gpu]:
    """Arenas made within the block are of this GPU, whose memory is the host's."""
    gpu = Gpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "MappedMemory", HostMemory)
        patch.setattr(arena_module, "_event", gpu.event)
        patch.setattr(torch.cuda, "synchronize", gpu.synchronize)
        patch.setattr(torch.cuda, "current_stream", gpu.current_stream)
        yield gpu


def on_cpu() -> Arena:
    return Arena(FIELDS, RESULT, PLAYED)


def submit(gpu: Gpu, arena: Arena, number: int) -> Callable[[], np.ndarray]:
    def compute() -> None:
        result = computed(arena.tensors)
        gpu.computed.append((number, result.tolist()))
        arena.store(result)

    arena.fill(inputs(number))
    gpu.enqueue(arena.load)
    gpu.enqueue(compute)
    return arena.submitted()


@settings(deadline=None)
@given(
    acts=st.lists(
        st.sampled_from(["submit", "submit", "read", "drop", "work", "fail", "fail on the way"]),
        max_size=30,
    )
)
def test_every_run_has_its_own_inputs_and_result(acts: list[str]) -> None:
    """Beside runs that failed before or after their load was enqueued, and results unread."""
    with played_gpu() as gpu:
        arena, pending = on_cpu(), deque[tuple[int, Callable[[], np.ndarray]]]()
        results = []
        for number, act in enumerate([*acts, "submit", "read", "read"]):
            if act == "submit":
                if len(pending) == 2:
                    pending.popleft()
                pending.append((number, submit(gpu, arena, number)))
            elif act == "read" and pending:
                run, result = pending.popleft()
                results.append((run, result()))
            elif act == "drop" and pending:
                pending.popleft()
            elif act == "work" and gpu.given:
                gpu.advance(gpu.num_done + 1)
            elif act.startswith("fail") and len(pending) < 2:
                arena.fill(inputs(number))
                if act == "fail on the way":
                    gpu.enqueue(arena.load)
        results = [(run, result.tolist()) for run, result in results]
        assert all(result == expected(run) for run, result in results + gpu.computed)


def test_a_result_that_may_be_overwritten_is_refused() -> None:
    with played_gpu() as gpu:
        arena = on_cpu()
        first, second, third = (submit(gpu, arena, number) for number in (10, 20, 30))
        with pytest.raises(InvariantError, match="overwritten before it was read"):
            first()
        assert second().tolist() == expected(20)
        assert third().tolist() == expected(30)


def test_the_host_waits_for_no_run_that_it_has_read() -> None:
    with played_gpu() as gpu:
        arena = on_cpu()
        results = [submit(gpu, arena, 0), submit(gpu, arena, 1)]
        for number in range(2, 9):
            results.pop(0)()
            done = gpu.num_done
            results.append(submit(gpu, arena, number))
            assert gpu.num_done == done == gpu.num_given - 4
        assert gpu.num_waits == 7


def test_a_result_is_waited_for_on_its_own_gpu_not_on_the_current_one() -> None:
    with played_gpu() as gpu:
        result = submit(gpu, on_cpu(), 5)
        assert gpu.num_done == 0
        assert result().tolist() == expected(5)
        assert gpu.num_done == gpu.num_given


OTHER_INPUTS: dict[str, dict[str, np.ndarray | None]] = {
    "ids: expected .*int32.*, got None": {"ids": None},
    "more: expected None, got .*": {"more": np.zeros(3, np.int32)},
    "ids: .*got .*int64": {"ids": np.zeros(3, np.int64)},
    r"ids: .*got .*\(1,\)": {"ids": np.zeros(1, np.int32)},
    r"units: .*got .*\(2,\)": {"units": np.zeros(2, np.int32)},
    r"shares: .*got .*\(\)": {"shares": np.array(1.0)},
}


@pytest.mark.parametrize("words", OTHER_INPUTS)
def test_inputs_that_would_be_cast_spread_or_left_as_they_were_are_refused(words: str) -> None:
    """Nothing is written, and the runs before and after have their own."""
    with played_gpu() as gpu:
        arena = on_cpu()
        first = submit(gpu, arena, 10)
        given = {**inputs(20), **OTHER_INPUTS[words]}
        with pytest.raises(InvariantError, match=f"inputs of a step: {words}"):
            arena.fill({name: array for name, array in given.items() if array is not None})
        second = submit(gpu, arena, 30)
        assert (gpu.num_done, first().tolist()) == (0, expected(10))
        assert second().tolist() == expected(30)


def test_a_gpu_without_memory_for_an_arena_is_one_error_with_the_numbers() -> None:
    zeros = torch.zeros

    def on_the_host(*size: int, device: torch.device | None = None, **fields: Any) -> torch.Tensor:
        if device is not None:
            raise torch.OutOfMemoryError("torch's own words")
        return zeros(*size, **fields)

    with played_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", on_the_host)
        patch.setattr(torch.cuda, "mem_get_info", lambda _device: (3, 70))
        with pytest.raises(EngineError, match="for the inputs of steps: 3 of 70 bytes are free"):
            on_cpu()


# ---- on a GPU


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("busy_cycles", [0, 100_000])
def test_graphs_take_the_inputs_they_were_launched_for(
    device: torch.device, busy_cycles: int
) -> None:
    """One launched ahead of the result that is read, with a GPU that keeps up and one behind."""
    arena, cache = Arena(FIELDS, RESULT, device), GraphCache(device)

    def work() -> None:
        if busy_cycles:
            torch.cuda._sleep(busy_cycles)
        arena.load()
        result = computed(arena.tensors)
        if busy_cycles:
            torch.cuda._sleep(busy_cycles)
        arena.store(result)

    pending = deque[tuple[int, Callable[[], np.ndarray]]]()
    for number in range(1000):
        arena.fill(inputs(number))
        cache.run("step", work)
        pending.append((number, arena.submitted()))
        if len(pending) == 2:
            run, result = pending.popleft()
            assert result().tolist() == expected(run)
    assert (cache.counters.captures, cache.counters.hits) == (1, 998)


@pytest.mark.gpu
def test_graphs_of_one_arena_and_failed_runs_keep_the_count(device: torch.device) -> None:
    arena, cache = Arena(FIELDS, RESULT, device), GraphCache(device)

    def work() -> None:
        arena.load()
        arena.store(computed(arena.tensors))

    for number in range(60):
        if number % 7 == 3:
            arena.fill(inputs(-1))
        if number % 7 == 5:
            arena.fill(inputs(-1))
            arena.load()
        arena.fill(inputs(number))
        cache.run(number % 3, work)
        assert arena.submitted()().tolist() == expected(number)
    assert cache.counters.captures == 3


@pytest.mark.gpu
def test_mapped_memory_is_one_memory_as_long_as_any_view(device: torch.device) -> None:
    memory = MappedMemory(2**20, device)
    here, there = memory.array(), memory.tensor()
    assert there.device == device
    assert not here.any()
    del memory
    gc.collect()
    there.fill_(7)
    torch.cuda.synchronize(device)
    assert (here == 7).all()
    here[5] = 9
    assert int(there.sum()) == 7 * 2**20 + 2
    del there
    gc.collect()
    assert int(here.sum()) == 7 * 2**20 + 2


@pytest.mark.gpu
def test_memory_that_the_host_does_not_have_is_an_error(device: torch.device) -> None:
    with pytest.raises(EngineError, match=f"cudaHostAlloc of {2**50} bytes: cudaError"):
        MappedMemory(2**50, device)
    assert int(MappedMemory(64, device).tensor().sum()) == 0
