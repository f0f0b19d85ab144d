"""The task of the tiny models: multi-hop look-up, and its split into training and held out.

A prompt is facts `x=y;`, three letters to resolve after `?`, and `>`; the answer repeats
each letter followed by the digit it leads to. `python examples/lookup_task.py 5` prints
held-out samples. Invariant: equal seeds give equal samples, on every Python.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from random import Random

MAX_HOPS = 4
MIN_FACTS, MAX_FACTS = 6, 10
HELD_OUT_SEED = 20260001
NUM_ANSWER_TOKENS = 7  # six characters and <eos>
BOS, EOS = 1, 2
TOKEN_OF = {
    character: token
    for token, character in enumerate(string.digits + string.ascii_lowercase + "=;?>", start=4)
}


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        hops: facts followed for the hardest of the three letters.
        query_hops: facts followed for each letter, in the order of the query.
    """

    prompt: str
    answer: str
    hops: int
    query_hops: list[int]


@dataclass(frozen=True)
class _Node:
    depth: int
    value: str
    root: str


def encode(text: str) -> list[int]:
    """Token ids of a text of the task, without `<bos>`."""
    return [TOKEN_OF[character] for character in text]


def draw(
    random: Random,
    max_hops: int = MAX_HOPS,
    facts: tuple[int, int] = (MIN_FACTS, MAX_FACTS),
    hardest_share: float = 0.0,
) -> Sample:
    """Draw one sample; the order of calls on `random` is part of the task.

    Args:
        random: the source; the task as evaluated uses the default of every other argument.
        max_hops: H, the longest chain of facts.
        facts: fewest and most facts, at least H + 2.
        hardest_share: share of samples that are made H hops hard, for training.
    """
    hops = random.randint(1, max_hops)
    if hardest_share and random.random() < hardest_share:
        hops = max_hops
    num_facts = random.randint(*facts)
    letters = random.sample(string.ascii_lowercase, num_facts)
    digits = iter(random.sample(string.digits, 10))
    nodes: list[_Node] = []
    for i in range(num_facts):
        parent = _draw_parent(random, nodes, i, max_hops)
        if parent is None:
            digit = next(digits)
            nodes.append(_Node(1, digit, digit))
        else:
            above = nodes[parent]
            nodes.append(_Node(above.depth + 1, letters[parent], above.root))
    order = list(range(num_facts))
    random.shuffle(order)
    hardest = random.choice([i for i, node in enumerate(nodes) if node.depth == hops])
    others = [i for i, node in enumerate(nodes) if node.depth <= hops and i != hardest]
    query = [hardest, *random.sample(others, 2)]
    random.shuffle(query)
    facts_text = "".join(f"{letters[i]}={nodes[i].value};" for i in order)
    return Sample(
        prompt=f"{facts_text}?{''.join(letters[i] for i in query)}>",
        answer="".join(letters[i] + nodes[i].root for i in query),
        hops=hops,
        query_hops=[nodes[i].depth for i in query],
    )


def _draw_parent(random: Random, nodes: list[_Node], i: int, max_hops: int) -> int | None:
    """Parent of node i: a chain of `max_hops`, two roots, then a tree; None for a root."""
    if i < max_hops:
        return i - 1 if i else None
    if i <= max_hops + 1 or random.random() < 0.4:
        return None
    above = [j for j, node in enumerate(nodes) if node.depth < max_hops]
    return random.choice(above) if above else None


def is_held_out(prompt: str) -> bool:
    """Whether no training loss ever saw this prompt: bucket 0 of 16."""
    return sum(i * token for i, token in enumerate(encode(prompt), start=1)) % 16 == 0


def held_out() -> Iterator[Sample]:
    """Held-out samples in their fixed order, without end."""
    random = Random(HELD_OUT_SEED)
    samples = (draw(random) for _ in count())
    return (sample for sample in samples if is_held_out(sample.prompt))


def load_samples(path: Path) -> list[Sample]:
    """Samples of a JSON-lines file such as data/heldout_eval.jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Sample(**json.loads(line)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print held-out samples as JSON lines.")
    parser.add_argument("count", type=int, nargs="?", default=5)
    for sample in islice(held_out(), parser.parse_args().count):
        print(json.dumps(asdict(sample)))


if __name__ == "__main__":
    main()
