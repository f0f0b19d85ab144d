"""Exported phases: plugin nodes, weights by reference, and the module's numbers."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import defs

from looptrt.builder.build import BuildConfig, plan_build
from looptrt.builder.export import export_phases
from looptrt.builder.lowering import Lowering
from looptrt.builder.onnx_ops import definition, register_definitions
from looptrt.builder.verify import PhaseEvaluator, open_phases
from looptrt.errors import BuildError
from looptrt.loop_spec import NoiseMode
from looptrt.manifest import PHASES, Manifest
from looptrt.models.weights import load_model
from looptrt.plugins.schema import NAMESPACE, OPS
from tests.golden.onnx_ops import onnx_ops
from tests.support.checkpoints import tiny_huginn

GOLDEN = Path(__file__).parents[1] / "golden" / "onnx_ops.json"


def graph_of(directory: Path, phase: str) -> onnx.ModelProto:
    return onnx.load(directory / f"rank0.{phase}.onnx", load_external_data=False)


def test_operators_are_the_golden_ones() -> None:
    assert onnx_ops() == json.loads(GOLDEN.read_text())


def test_every_custom_operator_is_one_plugin_node(engine: tuple[Path, Manifest]) -> None:
    directory, manifest = engine
    layers = {
        "prelude": manifest.spec.prelude_layers,
        "core": manifest.spec.core_layers,
        "coda": manifest.spec.coda_layers,
    }
    for phase, count in layers.items():
        nodes = graph_of(directory, phase).graph.node
        plugins = Counter(node.op_type for node in nodes if node.domain == NAMESPACE)
        rope = plugins["fenced_rope"] + plugins["fenced_bias_rope"]
        assert plugins["packed_plane_attention"] == plugins["fenced_silu_mul"] == rope == count
        assert plugins["compact_scatter"] == (phase == "core")
        assert {node.domain for node in nodes} <= {"", NAMESPACE}
        plain = {node.op_type for node in nodes if node.domain == ""}
        assert plain <= {"Gemm", "Gather", "Concat", "Mul", "Constant"}


def test_nodes_carry_the_schemas_attributes_and_operands(engine: tuple[Path, Manifest]) -> None:
    schemas = {op.name: op for op in OPS}
    kinds = {"int": onnx.AttributeProto.INT, "float": onnx.AttributeProto.FLOAT}
    for phase in PHASES:
        model = graph_of(engine[0], phase)
        for node in model.graph.node:
            if node.domain == NAMESPACE:
                op = schemas[node.op_type]
                assert len(node.input) == len(op.inputs)
                found = {attribute.name: attribute.type for attribute in node.attribute}
                assert found == {name: kinds[kind] for name, kind in op.attributes}
        versions = {item.domain: item.version for item in model.opset_import}
        assert versions.get(NAMESPACE, 1) == 1


def test_graph_tensors_are_named_as_the_manifest_says(engine: tuple[Path, Manifest]) -> None:
    directory, manifest = engine
    model = load_model(directory, manifest)
    for phase, graph in manifest.phases.items():
        proto = graph_of(directory, phase).graph
        assert tuple(value.name for value in proto.input) == graph.inputs
        assert tuple(value.name for value in proto.output) == graph.outputs
        assert graph.inputs == getattr(model, phase).input_names
        assert not set(graph.inputs) & set(graph.outputs)


def test_weights_are_references_into_the_one_file(engine: tuple[Path, Manifest]) -> None:
    directory, manifest = engine
    state = load_model(directory, manifest).state_dict()
    weights = (directory / "rank0.safetensors").read_bytes()
    for phase in PHASES:
        for initializer in graph_of(directory, phase).graph.initializer:
            place = {entry.key: entry.value for entry in initializer.external_data}
            assert not initializer.raw_data
            assert place["location"] == "rank0.safetensors"
            begin, length = int(place["offset"]), int(place["length"])
            stored = state[initializer.name].contiguous().view(torch.uint8).numpy().tobytes()
            assert weights[begin : begin + length] == stored
        assert (directory / f"rank0.{phase}.onnx").stat().st_size < 64 * 1024


def test_graphs_say_nothing_of_the_machine_that_built_them(engine: tuple[Path, Manifest]) -> None:
    for phase in PHASES:
        content = (engine[0] / f"rank0.{phase}.onnx").read_bytes()
        assert b"site-packages" not in content
        assert str(engine[0].parent).encode() not in content


def test_definitions_are_registered_with_onnx() -> None:
    register_definitions()
    for op in OPS:
        assert defs.has(op.name, NAMESPACE)
        inputs = definition(op).inputs
        assert [parameter.name for parameter in inputs] == [tensor.name for tensor in op.inputs]


# The reference evaluator's float32 products are NumPy's; after 4 loops of a random model they
# are this far from torch's, in parts of the largest logit.
TOLERANCE = 1e-5

Inputs = dict[str, torch.Tensor]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step_inputs(manifest: Manifest) -> tuple[torch.Tensor, Inputs]:
    """Two new sequences of 13 and 6 tokens in a shuffled pool of their own.

    Returns:
        The pool's memory, to be kept alive, and the inputs of all phases but the state's.
    """
    layout, generator = manifest.layout, torch.Generator().manual_seed(0)
    pages, lengths = 2, (13, 6)
    num_units = 1 + len(lengths) * layout.num_rows * pages
    pool = torch.zeros(num_units, *layout.unit_shape)
    table = torch.zeros(4, layout.num_rows, pages, dtype=torch.int32)
    units = 1 + torch.randperm(num_units - 1, generator=generator)
    table[torch.tensor([3, 1])] = units.view(2, layout.num_rows, pages).int()
    num_tokens = sum(lengths)
    ids = torch.randint(manifest.spec.vocab_size, (num_tokens,), generator=generator)
    return pool, {
        "input_ids": ids.int(),
        "positions": torch.cat([torch.arange(length) for length in lengths]).int(),
        "cu_seqlens": int32(0, lengths[0], num_tokens),
        "seq_slots": int32(3, 1),
        "block_table": table,
        "kv_pool": torch.tensor([pool.data_ptr(), num_units]),
        "noise_seeds": torch.zeros(num_tokens, dtype=torch.int64),
        "rows": torch.arange(num_tokens, dtype=torch.int32),
        "logit_rows": int32(lengths[0] - 1, num_tokens - 1),
    }


def run_step(manifest: Manifest, phases: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prelude, every loop and coda; `phases` are callables on inputs. Returns logits and pool."""
    pool, inputs = step_inputs(manifest)
    inputs["plane"] = int32(0)
    outputs = phases["prelude"](inputs)  # type: ignore[operator]
    inputs |= dict(zip(("state", "injection"), outputs, strict=False))
    for loop in range(manifest.spec.num_loops):
        inputs["plane"] = int32(manifest.layout.strategy.plane(loop))
        (inputs["state"],) = phases["core"](inputs)  # type: ignore[operator]
    inputs["plane"] = int32(0)
    (logits,) = phases["coda"](inputs)  # type: ignore[operator]
    return logits, pool


