"""What a caller may ask of one request, checked where it enters.

Invariant: a SamplingParams holds values that every engine can serve, except the loop
counts, whose upper bound only the engine directory knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from looptrt.errors import RequestError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and depth of one request.

    Args:
        max_tokens: new tokens at most; None means up to the engine's max_seq_len.
        temperature: 0 is greedy; values below 1e-5 are treated as 0.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p.
        min_p: drop tokens below min_p times the probability of the most likely one.
        seed: from 0 to 2**63 - 1; the draw for a token depends on nothing but the seed and
            the token's position. None draws a fresh seed for the request.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: token ids that end the answer, beside the model's own.
        ignore_eos: stop for none of the model's ids nor `stop_token_ids`.
        loops: S, loops of generated tokens; None means the model's default.
        prefill_loops: P, loops of prompt tokens but the last; None means `loops`.
        noise_seed: seed of the random initial state; None means the engine's constant (0),
            so that equal prompts share cached pages.
        cache_salt: requests share cached pages only under equal salts.
        priority: higher runs first; equal priorities run in order of arrival.

    Order of operations: temperature, top_k, top_p, min_p, renormalise, draw.

    Raises:
        RequestError: a value is not finite, out of range or of the wrong type.
    """

    max_tokens: int | None = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    loops: int | None = None
    prefill_loops: int | None = None
    noise_seed: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    _greedy_below: float = field(default=1e-5, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", _tuple_of("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", _tuple_of("stop_token_ids", self.stop_token_ids, int))
        if any(not text for text in self.stop):
            raise RequestError("stop: an empty string would stop every answer")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_float("temperature", self.temperature, 0.0, 1e30)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p: expected a number above 0 and at most 1, got 0")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        for name in ("seed", "noise_seed"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_SEED)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)
        for name in ("loops", "prefill_loops"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, 2**15 - 1)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos: expected true or false, got {self.ignore_eos!r}")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt: expected a string, got {self.cache_salt!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without a draw."""
        return self.temperature < self._greedy_below


def _tuple_of(name: str, values: object, kind: type) -> tuple[object, ...]:
    if not isinstance(values, tuple | list):
        raise RequestError(f"{name}: expected a list, got {values!r}")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RequestError(f"{name}: expected {kind.__name__} entries, got {value!r}")
    return tuple(values)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}: expected an integer from {low} to {high}, got {value!r}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type]
        raise RequestError(f"{name}: expected a finite number from {low} to {high}, got {value!r}")
