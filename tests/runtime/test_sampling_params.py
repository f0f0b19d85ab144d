"""Values that no engine can serve are refused by name (cases C7, C8, C11)."""

from __future__ import annotations

import math

import pytest

from looptrt.errors import RequestError
from looptrt.runtime.sampling_params import MAX_SEED, SamplingParams

NEVER = (math.nan, math.inf, -math.inf, -1, "0.5", None, True, [0.5], 1j)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", NEVER, ids=repr)
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


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0, True), (1e-30, True), (1e-5, False), (1.0, False)]
)
def test_tiny_temperature_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_one_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
