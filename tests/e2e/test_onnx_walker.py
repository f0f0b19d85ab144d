"""Exported phases in TensorRT's place (tests/support/onnx_walker.py): the modules' bits.

On the CPU plugin nodes are the twins, and the plugin library's objects go along in every call but
`enqueue`; on a GPU they are those objects' `enqueue`s.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tokenizers import Tokenizer

from looptrt.builder.build import BuildConfig, build
from looptrt.manifest import Manifest
from looptrt.plugins.schema import OPS
from tests.e2e import test_engine_oracle
from tests.e2e.test_engine_oracle import Build, engine_of  # noqa: F401 - a fixture
from tests.plugins.pools import assert_bitwise
from tests.support.checkpoints import tiny_huginn, tiny_llama, tiny_olmo, tiny_ouro
from tests.support.engines import Answer, Harness
from tests.support.onnx_walker import (
    STANDARD,
    FollowedTwins,
    HostedPlugins,
    PhaseWalker,
    Plugins,
    TwinPlugins,
    WalkError,
    WalkingHarness,
    profile,
)
from tests.support.plugin_host import HostError, plugin_host

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = torch.device("cpu")

# 4 layers of Ouro-1.4B, its vocabulary cut from 49,152 tokens.
full_width_ouro = partial(
    tiny_ouro,
    dtype=torch.bfloat16,
    num_hidden_layers=4,
    hidden_size=2048,
    intermediate_size=5632,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    vocab_size=4096,
)
MAKERS: dict[str, Callable[[Path], Path]] = {
    "ouro": partial(tiny_ouro, num_key_value_heads=2),
    "huginn": tiny_huginn,
    "olmo": tiny_olmo,
    "llama": tiny_llama,
    "trained_ouro": lambda _: EXAMPLES / "tiny-ouro",
    "trained_huginn": lambda _: EXAMPLES / "tiny-huginn",
    "full_width_ouro": full_width_ouro,
}

FAMILIES = ("ouro", "huginn", "olmo", "llama")

EngineDir = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    """Builds each (model, dtype) once."""
    root = tmp_path_factory.mktemp("walked")

    def get(model: str, dtype: str) -> Path:
        checkpoint, built = root / model, root / f"{model}-{dtype}"
        if not built.exists():
            if not checkpoint.exists():
                checkpoint = MAKERS[model](checkpoint)
            build(
                BuildConfig(
                    checkpoint,
                    built,
                    dtype=dtype,
                    tokens_per_block=8,
                    max_batch_size=6,
                    max_num_tokens=64,
                )
            )
        return built

    return get


def prompts(engine: Path, vocab_size: int) -> Iterator[list[int]]:
    """Of the task that a trained example knows; else random tokens of other lengths."""
    if (engine / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
        for line in (EXAMPLES / "data" / "heldout_eval.jsonl").read_text().splitlines():
            yield tokenizer.encode(json.loads(line)["prompt"]).ids
    generator = np.random.default_rng(0)
    while True:
        yield generator.integers(vocab_size, size=generator.integers(1, 50)).tolist()


def answers(harness: Harness, engine: Path) -> list[Answer]:
    """A batch of unequal lengths and depths, in prefill chunks and beside decoding rows."""
    spec = harness.core.manifest.spec
    loops = spec.num_loops
    depths = [(loops, loops), (loops, 1), (loops, 2), (2, 1), (1, 1), (loops, loops)]
    supply = prompts(engine, spec.vocab_size)
    for i, (deep, shallow) in enumerate(depths):
        harness.add(next(supply), 8, loops=deep, prefill_loops=shallow)
        for _ in range(i % 3):
            harness.step()
    harness.drain()
    results = list(harness.answers.values())
    assert any(len(answer.chunks) > len(answer.token_ids) for answer in results)
    return results


def assert_walks_alike(engine: Path, plugins: Plugins, **config: Any) -> None:
    """The same tokens as the modules, from logits with the same bits."""
    config = {"max_num_tokens": 40, "enable_prefix_cache": False, **config}
    modules = Harness(engine, **config)
    want = answers(modules, engine)
    modules.core.close()
    walker = WalkingHarness(engine, plugins, **config)
    walker.poison()
    got = answers(walker, engine)
    for one, other in zip(got, want, strict=True):
        assert one.token_ids == other.token_ids
        assert_bitwise(torch.stack(one.logits), torch.stack(other.logits))
    assert any(len(set(answer.token_ids)) > 2 for answer in want)
    walker.core.close()


def families(*often: str) -> pytest.MarkDecorator:
    """Every family, all but a few in the slower tier."""
    return pytest.mark.parametrize(
        "model",
        [pytest.param(name, marks=() if name in often else pytest.mark.full) for name in FAMILIES],
    )


@families("ouro", "huginn")
def test_twins_give_the_modules_bits(engine_dir: EngineDir, model: str) -> None:
    assert_walks_alike(engine_dir(model, "float32"), TwinPlugins())


@families("olmo")
def test_plugin_objects_go_along_with_every_step(engine_dir: EngineDir, model: str) -> None:
    """Each node's object through a plan and back, then told of every step's shapes."""
    assert_walks_alike(engine_dir(model, "bfloat16"), FollowedTwins(plugin_host()))


@pytest.mark.full
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_an_engine_over_graphs_equals_the_oracle(
    engine_of: Build,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    """Tests of the engine run unchanged with graphs in the executor's place."""
    monkeypatch.setattr(
        test_engine_oracle, "Harness", partial(WalkingHarness, plugins=TwinPlugins())
    )
    test_engine_oracle.test_mixed_batch_equals_oracle(engine_of, model, 8)
    test_engine_oracle.test_hit_equals_miss_and_leaves_shared_pages_alone(engine_of, model, 17)


