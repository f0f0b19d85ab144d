"""Echo (EchoForCausalLM): a toy looped model that no table of looptrt knows.

One stem layer, a ring of layers that turns several times, one crown layer; pre-norm layers
with grouped heads, a rotation stretched by a factor, and the embedding as head. Its config keys
and tensor names are its own. This file is all that looptrt needs of it: what the model is goes
into a LoopSpec, the arithmetic is looptrt's shared blocks.
"""

from __future__ import annotations

from looptrt.loop_spec import (
    BlockKind,
    InitialState,
    LoopSpec,
    RopeScaling,
    RopeScalingKind,
    RopeSpec,
    RopeStyle,
)
from looptrt.models.blocks import EMBEDDING, HEAD
from looptrt.models.family import Config, ConfigReader, Family, WeightRecipe

ARCHITECTURE = "EchoForCausalLM"

_PHASES = {"prelude": "stem", "core": "ring", "coda": "crown"}


def parse_config(config: Config, where: str) -> LoopSpec:
    """Read an Echo config.json; raises CheckpointError naming the key at fault."""
    read = ConfigReader(config, where)
    width, heads = read.integer("width"), read.integer("query_heads")
    if width % heads:
        raise read.error("width", f"a multiple of {heads} heads", width)
    stretch = RopeScaling(RopeScalingKind.LINEAR, read.number("rotation_stretch", default=1.0))
    return read.spec(
        architecture=ARCHITECTURE,
        vocab_size=read.integer("vocabulary"),
        hidden_size=width,
        intermediate_size=read.integer("inner_width"),
        num_heads=heads,
        num_kv_heads=read.integer("memory_heads", default=heads),
        head_dim=width // heads,
        max_position=read.integer("longest"),
        prelude_layers=1,
        core_layers=read.integer("ring_layers"),
        coda_layers=1,
        num_loops=read.integer("turns"),
        block=BlockKind.PRE_NORM,
        norm_eps=read.number("epsilon"),
        rope=RopeSpec(
            RopeStyle.HALF_SPLIT, read.number("rotation_base"), in_float32=True, scaling=stretch
        ),
        initial_state=InitialState.PRELUDE,
        norm_before_head=True,
        tied_head=True,
    )


def weight_map(spec: LoopSpec) -> dict[str, WeightRecipe]:
    """Where every tensor of looptrt's model comes from in an Echo checkpoint."""
    vocab, width = spec.vocab_size, spec.hidden_size
    recipes = {
        EMBEDDING: WeightRecipe.copy("words", vocab, width),
        "coda.norm.weight": WeightRecipe.copy("last_norm", width),
    }
    if not spec.tied_head:  # a checkpoint with a head of its own is served with it
        recipes[HEAD] = WeightRecipe.copy("head", vocab, width)
    counts = {"prelude": spec.prelude_layers, "core": spec.core_layers, "coda": spec.coda_layers}
    for phase, theirs in _PHASES.items():
        for layer in range(counts[phase]):
            recipes |= _layer(spec, f"{phase}.layers.{layer}.", f"{theirs}.{layer}.")
    return recipes


def _layer(spec: LoopSpec, stored: str, source: str) -> dict[str, WeightRecipe]:
    width, inner = spec.hidden_size, spec.intermediate_size
    query, memory = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        f"{stored}norm_1.weight": WeightRecipe.copy(f"{source}look.norm", width),
        f"{stored}qkv.weight": WeightRecipe.concat(
            {
                f"{source}look.query": (query, width),
                f"{source}look.key": (memory, width),
                f"{source}look.value": (memory, width),
            }
        ),
        f"{stored}o.weight": WeightRecipe.copy(f"{source}look.out", width, query),
        f"{stored}norm_3.weight": WeightRecipe.copy(f"{source}think.norm", width),
        f"{stored}gate_up.weight": WeightRecipe.concat(
            {f"{source}think.gate": (inner, width), f"{source}think.up": (inner, width)}
        ),
        f"{stored}down.weight": WeightRecipe.copy(f"{source}think.down", width, inner),
    }


FAMILY = Family(
    architecture=ARCHITECTURE,
    parse_config=parse_config,
    weight_map=weight_map,
    embedding="words",
    head="head",
)
