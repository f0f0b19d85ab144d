"""Flags of every command that starts an engine: the fields of `EngineConfig`.

Owns their names and help; leaves ranges and defaults to `EngineConfig`. Invariant: every field
of it that a person may set has one flag here, spelt with dashes or underscores.
"""

from __future__ import annotations

import argparse
from typing import Any

from looptrt.cli.terminal import byte_count
from looptrt.runtime.config import EngineConfig

_OPTIONS: tuple[tuple[str, Any, str, str], ...] = (
    ("kv_cache_bytes", byte_count, "SIZE", "KV memory (default: for the limits, at most 1GiB)"),
    ("max_batch_size", int, "N", "sequences in one step (default: as built)"),
    ("max_num_tokens", int, "N", "rows in one step (default: as built)"),
    ("max_seq_len", int, "N", "prompt and answer together (default: as built)"),
    ("max_waiting", int, "N", "requests that may wait (default: 1024)"),
    ("max_logprobs", int, "N", "log-probabilities a request may ask for (default: 1024)"),
    ("prefix_grid", int, "N", "hits and chunks end at multiples of N tokens (default: free)"),
    ("prefix_depth", str, "HOW", "pages to reuse: exact or at_least (default: exact)"),
    ("device", str, "DEVICE", "cpu, cuda or cuda:N (default: cpu)"),
    ("num_threads", int, "N", "CPU threads of the engine (default: by the model's width)"),
    ("start_timeout_s", float, "S", "how long loading may take (default: 300)"),
    ("step_timeout_s", float, "S", "how long a step may take (default: 600)"),
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags on a command's parser."""
    group = parser.add_argument_group("engine")
    for name, kind, metavar, text in _OPTIONS:
        group.add_argument(*_spellings(name), dest=name, type=kind, metavar=metavar, help=text)
    group.add_argument(
        *_spellings("enable_prefix_cache"),
        dest="enable_prefix_cache",
        action=argparse.BooleanOptionalAction,
        help="reuse the KV of equal prompt beginnings (default: yes)",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The settings that the flags ask for.

    Raises:
        EngineError: a value is out of range; names the field.
    """
    names = (*(name for name, *_ in _OPTIONS), "enable_prefix_cache")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return EngineConfig(**given)


def _spellings(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))