@pytest.mark.full
def test_operators_of_all_families_are_walked(engine_dir: EngineDir) -> None:
    """Every operator of the schema is in some graph that these tests execute."""
    walked = set()
    for model in FAMILIES:
        harness = WalkingHarness(engine_dir(model, "float32"), TwinPlugins())
        for walker in harness.walkers.values():
            walked |= set(walker.plugin_names)
    assert walked == {op.name for op in OPS}


# What a walk refuses, and what it notices.


def walker_of(path: Path, manifest: Manifest, plugins: Plugins | None = None) -> PhaseWalker:
    return PhaseWalker(path, CPU, plugins or TwinPlugins(), profile(manifest.limits, 6, 16))


def changed_core(
    engine: Path, folder: Path, change: Callable[[onnx.ModelProto], None]
) -> tuple[Path, Manifest]:
    """The core phase with a change, beside the engine's weights."""
    shutil.copy(engine / "rank0.safetensors", folder)  # ONNX's checker refuses links
    model = onnx.load(engine / "rank0.core.onnx", load_external_data=False)
    change(model)
    onnx.save(model, folder / "rank0.core.onnx")
    return folder / "rank0.core.onnx", Manifest.load(engine)


def first(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def rename_operator(model: onnx.ModelProto) -> None:
    first(model, "Gemm").op_type = "MatMul"
    del first(model, "MatMul").attribute[:]


def add_attribute(model: onnx.ModelProto) -> None:
    first(model, "Concat").attribute.append(helper.make_attribute("stride", 2))


def add_plugin_attribute_type(model: onnx.ModelProto) -> None:
    node = first(model, "fenced_rms_norm")
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("eps", 1))


def shorten_weight(model: onnx.ModelProto) -> None:
    weight = model.graph.initializer[0]
    next(item for item in weight.external_data if item.key == "length").value = "64"


def declare_wider(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value += 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rename_operator, r"rank0\.core\.onnx: .*\.MatMul: expected one of Constant"),
        (add_attribute, "not a valid graph: .*stride"),
        (add_plugin_attribute_type, "not a valid graph: .*eps"),
        (shorten_weight, "'length': '64'"),
        (declare_wider, r"next_state: declared .*72\], its node gives .*64\]"),
    ],
)
def test_a_graph_that_is_not_understood_is_refused(
    engine_dir: EngineDir, tmp_path: Path, change: Callable[[onnx.ModelProto], None], words: str
) -> None:
    path, manifest = changed_core(engine_dir("huginn", "float32"), tmp_path, change)
    with pytest.raises(WalkError, match=words):
        walker_of(path, manifest)


