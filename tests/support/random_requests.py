"""Random requests, good and bad, that a seed repeats.

Owns what is asked of an engine; leaves sending and checking to `soak`. A few cases come again
and again, so that prompts hit the prefix cache and each answer is compared many times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

VOCAB = 256
MAX_PROMPT = 70
MAX_NEW = 30
_ALPHABET = "abcde 01é客"


def pieces() -> list[str]:
    """Text of each token: one to three characters, so that stops go across tokens."""
    rng = random.Random(0)
    found = dict.fromkeys(_ALPHABET)
    while len(found) < VOCAB:
        found["".join(rng.choices(_ALPHABET, k=rng.choice((2, 3))))] = None
    return list(found)


@dataclass(frozen=True)
class Case:
    """A prompt and the fields of its SamplingParams.

    Attributes:
        number: of the case among its kind.
        is_bad: whether it must be refused.
    """

    number: int
    prompt: Any
    fields: dict[str, Any]
    is_bad: bool = False


class Cases:
    """A stream of cases, `num_cases` different ones.

    Args:
        seed: makes the same cases.
        max_loops: of the engine.
        has_gate: whether the model has an exit gate; without one there are exit criteria.
        exits: whether tokens may stop early.
        broken_token: met by a few prompts only; None where no token is broken.
    """

    def __init__(
        self,
        seed: int,
        num_cases: int,
        *,
        max_loops: int = 4,
        has_gate: bool = True,
        exits: bool = True,
        broken_token: int | None = None,
    ) -> None:
        self._seed, self._num_cases = seed, num_cases
        self._max_loops, self._has_gate, self._exits = max_loops, has_gate, exits
        self._broken = broken_token
        rng = random.Random(f"{seed}/documents")
        usual = [token for token in range(1, VOCAB) if token != broken_token]
        self._documents = [rng.choices(usual, k=MAX_PROMPT) for _ in range(3)]

    def all(self) -> list[Case]:
        """Every good case."""
        return [self._case(number) for number in range(self._num_cases)]

    def draw(self, number: int) -> Case:
        """The case of a request: a good one, or now and then one to refuse."""
        rng = random.Random(f"{self._seed}/which {number}")
        case = self._case(rng.randrange(self._num_cases))
        return case if rng.random() < 0.93 else self._bad(case, rng)

    def _case(self, number: int) -> Case:
        rng = random.Random(f"{self._seed}/case {number}")
        fields: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 3, 4, 7, 12, 20, MAX_NEW))}
        fields["noise_seed"] = rng.choice((None, None, 0, 3))
        self._add_depth(fields, rng)
        for add, chance in (
            (_add_sampling, 0.55),
            (_add_penalties, 0.15),
            (_add_masks, 0.12),
            (_add_stops, 0.4),
            (_add_scores, 0.2),
            (_add_rest, 0.3),
        ):
            if rng.random() < chance:
                add(fields, rng)
        return Case(number, self._prompt(rng), fields)

    def _prompt(self, rng: random.Random) -> list[int] | str:
        if rng.random() < 0.1:
            return "".join(rng.choices(_ALPHABET, k=rng.randrange(1, 40)))
        length = rng.choice((1, 7, 8, 9, 16, 24, 32, 40, rng.randrange(1, 50)))
        prompt = rng.choice(self._documents)[:length]
        if rng.random() < 0.3:
            prompt = prompt + rng.choices(self._documents[0], k=rng.randrange(1, 20))
        if self._broken is not None and rng.random() < 0.03:
            prompt[rng.randrange(len(prompt))] = self._broken
        return list(prompt)

    def _add_depth(self, fields: dict[str, Any], rng: random.Random) -> None:
        loops = rng.choice((None, None, None, *range(1, self._max_loops + 1)))
        if loops is not None:
            fields["loops"] = loops
        if rng.random() < 0.4:
            fields["prefill_loops"] = rng.randint(1, loops or self._max_loops)
        if not self._exits or rng.random() > 0.15:
            return
        fields["exit_kv"] = rng.choice(("last_exited", "run_all"))
        if rng.random() < 0.3:
            fields["exit_at_step"] = rng.randrange(loops or self._max_loops)
        elif self._has_gate:
            fields["exit_threshold"] = rng.choice((0.3, 0.7, 0.95))
        else:
            criterion = rng.choice(("entropy-diff", "latent-diff", "kl", "argmax-stability"))
            fields["exit_criterion"] = criterion
            fields["exit_threshold"] = 2 if criterion == "argmax-stability" else 0.3

    def _bad(self, case: Case, rng: random.Random) -> Case:
        """A case with one fault that every engine must refuse."""
        loops = case.fields.get("loops", self._max_loops)
        name, value = rng.choice(
            (
                ("loops", self._max_loops + 1),
                ("prefill_loops", loops + 1),
                ("temperature", float("nan")),
                ("max_tokens", 0),
                ("exit_at_step", loops),
                ("exit_mode", "x"),
                ("stop_token_ids", (VOCAB,)),
                ("min_tokens", 10**6),
                ("prompt", [*self._documents[0], VOCAB]),
                ("prompt", []),
                ("prompt", self._documents[0] * 3),
                ("top_k_", 3),
            )
        )
        if name == "prompt":
            fields = {k: v for k, v in case.fields.items() if k != "truncate_prompt_tokens"}
            return Case(case.number, value, fields, is_bad=True)
        return Case(case.number, case.prompt, {**case.fields, name: value}, is_bad=True)


def _add_sampling(fields: dict[str, Any], rng: random.Random) -> None:
    fields["temperature"] = rng.choice((0.5, 1.0, 1.5))
    fields["seed"] = rng.choice((0, 2**63 - 1, rng.randrange(2**63)))
    fields["top_k"] = rng.choice((0, 0, 1, 20, 10**6))
    fields["top_p"] = rng.choice((1.0, 0.9, 0.3))
    fields["min_p"] = rng.choice((0.0, 0.0, 0.02))
    fields["n"] = rng.choice((1, 1, 1, 2, 3))


def _add_penalties(fields: dict[str, Any], rng: random.Random) -> None:
    fields["repetition_penalty"] = rng.choice((1.0, 1.3, 0.8))
    fields["presence_penalty"] = rng.choice((0.0, 0.5))
    fields["frequency_penalty"] = rng.choice((0.0, -0.2))


def _add_masks(fields: dict[str, Any], rng: random.Random) -> None:
    fields["bad_words"] = ("a", (rng.randrange(VOCAB), rng.randrange(VOCAB)))
    fields["min_tokens"] = rng.randint(0, fields["max_tokens"])
    if rng.random() < 0.3:
        fields["embedding_bias"] = tuple(rng.uniform(-1, 1) for _ in range(VOCAB))


def _add_stops(fields: dict[str, Any], rng: random.Random) -> None:
    words = ("a", "b ", "c0", "客", "eé", "1ab")
    fields["stop"] = (*rng.sample(words, rng.randrange(3)), (rng.randrange(VOCAB), 5))
    fields["stop_token_ids"] = tuple(rng.sample(range(VOCAB), rng.choice((1, 10, 40))))
    fields["include_stop"] = rng.random() < 0.3
    fields["ignore_eos"] = rng.random() < 0.3


def _add_scores(fields: dict[str, Any], rng: random.Random) -> None:
    fields["logprobs"] = rng.choice((0, 3, VOCAB))
    fields["logprobs_mode"] = rng.choice(("raw", "processed"))
    if rng.random() < 0.5:
        fields["prompt_logprobs"] = rng.choice((0, 2))


def _add_rest(fields: dict[str, Any], rng: random.Random) -> None:
    fields["priority"] = rng.choice((-1, 0, 1, 5))
    fields["cache_salt"] = rng.choice((None, "", "x"))
    if rng.random() < 0.2:
        fields["truncate_prompt_tokens"] = rng.randrange(1, 20)
    if rng.random() < 0.2:
        fields["exclude_input"] = False
