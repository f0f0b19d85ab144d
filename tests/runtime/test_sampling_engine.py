"""Sampling, log-probabilities and exits through a whole engine with random weights."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import RequestError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from looptrt.runtime.outputs import RequestOutput
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.checkpoints import ouro_config, ouro_tensors, tiny_huginn, write_checkpoint

VOCAB = 256
PAGE = 8
LIMITS = {"tokens_per_block": PAGE, "max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 96}
GATES = (0.0, 2.2, 6.0, 6.3, 17.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def ouro(directory: Path, dtype: torch.dtype, gate: float) -> Path:
    """A tiny random Ouro whose exit gate says `gate` for every state."""
    config = ouro_config(torch_dtype=str(dtype).removeprefix("torch."))
    tensors = ouro_tensors(config, dtype=dtype)
    tensors["model.early_exit_gate.weight"].zero_()
    tensors["model.early_exit_gate.bias"].fill_(gate)
    return write_checkpoint(directory, config, tensors)


Engines = Callable[..., LLM]


@pytest.fixture(scope="module")
def llm_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """LLMs over engines that are built once: `llm_with(dtype, gate, **config)`."""
    root, built, llms = tmp_path_factory.mktemp("engines"), {}, {}

    def get(dtype: str = "float32", gate: float = 0.0, **config: Any) -> LLM:
        name = f"ouro-{dtype}-{gate}"
        if name not in built:
            checkpoint = ouro(root / f"{name}-checkpoint", DTYPES[dtype], gate)
            build(BuildConfig(checkpoint_dir=checkpoint, output_dir=root / name, **LIMITS))
            built[name] = root / name
        key = (name, *sorted(config.items()))
        if key not in llms:
            settings = EngineConfig(num_threads=1, **config)
            llms[key] = LLM(built[name], settings, in_process=True)
        return llms[key]

    yield get
    for llm in llms.values():
        llm.shutdown()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(VOCAB) for i in range(length)]


def loops_of(llm: LLM, **fields: Any) -> int:
    """Index of the last loop of generated tokens, the same for all."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, **fields)
    (answer,) = llm.generate([prompt_of(5)], params)[0].outputs
    (depth,) = set(answer.depths)
    return depth - 1


# ---- the exit gate (case A4)


def first_at(gate: float, threshold: float) -> int:
    """Loop at which the cumulative exit probability reaches the threshold, in exact sums."""
    exit_now = 1 / (1 + math.exp(-gate))
    reached = (loop for loop in range(4) if 1 - (1 - exit_now) ** (loop + 1) >= threshold)
    return next(reached, 3)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_gate_stops_where_its_sums_reach_the_threshold(
    llm_with: Engines, dtype: str, gate: float
) -> None:
    llm = llm_with(dtype, gate)
    for threshold in (None, 1.0, 1.5, 1e30):
        assert loops_of(llm, exit_threshold=threshold) == 3
    stored = float(torch.tensor(gate, dtype=DTYPES[dtype]))
    for threshold in (0.95, 0.5, 0, 0.0):
        expected = first_at(stored, threshold)
        assert loops_of(llm, exit_threshold=threshold) == expected
        assert loops_of(llm, exit_threshold=threshold, exit_kv="run_all") == expected


@pytest.mark.parametrize(
    ("dtype", "gate", "loop"),
    [
        ("bfloat16", 0.0, 3),
        ("bfloat16", 2.2, 2),
        ("bfloat16", 6.0, 1),
        ("bfloat16", 6.3, 0),
        ("bfloat16", 17.0, 0),
        ("float32", 0.0, 3),
        ("float32", 2.2, 3),
        ("float32", 6.3, 2),
        ("float32", 17.0, 0),
    ],
)
def test_reference_mode_stops_at_threshold_1_where_the_reference_does(
    llm_with: Engines, dtype: str, gate: float, loop: int
) -> None:
    llm = llm_with(dtype, gate)
    assert loops_of(llm, exit_mode="reference", exit_threshold=1.0) == loop
    assert loops_of(llm, exit_mode="reference") == loop
    assert loops_of(llm, exit_mode="reference", exit_threshold=1.5) == 3
    assert loops_of(llm, exit_mode="reference", exit_threshold=0.0) == 0


@pytest.mark.parametrize("gate", [0.0, 17.0])
def test_exit_at_step_comes_before_the_gate(llm_with: Engines, gate: float) -> None:
    llm = llm_with("float32", gate)
    for step in range(4):
        for fields in ({}, {"exit_threshold": 0.0}, {"exit_mode": "reference"}):
            assert loops_of(llm, exit_at_step=step, **fields) == step
    assert loops_of(llm, exit_at_step=1, loops=2) == 1


def test_exit_that_cannot_be_is_refused_by_name(llm_with: Engines) -> None:
    llm = llm_with()
    for step, fields in ((4, {}), (2, {"loops": 2})):
        with pytest.raises(RequestError, match=rf"exit_at_step: expected from 0 to .* got {step}"):
            llm.generate([1], SamplingParams(exit_at_step=step, **fields))
    with pytest.raises(RequestError, match=r"exit_at_step: expected an integer from 0"):
        SamplingParams(exit_at_step=-1)
    for threshold in (math.nan, -1e-9, math.inf, "0.5"):
        with pytest.raises(RequestError, match="exit_threshold: expected a finite number"):
            SamplingParams(exit_threshold=threshold)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="exit_criterion: OuroForCausalLM has an exit gate"):
        llm.generate([1], SamplingParams(exit_criterion="kl"))
    assert llm.generate([1], SamplingParams(max_tokens=1))[0].finished


