"""Ouro (OuroForCausalLM): a stack of layers run several times, its final norm in every loop.

Owns Ouro's config keys and checkpoint names; leaves arithmetic to `blocks`. Invariant: what the
config asks for and we do not do is refused, never ignored.
"""

from __future__ import annotations

import logging

from looptrt.loop_spec import BlockKind, InitialState, LoopSpec, RopeSpec, RopeStyle
from looptrt.models.blocks import EMBEDDING, HEAD
from looptrt.models.family import Config, ConfigReader, Family, WeightRecipe
from looptrt.models.files import shown

ARCHITECTURE = "OuroForCausalLM"

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_NORMS = {
    "norm_1": "input_layernorm",
    "norm_2": "input_layernorm_2",
    "norm_3": "post_attention_layernorm",
    "norm_4": "post_attention_layernorm_2",
}
# What requests set here, and the values in a config that ask for nothing.
_EXITS = {
    "early_exit_threshold": ("exit_threshold", (1.0, None)),
    "early_exit_step": ("exit_at_step", (None,)),
}
# Published files say that 0 is begin, end and pad, yet a chat turn ends in <|im_end|> (case A1).
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""

_logger = logging.getLogger(__name__)


def parse_config(config: Config, where: str) -> LoopSpec:
    """Read an Ouro config.json.

    Args:
        config: the parsed file.
        where: its name, for errors.

    Raises:
        CheckpointError: a key is missing, malformed or asks for what is not supported.
    """
    read = ConfigReader(config, where)
    read.expect("hidden_act", "silu")
    read.expect("use_sliding_window", False)
    read.expect("attention_bias", False)
    read.expect("rope_scaling")
    read.expect("rope_parameters")
    _warn_of_exits(read)
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise read.error("layer_types", "only 'full_attention'", layer_types)
    hidden = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    return read.spec(
        architecture=ARCHITECTURE,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=read.integer("num_key_value_heads", default=num_heads),
        head_dim=_head_dim(read, hidden, num_heads),
        max_position=read.integer("max_position_embeddings"),
        prelude_layers=0,
        core_layers=read.integer("num_hidden_layers"),
        coda_layers=0,
        num_loops=read.integer("total_ut_steps"),
        block=BlockKind.SANDWICH,
        norm_eps=read.number("rms_norm_eps"),
        rope=RopeSpec(RopeStyle.HALF_SPLIT, read.number("rope_theta"), in_float32=False),
        initial_state=InitialState.PRELUDE,
        norm_after_loop=True,
        exit_gate=True,
        tied_head=read.flag("tie_word_embeddings", default=False),
    )


def _warn_of_exits(read: ConfigReader) -> None:
    for key, (field, silent) in _EXITS.items():
        if read.config.get(key) not in silent:
            _logger.warning(
                "%s: %s %s: not applied; each request sets its own exits (%s)",
                read.where,
                key,
                shown(read.config[key]),
                field,
            )


def _head_dim(read: ConfigReader, hidden: int, num_heads: int) -> int:
    """The config's head size, or the hidden size shared out among the heads."""
    if read.config.get("head_dim") is not None:
        return read.integer("head_dim")
    if hidden % num_heads:
        raise read.error("hidden_size", f"a multiple of {num_heads} heads", hidden)
    return hidden // num_heads


def weight_map(spec: LoopSpec) -> dict[str, WeightRecipe]:
    """Recipes of every stored tensor of an Ouro checkpoint."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    recipes = {
        EMBEDDING: WeightRecipe.copy(_EMBEDDING, vocab, hidden),
        "core.norm.weight": WeightRecipe.copy("model.norm.weight", hidden),
        "core.exit_gate.weight": WeightRecipe.copy("model.early_exit_gate.weight", 1, hidden),
        "core.exit_gate.bias": WeightRecipe.copy("model.early_exit_gate.bias", 1),
    }
    if not spec.tied_head:
        recipes[HEAD] = WeightRecipe.copy(_HEAD, vocab, hidden)
    for layer in range(spec.core_layers):
        recipes |= _layer(spec, f"core.layers.{layer}.", f"model.layers.{layer}.")
    return recipes


def _layer(spec: LoopSpec, stored: str, source: str) -> dict[str, WeightRecipe]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = f"{source}self_attn.", f"{source}mlp."
    norms = {
        f"{stored}{ours}.weight": WeightRecipe.copy(f"{source}{theirs}.weight", hidden)
        for ours, theirs in _NORMS.items()
    }
    return norms | {
        f"{stored}qkv.weight": WeightRecipe.concat(
            {
                f"{attention}q_proj.weight": (query, hidden),
                f"{attention}k_proj.weight": (key, hidden),
                f"{attention}v_proj.weight": (key, hidden),
            }
        ),
        f"{stored}o.weight": WeightRecipe.copy(f"{attention}o_proj.weight", hidden, query),
        f"{stored}gate_up.weight": WeightRecipe.concat(
            {f"{mlp}gate_proj.weight": (wide, hidden), f"{mlp}up_proj.weight": (wide, hidden)}
        ),
        f"{stored}down.weight": WeightRecipe.copy(f"{mlp}down_proj.weight", hidden, wide),
    }


FAMILY = Family(
    architecture=ARCHITECTURE,
    parse_config=parse_config,
    weight_map=weight_map,
    embedding=_EMBEDDING,
    head=_HEAD,
    ignored=("*rotary_emb.inv_freq",),
    end_tokens=_END_TOKENS,
    chat_template=_CHAT_TEMPLATE,
)
