"""The task generator against the committed evaluation file and the examples of its card."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from lookup_task import BOS, encode, held_out, is_held_out, load_samples

EXAMPLES = Path(__file__).parents[2] / "examples"
EVALUATION_FILE = EXAMPLES / "data" / "heldout_eval.jsonl"


def test_first_500_held_out_samples_are_the_evaluation_file_byte_for_byte() -> None:
    lines = [json.dumps(asdict(sample)) for sample in islice(held_out(), 500)]
    assert "\n".join(lines) + "\n" == EVALUATION_FILE.read_text()


def test_every_answer_follows_the_facts_in_as_many_hops_as_stated() -> None:
    for sample in load_samples(EVALUATION_FILE):
        facts_text, query = sample.prompt.removesuffix(">").split("?")
        facts = dict(fact.split("=") for fact in facts_text.removesuffix(";").split(";"))
        answer, hops = "", []
        for letter in query:
            value, count = facts[letter], 1
            while value in facts:
                value, count = facts[value], count + 1
            answer, hops = answer + letter + value, [*hops, count]
        assert (sample.answer, sample.query_hops, sample.hops) == (answer, hops, max(hops))
        assert is_held_out(sample.prompt)


def test_task_encoding_is_the_tokenizers_with_bos_in_front() -> None:
    sample = load_samples(EVALUATION_FILE)[0]
    for name in ("tiny-ouro", "tiny-huginn"):
        tokenizer = Tokenizer.from_file(str(EXAMPLES / name / "tokenizer.json"))
        assert tokenizer.encode(sample.prompt).ids == [BOS, *encode(sample.prompt)]
