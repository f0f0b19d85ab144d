"""Limits of a build: what the flags leave open, and what no engine could start with.

Owns the arithmetic of what a limit costs; leaves what it costs on a given machine to the
runtime. Invariant: limits that pass are ones that a request can be answered within.
"""

from __future__ import annotations

import torch

from looptrt.builder.build_config import BuildConfig
from looptrt.errors import BuildError
from looptrt.kv_layout import MAX_LOOPS, PlaneLayout
from looptrt.loop_spec import LoopSpec
from looptrt.manifest import BuildLimits
from looptrt.models.blocks import inverse_frequencies
from looptrt.models.files import shown

_DEFAULT_INPUT_LEN = 1024
_SHORTEST = 2  # a token of a prompt and one of an answer
_LONGEST = 2**24  # float32 tells no more positions apart
_MOST_TABLE_BYTES = 2**32  # of rotary tables, which are made while planning
_MOST_BYTES = 2**40  # of one allocation: beyond any machine
_COUNTS = {
    "max_batch_size": 2**31 - 1,
    "max_input_len": 2**31 - 1,
    "max_seq_len": 2**31 - 1,
    "max_num_tokens": 2**31 - 1,
    "tokens_per_block": 2**31 - 1,
    "opt_batch_size": 2**31 - 1,
    "opt_num_tokens": 2**31 - 1,
    "max_loops": MAX_LOOPS,
    "workers": 1024,
}


def check_counts(config: BuildConfig) -> None:
    """Check every number on its own.

    Raises:
        BuildError: one is below 1 or beyond what any engine could use.
    """
    for name, most in _COUNTS.items():
        value = getattr(config, name)
        if value is not None and value < 1:
            raise BuildError(f"--{name}: expected at least 1, got {value}")
        if value is not None and value > most:
            raise BuildError(f"--{name}: expected at most {most}, got {shown(value)}")


def build_limits(config: BuildConfig, spec: LoopSpec) -> BuildLimits:
    """The limits of an engine.

    Raises:
        BuildError: they contradict each other or the model; names the flag.
    """
    max_seq_len = config.max_seq_len or spec.max_position
    if max_seq_len > spec.max_position:
        raise BuildError(
            f"--max_seq_len {max_seq_len}: the model defines {spec.max_position} positions"
        )
    if not _SHORTEST <= max_seq_len <= _LONGEST:
        raise BuildError(
            f"--max_seq_len {max_seq_len}: expected from {_SHORTEST}, a prompt and an answer, to "
            f"{_LONGEST}, the positions that float32 tells apart"
        )
    max_input_len = config.max_input_len or min(_DEFAULT_INPUT_LEN, max_seq_len)
    if max_input_len > max_seq_len:
        raise BuildError(
            f"--max_input_len {max_input_len}: expected at most max_seq_len, {max_seq_len}"
        )
    if config.max_num_tokens < config.max_batch_size:
        raise BuildError(
            f"--max_num_tokens {config.max_num_tokens}: expected at least max_batch_size, "
            f"{config.max_batch_size}: each running request takes a token of a step"
        )
    return BuildLimits(
        max_batch_size=config.max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=config.max_num_tokens,
    )


def check_memory(spec: LoopSpec, layout: PlaneLayout, limits: BuildLimits) -> None:
    """Refuse limits of which one allocation alone is beyond any machine.

    Raises:
        BuildError: names the flag and the bytes; or the rotary tables would not be finite.
    """
    widest = max(spec.hidden_size * 2, spec.intermediate_size * 2, spec.qkv_size)
    rows = layout.num_rows * layout.num_pages(limits.max_seq_len)
    tables = 4 * limits.max_seq_len * spec.head_dim
    page = layout.units_of_page(layout.max_loops) * layout.unit_bytes
    costs = {
        "max_seq_len": ("the rotary tables", tables, _MOST_TABLE_BYTES),
        "tokens_per_block": ("one KV page of the deepest request", page, _MOST_BYTES),
        "max_batch_size": (
            "the block table or the logits",
            4 * limits.max_batch_size * max(rows, spec.vocab_size),
            _MOST_BYTES,
        ),
        "max_num_tokens": (
            "the activations of a step",
            4 * limits.max_num_tokens * widest,
            _MOST_BYTES,
        ),
    }
    values = {**vars(limits), "tokens_per_block": layout.page_size}
    for name, (what, num_bytes, most) in costs.items():
        if num_bytes > most:
            raise BuildError(
                f"--{name} {values[name]}: {what} would take {num_bytes} bytes, expected at most "
                f"{most}; choose a lower --{name}"
            )
    if not bool(torch.isfinite(inverse_frequencies(spec) * limits.max_seq_len).all()):
        raise BuildError(
            f"rope base {spec.rope.base:g} and its scaling: the rotation of {limits.max_seq_len} "
            "positions is not finite"
        )
