"""Weights under TensorRT-LLM's names: the same recipes for every family.

Owns the names; leaves the tensors to the families, whose stored names they are derived from.
Layers are numbered through prelude, core and coda. A layer with four norms uses the names of
TensorRT-LLM's Gemma 2; parts that TensorRT-LLM has no word for keep ours. Invariant: two
tensors of a model never share a name.
"""

from __future__ import annotations

import re
from dataclasses import replace

from looptrt.errors import CheckpointError
from looptrt.loop_spec import BlockKind, LoopSpec
from looptrt.models.blocks import EMBEDDING, HEAD
from looptrt.models.family import Family, WeightRecipe

TRTLLM_EMBEDDING = "transformer.vocab_embedding.weight"
TRTLLM_HEAD = "lm_head.weight"
FINAL_NORM = "transformer.ln_f.weight"

MODEL_NAMES = {
    EMBEDDING: TRTLLM_EMBEDDING,
    HEAD: TRTLLM_HEAD,
    "core.norm.weight": FINAL_NORM,
    "coda.norm.weight": FINAL_NORM,
    "core.adapter.weight": "transformer.adapter.weight",
    "core.exit_gate.weight": "transformer.exit_gate.weight",
    "core.exit_gate.bias": "transformer.exit_gate.bias",
}
LAYER_NAMES = {
    "qkv.weight": "attention.qkv.weight",
    "o.weight": "attention.dense.weight",
    "qk_bias": "attention.qk_bias",
    "q_norm.weight": "attention.q_layernorm.weight",
    "k_norm.weight": "attention.k_layernorm.weight",
    "down.weight": "mlp.proj.weight",
}
GATE_UP = "gate_up.weight"
GATE_UP_NAMES = ("mlp.fc.weight", "mlp.gate.weight")  # silu(fc) * gate in TensorRT-LLM's words
NORM_NAMES = {
    BlockKind.SANDWICH: (
        "input_layernorm",
        "post_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    BlockKind.SUM_NORM: (
        "input_layernorm",
        "post_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    BlockKind.PRE_NORM: ("input_layernorm", "post_layernorm"),
    BlockKind.POST_NORM: ("post_layernorm", "post_feedforward_layernorm"),
}

_LAYER = re.compile(r"(prelude|core|coda)\.layers\.(\d+)\.(.+)")
_NORM = re.compile(r"norm_\d+\.weight")


def with_trtllm_names(family: Family) -> Family:
    """The same family, reading checkpoints under TensorRT-LLM's names."""
    return replace(
        family,
        weight_map=lambda spec: _recipes(family.weight_map(spec), spec),
        embedding=TRTLLM_EMBEDDING,
        head=TRTLLM_HEAD,
    )


def _recipes(recipes: dict[str, WeightRecipe], spec: LoopSpec) -> dict[str, WeightRecipe]:
    named = {stored: _recipe(stored, recipes, spec) for stored in recipes}
    sources = [source for recipe in named.values() for source in recipe.sources]
    if len(sources) != len(set(sources)):
        twice = next(name for name in sources if sources.count(name) > 1)
        raise CheckpointError(f"{spec.architecture}: two tensors would be named {twice!r}")
    return named


def _recipe(stored: str, recipes: dict[str, WeightRecipe], spec: LoopSpec) -> WeightRecipe:
    shape = recipes[stored].shape
    match = _LAYER.fullmatch(stored)
    if match is None:
        return WeightRecipe.copy(MODEL_NAMES.get(stored, f"transformer.{stored}"), *shape)
    phase, layer, part = match[1], int(match[2]), match[3]
    prefix = f"transformer.layers.{_first_layer(phase, spec) + layer}."
    if part == GATE_UP:
        half = (shape[0] // 2, *shape[1:])
        return WeightRecipe.concat({f"{prefix}{name}": half for name in GATE_UP_NAMES})
    if _NORM.fullmatch(part):
        return WeightRecipe.copy(prefix + _norm_name(stored, part, recipes, spec), *shape)
    return WeightRecipe.copy(prefix + LAYER_NAMES.get(part, part), *shape)


def _first_layer(phase: str, spec: LoopSpec) -> int:
    return {
        "prelude": 0,
        "core": spec.prelude_layers,
        "coda": spec.prelude_layers + spec.core_layers,
    }[phase]


def _norm_name(stored: str, part: str, recipes: dict[str, WeightRecipe], spec: LoopSpec) -> str:
    """Name of one of a layer's norms, by its place among them."""
    prefix = stored.removesuffix(part)
    norms = sorted(
        name
        for name in recipes
        if name.startswith(prefix) and _NORM.fullmatch(name.removeprefix(prefix))
    )
    return f"{NORM_NAMES[spec.block][norms.index(stored)]}.weight"
