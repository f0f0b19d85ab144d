"""What may happen while a CUDA graph is captured."""

from __future__ import annotations

import gc

import pytest
import torch

from looptrt.runtime.executor.graph_cache import GraphCache, collector_paused


def test_the_collector_is_paused_and_as_before_afterwards() -> None:
    def fail() -> None:
        with collector_paused():
            assert not gc.isenabled()
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_stays_paused_until_the_last_capture_has_ended() -> None:
    """Two engines of one process, each on its own thread, capture at once."""
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.gpu
def test_garbage_that_holds_graphs_does_not_spoil_a_capture() -> None:
    """An engine that was let go with its graphs was collected inside another one's capture."""
    device = torch.device("cuda", torch.cuda.current_device())
    values = torch.zeros(8, device=device)

    def add_one() -> None:
        values.add_(1)

    held = [GraphCache(device)]
    held[0].capture("old", add_one)
    calls = iter((False, True))

    def let_go() -> None:
        if next(calls):  # the first call is eager, the second captured
            ring: list[object] = [held.pop()]
            ring.append(ring)  # only the collector finds that nobody holds it
            del ring
            assert len([[number] for number in range(2000)]) == 2000  # enough to begin one
        add_one()

    cache, thresholds = GraphCache(device), gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        cache.capture("new", let_go)
    finally:
        gc.set_threshold(*thresholds)
    before = values.clone()
    cache.run("new", add_one)
    assert torch.equal(values, before + 1)
    assert cache.counters.hits == 1
