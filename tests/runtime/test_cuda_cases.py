"""Cases of the case list with steps as whole graphs, as chained graphs and without any.

The product's own loop runs, which has two steps in flight where it can. What a row computed shows
as the bits of its KV: they are made of every layer's input. Without a GPU all is the product's
but for the stand-ins of `graphs_on_cpu`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.manifest import Manifest
from looptrt.runtime.outputs import TokenLogprobs
from looptrt.runtime.request import FinishReason, SamplerParams
from tests.e2e.test_engine_oracle import MAKERS, prompt_of
from tests.support.engines import poison_free_units
from tests.support.graphs_on_cpu import use_graphs_on_cpu
from tests.support.watched import LOOPS, Ask, Engine

GRAPHS = ["off", "loop", "step"]
EngineOf = Callable[..., Engine]
EngineDirOf = Callable[..., Path]


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.nightly),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        use_graphs_on_cpu(monkeypatch)
    return str(request.param)


@pytest.fixture(scope="session")
def engine_dir_of(tmp_path_factory: pytest.TempPathFactory) -> EngineDirOf:
    root = tmp_path_factory.mktemp("cases")

    def get(model: str, dtype: torch.dtype = torch.float32) -> Path:
        name = f"{model}-{str(dtype).rpartition('.')[2]}"
        if not (root / name).exists():
            MAKERS[model](root / f"{name}.c", dtype=dtype)
            limits = {"tokens_per_block": 8, "max_batch_size": 8, "max_num_tokens": 1024}
            build(BuildConfig(root / f"{name}.c", root / name, **limits))
        return root / name

    return get


@pytest.fixture
def engine_of(
    device: str, engine_dir_of: EngineDirOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterable[EngineOf]:
    """Starts engines and closes them at the end of the test."""
    cache_dir = str(tmp_path_factory.getbasetemp().parent / "cache")  # of all workers
    engines = []

    def start(
        model: str, graphs: str, dtype: torch.dtype = torch.float32, pages: int = 100, **config: Any
    ) -> Engine:
        """`pages` of the deepest loop count in the pool."""
        engine_dir = engine_dir_of(model, dtype)
        # On the CPU filling rows stay within max_seq_len: less than 128 for up to 640 rows.
        settings: dict[str, Any] = {"max_num_tokens": 512}
        settings |= {"device": device, "cache_dir": cache_dir}
        settings |= {"cuda_graphs": graphs}
        settings |= {"kv_cache_bytes": pool_bytes(engine_dir, pages), **config}
        engines.append(Engine(engine_dir, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.core.close()


def pool_bytes(engine_dir: Path, pages: int) -> int:
    layout = Manifest.load(engine_dir).layout
    return (pages * layout.units_of_page(layout.max_loops) + 1) * layout.unit_bytes


def assert_only_written(before: torch.Tensor, after: torch.Tensor, writes: torch.Tensor) -> None:
    """Every byte outside the null unit and `writes` is as it was."""
    changed = (before != after).any(dim=3).any(dim=1).cpu()
    wrong = (changed & ~writes)[1:].nonzero()
    assert len(wrong) == 0, f"changed (unit - 1, token): {wrong[:5].tolist()}"


# ---- C13


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize(
    ("model", "num_requests"),
    [
        *(("ouro", 1), ("ouro", 3), ("ouro", 5), ("ouro", 8)),
        *(("huginn", 1), ("huginn", 3), ("huginn", 7), ("olmo_skip_adapter", 5), ("llama", 7)),
    ],
)
def test_rows_that_fill_a_step_up_touch_no_unit(
    engine_dir_of: EngineDirOf, engine_of: EngineOf, model: str, graphs: str, num_requests: int
) -> None:
    """Case C13: NaN in all units that nobody owns, every byte of the pool held to account.

    The second time the pool is so small that its last unit is a live request's.
    """
    asks = [
        Ask(prompt_of(9, index), 4 + index, prefill_loops=LOOPS if index % 3 else 2)
        for index in range(num_requests)
    ]
    expected = [engine_of(model, "off").run([ask])[0] for ask in asks]
    num_units = 1000
    for _ in range(2):
        unit_bytes = Manifest.load(engine_dir_of(model)).layout.unit_bytes
        engine = engine_of(model, graphs, kv_cache_bytes=num_units * unit_bytes)
        for ask in asks:
            engine.add(ask)
        owned: set[int] = set()
        while engine.core.has_work():
            poison_free_units(engine.core)
            before = engine.bits()
            engine.step()
            assert_only_written(before, engine.bits(), engine.take_writes())
            owned |= {u for r in engine.requests.values() for page in r.pages for u in page.units}
        engine.check_idle()
        assert list(engine.tokens.values()) == expected
        num_units = max(owned) + 1
    assert num_units == len(engine.units)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("graphs", ["loop", "step"])
def test_filling_rows_beyond_the_longest_sequence_touch_no_unit(
    engine_of: EngineOf, graphs: str
) -> None:
    """776 rows run as 1,024, so that filling rows reach position 247 of at most 127."""
    engine = engine_of("ouro", graphs, max_num_tokens=1024, enable_prefix_cache=False)
    for repeat in range(3):  # without a graph, captured, replayed
        ids = [engine.add(Ask(prompt_of(97, repeat + index), 3)) for index in range(8)]
        while engine.core.has_work():
            poison_free_units(engine.core)
            before = engine.bits()
            engine.step()
            assert_only_written(before, engine.bits(), engine.take_writes())
        assert all(engine.finished[one].reason is FinishReason.LENGTH for one in ids)
    engine.check_idle()


@pytest.mark.parametrize("graphs", ["loop", "step"])
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_answers_stay_right_over_many_replays_with_changing_sizes(
    engine_of: EngineOf, device: str, model: str, graphs: str
) -> None:
    """Case C13: on a GPU 1,000 steps of one to eight rows over poisoned memory."""
    rng, num_requests = random.Random(3), 150 if device == "cuda" else 30
    asks = [
        Ask(prompt_of(rng.randint(1, 30), seed), rng.randint(1, 40), noise_seed=seed % 3)
        for seed in range(num_requests)
    ]
    expected = [engine_of(model, "off").run([ask])[0] for ask in asks[:10]]
    engine, waiting, num_steps = engine_of(model, graphs, pages=60), list(asks), 0
    while waiting or engine.core.has_work():
        if waiting and rng.random() < 0.15:
            engine.add(waiting.pop(0))
        if rng.random() < 0.1:
            poison_free_units(engine.core)
        num_steps += bool(engine.step().token_ids)
    engine.check_idle()
    assert [engine.tokens[index] for index in range(10)] == expected
    assert all(len(engine.tokens[i]) == ask.max_new_tokens for i, ask in enumerate(asks))
    stats = engine.core.stats()
    assert num_steps > 3 * num_requests
    assert stats["graph_hits"] > num_steps // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_requests", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_graphs_give_the_same_bits_at_equal_shapes(
    engine_of: EngineOf, model: str, num_requests: int, dtype: torch.dtype
) -> None:
    """Rung R0: prompts of 16 tokens, so that no whole step has to be filled up."""
    histories = []
    for graphs in GRAPHS:
        engine = engine_of(model, graphs, dtype, enable_prefix_cache=False)
        for index in range(num_requests):
            sampler = SamplerParams(temperature=0.9 * (index % 2), seed=index)
            engine.add(Ask(prompt_of(16, index), 12, noise_seed=index, sampler=sampler))
        histories.append((follow(engine, range(num_requests)), engine.tokens))
    assert histories[1][1] == histories[2][1] == histories[0][1]
    # Preludes and codas of chained graphs are filled up to 16 rows: other shapes, rung R1.
    assert_same_history(histories[0][0], histories[2][0], "step")


History = dict[tuple[int, int], torch.Tensor]


def follow(engine: Engine, request_ids: Iterable[int]) -> History:
    """Run to the end; the KV of these requests by (request, computed tokens)."""
    history: History = {}
    while engine.core.has_work():
        engine.step()
        for request_id in request_ids:
            kv = engine.kv_of(request_id)
            if kv is not None and len(kv):
                history[request_id, len(kv)] = kv
    engine.check_idle()
    return history


def assert_same_history(wanted: History, got: History, what: str) -> None:
    assert got.keys() == wanted.keys()
    assert len(got) > 3
    for key, kv in wanted.items():
        different = (kv != got[key]).flatten(1).any(dim=1).nonzero()
        assert len(different) == 0, f"{what}: request, tokens {key}: tokens {different[:4, 0]}"


# ---- C14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_bits_do_not_depend_on_what_neighbours_hold(
    engine_of: EngineOf, model: str, graphs: str, dtype: torch.dtype
) -> None:
    """Case C14: equal shapes and pages, other tokens, noise and draws beside request 0."""
    runs = []
    for seed in (1, 50, 90):
        engine = engine_of(model, graphs, dtype, enable_prefix_cache=False)
        engine.add(Ask(prompt_of(19), 12, noise_seed=4))
        for index, length in enumerate((19, 7, 30, 1)):
            sampler = SamplerParams(temperature=1.0, seed=seed + index)
            ask = Ask(prompt_of(length, seed + index), 14, noise_seed=seed, sampler=sampler)
            engine.add(ask if seed < 90 else replace(ask, prompt=[3] * length))
        runs.append((follow(engine, [0]), engine.tokens[0]))
    for history, tokens in runs[1:]:
        assert_same_history(runs[0][0], history, graphs)
        assert tokens == runs[0][1]


# ---- B2


@pytest.mark.parametrize("graphs", GRAPHS)
def test_noise_follows_seed_and_position_only(engine_of: EngineOf, graphs: str) -> None:
    """Case B2: twice, in a batch, in chunks, preempted, from the cache; another seed differs."""
    ask = Ask(prompt_of(37), 16, noise_seed=7)

    def tokens(neighbours: int = 0, one: Ask = ask, **config: Any) -> list[int]:
        engine = engine_of("huginn", graphs, **config)
        others = [Ask(prompt_of(20 + i, i), 16, noise_seed=i) for i in range(neighbours)]
        first = engine.run([one, *others])[0]
        again = engine.run([one])[0]
        cached = engine.finished[len(engine.requests) - 1].num_cached_tokens
        assert again == first
        assert cached == (32 if "pages" not in config else cached)
        return first

    expected = tokens()
    assert tokens(neighbours=4) == expected
    for chunk in (8, 16, 37):
        assert tokens(max_num_tokens=chunk, max_batch_size=2) == expected
    assert tokens(neighbours=2, pages=9) == expected
    assert tokens(one=replace(ask, noise_seed=8)) != expected


# ---- C2


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("length", [15, 16, 17, 32])
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_a_prompt_that_is_cached_as_a_whole(
    engine_of: EngineOf, model: str, length: int, graphs: str
) -> None:
    """Case C2: answers and log-probabilities of the second time are those of the first."""
    engine = engine_of(model, graphs)
    scores = SamplerParams(logprobs=2, prompt_logprobs=1)
    for sampler in (SamplerParams(), replace(scores, prompt_logprobs=None), scores):
        for max_new_tokens in (8, 8, 1):
            pages = engine.core.scheduler.kv.pool.cache.pages()
            shared = [unit for page in pages for unit in page.units]
            before = engine.bits()[shared]
            (tokens,) = engine.run([Ask(prompt_of(length), max_new_tokens, sampler=sampler)])
            assert torch.equal(before, engine.bits()[shared])
            assert tokens == engine.tokens[0][:max_new_tokens]
    assert len(shared) > 0
    cached = [entry.num_cached_tokens for entry in engine.finished.values()]
    assert cached == [0, *[(length - 1) // 8 * 8] * 5, 0, 0, 0]  # scored prompts run as a whole
    for first, second in ((3, 4), (3, 6), (6, 7)):
        assert_close_scores(engine.logprobs[first], engine.logprobs[second])
    assert engine.scored[6].keys() == set(range(1, length))
    assert_close_scores(engine.scored[6].values(), engine.scored[7].values())


def assert_close_scores(first: Iterable[TokenLogprobs], second: Iterable[TokenLogprobs]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.token_ids[0] == other.token_ids[0]
        assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=1e-4)


# ---- C4


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("model", ["ouro", "huginn", "olmo_skip_adapter"])
def test_preemption_neither_drops_nor_repeats_tokens(
    engine_of: EngineOf, model: str, graphs: str
) -> None:
    """Case C4: a pool for one and a half requests; greedy, drawn, with penalties."""
    samplers = [
        SamplerParams(),
        SamplerParams(temperature=0.9, seed=3),
        SamplerParams(temperature=0.8, seed=4, repetition_penalty=1.3),
        SamplerParams(frequency_penalty=0.2),
    ]
    asks = [
        Ask(prompt_of(20, seed), 40, prefill_loops=1 + seed, sampler=sampler)
        for seed, sampler in enumerate(samplers)
    ]
    calm = engine_of(model, graphs)
    expected = [calm.run([ask])[0] for ask in asks]
    tight = engine_of(model, graphs, pages=12)
    assert tight.run(asks) == expected
    assert sum(entry.num_preemptions for entry in tight.finished.values()) >= 2
    assert all(entry.num_generated_tokens == 40 for entry in tight.finished.values())


# ---- C8


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_seed_is_followed_whatever_the_neighbour_does(engine_of: EngineOf, graphs: str) -> None:
    """Case C8: 20 runs in random order and arrival."""
    rng, engine = random.Random(8), engine_of("ouro", graphs, enable_prefix_cache=False)
    mine = Ask(prompt_of(9), 10, sampler=SamplerParams(temperature=0.8, seed=42))
    answers, others = set(), set()
    for run in range(20):
        seed = rng.choice((7, 2**63 - 1, rng.randrange(2**63)))
        sampler = SamplerParams(temperature=0.9 * (run % 3 > 0), seed=seed)
        asks = [mine, Ask(prompt_of(9, 1), 10, sampler=sampler)]
        rng.shuffle(asks)
        ids = {}
        for ask in asks:
            ids[ask is mine] = engine.add(ask)
            for _ in range(rng.randrange(3)):
                engine.step()
        engine.drain()
        answers.add(tuple(engine.tokens[ids[True]]))
        others.add(tuple(engine.tokens[ids[False]]))
    assert len(answers) == 1
    assert len(others) > 5


# ---- C10


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_cancels_at_any_moment_free_units_and_leave_the_others_alone(
    engine_of: EngineOf, model: str, graphs: str
) -> None:
    """Case C10: 100 requests on 4 slots, cancelled queued, in chunks, between tokens, twice."""
    rng = random.Random(f"{model}/{graphs}")
    kinds = [
        Ask(prompt_of(rng.randint(1, 40), seed), rng.randint(1, 20), noise_seed=seed)
        for seed in range(10)
    ]
    expected = [engine_of(model, graphs).run([ask])[0] for ask in kinds]
    engine = engine_of(
        model, graphs, max_batch_size=4, max_num_tokens=12, pages=16, enable_prefix_cache=False
    )
    asked = {engine.add(ask): index for index, ask in ((i % 10, kinds[i % 10]) for i in range(100))}
    cancelled: dict[int, int] = {}
    while engine.core.has_work():
        for request_id in rng.choices(range(110), k=rng.choice((0, 0, 1, 2))):
            is_live = request_id in asked and request_id not in engine.finished
            engine.core.abort_request(request_id, FinishReason.ABORT)
            if is_live:
                cancelled.setdefault(request_id, len(engine.tokens[request_id]))
        engine.step()
    engine.check_idle()
    assert engine.core.stats()["num_free_units"] == engine.core.stats()["num_units"]
    assert 20 < len(cancelled) < 90
    for request_id, index in asked.items():
        tokens, reason = engine.tokens[request_id], engine.finished[request_id].reason
        if request_id in cancelled:
            assert reason is FinishReason.ABORT
            assert tokens == expected[index][: cancelled[request_id]], "a token after the cancel"
        else:
            assert (reason, tokens) == (FinishReason.LENGTH, expected[index])


@pytest.mark.parametrize("graphs", GRAPHS)
def test_units_come_back_within_two_steps_of_a_cancel(engine_of: EngineOf, graphs: str) -> None:
    """Case C10, with a step in flight."""
    engine = engine_of("ouro", graphs, enable_prefix_cache=False)
    request_id = engine.add(Ask(prompt_of(20), 60))
    for _ in range(9):
        engine.step()
    engine.core.abort_request(request_id, FinishReason.ABORT)
    for _ in range(2):
        engine.step()
    assert not engine.core.has_work()
    stats = engine.core.stats()
    assert stats["num_free_units"] == stats["num_units"]
