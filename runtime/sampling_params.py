"""What a caller may ask of one request, checked where it enters.

Invariant: a SamplingParams holds values that every engine can serve, except the loop
counts, whose upper bound only the engine directory knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from looptrt.errors import RequestError

MAX_SEED = 2**63 - 1
_MAX_INT = 2**31 - 1
_MAX_LOOPS = 2**15 - 1  # recorded depths are int16
_GREEDY_BELOW = 1e-5

_INT_RANGES = {
    "max_tokens": (1, _MAX_INT),
    "top_k": (0, _MAX_INT),
    "seed": (0, MAX_SEED),
    "noise_seed": (0, MAX_SEED),
    "loops": (1, _MAX_LOOPS),
    "prefill_loops": (1, _MAX_LOOPS),
    "priority": (-_MAX_INT, _MAX_INT),
}
_OPTIONAL = ("max_tokens", "seed", "noise_seed", "loops", "prefill_loops")
_FLOAT_RANGES = {"temperature": (0.0, 1e30), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}


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
        loops: S, loops of generated tokens; None means the model's default, or the engine's
            limit where that is lower.
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

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of("stop", stop, str))
        stop_ids = _tuple_of("stop_token_ids", self.stop_token_ids, int)
        object.__setattr__(self, "stop_token_ids", stop_ids)
        if not all(self.stop):
            raise RequestError("stop: an empty string would stop every answer")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, _MAX_INT)
        for name, (low, high) in _INT_RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check_int(name, value, low, high)
        for name, (lowest, highest) in _FLOAT_RANGES.items():
            _check_float(name, getattr(self, name), lowest, highest)
        if self.top_p == 0.0:
            raise RequestError("top_p: expected a number above 0 and at most 1, got 0")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos: expected true or false, got {self.ignore_eos!r}")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt: expected a string, got {self.cache_salt!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without a draw."""
        return self.temperature < _GREEDY_BELOW


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
    if not is_number or not low <= float(value) <= high:  # type: ignore[arg-type]
        raise RequestError(f"{name}: expected a finite number from {low} to {high}, got {value!r}")
