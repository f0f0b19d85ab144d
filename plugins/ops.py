"""The operators of `schema.OPS` as `torch.ops.looptrt.*`, registered on import, and as a model's.

Owns operand checks, result shapes (both read off the schema) and a model's choice between an
operator and its chain of torch operators; leaves arithmetic to `reference` on the CPU, to
`launch` on CUDA, where the plugin library is opened by the first call, and to `unfused`.
Invariants: one registration a process, however often this is imported; a choice belongs to one
model, so engines of one process do not share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.plugins import launch, reference, schema
from looptrt.plugins.schema import NAMESPACE, Dim, Kind, OpSchema, operand_error
from looptrt.plugins.unfused import FORMS

_MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGER_DTYPES = {Kind.INT32: torch.int32, Kind.INT64: torch.int64}
_SHAPES = {
    tensor: tuple(map(Dim.parse, tensor.shape))
    for op in schema.OPS
    for tensor in (*op.inputs, *op.outputs)
}


def bind(
    op: OpSchema, operands: tuple[Tensor, ...], attributes: Mapping[str, float]
) -> dict[str, int]:
    """Match operands against a schema: dtypes, ranks and sizes.

    Sizes that are symbolic while a graph is traced are taken as they come.

    Returns:
        Size of every symbol in the schema's input shapes.

    Raises:
        PluginError: an operand does not fit; names operator, operand, expected and got.
    """
    sizes = schema.derived_sizes(attributes)
    dtypes: dict[Kind, torch.dtype] = {}
    for tensor, operand in zip(op.inputs, operands, strict=True):
        _bind_dtype(op, tensor, operand.dtype, dtypes)
        if operand.dim() != len(tensor.shape):
            raise operand_error(op.name, tensor.name, _text(tensor), list(operand.shape))
        for dim, size in zip(_SHAPES[tensor], operand.shape, strict=True):
            if not _fits(dim, size, sizes):
                raise operand_error(
                    op.name, tensor.name, f"{_text(tensor)} with {sizes}", list(operand.shape)
                )
    return sizes


def _bind_dtype(
    op: OpSchema, tensor: schema.Tensor, dtype: torch.dtype, dtypes: dict[Kind, torch.dtype]
) -> None:
    """Check an operand's dtype; the first of a kind decides for the call."""
    if tensor.kind in _INTEGER_DTYPES:
        allowed: tuple[torch.dtype, ...] = (_INTEGER_DTYPES[tensor.kind],)
    elif tensor.kind in dtypes:
        allowed = (dtypes[tensor.kind],)
    elif tensor.kind is Kind.TABLE:
        allowed = (dtypes[Kind.FLOAT], torch.float32)
    else:
        allowed = _MODEL_DTYPES
    if dtype not in allowed:
        raise operand_error(op.name, tensor.name, " or ".join(map(str, allowed)), dtype)
    dtypes[tensor.kind] = dtype


def _fits(dim: Dim, size: int, sizes: dict[str, int]) -> bool:
    """Compare a size with its expression, or learn its symbol from it."""
    if dim.times and dim.symbol not in sizes:
        sizes[dim.symbol] = (size - dim.plus) // dim.times
    expected = dim.times * sizes[dim.symbol] + dim.plus if dim.times else dim.plus
    is_symbolic = isinstance(size, torch.SymInt) or isinstance(expected, torch.SymInt)
    return is_symbolic or size == expected


def _text(tensor: schema.Tensor) -> str:
    return f"[{', '.join(tensor.shape)}]"


def _checked(op: OpSchema) -> Callable[..., Any]:
    """CPU kernel: the reference behind operand checks."""
    function = getattr(reference, op.name)

    def run(*operands: Tensor, **attributes: float) -> Any:  # noqa: ANN401 - one or two tensors
        bind(op, operands, attributes)
        return function(*operands, **attributes)

    return run


def _launched(op: OpSchema) -> Callable[..., Any]:
    """CUDA kernel: the launcher behind operand checks.

    Shapes, dtypes and attributes that passed once are not checked again: a large step launches
    thousands of kernels, and the checks cost the host more than the launch.
    """
    passed: set[tuple[Any, ...]] = set()

    def run(*operands: Tensor, **attributes: float) -> Any:  # noqa: ANN401 - one or two tensors
        call = (*attributes.values(), *((operand.shape, operand.dtype) for operand in operands))
        if call not in passed:
            bind(op, operands, attributes)
            if len(passed) >= _MOST_PASSED:
                passed.clear()
            passed.add(_plain(call))
        index = operands[0].get_device()
        for tensor, operand in zip(op.inputs, operands, strict=True):
            if operand.get_device() != index or not operand.is_contiguous():
                launch.check_placement(op.name, tensor.name, operand, operands[0].device)
        return launch.OPERATORS[op.name](*operands, **attributes)

    return run


def _plain(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """An equal tuple of plain tuples, which the collector stops following once it has seen them."""
    return tuple(tuple(map(_plain_size, item)) if type(item) is tuple else item for item in call)


def _plain_size(item: Any) -> Any:  # noqa: ANN401 - a shape or a dtype
    return tuple(item) if isinstance(item, torch.Size) else item


_MOST_PASSED = 1024


def _fake(op: OpSchema) -> Callable[..., Any]:
    """Results without values, for tracing: every result has the model dtype."""
    like = next(i for i, tensor in enumerate(op.inputs) if tensor.kind is Kind.FLOAT)

    def run(*operands: Tensor, **attributes: float) -> Any:  # noqa: ANN401 - one or two tensors
        sizes = bind(op, operands, attributes)
        results = tuple(
            operands[like].new_empty([sizes[dim.symbol] for dim in _SHAPES[tensor]])
            for tensor in op.outputs
        )
        return results if len(results) > 1 else results[0]

    return run


def _register() -> torch.library.Library:
    library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
    for op in schema.OPS:
        library.define(schema.torch_schema(op))
        library.impl(op.name, _checked(op), "CPU")
        library.impl(op.name, _launched(op), "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{op.name}", _fake(op), lib=library)
    return cast("torch.library.Library", library)


# A second execution of this module (a reload) finds the operators and leaves them alone.
if not hasattr(torch.ops.looptrt, schema.OPS[0].name):
    LIBRARY = _register()


class Operators(SimpleNamespace):
    """The operators as one model calls them, each an attribute: `operators.fenced_rope(...)`.

    Args:
        unfused: names of those that run as chains of torch operators, on every device; the
            others are `torch.ops.looptrt`'s.

    Raises:
        PluginError: there is no operator of such a name.
    """

    unfused: frozenset[str]

    def __init__(self, unfused: Iterable[str] = ()) -> None:
        names = frozenset(unfused)
        if unknown := names - FORMS.keys():
            raise PluginError(f"unfused: there is no operator {', '.join(sorted(unknown))}")
        fused = {name: getattr(torch.ops.looptrt, name) for name in FORMS}
        super().__init__(unfused=names, **(fused | {name: FORMS[name] for name in names}))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: models share these; give one others by use_operators")
