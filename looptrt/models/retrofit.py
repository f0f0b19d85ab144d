"""Retrofitted recurrence: recurrent OLMo-2 and recurrent Llama, in Raven's layout.

Owns their config keys; leaves telling them apart and their checkpoint names to `raven`.
Invariant: what the reference reads is read from where it reads it: rope_theta and not
rope_base, init_values and not the formulas behind them, whatever stale values stand beside.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from looptrt.loop_spec import (
    BlockKind,
    InitialState,
    LoopSpec,
    RopeScaling,
    RopeScalingKind,
    RopeSpec,
    RopeStyle,
)
from looptrt.models.family import ConfigReader

OLMO = "recurrent OLMo-2"
LLAMA = "recurrent Llama"
RANDOM = "random"

_STATES: dict[str, dict[str, Any]] = {
    RANDOM: {"initial_state": InitialState.RANDOM},
    "embed-init": {"initial_state": InitialState.PRELUDE},
    "skip-adapter": {"initial_state": InitialState.PRELUDE, "skip_first_adapter": True},
}

_logger = logging.getLogger(__name__)


def expect_known_parts(read: ConfigReader) -> None:
    """Refuse a Raven config that names parts which no variant here has."""
    read.expect("bias", False)
    read.expect("nonlin_name", "SiLU")
    read.expect("block_class_name", "SandwichBlock")
    read.expect("mlp_class_name", "GatedMLP")
    read.expect("injection_type", "linear")
    read.expect("state_init", "like-init")
    read.expect("test_time_noise", 0)


def parse(read: ConfigReader, architecture: str, variant: str) -> LoopSpec:
    """Read the config of a retrofitted model.

    Args:
        read: the config.
        architecture: the architecture's name.
        variant: `OLMO` or `LLAMA`.

    Raises:
        CheckpointError: a key is missing, malformed or asks for what is not supported.
    """
    expect_known_parts(read)
    read.expect("qk_bias", False)
    read.expect("partial_rotary_factor", 1.0)
    read.expect("rope_parameters")
    is_olmo = variant == OLMO
    hidden = read.integer("n_embd", "hidden_size")
    num_heads = read.integer("n_heads", "num_attention_heads")
    init_values = ConfigReader(read.mapping("init_values"), f"{read.where}: init_values")
    return read.spec(
        architecture=architecture,
        vocab_size=read.integer("padded_vocab_size", default=read.integer("vocab_size")),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=read.integer("num_key_value_heads", default=num_heads),
        head_dim=_head_dim(read, hidden, num_heads, is_free=is_olmo),
        max_position=read.integer("max_position_embeddings"),
        prelude_layers=read.integer("n_layers_in_prelude"),
        core_layers=read.integer("n_layers_in_recurrent_block"),
        coda_layers=read.integer("n_layers_in_coda"),
        num_loops=read.integer("mean_recurrence"),
        block=BlockKind.POST_NORM if is_olmo else BlockKind.PRE_NORM,
        norm_eps=read.number("norm_eps", default=1e-6),
        rope=RopeSpec(
            RopeStyle.HALF_SPLIT,
            read.number("rope_theta"),
            in_float32=is_olmo,
            scaling=rope_scaling(read),
        ),
        embedding_scale=init_values.number("embed_scale", default=math.sqrt(hidden)),
        adapter=True,
        norm_before_head=True,
        qk_norm=is_olmo,
        packed_projections=True,
        tied_head=read.flag("tie_embeddings", default=True),
        **_initial_state(read, init_values, variant),
    )


def _head_dim(read: ConfigReader, hidden: int, num_heads: int, *, is_free: bool) -> int:
    """The hidden size shared out among the heads; a config may say otherwise if it is free."""
    if is_free and read.config.get("head_dim") is not None:
        return read.integer("head_dim")
    if hidden % num_heads:
        raise read.error("n_embd", f"a multiple of {num_heads} heads", hidden)
    read.expect("head_dim", hidden // num_heads)
    return hidden // num_heads


def _initial_state(read: ConfigReader, init_values: ConfigReader, variant: str) -> dict[str, Any]:
    """Fields of the spec that say how a token starts."""
    mode = read.word("initial_state_mode", default=RANDOM)
    if mode not in _STATES:
        raise read.error("initial_state_mode", " or ".join(map(repr, _STATES)), mode)
    fields = _STATES[mode]
    if mode == RANDOM:
        width = read.integer("n_embd", "hidden_size")
        std = init_values.number("std", default=math.sqrt(2 / (5 * width)), may_be_zero=True)
        init_scale = read.number("init_scale", default=1.0, may_be_zero=True)
        return {
            **fields,
            "state_std": std * init_scale,
            "state_scale": init_values.number("embed_scale", default=math.sqrt(width)),
        }
    if variant == LLAMA:
        _logger.warning(
            "%s: initial_state_mode %s is followed; the reference's Llama file does not read the "
            "key and starts from noise",
            read.where,
            mode,
        )
    return fields


def rope_scaling(read: ConfigReader) -> RopeScaling | None:
    """The stretch that `rope_scaling` asks for, None for none.

    Raises:
        CheckpointError: another type than default, linear or llama3, or a bad number.
    """
    given = read.mapping("rope_scaling")
    if not given:
        return None
    nested = ConfigReader(given, f"{read.where}: rope_scaling")
    kind = nested.word("rope_type", "type")
    if kind == "default":
        return None
    if kind == RopeScalingKind.LINEAR:
        return RopeScaling(RopeScalingKind.LINEAR, nested.number("factor"))
    if kind != RopeScalingKind.LLAMA3:
        raise nested.error("rope_type", "'default', 'linear' or 'llama3'", kind)
    low, high = nested.number("low_freq_factor"), nested.number("high_freq_factor")
    if low >= high:
        raise nested.error("high_freq_factor", f"more than low_freq_factor, {low}", high)
    return RopeScaling(
        RopeScalingKind.LLAMA3,
        factor=nested.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=nested.integer("original_max_position_embeddings"),
    )
