"""The engine's logits and tokens against a dense float32 recompute."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import EngineError
from looptrt.loop_spec import InitialState, NoiseMode
from looptrt.manifest import Manifest
from looptrt.plugins import reference
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import checked
from looptrt.runtime.request import FinishReason, SamplerParams
from tests.support.checkpoints import tiny_huginn, tiny_llama, tiny_olmo, tiny_ouro
from tests.support.engines import Harness, assert_equals_oracle, depths_of
from tests.support.oracle import DenseOracle

Build = Callable[..., tuple[Path, DenseOracle]]
MAKERS = {
    "ouro": tiny_ouro,
    "ouro_gqa": partial(tiny_ouro, num_key_value_heads=2),
    "huginn": tiny_huginn,
    "olmo": tiny_olmo,
    "olmo_embed_init": partial(tiny_olmo, initial_state_mode="embed-init"),
    "olmo_skip_adapter": partial(tiny_olmo, initial_state_mode="skip-adapter"),
    "llama": tiny_llama,
    "llama_embed_init": partial(tiny_llama, initial_state_mode="embed-init"),
    "llama_skip_adapter": partial(tiny_llama, initial_state_mode="skip-adapter"),
}
VOCAB = 256


def engine_dirs(root: Path, **limits: int) -> Callable[[str], Path]:
    """Builds an engine directory of each model once, of pages of 8 tokens."""

    def get(model: str) -> Path:
        if not (root / model).exists():
            MAKERS[model](root / f"{model}.c")
            build(BuildConfig(root / f"{model}.c", root / model, tokens_per_block=8, **limits))
        return root / model

    return get


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds each (model, flags) once; returns the engine directory and the oracle."""
    root = tmp_path_factory.mktemp("engines")
    oracles: dict[str, DenseOracle] = {}
    built: dict[str, Path] = {}

    def get(model: str, **flags: Any) -> tuple[Path, DenseOracle]:
        checkpoint = root / model
        if model not in oracles:
            MAKERS[model](checkpoint)
            oracles[model] = DenseOracle.from_checkpoint(checkpoint)
        flags = {"tokens_per_block": 8, "max_batch_size": 8, "max_num_tokens": 512, **flags}
        name = f"{model}-" + "-".join(f"{key}={value}" for key, value in sorted(flags.items()))
        if name not in built:
            build(BuildConfig(checkpoint_dir=checkpoint, output_dir=root / name, **flags))
            built[name] = root / name
        return built[name], oracles[model]

    return get


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(VOCAB) for i in range(length)]


def assert_all(oracle: DenseOracle, harness: Harness) -> None:
    for request_id in harness.answers:
        assert_equals_oracle(oracle, harness, request_id)


@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("model", MAKERS)
def test_mixed_batch_equals_oracle(engine_of: Build, model: str, page_size: int) -> None:
    """Cases A2, B1, B3: unequal lengths and depth pairs in one batch."""
    engine_dir, oracle = engine_of(model, tokens_per_block=page_size)
    harness = Harness(engine_dir, enable_prefix_cache=False)
    harness.poison()
    loops = harness.core.manifest.spec.num_loops
    depths = [(loops, loops), (loops, 1), (loops, 2), (2, 1), (1, 1), (loops, loops)]
    for seed, (length, (deep, shallow)) in enumerate(
        zip([4, 7, 1, 15, 16, 33], depths, strict=True)
    ):
        harness.add(prompt_of(length, seed), 8, loops=deep, prefill_loops=shallow)
    harness.drain()
    assert_all(oracle, harness)


@pytest.mark.parametrize("chunk", [1, 3, 8, 13])
@pytest.mark.parametrize("model", ["ouro", "huginn", "olmo_skip_adapter", "llama"])
def test_chunked_prefill_equals_oracle(engine_of: Build, model: str, chunk: int) -> None:
    engine_dir, oracle = engine_of(model)
    harness = Harness(engine_dir, max_num_tokens=chunk, max_batch_size=1)
    harness.add(prompt_of(21), 4, prefill_loops=2)
    harness.add(prompt_of(21, 1), 4)
    harness.drain()
    assert max(end - start for start, end in harness.answers[0].chunks) == min(chunk, 21)
    assert_all(oracle, harness)


