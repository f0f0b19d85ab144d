"""`ModelRunner`: names, shapes and defaults of TensorRT-LLM's Python runtime."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import EngineError, ManifestError, RequestError
from looptrt.runtime import ModelRunner
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.checkpoints import tiny_ouro

END = 0  # of the tiny checkpoint
PROMPTS = [torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([9, 8, 7, 6, 5])]
NEW = 6


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runner")
    limits = {"max_batch_size": 4, "max_seq_len": 32, "max_num_tokens": 64, "tokens_per_block": 8}
    checkpoint = tiny_ouro(root / "checkpoint")
    build(BuildConfig(checkpoint_dir=checkpoint, output_dir=root / "engine", **limits))
    return root / "engine"


@pytest.fixture(scope="module")
def runner(engine_dir: Path) -> Iterator[ModelRunner]:
    config = EngineConfig(num_threads=1)
    with ModelRunner.from_dir(engine_dir, config=config, in_process=True, rank=0) as made:
        yield made


def answers(runner: ModelRunner, **fields: Any) -> list[list[list[int]]]:
    """What `LLM` answers: token ids by prompt and answer."""
    params = SamplingParams(**{"max_tokens": NEW, "ignore_eos": True, **fields})
    outputs = runner.llm.generate([prompt.tolist() for prompt in PROMPTS], params)
    return [[one.token_ids for one in output.outputs] for output in outputs]


def run(runner: ModelRunner, **arguments: Any) -> Any:
    return runner.generate(PROMPTS, **{"max_new_tokens": NEW, "end_id": -1, **arguments})


def rows(ids: torch.Tensor) -> list[list[list[int]]]:
    """Answers of `output_ids` that all have NEW tokens, their prompts checked."""
    for row, prompt in zip(ids, PROMPTS, strict=True):
        assert (row[:, : len(prompt)] == prompt).all()
    return [
        row[:, len(prompt) : len(prompt) + NEW].tolist()
        for row, prompt in zip(ids, PROMPTS, strict=True)
    ]


def test_default_is_greedy_and_rows_are_filled_up(runner: ModelRunner) -> None:
    ids = run(runner, pad_id=77)
    assert (ids.dtype, tuple(ids.shape)) == (torch.int32, (2, 1, 5 + NEW))
    assert rows(ids) == answers(runner)
    assert ids[0, 0, 3 + NEW :].tolist() == [77, 77]
    assert runner.generate([PROMPTS[0]], end_id=3, pad_id=77).shape == (1, 1, 4)


def test_dictionary_holds_what_was_asked_for(runner: ModelRunner) -> None:
    assert set(run(runner, return_dict=True)) == {"output_ids"}
    asked = ("output_sequence_lengths", "output_log_probs", "output_cum_log_probs")
    output = run(runner, return_dict=True, **dict.fromkeys(asked, True))
    assert set(output) == {"output_ids", "sequence_lengths", "log_probs", "cum_log_probs"}
    assert output["sequence_lengths"].tolist() == [[3 + NEW], [5 + NEW]]
    assert output["sequence_lengths"].dtype == torch.int32
    assert output["log_probs"].shape == (2, 1, NEW)
    assert (output["log_probs"] < 0).all()
    assert torch.equal(output["cum_log_probs"], output["log_probs"].sum(-1))


def test_end_id_ends_an_answer_and_is_not_counted(runner: ModelRunner) -> None:
    first = answers(runner)[0][0]
    end = first[2]
    output = run(runner, end_id=end, return_dict=True, output_sequence_lengths=True)
    length = 3 + first.index(end)
    assert output["sequence_lengths"][0].tolist() == [length]
    assert output["output_ids"][0, 0].tolist() == [5, 6, 7, *first[: length - 3]] + [end] * (
        5 + NEW - length
    )


def test_several_sequences_and_other_names_of_sampling(runner: ModelRunner) -> None:
    sampling = {"top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.2}
    ids = run(runner, num_return_sequences=3, random_seed=7, min_length=2, **sampling)
    assert ids.shape == (2, 3, 5 + NEW)
    assert rows(ids) == answers(runner, n=3, seed=7, **sampling)
    assert rows(run(runner, top_k=1, temperature=5.0)) == answers(runner)
    assert rows(run(runner, temperature=0.0)) == answers(runner)
    assert rows(run(runner, top_k=0, top_p=0.0, temperature=5.0)) == answers(runner)
    assert rows(run(runner, loops=2, prefill_loops=1)) == answers(runner, loops=2, prefill_loops=1)


def test_parameters_may_differ_by_prompt(runner: ModelRunner) -> None:
    ids = run(
        runner,
        temperature=torch.tensor([1.0, 2.0], dtype=torch.float64),
        top_k=[0, 1],
        top_p=np.array([0.5, 0.25]),
        random_seed=torch.tensor([3, 4]),
    )
    assert rows(ids) == [
        answers(runner, temperature=1.0, top_p=0.5, seed=3)[0],
        answers(runner)[1],
    ]


def test_stop_and_bad_words_are_token_sequences_of_each_prompt(runner: ModelRunner) -> None:
    first, second = (one[0] for one in answers(runner))
    stops = [[[first[1], first[2]]], [[second[0]], [1, 2, 3]]]
    asked = {"return_dict": True, "output_sequence_lengths": True}
    output = run(runner, stop_words_list=stops, **asked)
    assert output["sequence_lengths"].tolist() == [[3 + 3], [5 + 1]]
    packed = np.array(
        [
            [[first[1], first[2], 0, 0], [2, -1, -1, -1]],
            [[second[0], 1, 2, 3], [1, 4, -1, -1]],
        ]
    )
    for words in (packed, torch.tensor(packed)):
        again = run(runner, stop_words_list=words, **asked)
        assert torch.equal(again["output_ids"], output["output_ids"])
    banned = run(runner, bad_words_list=[[[first[0]]], []])
    assert first[0] not in rows(banned)[0][0]
    assert rows(banned)[1][0] == second
    assert rows(run(runner, bad_words_list=[None, None])) == answers(runner)


@pytest.mark.parametrize("n", [1, 2])
def test_stream_grows_to_the_whole_output(runner: ModelRunner, n: int) -> None:
    asked = {"return_dict": True, "output_sequence_lengths": True, "num_return_sequences": n}
    whole = run(runner, **asked)
    *early, last = run(runner, streaming=True, **asked)
    assert torch.equal(last["output_ids"], whole["output_ids"])
    lengths = [output["sequence_lengths"].sum().item() for output in [*early, last]]
    assert lengths == sorted(lengths)
    assert all(output["output_ids"].shape == whole["output_ids"].shape for output in early)
    stream = run(runner, streaming=True)
    next(stream)
    stream.close()
    assert rows(run(runner)) == answers(runner)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "num_beams: not supported, got 2"),
        ({"beam_search_diversity_rate": 0.5}, "beam_search_diversity_rate: not supported"),
        ({"prompt_table": "x.npy"}, "prompt_table: not supported"),
        ({"output_generation_logits": True}, "output_generation_logits: not supported"),
        ({"max_tokens": 3}, "max_tokens: not supported"),
        ({"max_new_tokens": 0}, "max_tokens: expected an integer from 1"),
        ({"max_new_tokens": "3"}, "max_tokens: expected an integer"),
        ({"max_new_tokens": 28}, "max_new_tokens: expected at most 27, .* max_seq_len 32, got 28"),
        ({"temperature": float("nan")}, "temperature: expected a finite number"),
        ({"top_p": [0.5]}, "top_p: expected one for each of 2 prompts, got 1"),
        ({"top_p": 1.5}, "top_p: expected a finite number"),
        ({"top_k": -1}, "top_k: expected an integer"),
        ({"num_return_sequences": [1, 2]}, "num_return_sequences: expected one number"),
        ({"end_id": 256}, "end_id: expected a token id|stop_token_ids: expected token ids"),
        ({"end_id": "x"}, "stop_token_ids: expected"),
        ({"pad_id": 2**40}, "pad_id: expected a token id up to 255"),
        ({"stop_words_list": [[[1]]]}, "stop_words_list: expected .* for each of 2 prompts"),
        ({"stop_words_list": np.zeros((2, 3))}, r"stop_words_list: expected an array \[batch, 2"),
        ({"bad_words_list": [[1], [2]]}, "bad_words: expected texts or lists"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    runner: ModelRunner, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        run(runner, **arguments)


def test_batches_and_prompts_beyond_the_limits_are_refused(runner: ModelRunner) -> None:
    for batch, message in (
        ([], "from 1 to max_batch_size 4 prompts, got 0"),
        ([PROMPTS[0]] * 5, "from 1 to max_batch_size 4 prompts, got 5"),
        ([5], "batch_input_ids: expected token ids of each prompt, got 5"),
        ([[]], "prompt: expected at least 1 token"),
        ([[1.5]], "prompt: expected integer token ids"),
        ([torch.tensor([256])], "prompt: expected token ids from 0 to 255, got 256"),
    ):
        with pytest.raises(RequestError, match=message):
            runner.generate(batch)  # type: ignore[arg-type]
    assert run(runner, num_beams=1, length_penalty=1.0, prompt_table=None) is not None


def test_neutral_arguments_of_from_dir_pass_and_others_are_named(
    engine_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="lora_dir: not supported, got 'x'"):
        ModelRunner.from_dir(engine_dir, lora_dir="x")
    with pytest.raises(EngineError, match="rank: not supported, got 1"):
        ModelRunner.from_dir(engine_dir, rank=1)
    with pytest.raises(ManifestError):
        ModelRunner.from_dir(tmp_path, lora_dir=None, debug_mode=False, gpu_weights_percent=1)


def test_limits_and_sizes_are_those_of_the_engine(runner: ModelRunner) -> None:
    assert (runner.max_batch_size, runner.max_seq_len, runner.vocab_size) == (4, 32, 256)
    assert runner.max_sequence_length == 32


def test_clients_that_do_not_ask_for_it_need_no_torch() -> None:
    code = (
        "import sys, looptrt.runtime, looptrt.runtime.llm; assert 'torch' not in sys.modules;"
        "looptrt.runtime.ModelRunner; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)