def test_exported_phases_compute_what_the_module_computes(engine: tuple[Path, Manifest]) -> None:
    directory, manifest = engine
    model = load_model(directory, manifest)

    def module(phase: str) -> object:
        def call(inputs: Inputs) -> tuple[torch.Tensor, ...]:
            part = getattr(model, phase)
            result = part(*(inputs[name] for name in part.input_names))
            return result if isinstance(result, tuple) else (result,)

        return call

    with torch.no_grad():
        expected, expected_pool = run_step(manifest, {phase: module(phase) for phase in PHASES})
    evaluators = open_phases(directory, manifest)
    found, found_pool = run_step(manifest, {name: item.run for name, item in evaluators.items()})
    for got, want in ((found, expected), (found_pool, expected_pool)):
        assert got.shape == want.shape
        assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert found_pool.abs().max() > 0


def test_missing_input_is_named(engine: tuple[Path, Manifest]) -> None:
    with pytest.raises(BuildError, match=r"rank0\.coda\.onnx: inputs missing: state"):
        open_phases(*engine)["coda"].run({"logit_rows": int32(0)})


class Foreign(torch.nn.Module):
    """A phase that does what `lower` is given."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def lower(call: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """Operators of a function of one bfloat16 matrix; its result is `y`."""
    program = torch.export.export(Foreign(call), (torch.empty(3, 4, dtype=torch.bfloat16),))
    graph = Lowering(program, {"x": (3, 4)}, ["y"], lambda _: pytest.fail("no weight")).graph("g")
    assert [value.name for value in graph.outputs] == ["y"]
    return [node.op_type for node in graph]


def test_plain_operators_have_one_form_each() -> None:
    assert lower(lambda x: x * 0.5 + x) == ["Constant", "Mul", "Add"]
    assert lower(lambda x: torch.cat((x, x.float().bfloat16()), 1)) == ["Cast", "Cast", "Concat"]
    assert lower(lambda x: x.clone()) == ["Identity"]
    assert lower(lambda x: x.to(torch.bfloat16)) == ["Identity"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.softmax(-1), "aten.softmax.int: no ONNX form"),
        (lambda x: x * 0.1, "0.1 is not a BFLOAT16"),
        (lambda x: torch.add(x, x, alpha=2), "no ONNX form with {'alpha': 2}"),
        (lambda x: x.double(), "torch.float64 has no place"),
        (lambda x: x + torch.ones(4), "cannot be stored as a weight|no ONNX form"),
    ],
)
def test_operators_without_a_form_are_refused(
    call: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    with pytest.raises(BuildError, match=words.replace("{", r"\{")):
        lower(call)


def test_invalid_graph_is_refused(tmp_path: Path, engine: tuple[Path, Manifest]) -> None:
    directory, manifest = engine
    # A copy: the checker refuses external data behind a link with the same words.
    shutil.copy(directory / "rank0.safetensors", tmp_path)
    model = graph_of(directory, "core")
    model.graph.node[0].op_type = "compact_typo"
    onnx.save(model, tmp_path / "rank0.core.onnx")
    with pytest.raises(BuildError, match=r"(?s)rank0\.core\.onnx: not a valid graph.*compact_typo"):
        PhaseEvaluator(tmp_path, manifest.phases["core"])


def test_sequential_noise_and_bfloat16_logits_export(tmp_path: Path) -> None:
    config = BuildConfig(
        tiny_huginn(tmp_path / "c"),
        tmp_path / "engine",
        noise=NoiseMode.SEQUENTIAL,
        dtype="bfloat16",
        logits_dtype="bfloat16",
    )
    plan = plan_build(config)
    graphs = export_phases(plan.model, plan.layout, plan.weights, tmp_path)
    assert graphs["prelude"].inputs[-1] == "initial_state"
    prelude, coda = (graph_of(tmp_path, phase).graph for phase in ("prelude", "coda"))
    assert prelude.node[-1].op_type == "Identity"
    assert coda.output[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
