"""Config parsing: what is read, what stands in for absent keys, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from looptrt.errors import CheckpointError
from looptrt.loop_spec import BlockKind, InitialState, LoopSpec, RopeSpec, RopeStyle
from looptrt.models.registry import family_of
from tests.support.checkpoints import huginn_config, huginn_tensors, ouro_config, ouro_tensors

WHERE = "somewhere/config.json"


def ouro(**changes: Any) -> LoopSpec:
    return family_of("OuroForCausalLM").parse_config(ouro_config(**changes), WHERE)


def huginn(**changes: Any) -> LoopSpec:
    return family_of("RavenForCausalLM").parse_config(huginn_config(**changes), WHERE)


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


@pytest.mark.parametrize(
    "changes",
    [
        {"init_values": {"std": 0.0087, "embed_scale": 1.0}},
        {"initial_state_mode": "embed-init"},
        {"auto_map": {"AutoModelForCausalLM": "raven_modeling_minimal_olmo.RavenForCausalLM"}},
        {"auto_map": {"AutoModelForCausalLM": "raven_modeling_minimal_llama.RavenForCausalLM"}},
    ],
)
def test_retrofitted_models_are_not_taken_for_huginn(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="recurrent OLMo-2/Llama are not supported yet"):
        huginn(**changes)


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
    assert extra == set(family.ignored)
    assert named == {name: tuple(tensors[name].shape) for name in named}
