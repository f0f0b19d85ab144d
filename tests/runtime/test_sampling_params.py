"""Values that no engine can serve are refused by name (cases C7, C8, C11)."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

from looptrt.errors import RequestError
from looptrt.runtime.sampling_params import MAX_SEED, SamplingParams

NEVER = (math.nan, math.inf, -math.inf, -1, "0.5", None, True, [0.5], 1j)


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [*NEVER, 10**400, 10**5000], ids=lambda v: type(v).__name__)
def test_number_that_is_not_finite_or_not_a_number_is_refused(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{field}: expected a finite number"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "is_good"),
    [
        ("temperature", 1e-30, True),
        ("temperature", 0, True),
        ("temperature", 1e30, True),
        ("temperature", 1e31, False),
        ("top_p", 1e-30, True),
        ("top_p", 0, False),
        ("top_p", 1, True),
        ("top_p", 1e30, False),
        ("min_p", 1e-30, True),
        ("min_p", 0, True),
        ("min_p", 1e30, False),
        ("top_k", 0, True),
        ("top_k", 2**31 - 1, True),
        ("top_k", -1, False),
        ("top_k", -2, False),
        ("top_k", 2**31, False),
        ("top_k", 1.0, False),
        ("max_tokens", 0, False),
        ("max_tokens", -1, False),
        ("max_tokens", 1, True),
        ("max_tokens", None, True),
        ("max_tokens", 10**9, True),
        ("max_tokens", "3", False),
        ("seed", 0, True),
        ("seed", MAX_SEED, True),
        ("seed", MAX_SEED + 1, False),
        ("seed", -1, False),
        ("noise_seed", MAX_SEED, True),
        ("noise_seed", -1, False),
        ("loops", 1, True),
        ("loops", 0, False),
        ("loops", -1, False),
        ("loops", "3", False),
        ("prefill_loops", 0, False),
        ("priority", -5, True),
        ("priority", 0.5, False),
        ("ignore_eos", 1, False),
        ("cache_salt", "", True),
        ("cache_salt", b"x", False),
        ("n", 1, True),
        ("n", 0, False),
        ("n", None, False),
        ("n", "2", False),
        ("min_tokens", 0, True),
        ("min_tokens", 32, True),
        ("min_tokens", 33, False),
        ("min_tokens", -1, False),
        ("repetition_penalty", 0, False),
        ("repetition_penalty", 1e-30, True),
        ("repetition_penalty", 1e30, True),
        ("repetition_penalty", 1e31, False),
        ("logprobs", 0, True),
        ("logprobs", 2**31 - 1, True),
        ("logprobs", -1, False),
        ("logprobs", 1.0, False),
        ("logprobs", True, False),
        ("prompt_logprobs", 0, True),
        ("prompt_logprobs", -1, False),
        ("logprobs_mode", "processed", True),
        ("logprobs_mode", "cooked", False),
        ("logprobs_mode", None, False),
        ("truncate_prompt_tokens", 1, True),
        ("truncate_prompt_tokens", 0, False),
        ("include_stop", 1, False),
        ("skip_special_tokens", None, False),
        ("exclude_input", "yes", False),
        ("exit_threshold", 0, True),
        ("exit_threshold", 1e30, True),
        ("exit_at_step", 0, True),
        ("exit_at_step", -1, False),
        ("exit_at_step", 1.0, False),
        ("exit_criterion", "cosine", False),
        ("exit_criterion", np.zeros(2), False),
        ("exit_mode", "bf16", False),
        ("exit_mode", None, False),
        ("exit_kv", "latest", False),
        ("bad_words", ["a", [3, 4]], True),
        ("bad_words", "a", True),
        ("bad_words", [""], False),
        ("bad_words", [[]], False),
        ("bad_words", [3], False),
        ("bad_words", [[-1]], False),
        ("bad_words", [[0.5]], False),
        ("bad_words", [[True]], False),
        ("bad_words", [np.array(3)], False),
        ("bad_words", np.array(3), False),
        ("bad_words", 3, False),
        ("stop", [[3, 4], "a"], True),
        ("stop", [[]], False),
        ("stop", {"a"}, False),
        ("stop_token_ids", 5, False),
        ("stop_token_ids", [[5]], False),
        ("stop_token_ids", "5", False),
        ("stop", ("",), False),
        ("stop", (3,), False),
        ("stop", None, False),
        ("stop_token_ids", (-1,), False),
        ("stop_token_ids", (2**31,), False),
        ("stop_token_ids", ("a",), False),
        ("stop_token_ids", [0, 5], True),
    ],
)
def test_edges(field: str, value: object, is_good: bool) -> None:
    if is_good:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
        return
    with pytest.raises(RequestError, match=rf"{field}: "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_penalty_of_the_answer_is_any_finite_number(field: str) -> None:
    for value in (math.nan, math.inf, -math.inf, "0.5", None, True, 1e31):
        with pytest.raises(RequestError, match=f"{field}: expected a finite number"):
            SamplingParams(**{field: value})
    for good in (-1, 0, 1e-30, 1e30, -2.5):
        SamplingParams(**{field: good})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, "0.5", True, [0.5]], ids=repr)
def test_exit_threshold_that_is_not_finite_or_below_0_is_refused(value: object) -> None:
    for fields in ({}, {"exit_at_step": 1}, {"exit_criterion": "kl"}, {"exit_mode": "reference"}):
        with pytest.raises(RequestError, match="exit_threshold: expected a finite number"):
            SamplingParams(exit_threshold=value, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, 0.5, 2.5])
def test_argmax_stability_counts_whole_loops(steps: float) -> None:
    with pytest.raises(RequestError, match="exit_threshold: expected a number of loops"):
        SamplingParams(exit_criterion="argmax-stability", exit_threshold=steps)
    SamplingParams(exit_criterion="argmax-stability", exit_threshold=2.0)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("best_of", "ask for n of them"),
        ("use_beam_search", "there is no beam search"),
        ("include_stop_str_in_output", "it is called include_stop"),
        ("max_new_tokens", "it is called max_tokens"),
        ("no_such_field", "not supported"),
    ],
)
def test_unknown_field_is_refused_with_the_reason(field: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"{field}: not supported.*{reason}|{field}: {reason}"):
        SamplingParams(**{field: 2})


@pytest.mark.parametrize(
    "bias",
    [
        *([math.nan], [0.0, math.inf], [1e31], [10**400], ["a"], [None], [[1.0], [2.0]]),
        *("abc", b"abc", 3.0, {}, [True], [1j], torch.zeros(2, dtype=torch.bfloat16)),
    ],
    ids=str,
)
def test_bias_that_is_no_list_of_finite_numbers_is_refused(bias: object) -> None:
    with pytest.raises(RequestError, match="embedding_bias: expected"):
        SamplingParams(embedding_bias=bias)  # type: ignore[arg-type]


def test_bias_is_kept_as_float32_whatever_holds_it() -> None:
    values = [0.1, -2.0, 3.0]
    rounded = tuple(np.array(values, np.float32).tolist())
    for bias in (values, tuple(values), np.array(values), torch.tensor(values)):
        assert SamplingParams(embedding_bias=bias).embedding_bias == rounded  # type: ignore[arg-type]
    assert SamplingParams(embedding_bias=[1, 2]).embedding_bias == (1.0, 2.0)  # type: ignore[arg-type]


def test_parameters_are_compared_hashed_and_copied_by_value() -> None:
    def make() -> SamplingParams:
        return SamplingParams(stop=["a", [1, 2]], bad_words=["b"], embedding_bias=[1.0])  # type: ignore[arg-type]

    assert make() == make() == copy.deepcopy(make()) == pickle.loads(pickle.dumps(make()))
    assert hash(make()) == hash(make())
    assert dataclasses.replace(make(), n=3).stop == ("a", (1, 2))


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0, True), (1e-30, True), (1e-5, False), (1.0, False)]
)
def test_tiny_temperature_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_integer_of_any_size_is_named_and_refused() -> None:
    for field in ("max_tokens", "seed", "loops"):
        with pytest.raises(RequestError, match=f"{field}: expected an integer from .*, got a huge"):
            SamplingParams(**{field: 10**5000})
    for field in ("stop_token_ids", "bad_words", "stop"):
        for value in (10**5000, [10**5000], [[10**5000]]):
            with pytest.raises(RequestError, match=f"{field}: "):
                SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_stops_are_bounded_and_counted_once() -> None:
    assert SamplingParams(stop_token_ids=[5, 7, 5] * 300).stop_token_ids == (5, 7)  # type: ignore[arg-type]
    SamplingParams(stop_token_ids=tuple(range(256)), stop=("a" * 1024, (1,) * 1024) * 32)
    for field, value, message in (
        ("stop_token_ids", range(257), "at most 256 different ids, got 257"),
        ("stop", ["a"] * 65, "at most 64 entries, got 65"),
        ("stop", ["a" * 1025], "at most 1024 characters or token ids in an entry, got 1025"),
        ("stop", [[1] * 1025], "at most 1024 characters or token ids in an entry, got 1025"),
    ):
        with pytest.raises(RequestError, match=f"{field}: expected {message}"):
            SamplingParams(**{field: list(value)})  # type: ignore[call-overload]


def test_one_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
