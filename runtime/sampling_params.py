"""What a caller may ask of one request, checked where it enters.

Invariant: a SamplingParams holds values that every engine can serve, except those whose
bounds only the engine directory knows: loop counts, token ids, the kind of exit.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np

from looptrt.errors import RequestError

MAX_SEED = 2**63 - 1
_MAX_INT = 2**31 - 1
_MAX_STOP_IDS = 256
_MAX_WORDS = {"stop": 64, "bad_words": 1024}
_MAX_WORD_LEN = 1024
_MAX_LOOPS = 2**15 - 1  # recorded depths are int16
_MAX_NUMBER = 1e30  # so that no product of two values nears the end of float64
_GREEDY_BELOW = 1e-5

LogprobsMode = Literal["raw", "processed"]
ExitCriterion = Literal["entropy-diff", "latent-diff", "kl", "argmax-stability"]
ExitMode = Literal["float32", "reference"]
ExitKv = Literal["last_exited", "run_all"]
Word = str | tuple[int, ...]

_INT_RANGES = {
    "n": (1, _MAX_INT),
    "max_tokens": (1, _MAX_INT),
    "min_tokens": (0, _MAX_INT),
    "top_k": (0, _MAX_INT),
    "seed": (0, MAX_SEED),
    "logprobs": (0, _MAX_INT),
    "prompt_logprobs": (0, _MAX_INT),
    "truncate_prompt_tokens": (1, _MAX_INT),
    "noise_seed": (0, MAX_SEED),
    "loops": (1, _MAX_LOOPS),
    "prefill_loops": (1, _MAX_LOOPS),
    "exit_at_step": (0, _MAX_LOOPS - 1),
    "priority": (-_MAX_INT, _MAX_INT),
}
_FLOAT_RANGES = {
    "temperature": (0.0, _MAX_NUMBER),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, _MAX_NUMBER),
    "presence_penalty": (-_MAX_NUMBER, _MAX_NUMBER),
    "frequency_penalty": (-_MAX_NUMBER, _MAX_NUMBER),
    "exit_threshold": (0.0, _MAX_NUMBER),
}
_CHOICES = {
    "logprobs_mode": get_args(LogprobsMode),
    "exit_criterion": get_args(ExitCriterion),
    "exit_mode": get_args(ExitMode),
    "exit_kv": get_args(ExitKv),
}
_OPTIONAL = {
    *("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"),
    *("noise_seed", "loops", "prefill_loops"),
    *("exit_at_step", "exit_threshold", "exit_criterion"),
}
_ABOVE_ZERO = ("top_p", "repetition_penalty")
_FLAGS = ("ignore_eos", "include_stop", "skip_special_tokens", "exclude_input")

_NO_BEAMS = "there is no beam search; answers are sampled"
_REASONS = {
    "best_of": "answers are not ranked; ask for n of them and choose",
    "use_beam_search": _NO_BEAMS,
    "beam_width_array": _NO_BEAMS,
    "beam_search_diversity_rate": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "no_repeat_ngram_size": "use repetition_penalty or bad_words",
    "top_p_min": "top_p does not decay",
    "top_p_decay": "top_p does not decay",
    "top_p_reset_ids": "top_p does not decay",
    "logits_processor": "no code of a request runs in the engine; see embedding_bias, bad_words",
    "logits_processors": "no code of a request runs in the engine; see embedding_bias, bad_words",
    "guided_decoding": "answers are not constrained by a grammar",
    "return_context_logits": "logits stay in the engine; use prompt_logprobs",
    "return_generation_logits": "logits stay in the engine; use logprobs",
    "end_id": "the engine directory holds it; add others by stop_token_ids",
    "pad_id": "nothing is padded",
    "bad": "it is called bad_words",
    "bad_token_ids": "give them to bad_words, as lists of one id",
    "logit_bias": "it is called embedding_bias, with a number for each token of the vocabulary",
    "random_seed": "it is called seed",
    "max_new_tokens": "it is called max_tokens",
    "min_length": "it is called min_tokens",
    "include_stop_str_in_output": "it is called include_stop",
    "exclude_input_from_output": "it is called exclude_input",
    "num_return_sequences": "it is called n",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping, output and depth of one request.

    Args:
        n: answers to the prompt, each with its own draws: answer i takes the seed `seed + i`
            modulo 2**63, or a fresh one. If one is refused, all are.
        max_tokens: new tokens at most; None means up to the engine's max_seq_len.
        min_tokens: tokens that come before the model's end ids, a stop id or the end of a
            stop string or sequence may; at most `max_tokens`.
        temperature: 0 is greedy; values below 1e-5 are treated as 0.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p.
        min_p: drop tokens below min_p times the probability of the most likely one.
        repetition_penalty: logits above 0 are divided by it, others multiplied, for each
            token of prompt and answer; 1 does nothing (Hugging Face's rule).
        presence_penalty: taken off the logit of each token that the answer holds.
        frequency_penalty: taken off as often as the answer holds the token (OpenAI's rules).
        bad_words: texts and lists of token ids that the answer never completes: the last
            token is masked wherever prompt and answer end in all before it. A text stands
            for its encoding with and without a space in front; other ways to split it into
            tokens stay possible. Where masks leave no token, they do not apply. At most 1024,
            each of at most 1024 characters or ids.
        embedding_bias: a finite number for each token of the vocabulary, added to the logits
            as float32.
        seed: from 0 to 2**63 - 1; the draw for a token depends on nothing but the seed and
            the token's position. None draws a fresh seed for the request.
        logprobs: report the log-probability of each generated token and of this many most
            likely ones; those beyond the vocabulary or of probability 0 are left out.
        prompt_logprobs: the same for each prompt token but the first, always `raw`, at the
            depth of the prompt: a token's value comes from `prefill_loops` loops.
        logprobs_mode: `raw` is the float32 log-softmax of the model's own logits;
            `processed` the distribution that the token was drawn from, after everything
            below (for a greedy answer: the token alone).
        stop: texts, or lists of token ids, that end the answer; they are no part of its text.
            At most 64, each of at most 1024 characters or ids.
        stop_token_ids: token ids that end the answer, beside the model's own; at most 256.
        ignore_eos: stop for none of the model's ids nor `stop_token_ids`.
        include_stop: keep what ended the answer in its text.
        skip_special_tokens: leave special tokens out of the text.
        exclude_input: False puts the prompt in front of the answer's text and token ids.
        truncate_prompt_tokens: keep only this many of the prompt's last tokens. A text that
            is 16 times longer than any prompt could be is refused all the same.
        loops: S, loops of generated tokens; None means the model's default, or the engine's
            limit where that is lower.
        prefill_loops: P, loops of prompt tokens but the last; None means `loops`.
        exit_at_step: stop each generated token after this loop, counted from 0; comes before
            `exit_threshold` and `exit_criterion`.
        exit_threshold: for models with an exit gate: stop a generated token once its
            cumulative exit probability reaches this; 1 or more runs all loops. With an
            `exit_criterion`: that criterion's threshold.
        exit_criterion: for models without a gate, stop a generated token once a loop changes
            less than the threshold: `entropy-diff` of the output distribution (1e-3),
            `latent-diff` of the state, relative to its norm (0.03), `kl` between the output
            distributions (1e-3); or once the best token has stayed the same for
            `argmax-stability` loops (5).
        exit_mode: of the gate: `float32` sums, or the `reference`'s, in the model's dtype,
            where every threshold counts, also 1, its default there.
        exit_kv: what a token that stopped early leaves for later ones: `last_exited`, its
            deepest plane, or `run_all`: the loops go on, only the logits are early.
        noise_seed: seed of the random initial state; None means the engine's constant (0),
            so that equal prompts share cached pages.
        cache_salt: requests share cached pages only under equal salts.
        priority: higher runs first; equal priorities run in order of arrival.

    Order of operations: embedding_bias, bad_words, min_tokens, repetition_penalty,
    frequency_penalty, presence_penalty; then temperature, top_k, top_p, min_p, renormalise,
    draw.

    Raises:
        RequestError: a value is not finite, out of range or of the wrong type, or a field is
            unknown.
    """

    n: int = 1
    max_tokens: int | None = 32
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[Word, ...] = ()
    embedding_bias: tuple[float, ...] | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    stop: tuple[Word, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    exclude_input: bool = True
    truncate_prompt_tokens: int | None = None
    loops: int | None = None
    prefill_loops: int | None = None
    exit_at_step: int | None = None
    exit_threshold: float | None = None
    exit_criterion: ExitCriterion | None = None
    exit_mode: ExitMode = "float32"
    exit_kv: ExitKv = "last_exited"
    noise_seed: int | None = None
    cache_salt: str | None = None
    priority: int = 0

    def __new__(cls, /, **fields: Any) -> Self:  # noqa: ANN401 - __init__ has the types
        """Refuse fields that are not there, with the reason where there is one."""
        for name in fields.keys() - cls.__dataclass_fields__.keys():
            reason = _REASONS.get(name)
            raise RequestError(f"{name:.80}: not supported" + (f"; {reason}" if reason else ""))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            is_choice = isinstance(value, str) and value in choices
            if not is_choice and not (value is None and name in _OPTIONAL):
                raise RequestError(f"{name}: expected {' or '.join(choices)}, got {shown(value)}")
        self._check_numbers()
        self._check_words()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                value = getattr(self, name)
                raise RequestError(f"{name}: expected true or false, got {shown(value)}")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt: expected a string, got {shown(self.cache_salt)}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without a draw."""
        return self.temperature < _GREEDY_BELOW

    def _check_numbers(self) -> None:
        for name, (low, high) in _INT_RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check_int(name, value, low, high)
        for name, (lowest, highest) in _FLOAT_RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check_float(name, value, lowest, highest)
                object.__setattr__(self, name, float(value))
        for name in _ABOVE_ZERO:
            if getattr(self, name) == 0:
                raise RequestError(f"{name}: expected a number above 0, got 0")
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens: expected at most max_tokens {self.max_tokens}, got {self.min_tokens}"
            )
        steps = self.exit_threshold if self.exit_criterion == "argmax-stability" else None
        if steps is not None and (steps < 1 or steps != int(steps)):
            raise RequestError(
                "exit_threshold: expected a number of loops, an integer of at least 1, for "
                f"exit_criterion argmax-stability, got {steps:g}"
            )

    def _check_words(self) -> None:
        """Bring lists to tuples, so that parameters can be compared and hashed."""
        for name in ("stop", "bad_words"):
            values = getattr(self, name)
            words = _entries(name, (values,) if isinstance(values, str) else values)
            object.__setattr__(self, name, tuple(_word(name, word) for word in words))
            _check_count(name, words, _MAX_WORDS[name], "entries")
            for word in getattr(self, name):
                _check_count(name, word, _MAX_WORD_LEN, "characters or token ids in an entry")
        stop_ids = tuple(dict.fromkeys(_token_ids("stop_token_ids", self.stop_token_ids)))
        _check_count("stop_token_ids", stop_ids, _MAX_STOP_IDS, "different ids")
        object.__setattr__(self, "stop_token_ids", stop_ids)
        if self.embedding_bias is not None:
            object.__setattr__(self, "embedding_bias", _finite_floats(self.embedding_bias))


def _entries(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, tuple | list):
        raise RequestError(f"{name}: expected a list, got {shown(values)}")
    return tuple(values)


def _word(name: str, word: object) -> Word:
    """A text, or a sequence of token ids."""
    if not isinstance(word, str | tuple | list):
        raise RequestError(f"{name}: expected texts or lists of token ids, got {shown(word)}")
    if len(word) == 0:
        raise RequestError(f"{name}: an empty entry is everywhere in every answer")
    return word if isinstance(word, str) else _token_ids(name, word)


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    ids = []
    for value in _entries(name, values):
        token_id = int(value) if isinstance(value, np.integer) else value
        _check_int(name, token_id, 0, _MAX_INT)
        ids.append(token_id)
    return tuple(ids)


def _finite_floats(values: object) -> tuple[float, ...]:
    """Numbers as float32 holds them."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"embedding_bias: expected a list of numbers: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise RequestError("embedding_bias: expected a list with a number for each token")
    bad = array[~(np.abs(array.astype(np.float64)) <= _MAX_NUMBER)]
    if bad.size:
        raise RequestError(
            f"embedding_bias: expected finite numbers from {-_MAX_NUMBER:g} to {_MAX_NUMBER:g}, "
            f"got {bad[0]}"
        )
    return tuple(array.astype(np.float32).tolist())


def _check_count(name: str, values: Word | tuple[Word, ...], most: int, what: str) -> None:
    if len(values) > most:
        raise RequestError(f"{name}: expected at most {most} {what}, got {len(values)}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}: expected an integer from {low} to {high}, got {shown(value)}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise RequestError(
            f"{name}: expected a finite number from {low:g} to {high:g}, got {shown(value)}"
        )


def shown(value: object) -> str:
    """A value of any kind and size, in few words."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a huge {type(value).__name__}"