def heads_of(count: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        attributes = first(model, "packed_plane_attention").attribute
        next(item for item in attributes if item.name == "num_heads").i = count

    return change


@pytest.mark.parametrize("count", [5, 0])
def test_a_node_that_its_plugin_refuses_is_an_error(
    engine_dir: EngineDir, tmp_path: Path, count: int
) -> None:
    path, manifest = changed_core(engine_dir("huginn", "float32"), tmp_path, heads_of(count))
    with pytest.raises(HostError, match="ERROR looptrt::packed_plane_attention"):
        walker_of(path, manifest, FollowedTwins(plugin_host()))


def swap_weights(model: onnx.ModelProto) -> None:
    """The first layer's gate-up and another's of the same shape."""
    gate_ups = [node for node in model.graph.node if node.op_type == "Gemm"][3::4]
    one, other = gate_ups[0].input[1], gate_ups[1].input[1]
    gate_ups[0].input[1], gate_ups[1].input[1] = other, one


def core_inputs(manifest: Manifest) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Pool and inputs of one loop over 5 tokens of one sequence."""
    layout, hidden = manifest.layout, manifest.spec.hidden_size
    table = torch.zeros(6, layout.num_rows, 16, dtype=torch.int32)
    table[2, :, 0] = torch.arange(1, layout.num_rows + 1)
    pool = torch.zeros(layout.num_rows + 1, *layout.unit_shape)
    generator = torch.Generator().manual_seed(0)
    five = torch.arange(5, dtype=torch.int32)
    return pool, {
        "state": torch.randn(5, hidden, generator=generator),
        "injection": torch.randn(5, hidden, generator=generator),
        "rows": five,
        "positions": five,
        "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32),
        "seq_slots": torch.tensor([2], dtype=torch.int32),
        "block_table": table,
        "kv_pool": torch.tensor([pool.data_ptr(), len(pool)]),
        "plane": torch.zeros(1, dtype=torch.int32),
    }


def test_a_graph_with_two_weights_exchanged_gives_other_numbers(
    engine_dir: EngineDir, tmp_path: Path
) -> None:
    engine = engine_dir("huginn", "float32")
    path, manifest = changed_core(engine, tmp_path, swap_weights)
    results = []
    for graph in (engine / "rank0.core.onnx", engine / "rank0.core.onnx", path):
        pool, inputs = core_inputs(manifest)
        results.append(walker_of(graph, manifest).run(inputs)["next_state"])
        assert pool.any()
    assert_bitwise(results[0], results[1])
    assert (results[0] - results[2]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("state", None, "input state: missing"),
        ("state", torch.zeros(5, 64, dtype=torch.bfloat16), "got torch.bfloat16"),
        ("state", torch.zeros(65, 64), r"from \[1, 64\] to \[64, 64\], got .* \[65, 64\]"),
        ("state", torch.zeros(64), r"got torch.float32 \[64\]"),
        ("rows", torch.zeros(0, dtype=torch.int32), r"from \[1\] to \[64\], got .* \[0\]"),
    ],
)
def test_inputs_outside_the_profile_are_refused(
    engine_dir: EngineDir, name: str, value: torch.Tensor | None, words: str
) -> None:
    engine = engine_dir("huginn", "float32")
    manifest = Manifest.load(engine)
    _, inputs = core_inputs(manifest)
    del inputs[name]
    if value is not None:
        inputs[name] = value
    with pytest.raises(WalkError, match=words):
        walker_of(engine / "rank0.core.onnx", manifest).run(inputs)


# ONNX's own operators against its reference evaluator.

A = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
B = np.random.default_rng(2).standard_normal((4, 5)).astype(np.float32)
ROW = np.random.default_rng(3).standard_normal((1, 5)).astype(np.float32)
CUBE = np.random.default_rng(4).standard_normal((2, 3, 4)).astype(np.float32)
IDS = np.array([[1, -1], [0, -3]], np.int64)
WIDE = np.array([[1.5, -2.5, 3.49, 1e-3]], np.float32)

CASES: list[tuple[str, list[np.ndarray], dict[str, Any]]] = [
    ("Add", [A, A[:1]], {}),
    ("Add", [CUBE, A], {}),
    ("Mul", [A, A[:, :1]], {}),
    ("Mul", [A, np.array(0.3, np.float32)], {}),
    ("Cast", [A], {"to": TensorProto.INT32}),
    ("Cast", [WIDE], {"to": TensorProto.INT64}),
    ("Cast", [IDS], {"to": TensorProto.FLOAT}),
    ("Concat", [A, A], {"axis": 0}),
    ("Concat", [A, B[:3], A], {"axis": -1}),
    ("Equal", [A, A[:1]], {}),
    ("Equal", [IDS, np.array(-1)], {}),
    ("Gather", [A, IDS], {}),
    ("Gather", [CUBE, IDS], {"axis": 1}),
    ("Gather", [CUBE, IDS.astype(np.int32)], {"axis": -1}),
    ("Gather", [CUBE, np.array(1)], {"axis": 0}),
    ("Gemm", [A, B], {}),
    ("Gemm", [A, B, ROW], {}),
    ("Gemm", [A, B.T.copy(), ROW[0]], {"transB": 1}),
    ("Gemm", [A.T.copy(), B], {"transA": 1, "alpha": 0.5}),
    ("Gemm", [A, B, A[:, :1]], {"beta": 0.25, "alpha": 2.0}),
    ("Identity", [CUBE], {}),
    ("Where", [A > 0, A, A[:1]], {}),
    ("Where", [A[:, :1] > 0, A, np.array(7, np.float32)], {}),
]


@pytest.mark.parametrize(
    ("op_type", "operands", "attributes"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_standard_operators_are_onnxs(
    op_type: str, operands: list[np.ndarray], attributes: dict[str, Any]
) -> None:
    names = [f"x{i}" for i in range(len(operands))]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in zip(names, operands, strict=True)
    ]
    node = helper.make_node(op_type, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    feeds = dict(zip(names, operands, strict=True))
    (want,) = ReferenceEvaluator(model).run(None, feeds)
    got = STANDARD[op_type](*map(torch.from_numpy, operands), **attributes)
    assert got.shape == want.shape
    exact = op_type != "Gemm"  # NumPy sums in another order
    torch.testing.assert_close(
        got, torch.from_numpy(want), rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6
    )


def test_every_standard_operator_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(STANDARD)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.BFLOAT16, TensorProto.INT64])
@pytest.mark.parametrize("raw", [True, False])
def test_constants_are_read_in_both_forms(tmp_path: Path, dtype: int, raw: bool) -> None:
    numbers = np.array([1.0, -2.0, 3.0])
    array = numbers.astype(helper.tensor_dtype_to_np_dtype(dtype))
    value = (
        numpy_helper.from_array(array, "v")
        if raw
        else helper.make_tensor("v", dtype, [3], numbers.astype(int).tolist())
    )
    node = helper.make_node("Constant", [], ["y"], value=value)
    output = helper.make_tensor_value_info("y", dtype, [3])
    graph = helper.make_graph([node], "g", [], [output])
    path = tmp_path / "g.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path
    )
    got = PhaseWalker(path, CPU, TwinPlugins(), {}).run({})["y"]
    assert got.tolist() == [1, -2, 3]


# On a GPU: `enqueue` against the PyTorch backend on the same GPU.


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines of a harness run on the GPU, with the library's kernels or not at all."""
    monkeypatch.setattr(
        Harness,
        "CONFIG",
        {
            "device": "cuda",
            "kv_cache_bytes": 2**28,
            "require_exact": True,
            # As the graphs: no step filled up to a usual size, every projection joined.
            "cuda_graphs": "off",
            "joined_projections": "always",
            "skinny_linear_rows": 0,
            "cache_dir": str(tmp_path_factory.getbasetemp() / "verdicts"),
        },
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("on_the_gpu")
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *itertools.product(["trained_ouro", "trained_huginn"], ["float32", "bfloat16"]),
        *((family, "bfloat16") for family in FAMILIES),
        ("full_width_ouro", "bfloat16"),
    ],
)
def test_enqueues_give_the_pytorch_backends_tokens(
    engine_dir: EngineDir, model: str, dtype: str
) -> None:
    assert_walks_alike(engine_dir(model, dtype), HostedPlugins(plugin_host()))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_the_gpu")
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_an_engine_over_enqueues_equals_the_oracle(
    engine_of: Build,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    harness = partial(WalkingHarness, plugins=HostedPlugins(plugin_host()))
    monkeypatch.setattr(test_engine_oracle, "Harness", harness)
    test_engine_oracle.test_mixed_batch_equals_oracle(engine_of, model, 8)
    test_engine_oracle.test_hit_equals_miss_and_leaves_shared_pages_alone(engine_of, model, 17)
