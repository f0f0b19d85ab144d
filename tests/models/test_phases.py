"""The phases against a dense recompute, chunked prefill, compaction, shared tensors, export."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export

from looptrt.errors import BuildError
from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import InitialState, NoiseMode
from looptrt.models import blocks
from looptrt.models.blocks import LoopedModel, stored_names
from looptrt.models.registry import family_of
from tests.models.phases import MAX_POSITIONS, Sequences, build, fill, run, spec_and_layout
from tests.plugins.pools import assert_bitwise, int32
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
from tests.support.oracle import DenseOracle

TOKENS = [(7 * i * i + 3) % 256 for i in range(24)]
MODELS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "ouro": (ouro_config(), ouro_tensors(ouro_config())),
    "huginn": (huginn_config(), huginn_tensors(huginn_config())),
}
for mode in ("random", "embed-init", "skip-adapter"):
    config = olmo_config(initial_state_mode=mode)
    MODELS[f"olmo-{mode}"] = (config, olmo_tensors(config))
    config = llama_config(initial_state_mode=mode)
    MODELS[f"llama-{mode}"] = (config, llama_tensors(config))
GQA = ouro_config(num_key_value_heads=2, head_dim=32)
MODELS["ouro_gqa"] = (GQA, ouro_tensors(GQA))

by_model = pytest.mark.parametrize("name", MODELS)


def sequences(name: str, num_seqs: int = 1) -> Sequences:
    config, tensors = MODELS[name]
    _, layout = spec_and_layout(config)
    return Sequences(fill(build(config), tensors), layout, num_seqs)


def noise_of(model: LoopedModel, tokens: int) -> Tensor | None:
    """What the model draws for positions 0..tokens at seed 0."""
    spec = model.spec
    if spec.initial_state is not InitialState.RANDOM:
        return None
    positions, seeds = torch.arange(tokens, dtype=torch.int32), torch.zeros(tokens).long()
    like = torch.empty(tokens, spec.hidden_size)
    scales = {"std": spec.state_std, "scale": spec.state_scale}
    return torch.ops.looptrt.position_keyed_noise(like, positions, seeds, **scales)


def oracle_logits(name: str, model: LoopedModel, tokens: list[int], depths: list[int]) -> Tensor:
    return DenseOracle(*MODELS[name]).logits(tokens, depths, noise_of(model, len(tokens)))


def assert_near(got: Tensor, want: Tensor) -> None:
    assert float(want.abs().max()) > 0.1
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


@by_model
@pytest.mark.parametrize("loops", [1, 4])
def test_one_prefill_equals_the_dense_recompute(name: str, loops: int) -> None:
    seqs = sequences(name)
    depths = [loops] * len(TOKENS)
    got = seqs.step([TOKENS], [0], [depths])
    assert got.dtype == torch.float32
    assert_near(got, oracle_logits(name, seqs.model, TOKENS, depths))
    seqs.pool.assert_guards_intact()


@by_model
def test_chunks_and_decode_equal_one_prefill(name: str) -> None:
    whole = sequences(name).step([TOKENS], [0])
    seqs, got, begin = sequences(name), [], 0
    for size in (1, 8, 5, 7, 1, 1, 1):
        got.append(seqs.step([TOKENS[begin : begin + size]], [begin]))
        begin += size
    assert_near(torch.cat(got), whole)


@by_model
def test_neighbours_do_not_change_a_sequence(name: str) -> None:
    whole = sequences(name).step([TOKENS], [0])
    seqs = sequences(name, num_seqs=3)
    other = [5, 6, 7]
    first = seqs.step([other, TOKENS[:9], []], [0, 0, 0])
    second = seqs.step([[8], TOKENS[9:], other], [3, 9, 0])
    assert_near(torch.cat((first[3:], second[1:-3])), whole)


@by_model
def test_mixed_depths_with_aliased_planes_equal_the_dense_recompute(name: str) -> None:
    """Two pages stop at 2 loops; their deeper table rows name the unit of plane 1."""
    seqs = sequences(name)
    plane_1 = seqs.layout.boundary_units + 1
    seqs.table[0, plane_1 + 1 :, :2] = seqs.table[0, plane_1, :2]
    depths = [2] * 8 + [4] * 16
    got = [seqs.step([TOKENS[:13]], [0], [depths[:13]])]
    got += [seqs.step([TOKENS[i : i + 1]], [i], [depths[i : i + 1]]) for i in range(13, 24)]
    want = oracle_logits(name, seqs.model, TOKENS, depths)
    assert_near(torch.cat(got), want)
    full = oracle_logits(name, seqs.model, TOKENS, [4] * 24)
    assert float((want - full)[8:].abs().max()) > 1e-2


@by_model
def test_core_leaves_the_state_of_resting_rows_alone(name: str) -> None:
    seqs = sequences(name)
    hidden = seqs.model.spec.hidden_size
    state, injection = (torch.randn(5, hidden, generator=torch.Generator()) for _ in range(2))
    rows = int32([1, 3])
    kv = {
        "positions": int32([0, 1]),
        "cu_seqlens": int32([0, 2]),
        "seq_slots": int32([0]),
        "block_table": seqs.table,
        "kv_pool": seqs.pool.kv_pool,
        "plane": int32([0]),
    }
    tensors = {"state": state, "injection": injection, "rows": rows, **kv}
    after = run(seqs.model.core, tensors)["next_state"]
    assert_bitwise(after[[0, 2, 4]], state[[0, 2, 4]])
    assert not torch.equal(after[[1, 3]], state[[1, 3]])


def test_the_norm_that_closes_an_ouro_loop_is_the_final_norm_of_its_stream() -> None:
    closed = sequences("ouro")
    spec = dataclasses.replace(closed.model.spec, norm_after_loop=False)
    open_model = family_of(spec.architecture).build(
        spec,
        closed.layout,
        max_positions=MAX_POSITIONS,
        dtype=torch.float32,
        noise_mode=NoiseMode.POSITION,
    )
    open_model.core.load_state_dict(closed.model.core.state_dict(), strict=False)
    tensors = {"state": torch.randn(5, spec.hidden_size), "rows": torch.arange(5).int()}
    tensors |= {"positions": tensors["rows"], "cu_seqlens": int32([0, 5]), "plane": int32([0])}
    tensors |= {"seq_slots": int32([0]), "block_table": closed.table}
    tensors["kv_pool"] = closed.pool.kv_pool
    stream, state = (run(model.core, tensors)["next_state"] for model in (open_model, closed.model))
    weight = closed.model.core.norm.weight
    assert_bitwise(state, torch.ops.looptrt.fenced_rms_norm(stream, weight, eps=spec.norm_eps))


def test_head_runs_on_the_chosen_rows_only() -> None:
    for name in MODELS:
        all_rows = sequences(name).step([TOKENS], [0])
        chosen = sequences(name).step([TOKENS], [0], logit_rows=int32([20, 3]))
        assert chosen.shape[0] == 2
        assert_near(chosen, all_rows[[20, 3]])


def test_sequential_noise_takes_the_given_state() -> None:
    config, tensors = MODELS["huginn"]
    _, layout = spec_and_layout(config)
    given = torch.randn(len(TOKENS), 64, generator=torch.Generator().manual_seed(5)) * 0.6
    model = fill(build(config, noise_mode=NoiseMode.SEQUENTIAL), tensors)
    got = Sequences(model, layout).step([TOKENS], [0], initial_state=given)
    want = DenseOracle(config, tensors).logits(TOKENS, [4] * len(TOKENS), given)
    assert_near(got, want)


def test_declared_inputs_are_the_ones_used() -> None:
    kv = ("positions", "cu_seqlens", "seq_slots", "block_table", "kv_pool", "plane")
    ouro, huginn = (build(MODELS[name][0], device="meta") for name in ("ouro", "huginn"))
    assert ouro.prelude.input_names == ("input_ids",)
    assert ouro.core.input_names == ("state", "rows", *kv)
    assert ouro.coda.input_names == ("state", "logit_rows")
    assert ouro.prelude.output_names == ("state",)
    assert ouro.core.output_names == ("next_state",)
    assert huginn.prelude.input_names == ("input_ids", *kv, "noise_seeds")
    assert huginn.prelude.output_names == ("state", "injection")
    assert huginn.core.input_names == ("state", "injection", "rows", *kv)
    assert huginn.coda.input_names == ("state", "logit_rows", *kv)
    with pytest.raises(BuildError, match=r"Prelude: expected 1 inputs \(input_ids\), got 2"):
        ouro.prelude(int32([1]), int32([1]))


@by_model
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_stored_names_are_the_recipes_and_one_rope_pair(name: str, device: str) -> None:
    model = build(MODELS[name][0], device=device)
    stored = set(stored_names(model).values())
    ropes = {entry for entry in stored if ".rope." in entry}
    assert stored - ropes == set(family_of(model.spec.architecture).weight_map(model.spec))
    assert len(ropes) == 2
    for entry, recipe in family_of(model.spec.architecture).weight_map(model.spec).items():
        assert tuple(model.state_dict()[entry].shape) == recipe.shape


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied = build(MODELS["huginn"][0], device="meta")
    assert stored_names(tied)[blocks.HEAD] == blocks.EMBEDDING
    assert tied.coda.head.weight is tied.prelude.embedding.weight
    untied = build(MODELS["ouro"][0], device="meta")
    assert stored_names(untied)[blocks.HEAD] == blocks.HEAD


def test_embedding_scale_is_on_the_embedding_and_not_on_the_head() -> None:
    """Cases D5 and G4: once, in float32, rounded once."""
    model = fill(build(MODELS["huginn"][0], dtype="bfloat16"), MODELS["huginn"][1])
    spec, layout = spec_and_layout(MODELS["huginn"][0], "bfloat16")
    weight = model.prelude.embedding.weight
    no_layers = dataclasses.replace(spec, prelude_layers=0)
    bare = family_of(spec.architecture).build(
        no_layers,
        layout,
        max_positions=MAX_POSITIONS,
        dtype=torch.bfloat16,
        noise_mode=NoiseMode.SEQUENTIAL,
    )
    bare.prelude.embedding.weight.copy_(weight)
    _, injection = bare.prelude(int32([3, 9]), torch.zeros(2, 64, dtype=torch.bfloat16))
    assert_bitwise(injection, weight[[3, 9]] * 8.0)
    assert model.coda.head.weight is weight


@by_model
def test_inverse_frequencies_are_right_to_float32(name: str) -> None:
    """Case A8: the tables are our own, and close to float64."""
    spec, _ = spec_and_layout(MODELS[name][0])
    spec = dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, scaling=None))
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
    want = spec.rope.base**-exponents
    relative = (blocks.inverse_frequencies(spec).double() / want - 1).abs().max()
    assert float(relative) < 4e-7


def test_ouro_tables_are_cast_and_huginn_s_stay_float32() -> None:
    for name, dtype in (("ouro", torch.bfloat16), ("huginn", torch.float32)):
        core = build(MODELS[name][0], dtype="bfloat16").core
        assert core.rope.cos.dtype == core.rope.sin.dtype == dtype
        assert core.rope.cos.shape == (MAX_POSITIONS, 8)


def test_huginn_tables_are_those_of_its_files_in_float32() -> None:
    config = huginn_config()
    spec, _ = spec_and_layout(config)
    table = huginn_tensors(config)["freqs_cis"][0, :, 0]
    cos, sin = blocks.rope_tables(spec, spec.max_position, torch.bfloat16)
    torch.testing.assert_close(cos, table[..., 0], atol=1e-5, rtol=0.0)
    torch.testing.assert_close(sin, table[..., 1], atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("max_positions", [0, 129])
def test_positions_the_model_does_not_define_are_refused(max_positions: int) -> None:
    spec, layout = spec_and_layout(MODELS["ouro"][0])
    with pytest.raises(BuildError, match=rf"max_positions: expected 1..128, got {max_positions}"):
        blocks.build(
            spec,
            layout,
            max_positions=max_positions,
            dtype=torch.float32,
            noise_mode=NoiseMode.POSITION,
        )


def test_a_skipped_adapter_refuses_planes_that_do_not_tell_the_loops() -> None:
    spec, _ = spec_and_layout(MODELS["olmo-skip-adapter"][0])
    for kv_planes in ("shared", "compress-s6"):
        layout = PlaneLayout.of(
            spec, page_size=4, max_loops=4, dtype="float32", kv_planes=kv_planes
        )
        with pytest.raises(BuildError, match=f"--kv_planes {kv_planes}: .*; use latest"):
            blocks.build(
                spec,
                layout,
                max_positions=8,
                dtype=torch.float32,
                noise_mode=NoiseMode.POSITION,
            )


def first_input(name: str, loops: int) -> tuple[Tensor, Tensor]:
    """Injection and next state where the core has no layers: what a loop starts with."""
    seqs = sequences(name)
    seqs.model.core.layers = torch.nn.ModuleList()
    generator = torch.Generator().manual_seed(4)
    state, injection = (torch.randn(5, 64, generator=generator) for _ in range(2))
    kv = {name: int32([0]) for name in ("positions", "cu_seqlens", "seq_slots", "block_table")}
    tensors = {"state": state, "injection": injection, "rows": torch.arange(5).int(), **kv}
    tensors |= {"kv_pool": seqs.pool.kv_pool, "plane": int32([loops])}
    return injection, run(seqs.model.core, tensors)["next_state"]


def test_the_first_loop_of_a_skipped_adapter_starts_with_the_injection_s_own_bits() -> None:
    injection, start = first_input("olmo-skip-adapter", 0)
    assert_bitwise(start, injection)
    injection, later = first_input("olmo-skip-adapter", 1)
    _, adapted = first_input("olmo-random", 0)
    assert_bitwise(later, adapted)


def test_an_embedding_state_is_the_embedding_before_the_prelude_s_layers() -> None:
    seqs = sequences("olmo-random")
    model = seqs.model
    model.prelude.spec = dataclasses.replace(model.spec, initial_state=InitialState.EMBEDDING)
    kv = {"positions": torch.arange(3).int(), "cu_seqlens": int32([0, 3]), "seq_slots": int32([0])}
    inputs = {"input_ids": int32([1, 2, 3]), "noise_seeds": torch.zeros(3).long(), **kv}
    inputs |= {"block_table": seqs.table, "kv_pool": seqs.pool.kv_pool, "plane": int32([0])}
    outputs = run(model.prelude, inputs)
    assert_bitwise(outputs["state"], model.prelude.embedding.weight[1:4])
    assert not torch.equal(outputs["injection"], outputs["state"])


def test_llama3_frequencies_are_stretched_by_wavelength() -> None:
    """Long wavelengths by the factor, short ones not at all, those between by less."""
    config = llama_config()
    plain, _ = spec_and_layout(llama_config(rope_scaling=None))
    scaled, _ = spec_and_layout(config)
    ratio = blocks.inverse_frequencies(plain) / blocks.inverse_frequencies(scaled)
    assert ratio.unique().tolist()[0] == 1.0
    assert ratio.unique().tolist()[-1] == 4.0
    between = (ratio > 1.0) & (ratio < 4.0)
    assert between.any()
    assert bool((ratio.diff() >= 0).all())
    oracle = DenseOracle(config, llama_tensors(config))
    want = oracle._angles(torch.tensor([1]))[0, 0]
    torch.testing.assert_close(blocks.inverse_frequencies(scaled), want, rtol=1e-6, atol=0.0)


def example_inputs(
    model: LoopedModel, phase: str, device: str
) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Example tensors of a phase and the dimensions that change from step to step."""
    seqs = Dim("seqs", max=64)
    dims = {
        "tokens": Dim("tokens", max=4096),
        "rows": Dim("rows", max=4096),
        "logit_rows": Dim("logit_rows", max=64),
        "seqs": seqs,
        "ends": seqs + 1,
        "slots": Dim("slots", max=64),
        "pages": Dim("pages", max=99),
    }
    sizes = {"tokens": 6, "rows": 5, "logit_rows": 3, "seqs": 2, "ends": 3, "slots": 8, "pages": 7}
    here = "rows" if phase == "core" else "tokens"
    dtype, hidden = torch.bfloat16, model.spec.hidden_size
    boundary = model.spec.prelude_layers + model.spec.coda_layers
    num_rows = model.spec.num_loops + -(-boundary // model.spec.core_layers)
    shapes: dict[str, tuple[torch.dtype, tuple[Any, ...]]] = {
        "input_ids": (torch.int32, ("tokens",)),
        "noise_seeds": (torch.int64, ("tokens",)),
        "initial_state": (dtype, ("tokens", hidden)),
        "state": (dtype, ("tokens", hidden)),
        "injection": (dtype, ("tokens", hidden)),
        "rows": (torch.int32, ("rows",)),
        "logit_rows": (torch.int32, ("logit_rows",)),
        "positions": (torch.int32, (here,)),
        "cu_seqlens": (torch.int32, ("ends",)),
        "seq_slots": (torch.int32, ("seqs",)),
        "block_table": (torch.int32, ("slots", num_rows, "pages")),
        "kv_pool": (torch.int64, (2,)),
        "plane": (torch.int32, (1,)),
    }
    tensors, dynamic = [], []
    for name in getattr(model, phase).input_names:
        kind, shape = shapes[name]
        fixed = [sizes.get(size, size) for size in shape]
        tensors.append(torch.zeros(fixed, dtype=kind, device=device))
        dynamic.append({i: dims[size] for i, size in enumerate(shape) if size in dims})
    return tuple(tensors), tuple(dynamic)


@pytest.mark.parametrize("phase", ["prelude", "core", "coda"])
@pytest.mark.parametrize(
    ("name", "noise_mode", "device"),
    [
        ("ouro", NoiseMode.POSITION, "meta"),
        ("huginn", NoiseMode.POSITION, "meta"),
        ("huginn", NoiseMode.SEQUENTIAL, "cpu"),
        ("olmo-random", NoiseMode.POSITION, "meta"),
        ("olmo-skip-adapter", NoiseMode.POSITION, "meta"),
        ("llama-embed-init", NoiseMode.POSITION, "meta"),
    ],
)
def test_phases_export_with_dynamic_sizes(
    name: str, noise_mode: NoiseMode, device: str, phase: str
) -> None:
    model = build(MODELS[name][0], dtype="bfloat16", noise_mode=noise_mode, device=device)
    inputs, dynamic = example_inputs(model, phase, device)
    module = getattr(model, phase)
    program = export(module, inputs, dynamic_shapes={"tensors": dynamic}, strict=False)
    program = program.run_decompositions()
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    attention = [target for target in targets if "packed_plane_attention" in target]
    assert len(attention) == len(module.layers)
    assert len(program.range_constraints) == len({d for entry in dynamic for d in entry.values()})
    assert not any("exit_gate" in node.name and node.users for node in program.graph.nodes)