def test_criteria_are_for_models_without_a_gate(tmp_path: Path) -> None:
    checkpoint = tiny_huginn(tmp_path / "checkpoint")
    build(BuildConfig(checkpoint_dir=checkpoint, output_dir=tmp_path / "engine", **LIMITS))
    with LLM(tmp_path / "engine", EngineConfig(num_threads=1), in_process=True) as llm:
        for fields, message in (
            ({"exit_threshold": 0.5}, "exit_threshold: RavenForCausalLM has no exit gate"),
            ({"exit_mode": "reference"}, "exit_mode: RavenForCausalLM has no exit gate"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate([1], SamplingParams(**fields))
        for criterion in ("entropy-diff", "latent-diff", "kl"):
            assert loops_of(llm, exit_criterion=criterion, exit_threshold=0) == 3
            late = loops_of(llm, exit_criterion=criterion, exit_threshold=1e30)
            assert late == (1 if criterion == "entropy-diff" else 0)
        assert loops_of(llm, exit_criterion="argmax-stability") == 3
        assert loops_of(llm, exit_at_step=2, exit_criterion="kl") == 2


# ---- prompt log-probabilities of a cached prompt (case C2)


@pytest.mark.parametrize("length", [15, 16, 17, 32])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_cached_prompt_gives_the_same_logprobs_as_a_new_one(
    llm_with: Engines, length: int, max_tokens: int
) -> None:
    llm, prompt = llm_with(), prompt_of(length, seed=max_tokens)
    params = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=3, logprobs=3, prefill_loops=2
    )
    plain = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=3, prefill_loops=2)
    first, second, cached = (llm.generate(prompt, p)[0] for p in (params, params, plain))
    assert first.prompt_logprobs is not None
    assert [at is None for at in first.prompt_logprobs] == [True] + [False] * (length - 1)
    assert second.prompt_logprobs == first.prompt_logprobs
    assert second.outputs[0].logprobs == first.outputs[0].logprobs
    assert second.outputs[0].token_ids == cached.outputs[0].token_ids
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert cached.num_cached_tokens == (length - 1) // PAGE * PAGE
    expected = [at.logprobs[0] for at in first.outputs[0].logprobs or ()]
    got = [at.logprobs[0] for at in cached.outputs[0].logprobs or ()]
    assert got == pytest.approx(expected, abs=1e-4)


# ---- preemption (case C4)


def with_pool(llm_with: Engines, num_units: int) -> LLM:
    unit_bytes = llm_with().manifest.layout.unit_bytes
    return llm_with(kv_cache_bytes=unit_bytes * num_units)


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def test_penalties_count_the_same_after_preemption(llm_with: Engines) -> None:
    """A pool for one and a half requests of 20 + 40 tokens."""
    sampling = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, "logprobs_mode": "processed"}
    params = [
        SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.6, **sampling),
        SamplingParams(
            temperature=1.1,
            seed=8,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.7,
            bad_words=((5,), (9, 10)),
            **sampling,
        ),
        SamplingParams(repetition_penalty=2.0, frequency_penalty=0.1, min_tokens=30, **sampling),
    ]
    prompts = [prompt_of(20, seed) for seed in (1, 2, 3)]
    roomy = llm_with().generate(prompts, params)
    units_of_request = 8 * 4  # 60 tokens in pages of 8, 4 planes each
    tight_llm = with_pool(llm_with, units_of_request * 3 // 2 + 1)
    tight = tight_llm.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in tight if output.metrics) >= 2
    assert texts(tight) == texts(roomy)
    for got, want in zip(tight, roomy, strict=True):
        for one, other in zip(
            got.outputs[0].logprobs or (), want.outputs[0].logprobs or (), strict=True
        ):
            assert one.token_ids[0] == other.token_ids[0]
            assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=1e-3)
    for prompt, one in zip(prompts, params, strict=True):
        streamed = [output.outputs[0].token_ids for output in tight_llm.stream(prompt, one)]
        assert streamed[-1] in texts(roomy)
        assert [len(tokens) for tokens in streamed] == sorted({len(tokens) for tokens in streamed})
    stats = tight_llm.stats()
    assert stats["num_free_units"] + stats["num_cached_units"] == stats["num_units"]


def test_several_answers_to_a_prompt_share_a_tight_pool(llm_with: Engines) -> None:
    params = SamplingParams(
        n=5, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True, repetition_penalty=1.2
    )
    prompt = prompt_of(21, seed=9)
    roomy = llm_with().generate(prompt, params)
    tight = with_pool(llm_with, 50).generate(prompt, params)
    single = [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True, repetition_penalty=1.2
        )
        for seed in range(1, 6)
    ]
    alone = [llm_with().generate(prompt, one)[0] for one in single]
    assert texts(roomy) == texts(tight) == texts(alone)
