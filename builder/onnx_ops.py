"""The plugin operators in ONNX terms: definitions and evaluators.

Owns what ONNX must know of the `looptrt` domain, all of it generated from
`looptrt.plugins.schema`; leaves graphs to `builder.lowering`. Invariant: a node's inputs and
attributes are those of the torch operator, in the same order and under the same names.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from onnx import defs
from onnx.reference.op_run import OpRun

import looptrt.plugins.ops  # noqa: F401  registers the torch operators
from looptrt.plugins.schema import NAMESPACE, OPS, Kind, OpSchema, Tensor

DOMAIN_VERSION = 1

_FLOATS = ["tensor(float)", "tensor(bfloat16)", "tensor(float16)"]
_CONSTRAINTS = {
    Kind.FLOAT: ("T", _FLOATS, "model dtype"),
    Kind.TABLE: ("TTable", _FLOATS, "model dtype or float32"),
    Kind.INT32: ("TInt32", ["tensor(int32)"], ""),
    Kind.INT64: ("TInt64", ["tensor(int64)"], ""),
}
_ATTRIBUTE_TYPES = {"int": defs.OpSchema.AttrType.INT, "float": defs.OpSchema.AttrType.FLOAT}


def register_definitions() -> None:
    """Make the operators known to ONNX's checker and shape inference."""
    for op in OPS:
        if not defs.has(op.name, NAMESPACE):
            defs.register_schema(definition(op))


def definition(op: OpSchema) -> defs.OpSchema:
    """ONNX definition of an operator."""
    kinds = dict.fromkeys(tensor.kind for tensor in (*op.inputs, *op.outputs))
    return defs.OpSchema(
        op.name,
        NAMESPACE,
        DOMAIN_VERSION,
        inputs=[_formal(tensor) for tensor in op.inputs],
        outputs=[_formal(tensor) for tensor in op.outputs],
        type_constraints=[_CONSTRAINTS[kind] for kind in kinds],
        attributes=[
            defs.OpSchema.Attribute(name, _ATTRIBUTE_TYPES[kind], required=True)
            for name, kind in op.attributes
        ],
    )


def _formal(tensor: Tensor) -> defs.OpSchema.FormalParameter:
    description = f"[{', '.join(tensor.shape)}]"
    return defs.OpSchema.FormalParameter(tensor.name, _CONSTRAINTS[tensor.kind][0], description)


class _PluginRun(OpRun):
    """A node of the `looptrt` domain, evaluated by the operator's CPU reference."""

    op_domain = NAMESPACE
    plugin: ClassVar[OpSchema]

    def _run(self, *inputs: np.ndarray, **attributes: float) -> tuple[np.ndarray, ...]:
        tensors = [torch.from_numpy(np.array(array)) for array in inputs]
        result = getattr(torch.ops.looptrt, self.plugin.name)(*tensors, **attributes)
        results = result if isinstance(result, tuple) else (result,)
        return tuple(tensor.numpy() for tensor in results)


def evaluators() -> list[type[OpRun]]:
    """One evaluator class per operator, for `onnx.reference.ReferenceEvaluator`."""
    return [type(op.name, (_PluginRun,), {"plugin": op}) for op in OPS]
