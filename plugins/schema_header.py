"""The schema as a C++ header, so that TensorRT's adapters read the same single source.

Owns the header's form; leaves the content to `schema` and its use to `plugins/trt/`. CMake runs
`python -m looptrt.plugins.schema_header FILE` before it compiles them. Invariant: no import but
the standard library's and `schema`, so that any Python of a build machine can run it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from looptrt.plugins.schema import (
    DERIVED_SIZES,
    NAMESPACE,
    OPS,
    DerivedSize,
    Dim,
    OpSchema,
    Tensor,
)

_FREE = DerivedSize(by=0)  # a size that operands decide


def schema_text() -> str:
    """Everything that the library is compiled from, one fact a line.

    A library whose `looptrt_schema_text()` differs was built from another schema.
    """
    lines = [f"{symbol} {size}\n" for symbol, size in DERIVED_SIZES.items()]
    for op in OPS:
        attributes = ", ".join(f"{kind} {name}" for name, kind in op.attributes)
        inputs, outputs = (", ".join(map(_text, side)) for side in (op.inputs, op.outputs))
        lines.append(
            f"{NAMESPACE}::{op.name} {op.version}({inputs}; {attributes}) -> {outputs} {op.level}\n"
        )
    return "".join(lines)


def header() -> str:
    """The header's text."""
    parts = [
        "// Generated from plugins/schema.py by plugins/schema_header.py; not to be edited.\n"
        "#pragma once\n\n"
        '#include "op_schema.h"\n\n'
        "namespace looptrt::trt::schema {\n\n"
        f"constexpr int kNumOps = {len(OPS)};\n"
        f"inline constexpr char kNamespace[] = {_quoted(NAMESPACE)};\n"
        f"inline constexpr char kText[] =\n{_lines(schema_text())};\n"
    ]
    parts += map(_operator, OPS)
    parts.append("}  // namespace looptrt::trt::schema\n")
    return "\n".join(parts)


def _text(tensor: Tensor) -> str:
    return f"{tensor.kind} {tensor.name}[{', '.join(tensor.shape)}]"


def _operator(op: OpSchema) -> str:
    sizes = list(dict.fromkeys(dim.symbol for dim in _dims(op) if dim.times))
    size_rows = [_size_row(symbol) for symbol in sizes]
    attribute_rows = [
        f"{{{_quoted(name)}, AttributeType::k{kind.title()}}}" for name, kind in op.attributes
    ]
    lines = [
        f"struct {op.name} {{",
        _enum("in", (tensor.name for tensor in op.inputs)),
        _enum("out", (tensor.name for tensor in op.outputs)),
        _enum("attr", (name for name, _ in op.attributes)),
        _enum("size", sizes),
        _array("SizeSchema", "kSizes", size_rows),
        _array("AttributeSchema", "kAttributes", attribute_rows),
        _array("TensorSchema", "kInputs", [_tensor_row(tensor, sizes) for tensor in op.inputs]),
        _array("TensorSchema", "kOutputs", [_tensor_row(tensor, sizes) for tensor in op.outputs]),
        f"static constexpr OpSchema kOp{{{_quoted(op.name)}, {_quoted(op.version)},",
        f"    kInputs, {len(op.inputs)}, kOutputs, {len(op.outputs)},",
        f"    kAttributes, {len(op.attributes)}, kSizes, {len(sizes)}}};",
        "static_assert(kOp.isServed());",
        "};",
    ]
    return "\n".join(lines) + "\n"


def _dims(op: OpSchema) -> Iterable[Dim]:
    for tensor in (*op.inputs, *op.outputs):
        yield from map(Dim.parse, tensor.shape)


def _size_row(symbol: str) -> str:
    size = DERIVED_SIZES.get(symbol, _FREE)
    return f"{{{_quoted(symbol)}, {size.heads}, {size.kv_heads}, {size.plus}, {size.by}}}"


def _tensor_row(tensor: Tensor, sizes: list[str]) -> str:
    dims = [Dim.parse(text) for text in tensor.shape]
    rows = ", ".join(
        f"{{{sizes.index(dim.symbol) if dim.times else 0}, {dim.times}, {dim.plus}}}"
        for dim in dims
    )
    kind = f"Kind::k{tensor.kind.title()}"
    return f"{{{_quoted(tensor.name)}, {kind}, {len(dims)}, {{{rows}}}}}"


def _enum(name: str, names: Iterable[str]) -> str:
    constants = ", ".join(map(_constant, names))
    return f"struct {name} {{ enum Index : int {{ {constants} }}; }};"


def _constant(name: str) -> str:
    return "k" + "".join(word[0].upper() + word[1:] for word in name.split("_"))


def _array(kind: str, name: str, rows: list[str]) -> str:
    if not rows:
        return f"static constexpr {kind} const* {name} = nullptr;"
    return f"static constexpr {kind} {name}[] = {{\n    " + ",\n    ".join(rows) + "};"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _lines(text: str) -> str:
    return "\n".join(f"    {_quoted(line)}" for line in text.splitlines(keepends=True))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(header(), encoding="utf-8")
