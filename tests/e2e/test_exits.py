"""Tokens that stop before their last loop: the exit gate, the exit criteria, their KV."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from looptrt.builder.build import BuildConfig, build
from looptrt.runtime.request import ExitKv, ExitParams, ExitRule
from tests.support.engines import Answer, Harness, initial_states
from tests.support.oracle import DenseOracle

EXAMPLES = Path(__file__).parents[2] / "examples"
OURO_PROMPT = "n=5;a=0;y=s;m=7;f=2;s=m;p=y;t=y;?mft>"
PROMPTS = [OURO_PROMPT, "d=0;i=d;a=i;l=a;h=9;w=5;?whd>", "g=c;e=g;h=8;j=7;b=9;c=h;?hjg>"]
RULES = {
    ExitRule.ENTROPY_DIFF: 1e-3,
    ExitRule.LATENT_DIFF: 0.2,
    ExitRule.KL: 1e-3,
    ExitRule.ARGMAX_STABILITY: 2,
}


class StateOracle(DenseOracle):
    """The dense oracle, also giving the state that the coda starts from."""

    last_state: Tensor

    @staticmethod
    def read(directory: Path) -> StateOracle:
        config = json.loads((directory / "config.json").read_text())
        return StateOracle(config, load_file(directory / "model.safetensors"))

    def _coda(self, state: Tensor, positions: Tensor) -> Tensor:
        self.last_state = state[-1].clone()
        return super()._coda(state, positions)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, StateOracle]]:
    root = tmp_path_factory.mktemp("exits")
    made = {}
    for name in ("tiny-ouro", "tiny-huginn"):
        build(BuildConfig(EXAMPLES / name, root / name, tokens_per_block=8, max_batch_size=8))
        made[name] = (root / name, StateOracle.read(EXAMPLES / name))
    return made


def encode(prompt: str) -> list[int]:
    letters = {chr(ord("a") + i): 14 + i for i in range(26)} | {str(i): 4 + i for i in range(10)}
    letters |= {"=": 40, ";": 41, "?": 42, ">": 43}
    return [1, *(letters[character] for character in prompt)]


def run(
    engine_dir: Path,
    params: list[ExitParams],
    *,
    loops: int,
    prompts: list[str] = PROMPTS,
    **config: int,
) -> tuple[Harness, list[Answer], list[list[int]]]:
    """Answers and the loops behind each of their tokens."""
    harness = Harness(engine_dir, **config)
    spent: dict[int, list[int]] = {}
    for prompt, one in zip(prompts, params, strict=False):
        spent[harness.add(encode(prompt), 8, loops=loops, exit=one, stop_token_ids=(2,))] = []
    scheduler, commit = harness.core.scheduler, harness.core.scheduler.commit

    def spy(plan, result):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        output = commit(plan, result)
        for request_id, depth in zip(output.request_ids, output.depths, strict=True):
            spent[request_id].append(depth)
        return output

    scheduler.commit = spy  # type: ignore[method-assign]
    harness.drain()
    return harness, list(harness.answers.values()), list(spent.values())


def rule_says(params: ExitParams, states: list[Tensor], logits: list[Tensor]) -> float:
    """How far below the threshold the rule's value is after the last of these loops."""
    now = logits[-1].log_softmax(-1)
    uniform = torch.full_like(now, -math.log(len(now)))
    before = logits[-2].log_softmax(-1) if len(logits) > 1 else uniform
    match params.rule:
        case ExitRule.LATENT_DIFF:
            value = (states[-1] - states[-2]).norm() / states[-1].norm()
        case ExitRule.KL:
            value = (before.exp() * (before - now)).sum()
        case ExitRule.ENTROPY_DIFF:
            entropies = [-(d.exp() * d).sum() for d in (before, now)]
            value = abs(entropies[1] - entropies[0]) if len(logits) > 1 else torch.tensor(99.0)
        case _:
            best = [int(row.argmax()) for row in logits]
            same = 0
            while same + 1 < len(best) and best[-2 - same] == best[-1]:
                same += 1
            return same - params.threshold + 0.5
    return params.threshold - float(value)


def expected_loops(
    oracle: StateOracle, harness: Harness, answer: Answer, depths: list[int], params: ExitParams
) -> tuple[int, bool]:
    """Loops the next token should spend, and whether a value came too near its threshold.

    Args:
        depths: of all tokens before the row that decides.
    """
    context = [*answer.request.prompt.tolist(), *answer.token_ids]
    token_ids = context[: len(depths) + 1]
    noise = initial_states(harness.core, len(token_ids), 0)
    states: list[Tensor] = [noise[-1] if noise is not None else torch.zeros(1)]
    logits: list[Tensor] = []
    survival, cumulative = 1.0, 0.0
    for loop in range(1, answer.request.loops + 1):
        logits.append(oracle.logits(token_ids, [*depths, loop], noise)[-1])
        states.append(oracle.last_state)
        if params.rule is ExitRule.GATE:
            gate = oracle.tensors
            logit = states[-1] @ gate["model.early_exit_gate.weight"][0]
            exit_now = torch.sigmoid(logit + gate["model.early_exit_gate.bias"][0]).item()
            cumulative += survival * exit_now
            survival *= 1 - exit_now
            margin = cumulative - params.threshold
        else:
            margin = rule_says(params, states, logits)
        if abs(margin) < 1e-4:
            return loop, True
        if margin > 0:
            return loop, False
    return answer.request.loops, False


Engines = dict[str, tuple[Path, StateOracle]]


