"""Flags of every command that starts an engine: the fields of `EngineConfig`.

Owns their names and help; leaves ranges and defaults to `EngineConfig`. Invariant: every field
of it that a person may set has one flag here, spelt with dashes or underscores.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from looptrt.cli.terminal import byte_count
from looptrt.runtime.config import EngineConfig

_OPTIONS: tuple[tuple[str, Any, str, str], ...] = (
    ("kv_cache_bytes", byte_count, "SIZE", "KV memory (default: CPU for the limits, up to 1GiB)"),
    (
        "kv_cache_free_gpu_memory_fraction",
        float,
        "X",
        "GPU KV memory without --kv_cache_bytes, of what weights leave free (default: 0.9)",
    ),
    ("max_batch_size", int, "N", "sequences in one step (default: as built)"),
    ("max_num_tokens", int, "N", "rows in one step (default: as built)"),
    ("max_seq_len", int, "N", "prompt and answer together (default: as built)"),
    ("max_waiting", int, "N", "requests that may wait (default: 1024)"),
    ("max_logprobs", int, "N", "log-probabilities a request may ask for (default: 1024)"),
    ("prefix_grid", int, "N", "hits and chunks end at multiples of N tokens (default: free)"),
    ("prefix_depth", str, "HOW", "pages to reuse: exact or at_least (default: exact)"),
    ("speculative_loops", int, "N", "guess at N loops, verify at all (default: no guesses)"),
    ("noise", str, "HOW", "random initial state: position or sequential (default: as built)"),
    ("device", str, "DEVICE", "auto, cpu, cuda or cuda:N (default: auto)"),
    ("backend", str, "NAME", "auto, pytorch, tensorrt or tensorrt_rtx (default: as built)"),
    ("cuda_graphs", str, "HOW", "CUDA graphs: auto, step, loop or off (default: auto)"),
    ("max_graph_rows", int, "N", "rows of the largest step that is a graph (default: 1024)"),
    ("joined_projections", str, "HOW", "q/k/v and gate/up: exact, always, never (default: exact)"),
    (
        "skinny_linear_rows",
        int,
        "N",
        "products of so few rows by our own kernel (default: 8, on a GPU)",
    ),
    ("cache_dir", str, "DIR", "what is known of this GPU's kernels (default: ~/.cache/looptrt)"),
    ("num_threads", int, "N", "CPU threads of the engine (default: by the model's width)"),
    ("start_timeout_s", float, "S", "how long loading may take (default: 300)"),
    ("step_timeout_s", float, "S", "how long a step may take (default: 600)"),
)
_SWITCHES = (
    ("enable_prefix_cache", "reuse the KV of equal prompt beginnings (default: yes)"),
    ("packed_prefill", "rows of several prompts in one step (default: yes)"),
    ("prefill_share", "whole steps for prompts that fit beside no answer (default: yes)"),
    ("look_ahead", "the next decode step planned while one runs on a GPU (default: yes)"),
    ("fused_kernels", "kernels of the plugin library on a GPU (default: yes)"),
    ("require_exact", "no start where a kernel breaks its promise of PyTorch's bits (default: no)"),
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags on a command's parser."""
    group = parser.add_argument_group("engine")
    for name, kind, metavar, text in _OPTIONS:
        group.add_argument(*_spellings(name), dest=name, type=kind, metavar=metavar, help=text)
    for name, text in _SWITCHES:
        action = argparse.BooleanOptionalAction
        group.add_argument(*_spellings(name), dest=name, action=action, help=text)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The settings that the flags ask for.

    Raises:
        EngineError: a value is out of range; names the field.
    """
    names = [name for name, *_ in (*_OPTIONS, *_SWITCHES)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "cache_dir" not in given and (cache := user_cache_dir()) is not None:
        given["cache_dir"] = cache
    return EngineConfig(**given)


def user_cache_dir() -> str | None:
    """Our folder where XDG_CACHE_HOME points; None without it."""
    root = os.environ.get("XDG_CACHE_HOME")
    return str(Path(root) / "looptrt") if root else None


def _spellings(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))
