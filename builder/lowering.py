"""From a traced phase to an ONNX graph, operator by operator.

Owns the translation: a custom operator becomes one plugin node, a plain one of PyTorch what
the table below says, any other is refused. Leaves tracing and files to `builder.export`.
Nothing is decomposed or folded on the way: the graph is the module, line by line.
Invariant: equal programs give equal graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from looptrt.builder.onnx_ops import DOMAIN_VERSION
from looptrt.errors import BuildError
from looptrt.plugins.schema import NAMESPACE, OPS, OpSchema

OPSET = 20
_DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
    torch.bool: ir.DataType.BOOL,
}

_PLUGINS = {getattr(torch.ops.looptrt, op.name).default: op for op in OPS}
_ATEN = torch.ops.aten

Dims = tuple[str | int, ...]


def onnx_dtype(name: str, dtype: torch.dtype) -> ir.DataType:
    """ONNX's name of a dtype; BuildError where engines have no such tensors."""
    if dtype not in _DTYPES:
        raise BuildError(f"{name}: {dtype} has no place in an engine's graph")
    return _DTYPES[dtype]


class Lowering:
    """One graph in the making.

    Args:
        program: the traced phase.
        inputs: {name: shape} of its inputs in order; strings are sizes that change.
        outputs: names of its results in order, none of them an input's.
        weight: makes the initializer for a parameter or buffer, by its name in the phase.
    """

    def __init__(
        self,
        program: ExportedProgram,
        inputs: Mapping[str, Dims],
        outputs: Sequence[str],
        weight: Callable[[str], ir.Value],
    ) -> None:
        self._program = program
        self._inputs = inputs
        self._outputs = outputs
        self._weight = weight
        self._values: dict[fx.Node, ir.Value | tuple[ir.Value, ...]] = {}
        self._weights: dict[str | None, ir.Value] = {}
        self._sizes: dict[str, str] = {}  # {symbol of the trace: name of the size}
        self._nodes: list[ir.Node] = []

    def graph(self, name: str) -> ir.Graph:
        """Translate the program.

        Raises:
            BuildError: an operator, a dtype or a constant has no place in an engine's graph.
        """
        inputs = self._declare_inputs()
        for node in self._program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
        return ir.Graph(
            inputs,
            self._name_outputs(inputs),
            nodes=self._nodes,
            initializers=list(self._weights.values()),
            opset_imports={"": OPSET, NAMESPACE: DOMAIN_VERSION},
            name=name,
        )

    def value_of(self, node: object) -> ir.Value:
        """The value of an operator's tensor operand."""
        value = self._values[node] if isinstance(node, fx.Node) else None
        if not isinstance(value, ir.Value):
            raise BuildError(f"{node}: expected one tensor, got {value}")
        return value

    def emit(
        self, node: fx.Node, op_type: str, inputs: Sequence[ir.Value], *attributes: ir.Attr
    ) -> None:
        """Append an ONNX node that computes what `node` computes."""
        output = self._declare(node.name, node.meta["val"])
        self._nodes.append(ir.Node("", op_type, inputs, attributes, outputs=[output]))
        self._values[node] = output

    def scalar(self, node: fx.Node, number: float, dtype: ir.DataType) -> ir.Value:
        """A constant of no dimensions, operand of `node`.

        Raises:
            BuildError: PyTorch would compute with the number itself, the graph with what is
                left of it in the tensors' narrower dtype.
        """
        tensor = ir.tensor(number, dtype=dtype)
        if dtype != ir.DataType.FLOAT and float(tensor.numpy()) != number:
            raise BuildError(f"{node.name}: {number} is not a {dtype.name}; compute in float32")
        output = ir.Value(name=f"{node.name}_scalar", shape=ir.Shape([]), type=ir.TensorType(dtype))
        attribute = ir.AttrTensor("value", tensor)
        self._nodes.append(ir.Node("", "Constant", [], [attribute], outputs=[output]))
        return output

    def share(self, node: fx.Node, source: object) -> None:
        """Let `node` be another name of its operand."""
        self._values[node] = self.value_of(source)

    def _declare(self, name: str, tensor: torch.Tensor) -> ir.Value:
        dims = [
            size if isinstance(size, int) else self._sizes.get(str(size), str(size))
            for size in tensor.shape
        ]
        dtype = onnx_dtype(name, tensor.dtype)
        return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype))

    def _declare_inputs(self) -> list[ir.Value]:
        placeholders = self._program.graph.find_nodes(op="placeholder")
        inputs = iter(self._inputs.items())
        values = []
        signature = self._program.graph_signature.input_specs
        for node, spec in zip(placeholders, signature, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                name, dims = next(inputs)
                for size, dim in zip(node.meta["val"].shape, dims, strict=True):
                    if isinstance(dim, str):
                        self._sizes.setdefault(str(size), dim)
                self._values[node] = value = self._declare(name, node.meta["val"])
                values.append(value)
            elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
                raise BuildError(f"{spec.target}: {spec.kind.name} cannot be stored as a weight")
            elif node.users:
                value = self._weight(str(spec.target))
                self._values[node] = self._weights.setdefault(value.name, value)
        return values

    def _name_outputs(self, inputs: Sequence[ir.Value]) -> list[ir.Value]:
        (output,) = self._program.graph.find_nodes(op="output")
        taken = {*inputs, *self._weights.values()}
        values = []
        for node, name in zip(output.args[0], self._outputs, strict=True):
            value = self.value_of(node)
            if value in taken:  # passed through, or already another output
                self.emit(node, "Identity", [value])
                value = self.value_of(node)
            value.name = name
            taken.add(value)
            values.append(value)
        return values

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._values[node] = self._result(*node.args)
        elif node.target in _PLUGINS:
            self._plugin(node, _PLUGINS[node.target])
        elif node.target in _PLAIN:
            _PLAIN[node.target](self, node)
        else:
            raise BuildError(
                f"{node.target}: no ONNX form; expected one of {', '.join(map(str, _PLAIN))} "
                f"or an operator of {NAMESPACE}"
            )

    def _result(self, source: object, index: object) -> ir.Value:
        values = self._values[source] if isinstance(source, fx.Node) else None
        if not isinstance(values, tuple) or not isinstance(index, int):
            raise BuildError(f"{source}: expected several results, got {values}")
        return values[index]

    def _plugin(self, node: fx.Node, op: OpSchema) -> None:
        results = node.meta["val"]
        attributes = [_attribute(name, kind, node.kwargs[name]) for name, kind in op.attributes]
        if len(op.outputs) == 1:
            outputs: tuple[ir.Value, ...] = (self._declare(node.name, results),)
            self._values[node] = outputs[0]
        else:
            outputs = tuple(
                self._declare(f"{node.name}_{tensor.name}", result)
                for tensor, result in zip(op.outputs, results, strict=True)
            )
            self._values[node] = outputs
        inputs = [self.value_of(operand) for operand in node.args]
        self._nodes.append(ir.Node(NAMESPACE, op.name, inputs, attributes, outputs=outputs))


def _attribute(name: str, kind: str, value: object) -> ir.Attr:
    if not isinstance(value, int | float):
        raise BuildError(f"{name}: expected {kind}, got {value!r}")
    return ir.AttrInt64(name, int(value)) if kind == "int" else ir.AttrFloat32(name, value)


def _linear(to: Lowering, node: fx.Node) -> None:
    """[rows, in] by [out, in], and a bias if there is one."""
    operands = [to.value_of(operand) for operand in node.args if operand is not None]
    to.emit(node, "Gemm", operands, ir.AttrInt64("transB", 1))


def _embedding(to: Lowering, node: fx.Node) -> None:
    table, ids = node.args[:2]
    to.emit(node, "Gather", [to.value_of(table), to.value_of(ids)], ir.AttrInt64("axis", 0))


def _concat(to: Lowering, node: fx.Node) -> None:
    tensors, axis = node.args[0], node.args[1] if len(node.args) > 1 else 0
    operands = [to.value_of(tensor) for tensor in tensors]  # type: ignore[union-attr]
    to.emit(node, "Concat", operands, ir.AttrInt64("axis", axis))  # type: ignore[arg-type]


def _cast(to: Lowering, node: fx.Node) -> None:
    source = node.args[0]
    dtype = onnx_dtype(node.name, node.meta["val"].dtype)
    if to.value_of(source).dtype == dtype:
        to.share(node, source)
    else:
        to.emit(node, "Cast", [to.value_of(source)], ir.AttrInt64("to", dtype))


def _arithmetic(op_type: str) -> Callable[[Lowering, fx.Node], None]:
    def lower(to: Lowering, node: fx.Node) -> None:
        if node.kwargs:
            raise BuildError(f"{node.target}: no ONNX form with {dict(node.kwargs)}")
        left, right = node.args
        first = to.value_of(left)
        if isinstance(right, int | float):
            second = to.scalar(node, right, onnx_dtype(node.name, node.meta["val"].dtype))
        else:
            second = to.value_of(right)
        to.emit(node, op_type, [first, second])

    return lower


def _equal(to: Lowering, node: fx.Node) -> None:
    left, right = node.args
    first = to.value_of(left)
    if not isinstance(right, int) or first.dtype is None:
        raise BuildError(f"{node.target}: no ONNX form with {right!r}")
    to.emit(node, "Equal", [first, to.scalar(node, right, first.dtype)])


def _where(to: Lowering, node: fx.Node) -> None:
    """Select by a condition that broadcasts; nothing is computed with what is not chosen."""
    to.emit(node, "Where", [to.value_of(operand) for operand in node.args])


_PLAIN: dict[object, Callable[[Lowering, fx.Node], None]] = {
    _ATEN.linear.default: _linear,
    _ATEN.embedding.default: _embedding,
    _ATEN.cat.default: _concat,
    _ATEN.to.dtype: _cast,
    _ATEN.add.Tensor: _arithmetic("Add"),
    _ATEN.mul.Tensor: _arithmetic("Mul"),
    _ATEN.eq.Scalar: _equal,
    _ATEN.where.self: _where,
    _ATEN.clone.default: lambda to, node: to.share(node, node.args[0]),
    _ATEN._assert_tensor_metadata.default: lambda _to, _node: None,
}