def check_loops(
    oracle: StateOracle, harness: Harness, answer: Answer, spent: list[int], params: ExitParams
) -> None:
    """Every token's loops are those its rule gives on the dense recompute."""
    request = answer.request
    depths = [request.prefill_loops] * (request.num_prompt - 1)
    for loops in spent:
        expected, unclear = expected_loops(oracle, harness, answer, depths, params)
        if unclear:
            return  # later tokens' contexts hang on this one
        assert loops == expected
        depths.append(loops if params.kv is ExitKv.LAST_EXITED else request.loops)


def check_tokens(
    oracle: StateOracle, harness: Harness, answer: Answer, spent: list[int], kv: ExitKv
) -> None:
    """Logits equal a dense recompute at the recorded depths."""
    request = answer.request
    token_ids = [*request.prompt.tolist(), *answer.token_ids]
    noise = initial_states(harness.core, len(token_ids), 0)
    before = [request.prefill_loops] * (request.num_prompt - 1)
    for index, loops in enumerate(spent):
        end = request.num_prompt + index
        want = oracle.logits(
            token_ids[:end], [*before, loops], None if noise is None else noise[:end]
        )[-1]
        got = answer.logits[index]
        assert (got - want).abs().max() <= 2e-4 * want.abs().max()
        before.append(loops if kv is ExitKv.LAST_EXITED else request.loops)


@pytest.mark.parametrize("kv", list(ExitKv))
@pytest.mark.parametrize("threshold", [0.3, 0.9])
def test_gate_stops_each_token_where_its_probability_says(
    engines: Engines, threshold: float, kv: ExitKv
) -> None:
    """Case A4: sums in float32, per token."""
    engine_dir, oracle = engines["tiny-ouro"]
    params = ExitParams(ExitRule.GATE, threshold, kv)
    harness, answers, spent = run(engine_dir, [params] * 3, loops=4)
    assert {loops for one in spent for loops in one} >= {1, 2}
    for answer, one in zip(answers, spent, strict=True):
        check_loops(oracle, harness, answer, one, params)
        check_tokens(oracle, harness, answer, one, kv)


@pytest.mark.parametrize("rule", RULES)
def test_criteria_stop_each_request_alone(engines: Engines, rule: ExitRule) -> None:
    """Case B6: loops and tokens equal solo, and the rule as recomputed densely."""
    engine_dir, oracle = engines["tiny-huginn"]
    params = ExitParams(rule, RULES[rule])
    harness, answers, together = run(engine_dir, [params] * 3, loops=8)
    assert len({loops for one in together for loops in one}) > 1
    for index, (answer, spent) in enumerate(zip(answers, together, strict=True)):
        _, (solo,), (alone,) = run(engine_dir, [params], loops=8, prompts=[PROMPTS[index]])
        assert alone == spent
        assert solo.token_ids == answer.token_ids
        check_loops(oracle, harness, answer, spent, params)
        check_tokens(oracle, harness, answer, spent, params.kv)


def test_rules_of_neighbours_do_not_mix(engines: Engines) -> None:
    engine_dir, _ = engines["tiny-huginn"]
    params = [
        ExitParams(ExitRule.LATENT_DIFF, 0.2),
        ExitParams(),
        ExitParams(ExitRule.STEP, 3),
    ]
    _, answers, together = run(engine_dir, params, loops=8)
    assert set(together[1]) == {8}
    assert set(together[2]) == {3}
    for index, one in enumerate(params):
        _, (solo,), (alone,) = run(engine_dir, [one], loops=8, prompts=[PROMPTS[index]])
        assert (alone, solo.token_ids) == (together[index], answers[index].token_ids)


@pytest.mark.parametrize("name", ["tiny-ouro", "tiny-huginn"])
def test_preemption_follows_recorded_exits(engines: Engines, name: str) -> None:
    """Recomputed tokens run the loops they ran; no exit is decided twice."""
    engine_dir, oracle = engines[name]
    rule = ExitRule.GATE if name == "tiny-ouro" else ExitRule.LATENT_DIFF
    params = ExitParams(rule, 0.7 if name == "tiny-ouro" else 0.2)
    calm = run(engine_dir, [params] * 3, loops=4)
    layout = calm[0].core.manifest.layout
    tight = run(
        engine_dir,
        [params] * 3,
        loops=4,
        kv_cache_bytes=layout.unit_bytes * (layout.units_of_page(4) * 8 + 1),
    )
    finished = [answer.finished for answer in tight[1]]
    assert sum(one.num_preemptions for one in finished if one is not None) > 0
    assert [answer.token_ids for answer in tight[1]] == [answer.token_ids for answer in calm[1]]
    assert tight[2] == calm[2]
    for answer, spent in zip(tight[1], tight[2], strict=True):
        check_tokens(oracle, tight[0], answer, spent, params.kv)


@pytest.mark.parametrize("kv", list(ExitKv))
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_fixed_step_gives_the_logits_of_that_loop(
    engines: Engines, step: int, kv: ExitKv
) -> None:
    """Case A4: with `run_all` later tokens still attend to all loops, as in the reference."""
    engine_dir, oracle = engines["tiny-ouro"]
    params = ExitParams(ExitRule.STEP, step, kv)
    harness, answers, spent = run(engine_dir, [params] * 3, loops=4)
    assert {loops for one in spent for loops in one} == {step}
    for answer, one in zip(answers, spent, strict=True):
        check_tokens(oracle, harness, answer, one, kv)
