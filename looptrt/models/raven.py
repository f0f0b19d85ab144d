"""Huginn (RavenForCausalLM): prelude, a core that starts from noise, coda.

Owns Huginn's config keys and checkpoint names; leaves arithmetic to `blocks`. Invariant: the
retrofitted models that share the architecture's name are refused, never run as Huginn.
"""

from __future__ import annotations

import math

from looptrt.errors import CheckpointError
from looptrt.loop_spec import BlockKind, InitialState, LoopSpec, RopeSpec, RopeStyle
from looptrt.models.blocks import EMBEDDING, HEAD
from looptrt.models.family import Config, ConfigReader, Family, WeightRecipe

ARCHITECTURE = "RavenForCausalLM"

_EMBEDDING = "transformer.wte.weight"
_HEAD = "lm_head.weight"
_ROPE_BASE = 50000.0  # the reference's default; the published file has no such key
_PHASES = {"prelude": "prelude", "core": "core_block", "coda": "coda"}


def parse_config(config: Config, where: str) -> LoopSpec:
    """Read a Huginn config.json.

    `head_dim` is not read: published files carry one derived from another head count.
    `init_scale` scales the random initial state; the reference takes it as an argument of the
    call (1 by default), an engine fixes it.

    Args:
        config: the parsed file.
        where: its name, for errors.

    Raises:
        CheckpointError: a key is missing, malformed or asks for what is not supported.
    """
    read = ConfigReader(config, where)
    _refuse_retrofits(read)
    read.expect("bias", False)
    read.expect("nonlin_name", "SiLU")
    read.expect("block_class_name", "SandwichBlock")
    read.expect("mlp_class_name", "GatedMLP")
    read.expect("injection_type", "linear")
    read.expect("state_init", "like-init")
    read.expect("test_time_noise", 0)
    hidden = read.integer("n_embd", "hidden_size")
    num_heads = read.integer("n_heads", "num_attention_heads")
    if hidden % num_heads:
        raise read.error("n_embd", f"a multiple of {num_heads} heads", hidden)
    read.expect("num_key_value_heads", num_heads)
    return read.spec(
        architecture=ARCHITECTURE,
        vocab_size=read.integer("padded_vocab_size", default=read.integer("vocab_size")),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        max_position=read.integer("block_size"),
        prelude_layers=read.integer("n_layers_in_prelude"),
        core_layers=read.integer("n_layers_in_recurrent_block"),
        coda_layers=read.integer("n_layers_in_coda"),
        num_loops=read.integer("mean_recurrence"),
        block=BlockKind.SUM_NORM,
        norm_eps=read.number("norm_eps", default=1e-6),
        rope=RopeSpec(
            RopeStyle.INTERLEAVED, read.number("rope_base", default=_ROPE_BASE), in_float32=True
        ),
        initial_state=InitialState.RANDOM,
        embedding_scale=math.sqrt(hidden),
        adapter=True,
        norm_before_coda=True,
        norm_before_head=True,
        qk_bias=read.flag("qk_bias"),
        state_std=math.sqrt(2 / (5 * hidden))
        * read.number("init_scale", default=1.0, may_be_zero=True),
        state_scale=math.sqrt(hidden),
        tied_head=read.flag("tie_embeddings", default=True),
    )


def _refuse_retrofits(read: ConfigReader) -> None:
    """Recurrent OLMo-2 and Llama files name the same architecture; three keys betray them."""
    modelling = str(read.mapping("auto_map").get("AutoModelForCausalLM"))
    if (
        read.mapping("init_values").get("embed_scale") == 1.0
        or "initial_state_mode" in read.config
        or "olmo" in modelling
        or "llama" in modelling
    ):
        raise CheckpointError(
            f"{read.where}: recurrent OLMo-2/Llama are not supported yet, only Huginn is"
        )


def weight_map(spec: LoopSpec) -> dict[str, WeightRecipe]:
    """Recipes of every stored tensor of a Huginn checkpoint."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    recipes = {
        EMBEDDING: WeightRecipe.copy(_EMBEDDING, vocab, hidden),
        "core.adapter.weight": WeightRecipe.copy("transformer.adapter.weight", hidden, 2 * hidden),
        "coda.norm.weight": WeightRecipe.copy("transformer.ln_f.weight", hidden),
    }
    if not spec.tied_head:
        recipes[HEAD] = WeightRecipe.copy(_HEAD, vocab, hidden)
    counts = {"prelude": spec.prelude_layers, "core": spec.core_layers, "coda": spec.coda_layers}
    for phase, theirs in _PHASES.items():
        for layer in range(counts[phase]):
            recipes |= _layer(spec, f"{phase}.layers.{layer}.", f"transformer.{theirs}.{layer}.")
    return recipes


def _layer(spec: LoopSpec, stored: str, source: str) -> dict[str, WeightRecipe]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    recipes = {
        f"{stored}norm_{i}.weight": WeightRecipe.copy(f"{source}norm_{i}.weight", hidden)
        for i in (1, 2, 3, 4)
    }
    if spec.qk_bias:
        rotated = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        recipes[f"{stored}qk_bias"] = WeightRecipe.reshape(
            f"{source}attn.qk_bias", (2, 1, spec.num_heads, spec.head_dim), (rotated,)
        )
    return recipes | {
        f"{stored}qkv.weight": WeightRecipe.copy(
            f"{source}attn.Wqkv.weight", spec.qkv_size, hidden
        ),
        f"{stored}o.weight": WeightRecipe.copy(f"{source}attn.proj.weight", hidden, hidden),
        f"{stored}gate_up.weight": WeightRecipe.copy(f"{source}mlp.fc.weight", 2 * wide, hidden),
        f"{stored}down.weight": WeightRecipe.copy(f"{source}mlp.proj.weight", hidden, wide),
    }


FAMILY = Family(
    architecture=ARCHITECTURE,
    parse_config=parse_config,
    weight_map=weight_map,
    embedding=_EMBEDDING,
    head=_HEAD,
    ignored=("freqs_cis",),
)
