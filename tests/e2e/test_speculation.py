"""Speculation on real models: the answers are those without it, whatever else happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import EngineError
from looptrt.loop_spec import NoiseMode
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from looptrt.runtime.request import FinishReason, SamplerParams
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.step_plan import StepPlan, StepResult
from tests.e2e.test_exits import EXAMPLES, PROMPTS, StateOracle, encode
from tests.support.engines import Harness, assert_equals_oracle

MODELS = {"tiny-ouro": (4, 2), "tiny-huginn": (8, 5)}  # loops, and those of a guess
FULL = pytest.mark.full
Engines = dict[str, tuple[Path, StateOracle]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    root = tmp_path_factory.mktemp("speculation")
    made = {}
    for name in MODELS:
        build(BuildConfig(EXAMPLES / name, root / name, tokens_per_block=8, max_batch_size=8))
        made[name] = (root / name, StateOracle.read(EXAMPLES / name))
    return made


class Guessing(Harness):
    """Keeps the logits that each token of the answer was taken from at full depth."""

    def __init__(self, engine_dir: Path, **config: Any) -> None:
        self._logits: dict[tuple[int, int], torch.Tensor] = {}
        super().__init__(engine_dir, **config)

    def drain(self, max_steps: int = 1000) -> None:
        super().drain(max_steps)
        for request_id, answer in self.answers.items():
            first = answer.request.num_prompt - 1
            places = range(first, first + len(answer.token_ids))
            answer.logits = [self._logits[request_id, place] for place in places]

    def _record_logits(self, logits: torch.Tensor, plan: StepPlan) -> StepResult:
        positions = plan.positions[plan.logit_rows].tolist()
        ids = self.core.scheduler.slots.request_id[plan.sample_slots].tolist()
        if not plan.is_draft:
            self._logits |= {
                place: logits[row].float().clone()
                for row, place in enumerate(zip(ids, positions, strict=True))
            }
        return self._sample(logits, plan)


def answers(harness: Harness) -> list[list[int]]:
    return [answer.token_ids for answer in harness.answers.values()]


def both(
    engines: Engines, model: str, requests: list[tuple[list[int], int, dict[str, Any]]], **more: Any
) -> tuple[Guessing, Guessing]:
    """The same requests with guesses and without."""
    engine_dir, _ = engines[model]
    pair = []
    for loops in (MODELS[model][1], None):
        harness = Guessing(engine_dir, speculative_loops=loops, **more)
        for prompt, count, fields in requests:
            harness.add(prompt, count, **fields)
        harness.drain()
        pair.append(harness)
    return pair[0], pair[1]


@pytest.mark.parametrize("num_requests", [1, 3, *(pytest.param(n, marks=FULL) for n in (2, 4))])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_without_guesses(
    engines: Engines, model: str, temperature: float, num_requests: int
) -> None:
    prompts = ([encode(prompt) for prompt in PROMPTS] * 2)[:num_requests]
    requests = [
        (prompt, 24, {"sampler": SamplerParams(temperature=temperature, seed=index)})
        for index, prompt in enumerate(prompts)
    ]
    guessing, plain = both(engines, model, requests)
    assert answers(guessing) == answers(plain)
    stats, without = guessing.core.scheduler.stats(), plain.core.scheduler.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    assert without.num_draft_tokens == 0
    deep = stats.num_steps - stats.num_draft_steps
    assert deep < without.num_steps
    if temperature == 0:
        for request_id in guessing.answers:
            assert_equals_oracle(engines[model][1], guessing, request_id)


@pytest.mark.parametrize("model", MODELS)
def test_shallow_prompts_and_other_depths_guess_alike(engines: Engines, model: str) -> None:
    loops = MODELS[model][0]
    requests = [
        (encode(PROMPTS[0]), 20, {"prefill_loops": 1}),
        (encode(PROMPTS[1]), 20, {"loops": loops - 1, "prefill_loops": 2, "noise_seed": 3}),
    ]
    guessing, plain = both(engines, model, requests)
    assert answers(guessing) == answers(plain)
    assert guessing.core.scheduler.stats().num_accepted_tokens > 0
    for request_id in guessing.answers:
        assert_equals_oracle(engines[model][1], guessing, request_id)


@pytest.mark.parametrize("model", MODELS)
def test_pages_written_with_guesses_serve_the_next_turn(engines: Engines, model: str) -> None:
    engine_dir, oracle = engines[model]
    harness = Guessing(engine_dir, speculative_loops=MODELS[model][1])
    prompt = encode(PROMPTS[0])
    harness.add(prompt, 21)
    harness.drain()
    harness.poison()
    turn = [*prompt, *harness.answers[0].token_ids, 9]
    harness.add(turn, 9)
    harness.drain()
    ended = harness.answers[1].finished
    assert ended is not None
    assert ended.num_cached_tokens == (len(turn) - 2) // 8 * 8
    assert_equals_oracle(oracle, harness, 1)


@pytest.mark.parametrize("model", MODELS)
def test_preemption_among_guesses(engines: Engines, model: str) -> None:
    """Cases C4 and B2: pages for one and a half requests."""
    engine_dir, oracle = engines[model]
    layout = Harness(engine_dir).core.manifest.layout
    units = 9 * layout.units_of_page(MODELS[model][0]) + 1
    requests = [(encode(prompt)[:20], 30, {"noise_seed": 7}) for prompt in PROMPTS[:2]]
    guessing, plain = both(engines, model, requests, kv_cache_bytes=units * layout.unit_bytes)
    assert answers(guessing) == answers(plain)
    ended = [answer.finished for answer in guessing.answers.values()]
    assert sum(end.num_preemptions for end in ended if end is not None) > 0
    assert guessing.core.scheduler.stats().num_accepted_tokens > 0
    for request_id in guessing.answers:
        assert_equals_oracle(oracle, guessing, request_id)


@pytest.mark.parametrize("after", [3, 6, *(pytest.param(n, marks=FULL) for n in (2, 4, 5, 7))])
def test_an_abort_among_guesses_leaves_the_neighbour_alone(engines: Engines, after: int) -> None:
    """Case C10."""
    engine_dir, oracle = engines["tiny-huginn"]
    harness = Guessing(engine_dir, speculative_loops=5)
    for prompt in PROMPTS[:2]:
        harness.add(encode(prompt), 16)
    for _ in range(after):
        harness.step()
    execute = harness.core.executor.execute

    def abort_meanwhile(plan: StepPlan) -> StepResult:
        harness.core.abort_request(0, FinishReason.ABORT)
        return execute(plan)

    harness.core.executor.execute = abort_meanwhile  # type: ignore[method-assign]
    harness.drain()
    ended = harness.answers[0].finished
    assert ended is not None
    assert ended.reason is FinishReason.ABORT
    assert len(harness.answers[1].token_ids) == 16
    assert_equals_oracle(oracle, harness, 1)


def test_seeds_ignore_neighbours_with_guesses_too(engines: Engines) -> None:
    """Case C8: more neighbours, fewer guesses, the same draws."""
    engine_dir, _ = engines["tiny-ouro"]
    drawn = set()
    for neighbours in range(5):
        harness = Guessing(engine_dir, speculative_loops=2)
        harness.add(encode(PROMPTS[0]), 16, sampler=SamplerParams(temperature=0.9, seed=42))
        for seed in range(neighbours):
            params = SamplerParams(temperature=1.0, seed=seed)
            harness.add(encode(PROMPTS[1]), 10 + seed, sampler=params)
        harness.drain()
        drawn.add(tuple(harness.answers[0].token_ids))
    assert len(drawn) == 1


def test_texts_stop_at_the_same_place(engines: Engines) -> None:
    """Stop strings are found by the client, in the middle of what one verification gives."""
    engine_dir, _ = engines["tiny-ouro"]
    texts = []
    for loops in (2, None):
        config = EngineConfig(device="cpu", num_threads=1, speculative_loops=loops)
        with LLM(engine_dir, config, in_process=True) as llm:
            params = SamplingParams(max_tokens=24, ignore_eos=True, seed=1, temperature=1.0)
            ended = llm.generate(PROMPTS[0], params)[0]
            full = ended.outputs[0]
            stop = full.text[7:9]
            params = replace(params, stop=(stop,))
            *_, last = streamed = list(llm.stream(PROMPTS[0], params))
            answer = last.outputs[0]
            assert "".join(output.outputs[0].delta for output in streamed) == answer.text
            assert answer.text == full.text[: full.text.index(stop)]
            assert answer.stop_reason == stop
            texts.append((full.text, full.token_ids, full.depths, answer.text, answer.token_ids))
            assert ended.metrics is not None
            assert (ended.metrics.num_accepted_tokens > 0) == (loops is not None)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("flags", "loops", "match"),
    [
        ({"kv_planes": "shared"}, 2, "shared"),
        ({"noise": NoiseMode.SEQUENTIAL}, 2, "sequential"),
        ({}, 8, "fewer than the engine's 8 loops"),
    ],
)
def test_engines_that_cannot_guess_refuse_to(
    tmp_path: Path, flags: dict[str, Any], loops: int, match: str
) -> None:
    build(BuildConfig(EXAMPLES / "tiny-huginn", tmp_path / "e", **flags))
    with pytest.raises(EngineError, match=match):
        Harness(tmp_path / "e", speculative_loops=loops)
