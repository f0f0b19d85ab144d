"""Tensors to prompts and parameters: each one honoured, or refused by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from looptrt.errors import RequestError
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.triton.requests import check_refused, prompts_of, wishes_of
from looptrt.runtime.triton.tensors import MODELS, NUMPY_TYPES, TENSORRT_LLM, Tensor

_SIZES = {-1: 3}


def array_of(tensor: Tensor, value: object) -> np.ndarray:
    """[1, *dims] of one value."""
    shape = [1, *(_SIZES.get(size, size) for size in tensor.dims)]
    return np.full(shape, value, NUMPY_TYPES[tensor.dtype])


def inputs_of(**values: Any) -> dict[str, np.ndarray]:
    """A request of one row: a number for a scalar tensor, a list for others."""
    given = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 8, **values}
    inputs = {}
    for name, value in given.items():
        tensor = TENSORRT_LLM.input(name)
        as_list = value if isinstance(value, list) else [value]
        inputs[name] = np.array([as_list], NUMPY_TYPES[tensor.dtype])
    return inputs


def params_of(**values: Any) -> SamplingParams:
    (prompt,) = prompts_of(inputs_of(**values), excludes_input=True)
    return prompt.params


def test_plain_request_is_greedy_and_ends_at_its_length() -> None:
    (prompt,) = prompts_of(inputs_of(), excludes_input=True)
    assert prompt.token_ids == [5, 6, 7]
    assert prompt.params == SamplingParams(max_tokens=8)


def test_defaults_that_tensorrt_llm_clients_send_change_nothing() -> None:
    params = params_of(
        beam_width=1,
        temperature=1.0,
        runtime_top_k=1,
        runtime_top_p=0.0,
        len_penalty=1.0,
        repetition_penalty=1.0,
        min_tokens=1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        runtime_top_p_min=1e-6,
        runtime_top_p_decay=1.0,
        runtime_top_p_reset_ids=-1,
        beam_search_diversity_rate=0.0,
        return_context_logits=False,
        return_generation_logits=False,
        pad_id=0,
        stop_words_list=[[0], [-1]],
        bad_words_list=[[0], [-1]],
        embedding_bias=[],
        early_stopping=True,
    )
    assert params == SamplingParams(max_tokens=8, temperature=1.0, top_k=1, min_tokens=1)


def test_fields_reach_the_parameters_of_the_same_meaning() -> None:
    params = params_of(
        num_return_sequences=2,
        temperature=0.5,
        runtime_top_k=4,
        runtime_top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        seed=2**63 - 1,
        noise_seed=3,
        loops=3,
        prefill_loops=2,
        exit_threshold=0.5,
        cache_salt=b"salt",
        priority=-2,
        end_id=9,
        return_log_probs=True,
        embedding_bias=[0.5, 1.0],
    )
    assert params == SamplingParams(
        n=2,
        max_tokens=8,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        seed=2**63 - 1,
        noise_seed=3,
        loops=3,
        prefill_loops=2,
        exit_threshold=0.5,
        cache_salt="salt",
        priority=-2,
        stop_token_ids=(9,),
        logprobs=0,
        embedding_bias=(0.5, 1.0),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.0, 0, 1.0)),
        ({"runtime_top_k": 1}, (0.0, 1, 1.0)),
        ({"runtime_top_k": 1, "runtime_top_p": 0.9}, (0.0, 1, pytest.approx(0.9))),
        ({"runtime_top_k": 5}, (1.0, 5, 1.0)),
        ({"runtime_top_p": 0.5}, (1.0, 0, 0.5)),
        ({"runtime_top_p": 0.0}, (0.0, 0, 1.0)),
        ({"temperature": 0.5}, (0.5, 0, 1.0)),
        ({"temperature": 0.0, "runtime_top_k": 5}, (0.0, 5, 1.0)),
    ],
)
def test_an_answer_is_sampled_when_one_of_the_three_says_so(
    given: dict[str, float], expected: tuple[float, int, float]
) -> None:
    params = params_of(**given)
    assert (params.temperature, params.top_k, params.top_p) == expected


@pytest.mark.parametrize("name", ["runtime_top_p", "temperature"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sampling_value_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    with pytest.raises(RequestError, match="expected a finite number"):
        params_of(**{name: bad})


def test_end_id_of_minus_1_means_that_no_token_ends_the_answer() -> None:
    assert params_of(end_id=-1).ignore_eos
    assert not params_of(end_id=2).ignore_eos


def test_word_lists_are_ids_and_the_ends_of_each_sequence() -> None:
    params = params_of(
        stop_words_list=[[4, 5, 6, 0], [2, 3, -1, -1]], bad_words_list=[[7, 8], [1, 2]]
    )
    assert params.stop == ((4, 5), (6,))
    assert params.bad_words == ((7,), (8,))


def test_words_as_texts_join_the_lists_and_empty_ones_count_for_nothing() -> None:
    params = params_of(stop_words=[b"", "né".encode()], bad_words=[b""], stop_words_list=[[4], [1]])
    assert params.stop == ((4,), "né")
    assert params.bad_words == ()


@pytest.mark.parametrize("ends", [[3, -1], [2, 1], [0, -1], [-2, -1]])
def test_word_list_with_impossible_ends_is_refused(ends: list[int]) -> None:
    with pytest.raises(RequestError, match="stop_words_list: expected ends"):
        params_of(stop_words_list=[[4, 5], ends])


def test_input_lengths_cuts_the_padding_off() -> None:
    (prompt,) = prompts_of(inputs_of(input_lengths=2), excludes_input=True)
    assert prompt.token_ids == [5, 6]


@pytest.mark.parametrize("length", [-1, 4])
def test_input_lengths_beyond_the_ids_is_refused(length: int) -> None:
    with pytest.raises(RequestError, match="input_lengths: expected from 0 to 3"):
        params_of(input_lengths=length)


def test_rows_of_a_batch_have_their_own_values() -> None:
    rows = [inputs_of(seed=1), inputs_of(seed=2)]
    batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    assert [one.params.seed for one in prompts_of(batch, excludes_input=True)] == [1, 2]


def test_tensors_of_different_batch_sizes_are_refused() -> None:
    inputs = inputs_of() | {"seed": np.array([[1], [2]], np.uint64)}
    with pytest.raises(RequestError, match="seed: expected 1 rows, got 2"):
        list(prompts_of(inputs, excludes_input=True))


@pytest.mark.parametrize("name", ["input_ids", "input_lengths", "request_output_len"])
def test_missing_tensor_is_named(name: str) -> None:
    inputs = inputs_of()
    del inputs[name]
    with pytest.raises(RequestError, match=f"{name}: a value is required"):
        list(prompts_of(inputs, excludes_input=True))


def test_seed_beyond_the_range_is_named_by_its_tensor() -> None:
    with pytest.raises(RequestError, match=r"^seed: expected from 0 to"):
        params_of(seed=2**64 - 1)


def test_prompt_is_left_out_as_the_request_says_else_as_the_model_is_set() -> None:
    for default in (True, False):
        (one,) = prompts_of(inputs_of(), excludes_input=default)
        assert one.params.exclude_input == default
        (one,) = prompts_of(inputs_of(exclude_input_in_output=not default), excludes_input=default)
        assert one.params.exclude_input != default


def test_stream_never_repeats_its_prompt() -> None:
    (one,) = prompts_of(
        inputs_of(streaming=True, exclude_input_in_output=False), excludes_input=False
    )
    assert one.params.exclude_input


def test_text_that_is_not_utf_8_is_refused_by_its_tensor() -> None:
    with pytest.raises(RequestError, match="cache_salt: expected UTF-8"):
        params_of(cache_salt=b"\xff")


@pytest.mark.parametrize("model", MODELS)
def test_what_is_not_served_is_refused_by_name_unless_it_is_neutral(model: str) -> None:
    refused = [tensor for tensor in MODELS[model].inputs if tensor.refusal is not None]
    for tensor in refused:
        assert tensor.refusal is not None
        wrong = array_of(tensor, b"x" if tensor.dtype == "BYTES" else 3)
        with pytest.raises(RequestError, match=rf"^{tensor.name}: not supported; "):
            check_refused({tensor.name: wrong}, MODELS[model])
        for value in tensor.refusal.neutral:
            check_refused({tensor.name: array_of(tensor, value)}, MODELS[model])
        check_refused({tensor.name: wrong[:, :0]}, MODELS[model])  # an empty tensor is none


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_refused_tensor_that_is_not_a_number_is_refused(bad: float) -> None:
    with pytest.raises(RequestError, match="len_penalty"):
        check_refused({"len_penalty": np.array([[bad]], np.float32)}, TENSORRT_LLM)


def test_wishes_are_those_of_the_request() -> None:
    assert not any(vars(wishes_of(inputs_of())).values())
    everything = inputs_of(
        streaming=True,
        return_log_probs=True,
        return_perf_metrics=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert all(vars(wishes_of(everything)).values())
