"""Random load on whole engines: every request ends once, as it would alone; nothing grows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.loop_spec import NoiseMode
from looptrt.manifest import Manifest
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from tests.e2e.test_engine_oracle import MAKERS
from tests.support.alone import SoloRuns
from tests.support.engines import Harness, poison_free_units
from tests.support.graphs_on_cpu import use_graphs_on_cpu
from tests.support.random_requests import Cases, pieces
from tests.support.scripted import write_tokenizer
from tests.support.soak import StepSoak, Usage, growth
from tests.support.soak_llm import closed_loop, poisson, soak_llm

SEED = 20261130
BROKEN = 200  # a token without a finite embedding


@dataclass(frozen=True)
class Variant:
    """An engine under load.

    Attributes:
        share: of 1,000 requests.
        pages: of the deepest loop count in the pool; 13 hold the longest request.
        compares: whether answers depend on nothing but their request.
        is_broken: whether one token's embedding is NaN.
        max_live: see `StepSoak`.
        graphs: `cuda_graphs`; on the CPU by stand-ins.
    """

    model: str
    share: int
    pages: int = 60
    build: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    compares: bool = True
    is_broken: bool = False
    max_live: int | None = None
    graphs: str = "off"


SMALL_STEPS = {"max_num_tokens": 24, "max_batch_size": 6}
GRID = SMALL_STEPS | {"prefix_grid": 16}
VARIANTS = {
    "ouro": Variant("ouro", 185, is_broken=True),
    "ouro_tight": Variant(
        "ouro_gqa", 190, pages=11, config=SMALL_STEPS, is_broken=True, graphs="step"
    ),
    "ouro_deeper_pages": Variant(
        "ouro", 130, pages=11, config={"prefix_depth": "at_least"}, compares=False, graphs="loop"
    ),
    "ouro_guesses": Variant("ouro", 30, config={"speculative_loops": 3}, max_live=2, graphs="step"),
    "huginn_tight_grid": Variant("huginn", 50, pages=11, config=GRID, graphs="step"),
    "huginn_no_cache": Variant(
        "huginn", 30, pages=11, config=SMALL_STEPS | {"enable_prefix_cache": False}, graphs="loop"
    ),
    # These depend on the chunks that a prompt comes in: steps have room for all of them.
    "huginn_shared": Variant("huginn", 30, build={"kv_planes": "shared"}),
    "huginn_sequential": Variant("huginn", 30, build={"noise": NoiseMode.SEQUENTIAL}),
    "olmo_tight": Variant("olmo_skip_adapter", 100, pages=11, config=SMALL_STEPS, graphs="loop"),
    "llama_tight_grid": Variant("llama", 120, pages=11, config=GRID, graphs="step"),
}
SERVED = {"ouro_gqa": 70, "huginn": 35}
assert sum(one.share for one in VARIANTS.values()) + sum(SERVED.values()) == 1000

EngineOf = Callable[..., Path]


@pytest.fixture(scope="session")
def soak_engine(tmp_path_factory: pytest.TempPathFactory) -> EngineOf:
    """Builds each engine once, with a tokenizer."""
    root = tmp_path_factory.mktemp("soak")

    def get(model: str, dtype: torch.dtype = torch.float32, **flags: Any) -> Path:
        name = "-".join([model, str(dtype), *map(str, flags.values())])
        if not (root / name).exists():
            checkpoint = root / f"{name}.checkpoint"
            MAKERS[model](checkpoint, dtype=dtype)
            write_tokenizer(checkpoint, pieces())
            limits = {"tokens_per_block": 8, "max_batch_size": 8, "max_num_tokens": 640}
            build(BuildConfig(checkpoint, root / name, **limits | flags))
        return root / name

    return get


def soak_of(engine_dir: Path, variant: Variant, num_cases: int, **more: Any) -> StepSoak:
    manifest = Manifest.load(engine_dir)
    layout, broken = manifest.layout, BROKEN if variant.is_broken else None
    cases = Cases(
        SEED,
        num_cases,
        max_loops=layout.max_loops,
        has_gate=manifest.spec.exit_gate,
        broken_token=broken,
    )
    num_units = variant.pages * layout.units_of_page(layout.max_loops) + 1
    return StepSoak(
        engine_dir,
        cases,
        seed=SEED,
        compares=variant.compares,
        broken_token=broken,
        cuda_graphs=variant.graphs,
        kv_cache_bytes=num_units * layout.unit_bytes,
        max_live=variant.max_live,
        max_waiting=6,
        **variant.config,
        **more,
    )


def run(soak: StepSoak, num_requests: int) -> Counter[str]:
    """The soak, whose first third brings the process to the memory that it keeps."""
    soak.prepare()
    poison_free_units(soak.core)  # every page of the pool is in memory now
    third = num_requests // 3
    soak.run(0, third)
    before = Usage.of(psutil.Process())
    soak.run(third, num_requests)
    grown = growth(before, Usage.of(psutil.Process()), num_requests - third)
    assert grown == [], f"seed {SEED}"
    return soak.outcomes


def check(soak: StepSoak, variant: Variant, num_requests: int) -> None:
    """Every kind of end came up, and rounding hardly ever decided."""
    outcomes, stats = soak.outcomes, soak.core.scheduler.stats()
    assert sum(outcomes.values()) >= num_requests
    cancelled = "abort, not compared"
    wanted = {"refused", "length", "stop", "cancelled"}
    if not variant.compares:
        wanted = {"refused", "length, not compared", "stop, not compared", cancelled}
    wanted |= {"error"} if variant.is_broken else set()
    wanted |= {"queue full"} if variant.max_live is None else set()
    assert outcomes.keys() >= wanted
    rounded = sum(count for kind, count in outcomes.items() if "rounded" in kind)
    assert rounded <= num_requests // 50, outcomes
    config = soak.core.scheduler.config
    if variant.pages < 20:
        assert (stats.num_evictions > 0) == config.enable_prefix_cache
        assert stats.num_preemptions > 0
    if config.enable_prefix_cache and config.recomputable:
        assert stats.num_hit_tokens > 0
    assert (stats.num_accepted_tokens > 0) == (config.draft_loops is not None)


TIERS = [
    pytest.param(1, marks=pytest.mark.full, id="1000"),
    pytest.param(20, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)], id="20000"),
    pytest.param(2, marks=pytest.mark.gpu, id="2000-gpu"),
]


@pytest.fixture(autouse=True)
def on_the_gpu(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Engines of a test with the mark `gpu` run there; others' graphs run on the CPU."""
    if request.node.get_closest_marker("gpu") is None:
        use_graphs_on_cpu(monkeypatch)
        return
    cache_dir = str(tmp_path_factory.getbasetemp().parent / "cache")  # of all workers
    config = {"device": "cuda", "cache_dir": cache_dir, "kv_cache_bytes": 2**26}
    monkeypatch.setattr(Harness, "CONFIG", config)


