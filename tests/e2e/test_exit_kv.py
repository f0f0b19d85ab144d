"""KV of tokens that stopped early is what their recorded depth says, also in the coda's layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from looptrt.builder.build import BuildConfig, build
from looptrt.runtime.request import ExitKv, ExitParams, ExitRule
from tests.e2e.test_engine_oracle import MAKERS, prompt_of
from tests.support.engines import Harness, assert_equals_oracle
from tests.support.oracle import DenseOracle

Engines = dict[str, tuple[Path, DenseOracle]]

MODELS = ["ouro", "huginn", "olmo", "llama"]
EARLY = ExitParams(ExitRule.STEP, 1, ExitKv.RUN_ALL)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    root, made = tmp_path_factory.mktemp("exit_kv"), {}
    for model in ("ouro", "huginn", "olmo", "llama"):
        MAKERS[model](root / f"{model}.c")
        build(BuildConfig(root / f"{model}.c", root / model, tokens_per_block=8, max_batch_size=4))
        made[model] = root / model, DenseOracle.from_checkpoint(root / f"{model}.c")
    return made


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_may_reuse_the_pages_of_an_answer_that_ran_all_loops(
    engines: Engines, model: str
) -> None:
    """Case C1: pages with the key of full depth hold what full depth computes."""
    engine_dir, oracle = engines[model]
    harness = Harness(engine_dir)
    harness.add(prompt_of(8), 17, exit=EARLY)
    harness.drain()
    context = [*prompt_of(8), *harness.answers[0].token_ids]
    request_id = harness.add(context, 4)
    harness.drain()
    finished = harness.answers[request_id].finished
    assert finished is not None
    assert finished.num_cached_tokens == 24
    assert_equals_oracle(oracle, harness, request_id)


@pytest.mark.parametrize("model", MODELS)
def test_preemption_does_not_change_an_answer_that_ran_all_loops(
    engines: Engines, model: str
) -> None:
    """Case C4: what is computed again is what was there."""
    engine_dir, _ = engines[model]
    runs = []
    for pages in (40, 6):
        layout = Harness(engine_dir).core.manifest.layout
        num_units = pages * layout.units_of_page(layout.max_loops) + 1
        harness = Harness(
            engine_dir, kv_cache_bytes=num_units * layout.unit_bytes, enable_prefix_cache=False
        )
        for seed in range(2):
            harness.add(prompt_of(16, seed), 24, exit=EARLY)
        harness.drain()
        runs.append(list(harness.answers.values()))
    assert sum(one.finished.num_preemptions for one in runs[1] if one.finished) > 0
    for calm, tight in zip(*runs, strict=True):
        assert tight.token_ids == calm.token_ids
        for mine, theirs in zip(calm.logits, tight.logits, strict=True):
            assert (mine - theirs).abs().max() <= 2e-4 * theirs.abs().max()
