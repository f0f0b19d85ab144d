"""What is asked of an engine: prompts, arrival times, conversations.

Owns their making, from a seed or a file; leaves asking to `runs`. Invariant: equal arguments
give equal requests, on every machine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

from looptrt.errors import RequestError

_LENGTH = re.compile(r"0*[1-9][0-9]{0,8}")


def random_prompts(
    count: int, num_tokens: int, vocab_size: int, *seed: int | str
) -> list[list[int]]:
    """Prompts of uniformly drawn token ids.

    Args:
        count: of prompts.
        num_tokens: of each.
        vocab_size: ids are below it.
        seed: whatever tells these prompts from others.
    """
    random = Random("/".join(map(str, ("prompts", *seed))))
    return [[random.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]


def arrival_times(rate: float, count: int, *seed: int | str) -> list[float]:
    """Seconds from the start of `count` arrivals of a Poisson process of `rate` a second."""
    random, now, times = Random("/".join(map(str, ("arrivals", *seed)))), 0.0, []
    for _ in range(count):
        now += random.expovariate(rate)
        times.append(now)
    return times


@dataclass(frozen=True)
class Lengths:
    """Prompt and answer of one kind of request, in tokens."""

    prompt: int
    answer: int

    @staticmethod
    def parse(text: str) -> Lengths:
        """Read `512:128`.

        Raises:
            RequestError: not two positive integers.
        """
        parts = text.split(":")
        if len(parts) != 2 or not all(_LENGTH.fullmatch(part) for part in parts):
            raise RequestError(f"lengths: expected PROMPT:ANSWER such as 512:128, got {text!r:.40}")
        return Lengths(*map(int, parts))


@dataclass(frozen=True)
class Question:
    """A prompt and, where its task has one, the right answer."""

    prompt: str
    answer: str | None


def read_questions(path: Path, *, need_answers: bool) -> list[Question]:
    """Read JSON lines with `prompt` and `answer`, or without answers also plain lines of text.

    Raises:
        RequestError: a line is malformed, lacks a field, or there is none; names the line.
    """
    try:
        # Lines as JSON lines have them; a text may hold what else ends a line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 text: {error}") from None
    questions = [
        _question(line.removesuffix("\r"), f"{path}:{number}", need_answers=need_answers)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise RequestError(f"{path}: there is no prompt")
    return questions


def _question(line: str, where: str, *, need_answers: bool) -> Question:
    if not line.lstrip().startswith("{"):
        if need_answers:
            raise RequestError(f"{where}: expected a JSON object with prompt and answer")
        return Question(line, None)
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON: {error}") from None
    for name in ("prompt", "answer") if need_answers else ("prompt",):
        if not isinstance(data.get(name), str):
            raise RequestError(f"{where}: expected a text under {name!r}")
    return Question(data["prompt"], data.get("answer"))


@dataclass(frozen=True)
class Conversation:
    """What a user says, in token ids; the answers come in between.

    Attributes:
        system: what all conversations begin with.
        turns: what the user adds, turn by turn.
    """

    system: list[int]
    turns: list[list[int]]


def conversations(
    count: int, num_turns: int, vocab_size: int, *, system: int, turn: int, seed: int | str
) -> list[Conversation]:
    """Conversations that share their first `system` tokens and add `turn` tokens a turn.

    The first turn's user text comes on top of the system prompt.
    """
    (shared,) = random_prompts(1, system, vocab_size, "system", seed)
    return [
        Conversation(shared, random_prompts(num_turns, turn, vocab_size, "turns", seed, index))
        for index in range(count)
    ]
