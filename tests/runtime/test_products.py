"""Matrix products of an engine: which are joined, what a failed check does, what is refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import EngineError
from looptrt.manifest import Manifest
from looptrt.models import ouro, raven
from looptrt.plugins import launch, probe_products, products
from looptrt.plugins.probe import Clock, Verdict
from looptrt.plugins.probe_products import call_of, product_of
from looptrt.plugins.products import JoinedProduct, Products, apart
from looptrt.plugins.schema import Exactness
from looptrt.plugins.verdict_cache import VerdictCache
from looptrt.runtime import engine_core, product_checks
from looptrt.runtime.config import MAX_SKINNY_ROWS, EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.executor.step_graphs import StepGraphs
from looptrt.runtime.padding import graph_rows, usual_shapes
from looptrt.runtime.product_checks import (
    act_on,
    check_asked,
    row_counts,
    settle_products,
    skinny_rows,
)
from tests.e2e.test_engine_oracle import Build, assert_all, engine_of, prompt_of
from tests.plugins.pools import assert_bitwise
from tests.support.checkpoints import (
    huginn_config,
    llama_config,
    olmo_config,
    ouro_config,
    tiny_ouro,
)
from tests.support.engines import Harness
from tests.support.graphs_on_cpu import use_graphs_on_cpu
from tests.support.watched import Ask, Engine

__all__ = ["engine_of"]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HIDDEN = ouro_config()["hidden_size"]
WIDE = ouro_config()["intermediate_size"]
KEYS = HIDDEN // 2  # half as many key heads, so that joined weights differ in shape
QKV, GATE_UP = JoinedProduct(HIDDEN, (HIDDEN, KEYS, KEYS)), JoinedProduct(HIDDEN, (WIDE, WIDE))


def count_products(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], int]:
    """How often a weight of each shape is multiplied from now on."""
    counts: dict[tuple[int, int], int] = {}
    linear = torch.nn.functional.linear

    def count(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        shape = (weight.shape[0], weight.shape[1])
        counts[shape] = counts.get(shape, 0) + 1
        return linear(x, weight, *rest)

    monkeypatch.setattr(products.F, "linear", count)
    return counts


def failed(product: JoinedProduct) -> Verdict:
    verdict = Verdict(call_of(product, "bfloat16"), Exactness.EQUALS_TORCH, "parts")
    verdict.count("bfloat16 [1, 64]", 3, 192)
    return verdict


# ---- what runs


@pytest.mark.parametrize("how", ["exact", "always", "never"])
def test_what_is_joined_is_the_configs_word_on_a_cpu(
    engine_of: Build, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_dir, oracle = engine_of("ouro_gqa")
    counts = count_products(monkeypatch)
    harness = Harness(engine_dir, joined_projections=how)
    for index in range(3):
        harness.add(prompt_of(5 + index, index), 6, prefill_loops=1 + index)
    harness.drain()
    assert_all(oracle, harness)
    is_joined = how != "never"
    for weight in (sum(QKV.sizes), sum(GATE_UP.sizes)):
        assert ((weight, HIDDEN) in counts) == is_joined
    for weight in (KEYS, WIDE):
        assert ((weight, HIDDEN) in counts) != is_joined


def test_a_failed_check_takes_that_product_apart_and_no_other(
    engine_of: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if engines run what `settle_products` found to differ."""
    engine_dir, oracle = engine_of("ouro_gqa")
    settled = Products(apart=frozenset(act_on([failed(QKV)], [1])))
    assert "run apart" in caplog.text
    assert "bfloat16 [1, 64]: 3 of 192 differ" in caplog.text
    monkeypatch.setattr(engine_core, "settle_products", lambda *_: settled)
    counts = count_products(monkeypatch)
    harness = Harness(engine_dir)
    harness.add(prompt_of(9), 6)
    harness.drain()
    assert_all(oracle, harness)
    assert (sum(QKV.sizes), HIDDEN) not in counts
    assert counts[KEYS, HIDDEN] == 2 * counts[2 * WIDE, HIDDEN] > 0  # k and v of every layer
    assert counts[HIDDEN, HIDDEN] == counts[KEYS, HIDDEN]  # q and o


