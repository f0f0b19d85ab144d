"""Config parsing: what is read, what stands in for absent keys, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from typing import Any

import pytest

from looptrt.errors import CheckpointError
from looptrt.loop_spec import (
    BlockKind,
    InitialState,
    LoopSpec,
    RopeScaling,
    RopeScalingKind,
    RopeSpec,
    RopeStyle,
)
from looptrt.models.registry import family_of
from tests.support.checkpoints import (
    huginn_config,
    huginn_tensors,
    llama_config,
    llama_tensors,
    olmo_config,
    olmo_tensors,
    ouro_config,
    ouro_tensors,
)

WHERE = "somewhere/config.json"


def ouro(**changes: Any) -> LoopSpec:
    return family_of("OuroForCausalLM").parse_config(ouro_config(**changes), WHERE)


def huginn(**changes: Any) -> LoopSpec:
    return family_of("RavenForCausalLM").parse_config(huginn_config(**changes), WHERE)


def olmo(**changes: Any) -> LoopSpec:
    return family_of("RavenForCausalLM").parse_config(olmo_config(**changes), WHERE)


def llama(**changes: Any) -> LoopSpec:
    return family_of("RavenForCausalLM").parse_config(llama_config(**changes), WHERE)


def test_ouro_is_read_in_full() -> None:
    spec = ouro()
    assert (spec.prelude_layers, spec.core_layers, spec.coda_layers) == (0, 3, 0)
    assert (spec.num_loops, spec.head_dim, spec.max_position) == (4, 16, 128)
    assert spec.rope == RopeSpec(RopeStyle.HALF_SPLIT, 1e6, in_float32=False)
    assert (spec.block, spec.initial_state) == (BlockKind.SANDWICH, InitialState.PRELUDE)
    assert spec.norm_after_loop
    assert spec.exit_gate
    assert not spec.tied_head


def test_huginn_is_read_in_full() -> None:
    spec = huginn()
    assert (spec.prelude_layers, spec.core_layers, spec.coda_layers) == (2, 4, 2)
    assert (spec.num_loops, spec.head_dim, spec.max_position) == (4, 16, 128)
    assert spec.rope == RopeSpec(RopeStyle.INTERLEAVED, 50000.0, in_float32=True)
    assert (spec.block, spec.initial_state) == (BlockKind.SUM_NORM, InitialState.RANDOM)
    assert spec.embedding_scale == spec.state_scale == math.sqrt(64)
    assert spec.state_std == math.sqrt(2 / (5 * 64))
    assert spec.adapter
    assert spec.norm_before_coda
    assert spec.norm_before_head
    assert spec.qk_bias
    assert spec.tied_head


def test_published_huginn_geometry_ignores_the_derived_head_dim() -> None:
    spec = huginn(
        n_embd=5280, n_heads=..., num_attention_heads=55, num_key_value_heads=55, head_dim=95
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (55, 55, 96)


def test_huginn_rope_base_and_eps_have_the_reference_s_defaults() -> None:
    spec = huginn(rope_base=..., norm_eps=...)
    assert (spec.rope.base, spec.norm_eps) == (50000.0, 1e-6)


@pytest.mark.parametrize("head_dim", [..., None])
def test_ouro_head_dim_is_shared_out_when_not_given(head_dim: object) -> None:
    assert ouro(head_dim=head_dim).head_dim == 16


def test_ouro_head_dim_given_wins() -> None:
    spec = ouro(head_dim=32)
    assert spec.head_dim == 32
    recipes = family_of("OuroForCausalLM").weight_map(spec)
    assert recipes["core.layers.0.o.weight"].hf_shapes == ((64, 128),)


@pytest.mark.parametrize(("given", "found"), [(None, 4), (..., 4), (4, 4), (2, 2), (1, 1)])
def test_ouro_kv_heads_default_to_the_heads(given: object, found: int) -> None:
    assert ouro(num_key_value_heads=given).num_kv_heads == found


@pytest.mark.parametrize("loops", [1, 3, 64])
def test_any_positive_loop_count_is_read(loops: int) -> None:
    assert ouro(total_ut_steps=loops).num_loops == loops
    assert huginn(mean_recurrence=loops).num_loops == loops


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_ut_steps": "3"}, "total_ut_steps: expected an integer of at least 1, found '3'"),
        ({"total_ut_steps": True}, "total_ut_steps: expected an integer .* found True"),
        ({"total_ut_steps": 0}, "total_ut_steps: expected an integer .* found 0"),
        ({"total_ut_steps": 2.0}, "total_ut_steps: expected an integer .* found 2.0"),
        ({"total_ut_steps": ...}, "total_ut_steps: expected a value, found None"),
        ({"num_key_value_heads": 3}, "num_kv_heads: 4 heads are not a multiple of 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: expected an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected an integer"),
        ({"hidden_size": 66, "head_dim": None}, "hidden_size: expected a multiple of 4 heads"),
        ({"head_dim": 15}, "head_dim: expected an even number, got 15"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: expected null or no key"),
        ({"rope_theta": ...}, "rope_theta: expected a value"),
        ({"rope_theta": float("nan")}, "rope_theta: expected a positive number, found nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a positive number, found 0"),
        ({"use_sliding_window": True}, "use_sliding_window: expected False, found True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: expected only 'full_attention'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
    ],
)
def test_ouro_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{WHERE}: {message}"):
        ouro(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_recurrence": 0}, "mean_recurrence: expected an integer of at least 1, found 0"),
        ({"num_attention_heads": 8}, "num_attention_heads: expected 4 as in n_heads, found 8"),
        ({"n_embd": 66}, "n_embd: expected a multiple of 4 heads, found 66"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: expected 4, found 2"),
        ({"n_heads": 0, "num_attention_heads": ...}, "n_heads: expected an integer"),
        ({"bias": True}, "bias: expected False, found True"),
        ({"test_time_noise": 0.1}, "test_time_noise: expected 0, found 0.1"),
        ({"block_class_name": "TransformerPreNormBlock"}, "block_class_name: expected 'Sand"),
        ({"injection_type": "add"}, "injection_type: expected 'linear', found 'add'"),
        ({"qk_bias": ...}, "qk_bias: expected a value"),
        ({"init_values": 3}, "init_values: expected an object, found 3"),
    ],
)
def test_huginn_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{WHERE}: {message}"):
        huginn(**changes)


def raven(config: dict[str, Any], tensors: Collection[str]) -> LoopSpec:
    """A Raven config read with the tensor names beside it."""
    parse = family_of("RavenForCausalLM").parse_with_names
    assert parse is not None
    return parse(config, WHERE, dict.fromkeys(tensors, ()))


def test_recurrent_olmo_is_read_in_full() -> None:
    spec = olmo()
    assert (spec.prelude_layers, spec.core_layers, spec.coda_layers) == (2, 3, 1)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.num_loops, spec.max_position, spec.norm_eps) == (4, 128, 1e-6)
    assert spec.rope == RopeSpec(RopeStyle.HALF_SPLIT, 500000.0, in_float32=True)
    assert (spec.block, spec.initial_state) == (BlockKind.POST_NORM, InitialState.RANDOM)
    assert (spec.state_std, spec.state_scale, spec.embedding_scale) == (0.5, 1.0, 1.0)
    assert (spec.qk_norm, spec.qk_bias, spec.tied_head) == (True, False, False)
    assert (spec.norm_before_coda, spec.norm_before_head, spec.norm_after_loop) == (
        False,
        True,
        False,
    )
    assert spec.adapter
    assert not spec.skip_first_adapter


def test_recurrent_llama_is_read_in_full() -> None:
    spec = llama()
    assert (spec.block, spec.qk_norm, spec.qk_bias) == (BlockKind.PRE_NORM, False, False)
    assert (spec.num_kv_heads, spec.norm_eps, spec.norm_before_coda) == (2, 1e-5, False)
    scaling = RopeScaling(RopeScalingKind.LLAMA3, 4.0, 1.0, 4.0, 32)
    assert spec.rope == RopeSpec(RopeStyle.HALF_SPLIT, 10000.0, in_float32=False, scaling=scaling)


@pytest.mark.parametrize("read", [olmo, llama])
@pytest.mark.parametrize(
    ("mode", "state", "skips"),
    [
        ("random", InitialState.RANDOM, False),
        (..., InitialState.RANDOM, False),
        ("embed-init", InitialState.PRELUDE, False),
        ("skip-adapter", InitialState.PRELUDE, True),
    ],
)
def test_initial_state_modes(
    read: Callable[..., LoopSpec], mode: object, state: InitialState, skips: bool
) -> None:
    spec = read(initial_state_mode=mode)
    assert (spec.initial_state, spec.skip_first_adapter) == (state, skips)
    assert (spec.state_std > 0) == (state is InitialState.RANDOM)


def test_a_llama_with_a_state_mode_is_followed_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    llama(initial_state_mode="embed-init")
    assert "the reference's Llama file does not read the key" in caplog.text


@pytest.mark.parametrize("read", [olmo, llama])
def test_retrofits_read_what_the_reference_reads(read: Callable[..., LoopSpec]) -> None:
    """The stale values of converted configs change nothing; init_values does."""
    assert read() == read(rope_base=1e6, block_size=1, effective_expected_depth=3, n_layers=99)
    spec = read(init_values={"std": 0.0087039, "embed_scale": 3.0}, init_scale=0.5)
    assert (spec.state_std, spec.state_scale) == (0.0087039 * 0.5, 3.0)
    assert spec.embedding_scale == 3.0
    spec = read(init_values=...)
    assert (spec.state_std, spec.embedding_scale) == (math.sqrt(2 / (5 * 64)), 8.0)


def test_linear_and_default_rope_scaling() -> None:
    linear = llama(rope_scaling={"type": "linear", "factor": 2.0}).rope.scaling
    assert linear == RopeScaling(RopeScalingKind.LINEAR, 2.0)
    for none in (..., None, {}, {"rope_type": "default"}):
        assert llama(rope_scaling=none).rope.scaling is None


@pytest.mark.parametrize("read", [olmo, llama])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": ...}, "rope_theta: expected a value"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: rope_type: expected 'default', "),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor: expected a value"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling: rope_type or type: expected a value"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "rope_scaling: type: exp"),
        (
            {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}},
            "rope_scaling: high_freq_factor: expected more than low_freq_factor, 4.0, found 4.0",
        ),
        ({"rope_parameters": {}}, "rope_parameters: expected null or no key"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0"),
        ({"initial_state_mode": "zeros"}, "initial_state_mode: expected 'random' or 'embed-init'"),
        ({"initial_state_mode": ["random"]}, "initial_state_mode: expected a string"),
        ({"init_values": {"std": -1}}, "init_values: std: expected a number of at least 0"),
        ({"max_position_embeddings": ...}, "max_position_embeddings: expected a value"),
        ({"num_key_value_heads": 3}, "num_kv_heads: 4 heads are not a multiple of 3"),
        ({"mean_recurrence": 0}, "mean_recurrence: expected an integer of at least 1"),
        ({"test_time_noise": 1}, "test_time_noise: expected 0"),
    ],
)
def test_retrofit_configs_that_are_refused(
    read: Callable[..., LoopSpec], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"^{WHERE}: {message}"):
        read(**changes)


def test_head_dim_is_free_in_olmo_and_not_in_llama() -> None:
    assert olmo(head_dim=32).head_dim == 32
    assert olmo(head_dim=...).head_dim == llama(head_dim=...).head_dim == 16
    with pytest.raises(CheckpointError, match="head_dim: expected 16, found 32"):
        llama(head_dim=32)


MAKERS = {
    "huginn": (huginn_config, huginn_tensors),
    "olmo": (olmo_config, olmo_tensors),
    "llama": (llama_config, llama_tensors),
}
BLOCKS = {
    "huginn": BlockKind.SUM_NORM,
    "olmo": BlockKind.POST_NORM,
    "llama": BlockKind.PRE_NORM,
}


@pytest.mark.parametrize("name", MAKERS)
def test_tensor_names_tell_the_variant_where_the_config_does_not(name: str) -> None:
    make_config, make_tensors = MAKERS[name]
    config = make_config()
    names = make_tensors(config)
    assert raven(config, names).block is BLOCKS[name]
    config.pop("auto_map", None)
    assert raven(config, names).block is BLOCKS[name]


def test_a_retrofit_without_names_and_modelling_file_is_taken_for_olmo_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert olmo(auto_map=...).block is BlockKind.POST_NORM
    assert "auto_map does not tell" in caplog.text


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("other", MAKERS)
def test_a_config_with_another_variants_tensors_is_refused(name: str, other: str) -> None:
    """Nothing is run as what it is not, whichever side is wrong."""
    config, tensors = MAKERS[name][0](), MAKERS[other][1](MAKERS[other][0]())
    if name == other:
        assert raven(config, tensors).block is BLOCKS[name]
        return
    with pytest.raises(CheckpointError, match=rf"^{WHERE}: expected the keys and tensors of one"):
        raven(config, tensors)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"init_values": {"std": 0.0087, "embed_scale": 1.0}}, "qk_bias true: Huginn; init_val"),
        ({"initial_state_mode": "embed-init"}, "qk_bias true: Huginn; initial_state_mode 'embed"),
        (
            {"auto_map": {"AutoModelForCausalLM": "raven_modeling_minimal_olmo.RavenForCausalLM"}},
            "qk_bias true: Huginn; auto_map 'raven_modeling_minimal_olmo.RavenForCausalLM': rec",
        ),
    ],
)
def test_contradicting_keys_are_refused(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(CheckpointError, match=f"of one model, found {found}"):
        huginn(**changes)


@pytest.mark.parametrize("name", ["olmo", "llama"])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}])
def test_retrofit_recipes_name_every_tensor_with_its_shape(
    name: str, changes: dict[str, Any]
) -> None:
    config = MAKERS[name][0](**changes)
    tensors = MAKERS[name][1](config)
    recipes = family_of("RavenForCausalLM").weight_map(raven(config, tensors))
    named = {
        source: shape
        for recipe in recipes.values()
        for source, shape in zip(recipe.sources, recipe.hf_shapes, strict=True)
    }
    assert named == {key: tuple(tensor.shape) for key, tensor in tensors.items()}


@pytest.mark.parametrize("read", [ouro, huginn, olmo, llama])
def test_a_spec_survives_json(read: Callable[..., LoopSpec]) -> None:
    assert LoopSpec.from_json(json.loads(json.dumps(read().to_json()))) == read()


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}, {"head_dim": 32}])
def test_ouro_recipes_name_every_tensor_with_its_shape(changes: dict[str, Any]) -> None:
    tensors = ouro_tensors(ouro_config(**changes))
    recipes = family_of("OuroForCausalLM").weight_map(ouro(**changes))
    named = {
        source: shape
        for recipe in recipes.values()
        for source, shape in zip(recipe.sources, recipe.hf_shapes, strict=True)
    }
    assert named == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_huginn_recipes_name_every_tensor_with_its_shape() -> None:
    family = family_of("RavenForCausalLM")
    tensors = huginn_tensors(huginn_config())
    recipes = family.weight_map(huginn())
    named = {
        source: shape
        for recipe in recipes.values()
        for source, shape in zip(recipe.sources, recipe.hf_shapes, strict=True)
    }
    extra = set(tensors) - set(named)
    assert extra == {"freqs_cis"} <= set(family.ignored)
    assert named == {name: tuple(tensors[name].shape) for name in named}
