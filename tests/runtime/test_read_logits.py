"""Requests that read their logits, in steps that are whole graphs: the host finishes their rows.

Without a GPU the graphs are those of `graphs_on_cpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from looptrt.errors import EngineError
from looptrt.runtime.executor import cuda, graph_cache, step_graphs
from looptrt.runtime.request import LogprobsMode, SamplerParams
from looptrt.runtime.scheduler import Scheduler
from tests.e2e.test_engine_oracle import engine_dirs, prompt_of
from tests.support.graphs_on_cpu import device
from tests.support.watched import Ask, Engine

__all__ = ["device"]

VOCAB = 256
EngineOf = Callable[..., Engine]
BIAS = np.zeros(VOCAB, "<f4")
BIAS[7] = 3.0
READERS = {
    "penalties": SamplerParams(
        temperature=0.8, seed=4, repetition_penalty=1.3, frequency_penalty=0.2
    ),
    "greedy penalty": SamplerParams(presence_penalty=0.7),
    "bad words": SamplerParams(bad_words=((5,), (60, 42))),
    "bias": SamplerParams(temperature=0.7, seed=9, embedding_bias=BIAS.tobytes()),
    "raw": SamplerParams(logprobs=3),
    "processed": SamplerParams(
        temperature=1.1, seed=2, top_k=9, logprobs=2, logprobs_mode=LogprobsMode.PROCESSED
    ),
}
PLAIN = [SamplerParams(), SamplerParams(temperature=1.0, seed=6)]


@pytest.fixture(scope="module")
def engine_dir_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("read")
    return engine_dirs(root, max_batch_size=8, max_num_tokens=512)


@pytest.fixture
def start(engine_dir_of: Callable[[str], Path], device: str, tmp_path: Path) -> EngineOf:
    def make(model: str, graphs: str, **config: Any) -> Engine:
        fields = {"device": device, "kv_cache_bytes": 2**22, "cache_dir": str(tmp_path)}
        return Engine(engine_dir_of(model), **{**fields, "cuda_graphs": graphs, **config})

    return make


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, device: str) -> list[Hashable]:
    """Keys of the graphs that steps ask for, a list that grows."""
    keys: list[Hashable] = []
    cache: Any = step_graphs.GraphCache
    run = cache.run

    def record(self: object, key: Hashable, work: Callable[[], None]) -> None:
        keys.append(key)
        run(self, key, work)

    monkeypatch.setattr(cache, "run", record)
    return keys


def asks_of(samplers: list[SamplerParams]) -> list[Ask]:
    """Fewest tokens for the last ones, so that the first end alone."""
    return [
        Ask(prompt_of(4 + 3 * index, index), 14 - index, sampler=sampler)
        for index, sampler in enumerate(samplers)
    ]


@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_answers_and_scores_are_those_without_graphs(
    start: EngineOf, ran: list[Hashable], model: str
) -> None:
    """Fails if a row gets another row's logits, or those of another step."""
    asks = asks_of([PLAIN[0], *READERS.values(), PLAIN[1]])
    without = start(model, "off")
    wanted = without.run(asks)
    assert not ran
    engine = start(model, "step")
    assert engine.run(asks) == wanted
    assert {key[0] for key in ran} == {"step"}, "every step was one graph"  # type: ignore[index]
    assert engine.logprobs.keys() == without.logprobs.keys()
    for request_id, entries in without.logprobs.items():
        got = engine.logprobs[request_id]
        assert len(entries) == (
            0 if asks[request_id].sampler.logprobs is None else len(wanted[0]) - request_id
        )
        for one, other in zip(got, entries, strict=True):
            assert one.token_ids == other.token_ids
            assert one.ranks == other.ranks
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("name", ["penalties", "raw"])
def test_steps_are_planned_ahead_again_once_no_request_reads_logits(
    start: EngineOf, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one does, its token is the host's to choose."""
    ahead: list[int] = []
    schedule_ahead = Scheduler.schedule_ahead

    def count(scheduler: Scheduler) -> Any:
        plan = schedule_ahead(scheduler)
        ahead.append(0 if plan is None else len(plan.seq_slots))
        return plan

    monkeypatch.setattr(Scheduler, "schedule_ahead", count)
    engine = start("ouro", "step")
    plain = engine.add(Ask(prompt_of(5), 20))
    reader = engine.add(Ask(prompt_of(7, 1), 6, sampler=READERS[name]))
    while reader not in engine.finished:
        engine.step()
        assert not ahead
    engine.drain()
    assert sum(ahead) >= 10
    expected = start("ouro", "off").run([Ask(prompt_of(5), 20)])
    assert engine.tokens[plain] == expected[0]


def test_more_samples_than_are_kept_run_as_chained_graphs(
    start: EngineOf, ran: list[Hashable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "MAX_READ_SAMPLES", 2)
    asks = [Ask(prompt_of(4, seed), 8, sampler=READERS["raw"]) for seed in range(3)]
    engine = start("ouro", "step")
    tokens = engine.run(asks)
    assert {key[0] for key in ran} == {"prelude", "loop"}  # type: ignore[index]
    ran.clear()
    assert engine.run([asks[0]]) == tokens[:1]
    # A prompt's step has room for nine samples, those that follow for one.
    assert {key[0] for key in ran[-7:]} == {"step"}  # type: ignore[index]


def test_scored_prompts_are_no_whole_graphs(start: EngineOf, ran: list[Hashable]) -> None:
    """Their rows are beside the samples'; the answer's steps are graphs again."""
    engine = start("ouro", "step")
    ask = Ask(prompt_of(9), 6, sampler=SamplerParams(prompt_logprobs=1, logprobs=1))
    tokens = engine.run([ask])
    kinds = [key[0] for key in ran]  # type: ignore[index]
    assert kinds[0] == "prelude"
    assert kinds[-5:] == ["step"] * 5
    without = start("ouro", "off")
    assert without.run([ask]) == tokens
    assert [*engine.scored[0]] == [*without.scored[0]] == [*range(1, 9)]


def test_no_memory_for_what_graphs_read_is_an_error_with_the_numbers(
    start: EngineOf, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> None:
        monkeypatch.setattr(graph_cache.torch.cuda, "mem_get_info", lambda _device: (3, 70))
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(cuda, "StepGraphs", none_left)
    with pytest.raises(EngineError, match="graphs read and write: 3 of 70 bytes are free; lower"):
        start("ouro", "step")
