"""The switch of scheduling ahead: answers with it and without it, on steps that are whole graphs.

Without a GPU the graphs are those of `graphs_on_cpu`; what is planned ahead is the product's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from looptrt.builder.build import BuildConfig, build
from looptrt.manifest import Manifest
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from looptrt.runtime.request import FinishReason, SamplerParams
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.scheduler import Scheduler
from looptrt.runtime.step_plan import StepPlan
from tests.e2e.test_engine_oracle import MAKERS, prompt_of
from tests.support.graphs_on_cpu import use_graphs_on_cpu
from tests.support.random_requests import pieces
from tests.support.scripted import write_tokenizer
from tests.support.watched import Ask, Engine

EngineDirOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def engine_dir_of(tmp_path_factory: pytest.TempPathFactory) -> EngineDirOf:
    root = tmp_path_factory.mktemp("ahead")

    def get(model: str) -> Path:
        if not (root / model).exists():
            checkpoint = root / f"{model}.checkpoint"
            MAKERS[model](checkpoint)
            write_tokenizer(checkpoint, pieces())
            limits = {"tokens_per_block": 8, "max_batch_size": 8, "max_num_tokens": 512}
            build(BuildConfig(checkpoint, root / model, **limits))
        return root / model

    return get


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        use_graphs_on_cpu(monkeypatch)
    return str(request.param)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Plans made ahead, a list that grows."""
    plans: list[StepPlan] = []
    schedule_ahead = Scheduler.schedule_ahead

    def record(scheduler: Scheduler) -> StepPlan | None:
        plan = schedule_ahead(scheduler)
        plans.extend([] if plan is None else [plan])
        return plan

    monkeypatch.setattr(Scheduler, "schedule_ahead", record)
    return plans


def config_of(device: str, engine_dir: Path, pages: int, look_ahead: bool) -> EngineConfig:
    """`pages` of the deepest loop count in the pool."""
    layout = Manifest.load(engine_dir).layout
    num_units = pages * layout.units_of_page(layout.max_loops) + 1
    return EngineConfig(
        device=device,
        cuda_graphs="step",
        cache_dir=str(engine_dir.parent / "cache"),
        kv_cache_bytes=num_units * layout.unit_bytes,
        look_ahead=look_ahead,
    )


@pytest.mark.parametrize("pages", [100, 12], ids=["roomy", "preempted"])
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_answers_are_equal_with_and_without_looking_ahead(
    engine_dir_of: EngineDirOf, device: str, ahead: list[StepPlan], model: str, pages: int
) -> None:
    """Greedy, drawn and filtered rows; fails if an unknown token or a stop is taken for another."""
    samplers = [
        SamplerParams(),
        SamplerParams(temperature=0.9, seed=3),
        SamplerParams(temperature=1.2, seed=4, top_k=20, top_p=0.9, min_p=0.01),
        SamplerParams(temperature=0.8, seed=5, repetition_penalty=1.3),
    ]
    # The one whose logits the host reads ends early: from there on steps are planned ahead.
    asks = [
        Ask(prompt_of(11 + 9 * index, index), 24 if index < 3 else 5, sampler=sampler)
        for index, sampler in enumerate(samplers)
    ]
    answers = {}
    for look_ahead in (True, False):
        ahead.clear()
        config = config_of(device, engine_dir_of(model), pages, look_ahead)
        engine = Engine(engine_dir_of(model), **config.to_json())
        answers[look_ahead] = engine.run(asks)
        assert len(ahead) > 10 if look_ahead else not ahead
        assert all((plan.input_ids < 0).any() for plan in ahead)
        preempted = sum(entry.num_preemptions for entry in engine.finished.values())
        assert (preempted > 0) == (pages == 12)
        engine.core.close()
    assert answers[True] == answers[False]
    assert [len(tokens) for tokens in answers[True]] == [24, 24, 24, 5]


def test_stop_strings_end_answers_alike_with_and_without_looking_ahead(
    engine_dir_of: EngineDirOf, device: str, ahead: list[StepPlan]
) -> None:
    """The engine hears of a stop string while steps beyond it are in flight."""
    engine_dir = engine_dir_of("ouro")
    prompts = [prompt_of(9 + index, index) for index in range(4)]

    def outputs(look_ahead: bool, **fields: object) -> list[tuple[list[int], str, FinishReason]]:
        ahead.clear()
        params = [
            SamplingParams(
                max_tokens=20, temperature=0.9 * (index % 2), seed=index, ignore_eos=True, **fields
            )
            for index in range(4)
        ]
        config = config_of(device, engine_dir, 100, look_ahead)
        with LLM(engine_dir, config, in_process=True) as llm:
            found = [output.outputs[0] for output in llm.generate(prompts, params)]
            assert llm.stats()["num_running"] == 0
        assert bool(ahead) == look_ahead
        return [(one.token_ids, one.text, one.finish_reason) for one in found]

    whole = outputs(True)
    assert whole == outputs(False)
    stop = [text[len(text) // 2 :][:2] for _, text, _ in whole]
    cut = outputs(True, stop=stop)
    assert cut == outputs(False, stop=stop)
    assert all(len(text) < len(other[1]) for (_, text, _), other in zip(cut, whole, strict=True))
    assert {reason for *_, reason in cut} == {FinishReason.STOP}