def test_engines_of_one_process_do_not_share_a_choice(
    engine_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_dir, _ = engine_of("ouro_gqa")
    never = Harness(engine_dir, joined_projections="never")
    always = Harness(engine_dir, joined_projections="always")
    counts = count_products(monkeypatch)
    for harness, is_joined in ((never, False), (always, True), (never, False)):
        counts.clear()
        harness.add(prompt_of(9), 3)
        harness.drain()
        assert ((sum(QKV.sizes), HIDDEN) in counts) == is_joined


def test_what_a_checkpoint_holds_as_one_matrix_is_never_taken_apart(
    engine_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that the weights were made for multiplies them joined."""
    packed = (huginn_config(), olmo_config(), llama_config())
    assert all(raven.parse_config(config, "raven").packed_projections for config in packed)
    assert not ouro.parse_config(ouro_config(), "ouro").packed_projections
    engine_dir, _ = engine_of("huginn")
    assert (
        settle_products(Manifest.load(engine_dir), EngineConfig(joined_projections="never"), CPU)
        == Products()
    )


def test_apart_means_every_matrix_by_itself() -> None:
    x, weight = torch.randn(5, 8), torch.randn(9, 8)
    product = JoinedProduct(8, (4, 2, 3))
    got = Products(apart=frozenset([product])).joined(x, weight, product)
    parts = [x @ part.T for part in (weight[:4], weight[4:6], weight[6:])]
    assert torch.equal(got, torch.cat(parts, dim=1))
    assert torch.equal(apart(x, weight, product), got)


# ---- the check


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Checks for a GPU run on the CPU; the questions whose verdicts may be recalled."""
    questions: list[dict[str, Any]] = []
    probe = product_checks.probe_products

    def fresh(
        question: dict[str, Any], make: Callable[[Clock], list[Verdict]], *_: object
    ) -> list[Verdict]:
        questions.append(question)
        return make(Clock(None))

    monkeypatch.setattr(product_checks, "recalled", fresh)
    monkeypatch.setattr(
        product_checks, "probe_products", lambda p, r, d, _, clock: probe(p, r, d, CPU, clock)
    )
    return questions


def off_by_a_bit_at(rows: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined products of that many outputs differ from their parts' at one row count."""

    def wrong(x: Tensor, weight: Tensor) -> Tensor:
        # Rows are products of their own, so that the CPU's order of sums is the same everywhere.
        y = torch.stack([(weight * row).float().sum(dim=1).to(row.dtype) for row in x])
        if (len(x), len(weight)) == (rows, outputs):
            y.view(torch.int32 if y.dtype == torch.float32 else torch.int16)[-1, -1] ^= 1
        return y

    monkeypatch.setattr(probe_products.F, "linear", wrong)


@pytest.mark.parametrize("rows", [1, 17, 24])
def test_one_wrong_bit_at_one_row_count_takes_a_product_apart(
    engine_of: Build,
    asked: list[dict[str, Any]],
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """17 is where PyTorch's sums change, 24 the size of a graph."""
    caplog.set_level(logging.INFO)
    manifest = Manifest.load(engine_of("ouro_gqa")[0])
    monkeypatch.setattr(product_checks, "row_counts", lambda _manifest: [1, 2, 17, 24, 32])
    off_by_a_bit_at(rows, 2 * WIDE, monkeypatch)
    assert settle_products(manifest, EngineConfig(), GPU).apart == {GATE_UP}
    assert f"float32 [{rows}, {HIDDEN}], {WIDE} + {WIDE}: 1 of" in caplog.text
    assert "1 of 2 joined products have their parts' bits" in caplog.text
    assert [len(question["products"]) for question in asked] == [2]


def test_equal_bits_keep_products_joined(
    engine_of: Build, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest.load(engine_of("ouro_gqa")[0])
    monkeypatch.setattr(product_checks, "row_counts", lambda _manifest: [1, 2, 17])
    off_by_a_bit_at(0, 0, monkeypatch)
    assert settle_products(manifest, EngineConfig(), GPU) == Products()
    assert len(asked) == 1


def test_nothing_is_compared_where_the_answer_changes_nothing(
    engine_of: Build, asked: list[dict[str, Any]]
) -> None:
    manifest, packed = (Manifest.load(engine_of(name)[0]) for name in ("ouro_gqa", "huginn"))
    always, never = (EngineConfig(joined_projections=how) for how in ("always", "never"))
    assert settle_products(manifest, always, GPU) == Products()
    assert settle_products(manifest, never, GPU).apart == {QKV, GATE_UP}
    assert settle_products(manifest, EngineConfig(), CPU) == Products()
    assert settle_products(packed, EngineConfig(), GPU) == Products()
    assert asked == []


def test_a_check_without_time_compares_one_row_count_of_every_product() -> None:
    products = [QKV, GATE_UP]
    verdicts = probe_products.probe_products(products, [1, 2], "bfloat16", CPU, Clock(-1.0))
    assert [verdict.rows for verdict in verdicts] == [[1], [1]]
    assert [product_of(verdict) for verdict in verdicts] == products


def test_what_was_not_compared_in_time_runs_apart(caplog: pytest.LogCaptureFixture) -> None:
    call = call_of(QKV, "bfloat16")
    empty, sound = (Verdict(call, Exactness.EQUALS_TORCH, "parts", rows) for rows in ([], [1, 2]))
    sound.count("none", 0, 192)
    assert act_on([sound], [1, 2]) == []
    assert act_on([empty], [1, 2]) == [QKV]
    caplog.clear()
    assert act_on([sound], [1, 2, 17]) == [QKV]
    assert "2 of 3 row counts were compared in time" in caplog.text


def test_a_verdict_that_is_recalled_takes_the_same_product_apart(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path, {"driver": "1"})
    sound = Verdict(call_of(GATE_UP, "bfloat16"), Exactness.EQUALS_TORCH, "parts", [1])
    sound.count("none", 0, 192)
    cache.keep([failed(QKV), sound])
    assert act_on(cache.load() or [], [1]) == [QKV]


@pytest.mark.parametrize(
    ("largest", "most"), [(512, 512), (500, 512), (5, 16), (3000, 3072), (9000, 9000)]
)
def test_compared_row_counts_are_those_of_all_graphs_and_of_the_largest_step(
    engine_of: Build, largest: int, most: int
) -> None:
    manifest = Manifest.load(engine_of("ouro_gqa")[0])
    limits = dataclasses.replace(manifest.limits, max_num_tokens=largest)
    counts = row_counts(dataclasses.replace(manifest, limits=limits))
    assert counts[0] == 1
    assert max(counts) == most
    graphs = {shape.rows for shape in usual_shapes(128, graph_rows(largest))}
    assert {largest, *graphs} <= {*counts}
    assert len({*counts}) == len(counts)


@pytest.mark.gpu
@pytest.mark.parametrize("num_requests", [1, 3, 8])
def test_on_a_gpu_what_is_joined_has_the_bits_of_what_is_apart(
    tmp_path: Path, num_requests: int
) -> None:
    """Rung R0 of the default; loops run at row counts of graphs, all of which are compared."""
    tiny_ouro(tmp_path / "c", dtype=torch.bfloat16)
    build(BuildConfig(tmp_path / "c", tmp_path / "e", tokens_per_block=8, max_batch_size=8))
    config = {"device": "cuda", "kv_cache_bytes": 2**24, "cache_dir": str(tmp_path / "cache")}
    config |= {"skinny_linear_rows": 0}  # whose bits do not depend on what is joined
    answers = []
    for how in ("exact", "never"):
        harness = Harness(tmp_path / "e", **config, cuda_graphs="loop", joined_projections=how)
        for index in range(num_requests):
            harness.add(prompt_of(9 + 7 * index, index), 12)
        harness.drain()
        harness.core.close()
        answers.append(harness.answers)
    for index in range(num_requests):
        one, other = (torch.stack(answer[index].logits) for answer in answers)
        assert_bitwise(one, other)


# ---- refusals


def test_the_configs_limit_of_rows_is_the_kernels() -> None:
    assert MAX_SKINNY_ROWS == launch.MAX_SKINNY_ROWS
    for rows in (17, -1, True, 1.5):
        with pytest.raises(EngineError, match="skinny_linear_rows: expected an integer from 0"):
            EngineConfig(skinny_linear_rows=rows)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="joined_projections: expected exact, always or never"):
        EngineConfig(joined_projections="sometimes")  # type: ignore[arg-type]


def test_skinny_products_on_a_cpu_are_refused_when_an_engine_starts(engine_of: Build) -> None:
    engine_dir, _ = engine_of("ouro_gqa")
    with pytest.raises(EngineError, match=r"skinny_linear_rows: expected 0, got 4: .* device cpu"):
        EngineCore(engine_dir, EngineConfig(device="cpu", skinny_linear_rows=4))


@pytest.mark.parametrize(
    ("fields", "dtype", "backend", "message"),
    [
        ({"skinny_linear_rows": 1}, "float32", "pytorch", "got 1: the engine's dtype is float32"),
        ({"skinny_linear_rows": 1}, "bfloat16", "tensorrt", "got 1: backend tensorrt computes"),
        (
            {"fused_kernels": False},
            "bfloat16",
            "tensorrt",
            "fused_kernels: expected true, got false: backend tensorrt runs what was compiled",
        ),
        (
            {"cuda_graphs": "loop"},
            "bfloat16",
            "tensorrt",
            "cuda_graphs: expected auto or off, got loop: backend tensorrt has none",
        ),
        (
            {"joined_projections": "never"},
            "bfloat16",
            "tensorrt_rtx",
            "joined_projections: expected exact, got never: backend tensorrt_rtx",
        ),
    ],
)
def test_what_nothing_could_follow_is_refused_by_name(
    fields: dict[str, Any], dtype: str, backend: str, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        check_asked(EngineConfig(**fields), dtype, backend, GPU)
    check_asked(EngineConfig(), dtype, backend, GPU)
    check_asked(EngineConfig(skinny_linear_rows=16), "bfloat16", "pytorch", GPU)


@pytest.mark.parametrize(
    ("fields", "dtype", "device", "rows"),
    [
        ({}, "bfloat16", GPU, 8),
        ({}, "float16", GPU, 8),
        ({}, "float32", GPU, 0),
        ({}, "bfloat16", CPU, 0),
        ({"require_exact": True}, "bfloat16", GPU, 0),
        ({"require_exact": True, "skinny_linear_rows": 2}, "bfloat16", GPU, 2),
        ({"skinny_linear_rows": 0}, "bfloat16", GPU, 0),
    ],
)
def test_by_default_few_rows_are_ours_where_the_kernel_runs(
    engine_of: Build, fields: dict[str, Any], dtype: str, device: torch.device, rows: int
) -> None:
    manifest = dataclasses.replace(Manifest.load(engine_of("ouro_gqa")[0]), dtype=dtype)
    assert skinny_rows(EngineConfig(**fields), manifest, device) == rows


def test_by_default_products_are_pytorch_s_where_no_matrix_is_small_enough(
    engine_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where small kernels start early beside cuBLAS's products alone."""
    manifest = dataclasses.replace(Manifest.load(engine_of("ouro_gqa")[0]), dtype="bfloat16")
    monkeypatch.setattr(product_checks, "MAX_SKINNY_BYTES", 16)
    assert skinny_rows(EngineConfig(), manifest, GPU) == 0
    assert skinny_rows(EngineConfig(skinny_linear_rows=2), manifest, GPU) == 2


# ---- products of few rows


class Overlap:
    """Stands in for the library: rows of small kernels that may start early, as it was told."""

    def __init__(self) -> None:
        self.rows = 0

    def let_kernels_overlap(self, most_rows: int) -> None:
        self.rows = most_rows


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Overlap:
    library = Overlap()
    monkeypatch.setattr(launch._Process, "library", library)
    return library


def test_kernels_overlap_until_the_last_block_ends(overlap: Overlap) -> None:
    with launch.overlapping_kernels(4):
        with launch.overlapping_kernels(8):
            assert overlap.rows == 8
        with launch.overlapping_kernels(2):
            assert overlap.rows == 4
        assert overlap.rows == 4
    assert overlap.rows == 0
    with pytest.raises(ZeroDivisionError), launch.overlapping_kernels(4):
        raise ZeroDivisionError
    assert overlap.rows == 0


def test_kernels_overlap_while_an_engine_with_skinny_products_is_open(
    engine_of: Build, overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without them, and one that fails to capture, leave the process as it was."""
    use_graphs_on_cpu(monkeypatch)
    engine_dir, _ = engine_of("ouro_gqa")
    config = EngineConfig(device="cpu", cuda_graphs="step")
    plain = EngineCore(engine_dir, config)
    assert overlap.rows == 0
    monkeypatch.setattr(engine_core, "settle_products", lambda *_: Products(max_skinny_rows=4))
    first, second = (EngineCore(engine_dir, config) for _ in range(2))
    for core in (plain, first):
        assert overlap.rows == 4
        core.close()
        core.close()
    assert overlap.rows == 4
    second.close()
    assert overlap.rows == 0

    def no_memory(*_: object) -> None:
        raise EngineError("no memory to capture a CUDA graph")

    monkeypatch.setattr(StepGraphs, "capture_ahead", no_memory)
    with pytest.raises(EngineError, match="no memory"):
        EngineCore(engine_dir, config)
    assert overlap.rows == 0


@pytest.mark.gpu
def test_on_a_gpu_rows_of_skinny_products_have_their_bits_whatever_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests among seven: row counts at which norms have one order of sums (4 to 7).

    Prompts of one token, so that no step has other rows; no graph, which would fill it up.
    """
    tiny_ouro(tmp_path / "c", dtype=torch.bfloat16)
    build(BuildConfig(tmp_path / "c", tmp_path / "e", tokens_per_block=8, max_batch_size=8))
    calls: list[int] = []
    skinny = launch.skinny_linear

    def count(x: Tensor, weight: Tensor) -> Tensor:
        calls.append(len(x))
        return skinny(x, weight)

    monkeypatch.setattr(launch, "skinny_linear", count)
    config = {"device": "cuda", "kv_cache_bytes": 2**24, "cache_dir": str(tmp_path / "cache")}

    def answered(num_requests: int, **fields: Any) -> Harness:
        harness = Harness(tmp_path / "e", **config, **fields)
        for index in range(num_requests):
            harness.add([3 + index], 12)
        harness.drain()
        harness.core.close()
        return harness

    four, seven = (answered(n, cuda_graphs="off", skinny_linear_rows=8) for n in (4, 7))
    assert {*calls} == {4, 7}
    for index in range(4):
        one, other = four.answers[index], seven.answers[index]
        assert one.token_ids == other.token_ids
        assert len(one.token_ids) == 12
        assert_bitwise(torch.stack(one.logits), torch.stack(other.logits))
    calls.clear()
    plain = answered(4, cuda_graphs="off", skinny_linear_rows=0)
    assert not calls
    first, same = (harness.answers[0].logits[0] for harness in (four, plain))
    assert (first - same).abs().max() <= 0.05 * same.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["loop", "step"])
def test_on_a_gpu_graphs_hold_skinny_products(tmp_path: Path, graphs: str) -> None:
    """Tokens of replayed graphs are those of the same rows without one: 8 rows fill no graph up."""
    tiny_ouro(tmp_path / "c", dtype=torch.bfloat16)
    build(BuildConfig(tmp_path / "c", tmp_path / "e", tokens_per_block=8, max_batch_size=8))
    config = {"device": "cuda", "kv_cache_bytes": 2**24, "cache_dir": str(tmp_path / "cache")}
    asks = [Ask([3 + index], 12) for index in range(8)]
    answers = []
    for how in ("off", graphs):
        engine = Engine(tmp_path / "e", **config, cuda_graphs=how, skinny_linear_rows=16)
        answers.append(engine.run(asks))
        hits = engine.core.stats().get("graph_hits", 0)
        engine.core.close()
    assert answers[1] == answers[0]
    assert hits > 0
