"""Schemas drive the torch registration, the operand checks and the traced shapes."""

from __future__ import annotations

import gc
import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.plugins import launch, ops, reference, schema
from looptrt.plugins.schema import Dim, Kind, OpSchema
from tests.plugins.pools import int32

OPS = torch.ops.looptrt
_DTYPES = {Kind.FLOAT: torch.float32, Kind.TABLE: torch.float32, Kind.INT32: torch.int32}
_ATTRIBUTES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4}
_SIZES = {"T": 5, "H": 6, "I": 3, "R": 2, "N": 1, "max_positions": 9, "max_pages": 2}


def attributes_of(op: OpSchema) -> dict[str, float]:
    kinds = {"int": 1, "float": 0.5}
    return {name: _ATTRIBUTES.get(name, kinds[kind]) for name, kind in op.attributes}


def operands_of(op: OpSchema, device: str) -> list[Tensor]:
    sizes = _SIZES | schema.derived_sizes(attributes_of(op)) | {"max_slots": 1, "num_rows": 3}
    shapes = [
        [dim.times * sizes.get(dim.symbol, 0) + dim.plus for dim in map(Dim.parse, tensor.shape)]
        for tensor in op.inputs
    ]
    dtypes = [_DTYPES.get(tensor.kind, torch.int64) for tensor in op.inputs]
    return [
        torch.ones(shape, dtype=dtype, device=device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "dim"),
    [
        ("2", Dim("", 0, 2)),
        ("T", Dim("T", 1, 0)),
        ("2*I", Dim("I", 2, 0)),
        ("N+1", Dim("N", 1, 1)),
    ],
)
def test_dim_reads_every_form(text: str, dim: Dim) -> None:
    assert Dim.parse(text) == dim


@pytest.mark.parametrize("op", schema.OPS, ids=lambda op: op.name)
def test_reference_and_registration_follow_the_schema(op: OpSchema) -> None:
    parameters = inspect.signature(getattr(reference, op.name)).parameters
    names = [tensor.name for tensor in op.inputs] + [name for name, _ in op.attributes]
    assert list(parameters) == names
    keywords = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {name for name, _ in op.attributes}
    registered = getattr(OPS, op.name).default._schema
    assert [argument.name for argument in registered.arguments] == names
    assert [result.name for result in registered.returns] == [t.name for t in op.outputs]


@pytest.mark.parametrize("op", schema.OPS, ids=lambda op: op.name)
def test_traced_results_have_the_shapes_of_the_schema(op: OpSchema) -> None:
    results = getattr(OPS, op.name)(*operands_of(op, "meta"), **attributes_of(op))
    results = results if isinstance(results, tuple) else (results,)
    sizes = _SIZES | schema.derived_sizes(attributes_of(op))
    for tensor, result in zip(op.outputs, results, strict=True):
        assert list(result.shape) == [sizes[name] for name in tensor.shape]
        assert result.dtype == torch.float32
        assert result.is_meta


@pytest.mark.parametrize("op", schema.OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_dtype_or_rank_names_the_operand(op: OpSchema, device: str) -> None:
    for i, tensor in enumerate(op.inputs):
        for change in (lambda x: x.to(torch.int8), lambda x: x[None]):
            operands = operands_of(op, device)
            operands[i] = change(operands[i])
            with pytest.raises(PluginError, match=rf"^{op.name}: {tensor.name}: expected .*, got"):
                getattr(OPS, op.name)(*operands, **attributes_of(op))


@pytest.mark.parametrize("op", schema.OPS, ids=lambda op: op.name)
def test_a_size_that_disagrees_is_refused(op: OpSchema) -> None:
    uses = [name for tensor in op.inputs for name in tensor.shape]
    derived = schema.derived_sizes(attributes_of(op))
    for i, tensor in enumerate(op.inputs):
        for axis, name in enumerate(tensor.shape):
            if name.isdigit() or name in derived or uses.count(name) > 1:
                operands = operands_of(op, "cpu")
                operands[i] = torch.cat((operands[i], operands[i]), dim=axis)
                with pytest.raises(PluginError, match=rf"^{op.name}: \w+: expected"):
                    getattr(OPS, op.name)(*operands, **attributes_of(op))


def test_odd_gate_up_is_refused() -> None:
    with pytest.raises(PluginError, match="fenced_silu_mul: gate_up: expected"):
        OPS.fenced_silu_mul(torch.ones(2, 7))


def test_tables_are_float32_or_the_model_dtype_together() -> None:
    def rope(cos: torch.dtype, sin: torch.dtype) -> Tensor:
        tables = torch.ones(4, 4, dtype=cos), torch.ones(4, 4, dtype=sin)
        qkv = torch.ones(1, 24, dtype=torch.bfloat16)
        heads: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
        return OPS.fenced_rope(qkv, int32([0]), *tables, **heads, interleaved=0)

    assert rope(torch.float32, torch.float32).dtype == torch.bfloat16
    assert rope(torch.bfloat16, torch.bfloat16).dtype == torch.bfloat16
    for wrong in ((torch.float16, torch.float16), (torch.float32, torch.bfloat16)):
        with pytest.raises(PluginError, match=r"fenced_rope: (cos|sin): expected torch"):
            rope(*wrong)


def test_calls_that_passed_are_remembered_without_work_for_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of shapes made full collections of garbage longer, on a GPU's engine only."""
    op = next(op for op in schema.OPS if op.name == "fenced_silu_mul")
    monkeypatch.setitem(launch.OPERATORS, op.name, lambda x: x)
    bound: list[int] = []
    bind = ops.bind

    def counted(*args: Any) -> Any:
        bound.append(1)
        return bind(*args)

    monkeypatch.setattr(ops, "bind", counted)
    run = ops._launched(op)

    def objects() -> int:
        for _ in range(3):
            gc.collect()
        return len(gc.get_objects())

    run(torch.zeros(1, 8))
    before = objects()
    for rows in range(1, 501):
        run(torch.zeros(rows, 8))
    assert objects() <= before + 50
    assert len(bound) == 500
    for rows in range(1, 501):
        run(torch.zeros(rows, 8))
    assert len(bound) == 500
    with pytest.raises(PluginError, match="gate_up"):
        run(torch.zeros(1, 7))


def test_importing_again_keeps_the_operators() -> None:
    before = OPS.fenced_rms_norm.default
    importlib.reload(ops)
    del sys.modules["looptrt.plugins.ops"]
    importlib.import_module("looptrt.plugins.ops")
    x, weight = torch.ones(1, 4), torch.ones(4)
    assert torch.equal(OPS.fenced_rms_norm(x, weight, eps=0.0), x)
    assert OPS.fenced_rms_norm.default is before


def test_schema_needs_no_torch() -> None:
    code = "import sys; import looptrt.plugins.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