@pytest.mark.parametrize(("name", "num_requests"), [("ouro_tight", 40), ("huginn_tight_grid", 20)])
def test_60_random_requests_end_as_alone(
    soak_engine: EngineOf, name: str, num_requests: int
) -> None:
    variant = VARIANTS[name]
    soak = soak_of(soak_engine(variant.model), variant, num_requests // 5)
    soak.run(0, num_requests)
    assert soak.outcomes.keys() >= {"length", "cancelled"}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("thousands", TIERS)
def test_random_requests_end_as_alone_and_leave_nothing(
    soak_engine: EngineOf, name: str, thousands: int
) -> None:
    """With the next test's 1,000, 20,000 or 2,000 requests in all."""
    variant = VARIANTS[name]
    num_requests = thousands * variant.share
    soak = soak_of(soak_engine(variant.model, **variant.build), variant, num_requests // 4)
    run(soak, num_requests)
    check(soak, variant, num_requests)


@pytest.mark.parametrize("model", SERVED)
@pytest.mark.parametrize("thousands", TIERS)
def test_random_requests_to_an_engine_process_end_as_alone_and_leave_nothing(
    soak_engine: EngineOf, model: str, thousands: int
) -> None:
    """Through LLM and asyncio: streams that are read, closed, aborted, cancelled and let go."""
    engine_dir, num_requests = soak_engine(model), thousands * SERVED[model]
    manifest = Manifest.load(engine_dir)
    layout = manifest.layout
    cases = Cases(SEED, num_requests // 5, has_gate=manifest.spec.exit_gate)
    solo = SoloRuns(engine_dir)
    num_units = 14 * layout.units_of_page(layout.max_loops) + 1
    config = Harness.CONFIG | {"kv_cache_bytes": num_units * layout.unit_bytes}
    children = set(psutil.Process().children())
    with LLM(engine_dir, EngineConfig(**config)) as llm:
        (engine,) = set(psutil.Process().children()) - children
        third = num_requests // 3
        outcomes = asyncio.run(soak_llm(llm, solo, cases, begin=0, end=third, seed=SEED))
        before = Usage.of(engine)
        outcomes += asyncio.run(
            soak_llm(llm, solo, cases, begin=third, end=num_requests, seed=SEED)
        )
        stats, grown = llm.stats(), growth(before, Usage.of(engine), num_requests - third)
    assert grown == [], f"seed {SEED}"
    assert sum(outcomes.values()) == num_requests
    assert outcomes.keys() >= {"answered", "abort", "close", "let go", "cancel", "refused"}
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_units"] + stats["num_cached_units"] == stats["num_units"]
    assert stats["num_preemptions"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_ten_poisson_runs_near_saturation_end_every_request(
    soak_engine: EngineOf, model: str
) -> None:
    """A peer's engine lost two of ten such runs to a tensor that was freed too early."""
    engine_dir = soak_engine(model, torch.bfloat16)
    with LLM(engine_dir, EngineConfig(**Harness.CONFIG)) as llm:
        most = asyncio.run(closed_loop(llm, num_tasks=32, seconds=2.0, seed=0))
        for seed in range(1, 11):
            reasons = asyncio.run(poisson(llm, 0.95 * most, seconds=5.0, seed=seed))
            assert reasons.keys() == {"length"}, f"run {seed}: {reasons}"
            assert sum(reasons.values()) > 2 * most
            stats = llm.stats()
            assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
            assert stats["num_free_units"] + stats["num_cached_units"] == stats["num_units"]