@pytest.mark.parametrize("length", [15, 16, 17, 32])
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_hit_equals_miss_and_leaves_shared_pages_alone(
    engine_of: Build, model: str, length: int
) -> None:
    """Case C2: the whole prompt is cached; at least one token is computed again."""
    engine_dir, oracle = engine_of(model)
    for fields in ({}, {"prefill_loops": 2}):
        harness = Harness(engine_dir)
        for max_new_tokens in (8, 8, 1):
            shared = [page.units for page in harness.core.scheduler.kv.pool.cache.pages()]
            before = unit_bits(harness, shared)
            harness.add(prompt_of(length), max_new_tokens, **fields)
            harness.drain()
            assert torch.equal(before, unit_bits(harness, shared))
        first, second, third = harness.answers.values()
        cached = (length - 1) // 8 * 8
        assert [answer.finished.num_cached_tokens for answer in (first, second, third)] == [
            0,
            cached,
            cached,
        ]
        assert second.token_ids == first.token_ids
        assert third.token_ids == first.token_ids[:1]
        assert_all(oracle, harness)


def unit_bits(harness: Harness, owned: list[tuple[int, ...]]) -> torch.Tensor:
    units = harness.core.executor.pool.view(-1, harness.core.manifest.layout.unit_bytes)
    return units[[unit for page in owned for unit in page]].clone()


