"""Raven (RavenForCausalLM): prelude, a core that is looped, coda, in three variants.

Owns the choice among Huginn, recurrent OLMo-2 and recurrent Llama, which share architecture and
model_type, Huginn's config keys, and the checkpoint names of all; leaves the config keys of the
retrofitted variants to `retrofit` and arithmetic to `blocks`. Invariant: a checkpoint whose
config and tensors are not those of one variant is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from looptrt.errors import CheckpointError
from looptrt.loop_spec import BlockKind, InitialState, LoopSpec, RopeSpec, RopeStyle
from looptrt.models import retrofit
from looptrt.models.blocks import EMBEDDING, HEAD
from looptrt.models.family import Config, ConfigReader, Family, Shape, WeightRecipe
from looptrt.models.files import shown

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

# Endings of the names of the packed projections, Hugging Face's and TensorRT-LLM's.
_QKV_NAMES = (".attn.Wqkv.weight", ".attention.qkv.weight")
# Those of Huginn, and those of the models that were made recurrent.
_END_TOKENS = ("<|end_text|>", "<|end_turn|>", "<|im_end|>", "<|endoftext|>")
_CHAT_TEMPLATE = """\
{{- bos_token | default('<|begin_text|>') -}}
{%- for message in messages -%}
{%- set role = 'Huginn' if message['role'] == 'assistant' else message['role'] -%}
{{- '<|begin_header|>' + role + '<|end_header|>\\n\\n' -}}
{{- message['content'] | trim + '<|end_turn|>' -}}
{%- endfor -%}
{{- '<|begin_header|>Huginn<|end_header|>\\n\\n' if add_generation_prompt else '<|end_text|>' -}}
"""

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
    return _parse(read, possible, {})


def parse_with_names(config: Config, where: str, tensors: Mapping[str, Shape]) -> LoopSpec:
    """Read the config.json of the variant that config and tensor names agree on.

    Args:
        config: the parsed file.
        where: its name, for errors.
        tensors: {name: shape} of those that are there.

    Raises:
        CheckpointError: as in `parse_config`, or the tensors are another variant's.
    """
    read = ConfigReader(config, where)
    return _parse(read, _possible_variants(read, tensors), tensors)


def _parse(read: ConfigReader, possible: frozenset[str], tensors: Mapping[str, Shape]) -> LoopSpec:
    if HUGINN in possible:
        return _parse_huginn(read, tensors)
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
    modelling = shown(read.mapping("auto_map").get("AutoModelForCausalLM"))
    for part, variant in (("olmo", retrofit.OLMO), ("llama", retrofit.LLAMA)):
        if part in modelling:
            yield _Clue(f"auto_map {modelling}", frozenset({variant}))
    if read.mapping("init_values").get("embed_scale") == 1.0:
        yield _Clue("init_values.embed_scale 1.0", _RETROFITS)
    if read.config.get("initial_state_mode") not in (None, retrofit.RANDOM):
        yield _Clue(f"initial_state_mode {shown(read.config['initial_state_mode'])}", _RETROFITS)
    if read.config.get("qk_bias") is True:
        yield _Clue("qk_bias true", frozenset({HUGINN}))


def _name_clues(tensors: Collection[str]) -> Iterator[_Clue]:
    for ending, variant in _TELLING_NAMES.items():
        for name in tensors:
            if name.endswith(ending):
                yield _Clue(f"tensor {name!r}", frozenset({variant}))
                return


def _parse_huginn(read: ConfigReader, tensors: Mapping[str, Shape]) -> LoopSpec:
    """Read a Huginn config.

    `init_scale` scales the random initial state; the reference takes it as an argument of the
    call (1 by default), an engine fixes it.
    """
    retrofit.expect_known_parts(read)
    hidden = read.integer("n_embd", "hidden_size")
    num_heads = read.integer("n_heads", "num_attention_heads")
    read.expect("num_key_value_heads", num_heads)
    return read.spec(
        architecture=ARCHITECTURE,
        vocab_size=read.integer("padded_vocab_size", default=read.integer("vocab_size")),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_huginn_head_dim(read, hidden, num_heads, tensors),
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
        packed_projections=True,
        state_std=math.sqrt(2 / (5 * hidden))
        * read.number("init_scale", default=1.0, may_be_zero=True),
        state_scale=math.sqrt(hidden),
        tied_head=read.flag("tie_embeddings", default=True),
    )


def _huginn_head_dim(
    read: ConfigReader, hidden: int, num_heads: int, tensors: Mapping[str, Shape]
) -> int:
    """The hidden size shared out among the heads, or what the config says if the weights agree.

    Published files carry a `head_dim` derived from another head count: it is not trusted
    alone, nor passed over in silence.
    """
    if read.config.get("head_dim") is None:
        return _shared_out(read, hidden, num_heads)
    given = read.integer("head_dim")
    if given * num_heads == hidden:
        return given
    shape = next((tensors[name] for name in tensors if name.endswith(_QKV_NAMES)), None)
    if shape is None:
        used, why = _shared_out(read, hidden, num_heads), "there are no weights to tell"
    else:
        fits = [
            size for size in (given, hidden // num_heads) if shape[:1] == (3 * num_heads * size,)
        ]
        if not fits:
            found = f"q, k and v of {num_heads} heads are {list(shape)}"
            raise read.error("head_dim", f"what the weights show ({found})", given)
        used, why = fits[0], "the weights show it"
    _logger.warning(
        "%s: head_dim %d, yet n_embd %d over %d heads is %g: %d is used, %s",
        read.where,
        given,
        hidden,
        num_heads,
        hidden / num_heads,
        used,
        why,
    )
    return used


def _shared_out(read: ConfigReader, hidden: int, num_heads: int) -> int:
    if hidden % num_heads:
        raise read.error("n_embd", f"a multiple of {num_heads} heads", hidden)
    return hidden // num_heads


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
    end_tokens=_END_TOKENS,
    chat_template=_CHAT_TEMPLATE,
)
