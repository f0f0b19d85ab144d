"""Raven (RavenForCausalLM): prelude, a core that is looped, coda, in three variants.

Owns the choice among Huginn, recurrent OLMo-2 and recurrent Llama, which share architecture and
model_type, Huginn's config keys, and the checkpoint names of all; leaves the config keys of the
retrofitted variants to `retrofit` and arithmetic to `blocks`. Invariant: a checkpoint whose
config and tensors are not those of one variant is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from looptrt.errors import CheckpointError
from looptrt.loop_spec import BlockKind, InitialState, LoopSpec, RopeSpec, RopeStyle
from looptrt.models import retrofit
from looptrt.models.blocks import EMBEDDING, HEAD
from looptrt.models.family import Config, ConfigReader, Family, WeightRecipe

ARCHITECTURE = "RavenForCausalLM"
HUGINN = "Huginn"

_RETROFITS = frozenset({retrofit.OLMO, retrofit.LLAMA})
_VARIANTS = _RETROFITS | {HUGINN}
_EMBEDDING = "transformer.wte.weight"
_HEAD = "lm_head.weight"
_ROPE_BASE = 50000.0  # the reference's default; the published file has no such key
_PHASES = {"prelude": "prelude", "core": "core_block", "coda": "coda"}
# Endings of tensor names, Hugging Face's and TensorRT-LLM's; the first that is found decides.
_TELLING_NAMES = {
    "attn.q_norm.weight": retrofit.OLMO,
    "attention.q_layernorm.weight": retrofit.OLMO,
    "qk_bias": HUGINN,
    ".norm_3.weight": HUGINN,
    ".pre_feedforward_layernorm.weight": HUGINN,
    ".norm_2.weight": retrofit.LLAMA,
    ".input_layernorm.weight": retrofit.LLAMA,
}
# The checkpoint's norms of a layer in order: the stored names they go to.
_NORMS = {
    BlockKind.SUM_NORM: ("norm_1", "norm_2", "norm_3", "norm_4"),
    BlockKind.POST_NORM: ("norm_2", "norm_4"),
    BlockKind.PRE_NORM: ("norm_1", "norm_3"),
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Clue:
    """What one key or tensor says: the variants that have it so."""

    what: str
    variants: frozenset[str]


def parse_config(config: Config, where: str) -> LoopSpec:
    """Read the config.json of any variant.

    A config of a retrofitted model that names no modelling file does not tell which one; it
    is taken for recurrent OLMo-2, with a warning.

    Args:
        config: the parsed file.
        where: its name, for errors.

    Raises:
        CheckpointError: a key is missing, malformed, asks for what is not supported, or two
            keys belong to different variants.
    """
    read = ConfigReader(config, where)
    possible = _possible_variants(read, ())
    if possible == _RETROFITS:
        _logger.warning(
            "%s: auto_map does not tell recurrent OLMo-2 from Llama; unless the tensors do, it is "
            "taken for OLMo-2",
            where,
        )
    return _parse(read, possible)


def parse_with_names(config: Config, where: str, tensors: Collection[str]) -> LoopSpec:
    """Read the config.json of the variant that config and tensor names agree on.

    Raises:
        CheckpointError: as in `parse_config`, or the tensors are another variant's.
    """
    read = ConfigReader(config, where)
    return _parse(read, _possible_variants(read, tensors))


def _parse(read: ConfigReader, possible: frozenset[str]) -> LoopSpec:
    if HUGINN in possible:
        return _parse_huginn(read)
    variant = retrofit.OLMO if retrofit.OLMO in possible else retrofit.LLAMA
    return retrofit.parse(read, ARCHITECTURE, variant)


def _possible_variants(read: ConfigReader, tensors: Collection[str]) -> frozenset[str]:
    possible, heard = _VARIANTS, list[_Clue]()
    for clue in (*_config_clues(read), *_name_clues(tensors)):
        if not possible & clue.variants:
            rest = "; ".join(f"{other.what}: {_names(other.variants)}" for other in heard)
            raise CheckpointError(
                f"{read.where}: expected the keys and tensors of one model, found {clue.what}: "
                f"{_names(clue.variants)}; {rest}"
            )
        possible &= clue.variants
        heard.append(clue)
    return possible


def _names(variants: frozenset[str]) -> str:
    return " or ".join(sorted(variants))


def _config_clues(read: ConfigReader) -> Iterator[_Clue]:
    modelling = str(read.mapping("auto_map").get("AutoModelForCausalLM"))
    for part, variant in (("olmo", retrofit.OLMO), ("llama", retrofit.LLAMA)):
        if part in modelling:
            yield _Clue(f"auto_map {modelling!r}", frozenset({variant}))
    if read.mapping("init_values").get("embed_scale") == 1.0:
        yield _Clue("init_values.embed_scale 1.0", _RETROFITS)
    if read.config.get("initial_state_mode") not in (None, retrofit.RANDOM):
        yield _Clue(f"initial_state_mode {read.config['initial_state_mode']!r}", _RETROFITS)
    if read.config.get("qk_bias") is True:
        yield _Clue("qk_bias true", frozenset({HUGINN}))


def _name_clues(tensors: Collection[str]) -> Iterator[_Clue]:
    for ending, variant in _TELLING_NAMES.items():
        for name in tensors:
            if name.endswith(ending):
                yield _Clue(f"tensor {name!r}", frozenset({variant}))
                return


def _parse_huginn(read: ConfigReader) -> LoopSpec:
    """Read a Huginn config.

    `head_dim` is not read: published files carry one derived from another head count.
    `init_scale` scales the random initial state; the reference takes it as an argument of the
    call (1 by default), an engine fixes it.
    """
    retrofit.expect_known_parts(read)
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


def weight_map(spec: LoopSpec) -> dict[str, WeightRecipe]:
    """Recipes of every stored tensor of a checkpoint of any variant."""
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
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    recipes = {
        f"{stored}{ours}.weight": WeightRecipe.copy(f"{source}norm_{number}.weight", hidden)
        for number, ours in enumerate(_NORMS[spec.block], start=1)
    }
    if spec.qk_bias:
        recipes[f"{stored}qk_bias"] = WeightRecipe.reshape(
            f"{source}attn.qk_bias", (2, 1, spec.num_heads, spec.head_dim), (query + key,)
        )
    if spec.qk_norm:
        for part, size in (("q_norm", query), ("k_norm", key)):
            recipes[f"{stored}{part}.weight"] = WeightRecipe.copy(
                f"{source}attn.{part}.weight", size
            )
    return recipes | {
        f"{stored}qkv.weight": WeightRecipe.copy(
            f"{source}attn.Wqkv.weight", spec.qkv_size, hidden
        ),
        f"{stored}o.weight": WeightRecipe.copy(f"{source}attn.proj.weight", hidden, query),
        f"{stored}gate_up.weight": WeightRecipe.copy(f"{source}mlp.fc.weight", 2 * wide, hidden),
        f"{stored}down.weight": WeightRecipe.copy(f"{source}mlp.proj.weight", hidden, wide),
    }


FAMILY = Family(
    architecture=ARCHITECTURE,
    parse_config=parse_config,
    weight_map=weight_map,
    embedding=_EMBEDDING,
    head=_HEAD,
    ignored=("freqs_cis", "*rotary_emb.inv_freq"),
    parse_with_names=parse_with_names,
)