def test_grid_makes_a_hit_bitwise_equal_to_a_miss(engine_of: Build) -> None:
    engine_dir, oracle = engine_of("huginn")
    harness = Harness(engine_dir, prefix_grid=16)
    for _ in range(2):
        harness.add(prompt_of(45), 6)
        harness.drain()
    miss, hit = harness.answers.values()
    assert hit.finished is not None
    assert hit.finished.num_cached_tokens == 32
    for a, b in zip(miss.logits, hit.logits, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert_all(oracle, harness)


def test_grid_gives_no_page_that_was_not_computed_in_a_whole_chunk(engine_of: Build) -> None:
    """The end of a prompt and its answer fill pages up to the next multiple, with other bits."""
    engine_dir, oracle = engine_of("ouro")
    harness = Harness(engine_dir, prefix_grid=16)
    harness.add(prompt_of(45), 30)  # 32 tokens in whole chunks, 13 at the end, 29 one by one
    harness.drain()
    talk = [*prompt_of(45), *harness.answers[0].token_ids]
    harness.add([*talk, 1, 2, 3], 6)  # of which 64 in whole chunks
    harness.drain()
    harness.add([*talk, 1, 2, 3, 4], 6)
    harness.drain()
    hits = [answer.finished.num_cached_tokens for answer in harness.answers.values()]
    assert hits == [0, 32, 64]
    assert_all(oracle, harness)


def test_grid_gives_no_page_of_guesses_of_which_some_were_not_kept(tmp_path: Path) -> None:
    """Five rows of which four are kept fill a page as a chunk of four rows would."""
    build(BuildConfig(tiny_ouro(tmp_path / "c"), tmp_path / "e", tokens_per_block=4))
    harness = Harness(tmp_path / "e", prefix_grid=4)
    harness.add(prompt_of(20), 8)
    scheduler = harness.core.scheduler
    while scheduler.slots.num_computed[0] < 20:
        harness.core.step()
    kept = []
    assert scheduler.kv.grow(0, 24)
    for num_rows in (5, 4):
        scheduler.kv.publish(0, 20, 24, num_rows)
        kept.append(len(list(scheduler.kv.pool.cache.pages())))
    assert kept == [5, 6]


@pytest.mark.parametrize("rows", [7, 8])
def test_a_grid_too_large_for_a_step_is_refused_before_weights_are_read(
    engine_of: Build, rows: int
) -> None:
    manifest = Manifest.load(engine_of("ouro")[0])
    config = EngineConfig(prefix_grid=16, max_batch_size=8, max_num_tokens=15 + rows)
    if rows == 8:
        checked(manifest, config)
    else:
        with pytest.raises(EngineError, match="max_num_tokens: expected at least 23"):
            checked(manifest, config)


@pytest.mark.parametrize("model", ["ouro", "huginn", "olmo_skip_adapter"])
def test_preempted_requests_equal_oracle(engine_of: Build, model: str) -> None:
    """Case C4: a pool for one and a half requests; recomputation follows recorded depths."""
    engine_dir, oracle = engine_of(model)
    loops = 4
    layout_units = 9 * (loops + (model != "ouro"))
    unit_bytes = Harness(engine_dir).core.manifest.layout.unit_bytes
    harness = Harness(engine_dir, kv_cache_bytes=(layout_units + 1) * unit_bytes)
    for seed, shallow in enumerate([1, 4, 2]):
        harness.add(prompt_of(20, seed), 30, prefill_loops=shallow)
    harness.drain()
    assert sum(answer.finished.num_preemptions for answer in harness.answers.values()) > 0
    assert all(len(answer.token_ids) == 30 for answer in harness.answers.values())
    assert_all(oracle, harness)


@pytest.mark.parametrize("strategy", ["shared", "ring2", "ring3", "ring4"])
@pytest.mark.parametrize("model", ["ouro", "huginn", "olmo"])
@pytest.mark.parametrize("chunk", [5, 64])
def test_ring_strategies_equal_the_replaying_oracle(
    engine_of: Build, model: str, strategy: str, chunk: int
) -> None:
    """Case B3: overwritten planes, held against an oracle that replays the chunks."""
    core_layers = {"ouro": 3, "huginn": 4, "olmo": 3}[model]
    name = strategy.replace("ring", "compress-s")
    if name != "shared":
        name = f"compress-s{int(name[-1]) * core_layers}"
    engine_dir, oracle = engine_of(model, kv_planes=name)
    harness = Harness(engine_dir, max_num_tokens=chunk, max_batch_size=3)
    harness.poison()
    for seed, shallow in enumerate([1, 2, 4]):
        harness.add(prompt_of(13 + seed, seed), 5, prefill_loops=shallow)
    harness.drain()
    assert all(answer.finished.num_cached_tokens == 0 for answer in harness.answers.values())
    assert_all(oracle, harness)


@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_strategies_differ_from_latest_where_the_reference_says_so(
    engine_of: Build, model: str
) -> None:
    """Case B3: compressed stores drift from the first decoded token on."""
    answers = []
    for planes in ("latest", "shared"):
        engine_dir, _ = engine_of(model, kv_planes=planes)
        harness = Harness(engine_dir)
        harness.add(prompt_of(5), 4)
        harness.drain()
        answers.append(torch.stack(harness.answers[0].logits))
    assert torch.allclose(answers[0][0], answers[1][0], rtol=1e-4, atol=1e-4)
    assert (answers[0][1] - answers[1][1]).abs().max() > 1e-3


@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_neighbours(engine_of: Build, model: str) -> None:
    """Case C14: (1) equal shapes give equal bits; (2) other batch sizes stay within a bound."""
    engine_dir, oracle = engine_of(model)

    def run(others: list[int], seed: int) -> list[torch.Tensor]:
        harness = Harness(engine_dir, enable_prefix_cache=False)
        harness.add(prompt_of(19), 6)
        for index, length in enumerate(others):
            harness.add(prompt_of(length, seed + index), 6)
        harness.drain()
        assert_equals_oracle(oracle, harness, 0)
        return harness.answers[0].logits

    first, second = run([19, 7, 30], seed=1), run([19, 7, 30], seed=50)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    run([], seed=1)
    run([12] * 7, seed=1)


def test_noise_follows_seed_and_position_only(engine_of: Build) -> None:
    """Case B2: repeats, batches, chunks, preemption and hits agree; another seed differs."""
    engine_dir, oracle = engine_of("huginn")
    prompt = prompt_of(37)

    def tokens(
        noise_seed: int = 7, neighbours: int = 0, repeat: int = 1, **config: Any
    ) -> list[int]:
        harness = Harness(engine_dir, **config)
        for _ in range(repeat):
            request_id = harness.add(prompt, 16, noise_seed=noise_seed)
            for seed in range(neighbours):
                harness.add(prompt_of(20 + seed, seed), 16, noise_seed=seed)
            harness.drain()
        assert_equals_oracle(oracle, harness, request_id)
        return harness.answers[request_id].token_ids

    expected = tokens()
    assert tokens() == expected
    assert tokens(neighbours=4) == expected
    for chunk in (8, 16, 37):
        assert tokens(max_num_tokens=chunk, max_batch_size=2) == expected
    assert tokens(repeat=2) == expected
    unit_bytes = Harness(engine_dir).core.manifest.layout.unit_bytes
    assert tokens(neighbours=2, kv_cache_bytes=46 * unit_bytes) == expected
    assert tokens(noise_seed=8) != expected


def test_zero_scale_starts_from_zero(tmp_path: Path) -> None:
    """Case B2: init_scale 0 gives a state of exactly 0."""
    checkpoint = tiny_huginn(tmp_path / "c", init_scale=0)
    build(BuildConfig(checkpoint_dir=checkpoint, output_dir=tmp_path / "e"))
    harness = Harness(tmp_path / "e")
    assert harness.core.manifest.spec.state_std == 0
    harness.add(prompt_of(12), 6, noise_seed=3)
    harness.drain()
    assert_equals_oracle(DenseOracle.from_checkpoint(checkpoint), harness, 0)


def test_sequential_noise_draws_as_the_reference_does(engine_of: Build) -> None:
    """One generator a request: a normal sample, then the cut one, scaled; chunk by chunk."""
    engine_dir, oracle = engine_of("huginn", noise=NoiseMode.SEQUENTIAL)
    # It is drawn on the host, which on a GPU no graph can be part of.
    harness = Harness(engine_dir, max_num_tokens=16, max_batch_size=2, cuda_graphs="off")
    for noise_seed in (5, 6):
        harness.add(prompt_of(20, noise_seed), 4, noise_seed=noise_seed)
    harness.drain()
    spec = harness.core.manifest.spec
    for request_id, noise_seed in enumerate((5, 6)):
        answer = harness.answers[request_id]
        assert answer.finished is not None
        assert answer.finished.num_cached_tokens == 0
        torch.manual_seed(noise_seed)
        states = []
        for start, end in answer.chunks:
            state = torch.randn(end - start, spec.hidden_size)
            torch.nn.init.trunc_normal_(
                state, std=spec.state_std, a=-3 * spec.state_std, b=3 * spec.state_std
            )
            states.append(state * spec.state_scale)
        token_ids = [*answer.request.prompt.tolist(), *answer.token_ids[:-1]]
        depths = [4] * len(token_ids)
        expected = oracle.logits(token_ids, depths, torch.cat(states))[19:]
        torch.testing.assert_close(torch.stack(answer.logits), expected, rtol=2e-4, atol=2e-4)


def test_a_shorter_loop_count_equals_a_model_of_that_depth(engine_of: Build) -> None:
    """Case A6: T = 2 and 3 equal the model run that deep, and use only those planes."""
    engine_dir, oracle = engine_of("ouro")
    for loops in (1, 2, 3):
        harness = Harness(engine_dir)
        harness.add(prompt_of(9), 6, loops=loops)
        harness.drain()
        assert_equals_oracle(oracle, harness, 0)
        finished = harness.answers[0].finished
        layout = harness.core.manifest.layout
        assert finished is not None
        assert finished.kv_bytes == 2 * loops * layout.unit_bytes


def test_poisoned_memory_never_leaks_in(engine_of: Build) -> None:
    """Case C13's CPU half: NaN in free units and the null unit changes no bit."""
    engine_dir, _ = engine_of("huginn")
    results = []
    for poisoned in (False, True):
        harness = Harness(engine_dir)
        for seed in range(3):
            if poisoned:
                harness.poison()
            harness.add(prompt_of(11 + seed, seed), 5, prefill_loops=2)
            harness.drain()
        results.append([torch.stack(answer.logits) for answer in harness.answers.values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_seeded_sampling_ignores_neighbours(engine_of: Build) -> None:
    """Case C8: the draw depends on (seed, position) alone."""
    engine_dir, _ = engine_of("ouro")
    answers = set()
    others = set()
    for run in range(6):
        harness = Harness(engine_dir, enable_prefix_cache=False)
        neighbour = SamplerParams(temperature=0.9, seed=run) if run % 2 else SamplerParams()
        params = [SamplerParams(temperature=0.8, seed=42), neighbour]
        order = [0, 1] if run < 3 else [1, 0]
        for index in order:
            harness.add(prompt_of(9, index), 10, sampler=params[index])
        harness.drain()
        ids = {index: request_id for request_id, index in enumerate(order)}
        answers.add(tuple(harness.answers[ids[0]].token_ids))
        others.add(tuple(harness.answers[ids[1]].token_ids))
    assert len(answers) == 1
    assert len(others) > 1


def bfloat16_errors(
    oracle: DenseOracle, plain: DenseOracle, harness: Harness, request_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances of the engine's logits and of plain bfloat16's from float32's."""
    answer = harness.answers[request_id]
    token_ids = [*answer.request.prompt.tolist(), *answer.token_ids]
    spec, noise = harness.core.manifest.spec, None
    if spec.initial_state is InitialState.RANDOM:
        noise = reference.position_keyed_noise(
            torch.empty(len(token_ids), spec.hidden_size, dtype=torch.bfloat16),
            torch.arange(len(token_ids), dtype=torch.int32),
            torch.full((len(token_ids),), answer.request.noise_seed, dtype=torch.int64),
            std=spec.state_std,
            scale=spec.state_scale,
        )
    first = answer.request.num_prompt - 1
    chosen = slice(first, first + len(answer.token_ids))
    want, rounded = (
        model.logits(token_ids, depths_of(answer), noise)[chosen] for model in (oracle, plain)
    )
    return torch.stack(answer.logits) - want, rounded - want


def scale_rows(checkpoint: Path) -> None:
    """Give tokens 1, 2 and 3 embeddings of magnitude 300, 1e-3 and 0."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens.weight"
    embedding = tensors[name if name in tensors else "transformer.wte.weight"]
    for token, magnitude in ((1, 300.0), (2, 1e-3), (3, 0.0)):
        embedding[token] *= magnitude
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("model", MAKERS)
def test_bfloat16_is_no_worse_than_plain_bfloat16(model: str, tmp_path: Path) -> None:
    """Case D5: root-mean-square distance from float32, over depth pairs."""
    checkpoint = MAKERS[model](tmp_path / "c", dtype=torch.bfloat16)
    oracle, plain = (
        DenseOracle.from_checkpoint(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    build(BuildConfig(checkpoint, tmp_path / "e", tokens_per_block=8))
    harness = Harness(tmp_path / "e")
    assert harness.core.manifest.dtype == "bfloat16"
    for seed, (length, shallow) in enumerate([(5, 4), (17, 2), (33, 1), (24, 4)]):
        harness.add(prompt_of(length, seed), 8, prefill_loops=shallow)
    harness.drain()
    pairs = [bfloat16_errors(oracle, plain, harness, i) for i in harness.answers]
    ours, theirs = (torch.cat(errors).pow(2).mean().sqrt() for errors in zip(*pairs, strict=True))
    assert 0 < theirs < 0.2
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("model", MAKERS)
def test_extreme_rows_and_many_loops_stay_finite_in_bfloat16(model: str, tmp_path: Path) -> None:
    """Case D5: embeddings of magnitude 300, 1e-3 and 0, and 64 loops."""
    checkpoint = MAKERS[model](tmp_path / "c", dtype=torch.bfloat16)
    scale_rows(checkpoint)
    build(BuildConfig(checkpoint, tmp_path / "e", tokens_per_block=8, max_loops=64))
    harness = Harness(tmp_path / "e")
    harness.add([1, 2, 3, 1, 3, 2, 9, 3], 4, loops=64, prefill_loops=3)
    for token in (1, 2, 3):
        harness.add([token] * 6, 3)
    harness.drain()
    for answer in harness.answers.values():
        logits = torch.stack(answer.logits)
        assert logits.isfinite().all()
        assert float(logits.abs().max()) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_that_request_alone(
    engine_of: Build, temperature: float
) -> None:
    engine_dir, oracle = engine_of("ouro")
    harness = Harness(engine_dir, enable_prefix_cache=False)
    harness.core.executor._model.prelude.embedding.weight.data[7] = torch.nan
    harness.add([7, *prompt_of(6)], 4, sampler=SamplerParams(temperature=temperature))
    harness.add([token for token in prompt_of(20) if token != 7], 4)
    harness.drain()
    failed, fine = harness.answers.values()
    assert failed.finished is not None
    assert (failed.finished.reason, failed.token_ids) == (FinishReason.ERROR, [])
    assert len(fine.token_ids) == 4
    assert_equals_oracle(oracle, harness, 1)


def test_prefill_in_one_process_and_decode_in_another(engine_of: Build, tmp_path: Path) -> None:
    """Case B2 (f): pages computed by another process give the answer of one engine alone."""
    engine_dir, oracle = engine_of("huginn")
    prompt, dump, config = prompt_of(37), tmp_path / "pages.pt", Harness.CONFIG
    subprocess.run(
        [sys.executable, "-c", PREFILL, engine_dir, dump, *map(json.dumps, (prompt, config))],
        check=True,
    )
    alone = Harness(engine_dir)
    alone.add(prompt, 12, noise_seed=7)
    alone.drain()
    decoder = Harness(engine_dir)
    pool, layout = decoder.core.scheduler.kv.pool, decoder.core.manifest.layout
    for key, units in torch.load(dump).items():
        page = pool.allocate(4)
        assert page is not None
        decoder.core.executor.pool.view(-1, layout.unit_bytes)[list(page.units)] = units
        pool.publish(page, key, None, 0)
        pool.release(page)
    decoder.add(prompt, 12, noise_seed=7)
    decoder.drain()
    answer = decoder.answers[0]
    assert answer.finished is not None
    assert answer.finished.num_cached_tokens == 32
    assert answer.token_ids == alone.answers[0].token_ids
    assert_equals_oracle(oracle, decoder, 0)


PREFILL = """
import json, sys, torch
from pathlib import Path
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.request import Request
import numpy as np

core = EngineCore(Path(sys.argv[1]), EngineConfig(**json.loads(sys.argv[4])))
prompt = np.array(json.loads(sys.argv[3]), np.int32)
core.add_request(Request(0, prompt, 1, (), 4, 4, noise_seed=7))
while core.has_work():
    core.step()
units = core.executor.pool.view(-1, core.manifest.layout.unit_bytes)
pages = core.scheduler.kv.pool.cache.pages()
torch.save({page.key: units[list(page.units)].clone() for page in pages}, sys.argv[2])
"""
