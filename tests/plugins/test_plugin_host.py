"""The library's plugin objects, driven as TensorRT drives them (tests/support/plugin_host.py).

Everything up to `enqueue` runs anywhere. On a GPU, `enqueue` has to give the launchers' bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators
from looptrt.plugins.schema import NAMESPACE, OPS, Dim, Kind, OpSchema, derived_sizes
from tests.plugins.pools import assert_bitwise, int32
from tests.support.plugin_host import (
    DYNAMIC,
    FIELD_FLOAT16,
    FIELD_FLOAT32,
    FIELD_FLOAT64,
    FIELD_INT32,
    FIELD_INT64,
    Field,
    HostedPlugin,
    HostError,
    PluginHost,
    TensorDesc,
    plugin_host,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)
INTEGERS = {Kind.INT32: torch.int32, Kind.INT64: torch.int64}
FIELD_TYPES = {"int": FIELD_INT32, "float": FIELD_FLOAT32}
VECTOR = 32  # nvinfer1::TensorFormat::kCHW32 is another layout than linear, whatever its number

Sizes = Mapping[str, int]
Attributes = Mapping[str, float]

ATTRIBUTES: Attributes = {
    "eps": 1e-6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "interleaved": 1,
    "page_size": 8,
    "unit_slots": 3,
    "row": 1,
    "slot": 2,
    "scale": 0.125,
    "std": 0.0123,
}
USUAL: Sizes = {
    "T": 7,
    "H": 64,
    "I": 96,
    "R": 5,
    "N": 2,
    "max_positions": 50,
    "max_slots": 3,
    "num_rows": 4,
    "max_pages": 6,
}
LEAST: Sizes = USUAL | {"T": 1, "R": 0, "N": 1, "max_pages": 1}
GREATEST: Sizes = USUAL | {"T": 8192, "R": 4096, "N": 64, "max_pages": 2048}

by_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return plugin_host()


@pytest.fixture(autouse=True)
def _silence(host: PluginHost) -> None:
    """What a test reads in the log is its own."""
    host.messages()


def attributes_of(op: OpSchema, values: Attributes = ATTRIBUTES) -> dict[str, float]:
    return {name: values[name] for name, _ in op.attributes}


def shape_of(dims: tuple[str, ...], sizes: Sizes) -> tuple[int, ...]:
    parsed = map(Dim.parse, dims)
    return tuple(d.times * sizes[d.symbol] + d.plus if d.times else d.plus for d in parsed)


def shapes(op: OpSchema, sizes: Sizes, attributes: Attributes) -> list[tuple[int, ...]]:
    """Shapes of an operator's inputs, then outputs."""
    every = {**sizes, **derived_sizes(attributes)}
    return [shape_of(tensor.shape, every) for tensor in (*op.inputs, *op.outputs)]


def dtypes(op: OpSchema, dtype: torch.dtype, table: torch.dtype | None = None) -> list[torch.dtype]:
    kinds = {**INTEGERS, Kind.FLOAT: dtype, Kind.TABLE: table or dtype}
    return [kinds[tensor.kind] for tensor in (*op.inputs, *op.outputs)]


def descs(
    op: OpSchema,
    dtype: torch.dtype = BF16,
    sizes: Sizes = USUAL,
    attributes: Attributes = ATTRIBUTES,
    table: torch.dtype | None = None,
) -> tuple[list[TensorDesc], list[TensorDesc]]:
    """A step's inputs and outputs, by the schema."""
    every = [
        TensorDesc(*pair)
        for pair in zip(dtypes(op, dtype, table), shapes(op, sizes, attributes), strict=True)
    ]
    return every[: len(op.inputs)], every[len(op.inputs) :]


def ranged(op: OpSchema, dtype: torch.dtype = BF16) -> tuple[list[TensorDesc], list[TensorDesc]]:
    """A network's inputs and outputs, by the schema: some sizes dynamic."""
    points = [shapes(op, sizes, ATTRIBUTES) for sizes in (LEAST, USUAL, GREATEST)]
    every = [
        TensorDesc.ranged(dtype_, *profile)
        for dtype_, *profile in zip(dtypes(op, dtype), *points, strict=True)
    ]
    return every[: len(op.inputs)], every[len(op.inputs) :]


def created(host: PluginHost, op: OpSchema, attributes: Attributes = ATTRIBUTES) -> HostedPlugin:
    return host.create(op.name, host.node_fields(op.name, attributes, op.version), op.version)


def schema_of(name: str) -> OpSchema:
    return next(op for op in OPS if op.name == name)


# The library.


def test_creators_are_the_schemas(host: PluginHost) -> None:
    assert host.creators == {
        (NAMESPACE, op.name, op.version): {n: FIELD_TYPES[kind] for n, kind in op.attributes}
        for op in OPS
    }


def test_a_second_copy_of_the_library_lives_beside_the_first(
    host: PluginHost, tmp_path: Path
) -> None:
    copy = tmp_path / host.plugins_path.name
    copy.write_bytes(host.plugins_path.read_bytes())
    for path in (copy, host.plugins_path):
        again = PluginHost(host.path, path)
        assert again.creators == host.creators
        with pytest.raises(HostError, match=r"ERROR looptrt::fenced_rms_norm .*eps: missing"):
            again.create("fenced_rms_norm", [])


@pytest.mark.parametrize(
    ("name", "version", "namespace"),
    [
        ("fenced_rms_nom", "1", NAMESPACE),
        ("fenced_rms_norm", "2", NAMESPACE),
        ("fenced_rms_norm", "1", ""),
        ("fenced_rms_norm", "1", "other"),
    ],
)
def test_an_unknown_plugin_is_refused(
    host: PluginHost, name: str, version: str, namespace: str
) -> None:
    fields = [Field("eps", 1e-6, FIELD_FLOAT32)]
    expected = rf"no creator of {name} version {version} in namespace '{namespace}'"
    with pytest.raises(HostError, match=expected):
        host.create(name, fields, version, namespace)


def test_what_is_no_plugin_library_is_refused(host: PluginHost, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="expected the exports getCreators and setLoggerFinder"):
        PluginHost(host.path, host.path)
    with pytest.raises(HostError, match=r"absent\.so: cannot open shared object file"):
        PluginHost(host.path, tmp_path / "absent.so")


# Creation.


@by_op
def test_a_plugin_says_who_it_is(host: PluginHost, op: OpSchema) -> None:
    plugin = created(host, op)
    for made in (plugin, plugin.clone(), plugin.attach(), host.restore(plugin.serialize())):
        assert made.identity == (NAMESPACE, op.name, op.version)
        assert made.num_outputs == len(op.outputs)
    assert not host.messages()


@by_op
def test_a_missing_attribute_is_refused(host: PluginHost, op: OpSchema) -> None:
    for missing, _ in op.attributes:
        fields = [item for item in host.node_fields(op.name, ATTRIBUTES) if item.name != missing]
        with pytest.raises(HostError, match=rf"ERROR looptrt::{op.name} .*{missing}: missing"):
            host.create(op.name, fields)


@by_op
def test_an_attribute_of_another_form_is_refused(host: PluginHost, op: OpSchema) -> None:
    right = host.node_fields(op.name, ATTRIBUTES)
    for i, item in enumerate(right):
        others = [FIELD_FLOAT16, FIELD_FLOAT64, FIELD_INT64, FIELD_INT32, FIELD_FLOAT32]
        wrong = [Field(item.name, 1, kind) for kind in others if kind != item.type]
        wrong.append(Field(item.name, item.value, item.type, length=2))
        wrong.append(Field(item.name, None, item.type))
        wrong.append(Field(item.name, None, item.type, length=0))
        for other in wrong:
            with pytest.raises(HostError, match=rf"ERROR looptrt::{op.name} .*{item.name}: "):
                host.create(op.name, [*right[:i], other, *right[i + 1 :]])


@by_op
@pytest.mark.parametrize("value", [0, -1, -(2**31), 2**31 - 1])
def test_heads_without_a_layout_are_refused(host: PluginHost, op: OpSchema, value: int) -> None:
    for name in {"num_heads", "num_kv_heads", "head_dim"} & {name for name, _ in op.attributes}:
        with pytest.raises(HostError, match=rf"ERROR looptrt::{op.name} .*{name} {value}"):
            created(host, op, {**ATTRIBUTES, name: value})


# Sizes while a network is built.


@by_op
@by_dtype
def test_outputs_are_the_schemas(host: PluginHost, op: OpSchema, dtype: torch.dtype) -> None:
    plugin = created(host, op)
    for sizes in (LEAST, USUAL, GREATEST):
        inputs, outputs = descs(op, dtype, sizes)
        traced = getattr(torch.ops.looptrt, op.name)(
            *(torch.empty(item.dims, dtype=item.dtype, device="meta") for item in inputs),
            **attributes_of(op),
        )
        traced = traced if isinstance(traced, tuple) else (traced,)
        found = plugin.output_descs(inputs)
        assert [(item.dtype, item.dims) for item in found] == [
            (item.dtype, tuple(item.shape)) for item in traced
        ]
        assert [(item.dtype, item.dims) for item in outputs] == [
            (item.dtype, item.dims) for item in found
        ]


@by_op
def test_dynamic_sizes_follow_the_profile(host: PluginHost, op: OpSchema) -> None:
    inputs, outputs = ranged(op)
    assert any(DYNAMIC in item.dims for item in inputs)
    assert created(host, op).output_descs(inputs) == tuple(outputs)


@by_op
def test_inputs_of_another_rank_have_no_outputs(host: PluginHost, op: OpSchema) -> None:
    inputs, _ = descs(op)
    for i, item in enumerate(inputs):
        wrong = TensorDesc(item.dtype, (*item.dims, 1))
        with pytest.raises(HostError, match=rf"ERROR looptrt::{op.name} .*{op.inputs[i].name}: "):
            created(host, op).output_descs([*inputs[:i], wrong, *inputs[i + 1 :]])


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        (0, lambda a, b: a + b),
        (1, lambda a, b: a * b),
        (2, max),
        (3, min),
        (4, lambda a, b: a - b),
        (5, lambda a, b: int(a == b)),
        (6, lambda a, b: int(a < b)),
        (7, lambda a, b: a // b),
        (8, lambda a, b: -(-a // b)),
    ],
)
def test_expressions_of_sizes_have_tensorrts_operations(
    host: PluginHost, operation: int, call: Any
) -> None:
    """The numbers are those of nvinfer1::DimensionOperation."""
    for a, b in itertools.product((-7, -1, 0, 1, 6, 2**31), (-3, 1, 2, 7)):
        assert host.dimension_operation(operation, a, b) == call(a, b)
    assert (host.dimension_operation(operation, 5, 0) is None) == (operation in (7, 8))


# Formats.


@by_op
@by_dtype
def test_the_schemas_formats_are_supported(
    host: PluginHost, op: OpSchema, dtype: torch.dtype
) -> None:
    plugin = created(host, op)
    for table in (dtype, F32):
        inputs, outputs = descs(op, dtype, table=table)
        count = len(inputs) + len(outputs)
        assert all(plugin.supports(pos, inputs, outputs) for pos in range(count))
        plugin.configure(inputs, outputs)
        plugin.on_shape_change(inputs, outputs)
    plugin.configure(*ranged(op, dtype))
    assert not host.messages()


@by_op
@by_dtype
def test_other_formats_are_not(host: PluginHost, op: OpSchema, dtype: torch.dtype) -> None:
    """Every position in turn: a dtype that the schema does not allow there, or a vector format."""
    plugin = created(host, op)
    inputs, outputs = descs(op, dtype)
    right = [*inputs, *outputs]
    first_table = [tensor.kind for tensor in op.inputs].count(Kind.TABLE)
    for pos, tensor in enumerate((*op.inputs, *op.outputs)):
        allowed = {right[pos].dtype}
        if pos == 0:
            allowed = set(DTYPES)
        elif tensor.kind is Kind.TABLE and op.inputs[pos - 1].kind is not Kind.TABLE:
            assert first_table
            allowed |= {F32}
        every = {*DTYPES, torch.int8, torch.int32, torch.int64}
        wrong = [TensorDesc(other, right[pos].dims) for other in every - allowed]
        wrong.append(TensorDesc(right[pos].dtype, right[pos].dims, format=VECTOR))
        for other in wrong:
            changed = [*right[:pos], other, *right[pos + 1 :]]
            split = changed[: len(inputs)], changed[len(inputs) :]
            assert not plugin.supports(pos, *split)
            for call in (plugin.configure, plugin.on_shape_change):
                with pytest.raises(
                    HostError, match=rf"ERROR looptrt::{op.name} .*{tensor.name}: wrong"
                ):
                    call(*split)


@by_op
def test_other_shapes_are_refused_in_every_call(host: PluginHost, op: OpSchema) -> None:
    """A rank, or a size that contradicts an attribute or another tensor, each in turn."""
    plugin = created(host, op)
    inputs, outputs = descs(op)
    right = [*inputs, *outputs]
    tensors = (*op.inputs, *op.outputs)
    uses: dict[str, int] = {}
    for dim in (dim for tensor in tensors for dim in tensor.shape):
        symbol = Dim.parse(dim).symbol
        uses[symbol] = uses.get(symbol, 0) + 1
    fixed = {*derived_sizes(ATTRIBUTES), ""} | {
        symbol for symbol, count in uses.items() if count > 1
    }
    refused = 0
    for pos, tensor in enumerate(tensors):
        dims = right[pos].dims
        wrong = [(*dims, 1), dims[1:]]
        for i, dim in enumerate(tensor.shape):
            if Dim.parse(dim).symbol in fixed:
                wrong.append((*dims[:i], dims[i] + 1, *dims[i + 1 :]))
            wrong.append((*dims[:i], -7, *dims[i + 1 :]))
        for other in wrong:
            changed = [*right[:pos], TensorDesc(right[pos].dtype, other), *right[pos + 1 :]]
            split = changed[: len(inputs)], changed[len(inputs) :]
            calls = {
                "configurePlugin": lambda split=split: plugin.configure(*split),
                "onShapeChange": lambda split=split: plugin.on_shape_change(*split),
                "enqueue": lambda split=split: plugin.enqueue(*split, [0] * len(right)),
            }
            for name, call in calls.items():
                with pytest.raises(HostError, match=rf"{name} gave .*ERROR looptrt::{op.name} "):
                    call()
                refused += 1
    assert refused >= 3 * 3 * len(tensors)


@by_op
def test_a_step_needs_every_size(host: PluginHost, op: OpSchema) -> None:
    """What configurePlugin may leave open, a step may not."""
    plugin = created(host, op)
    inputs, outputs = ranged(op)
    with pytest.raises(HostError, match=rf"ERROR looptrt::{op.name} "):
        plugin.on_shape_change(inputs, outputs)


@by_op
def test_another_number_of_tensors_is_refused(host: PluginHost, op: OpSchema) -> None:
    plugin = created(host, op)
    inputs, outputs = descs(op)
    calls = [
        lambda: plugin.configure(inputs[:-1], outputs),
        lambda: plugin.configure(inputs, [*outputs, outputs[0]]),
        lambda: plugin.on_shape_change([*inputs, inputs[0]], outputs),
        lambda: plugin.output_descs(inputs[:-1]),
    ]
    for call in calls:
        with pytest.raises(HostError, match=rf"ERROR looptrt::{op.name} .*expected \d inputs"):
            call()
    assert not plugin.supports(0, inputs[:-1], outputs)


# Fields through a plan.


FLOATS = (1e-6, 0.1, -0.0, 1e-45, 3.4028234663852886e38, math.inf, -math.nan)


@by_op
def test_fields_survive_the_plan_bit_for_bit(host: PluginHost, op: OpSchema) -> None:
    """Host memory of a field is overwritten as soon as the creator has returned."""
    for number in FLOATS:
        values = {name: number for name, kind in op.attributes if kind == "float"}
        plugin = created(host, op, {**ATTRIBUTES, **values})
        blob = plugin.serialize()
        for name, kind in op.attributes:
            value = {**ATTRIBUTES, **values}[name]
            packed = struct.pack("<f" if kind == "float" else "<i", value)
            label = struct.pack("<i", len(name)) + name.encode()
            assert label + struct.pack("<ii", FIELD_TYPES[kind], 1) + packed in blob
        restored = host.restore(blob)
        for made in (plugin, plugin.clone(), restored, restored.clone(), restored.attach()):
            assert made.serialize() == blob


@by_op
def test_each_attribute_is_its_own_field(host: PluginHost, op: OpSchema) -> None:
    blobs = {created(host, op).serialize()}
    for name, _ in op.attributes:
        changed = {**ATTRIBUTES, name: ATTRIBUTES[name] + 4}
        blobs.add(created(host, op, changed).serialize())
    assert len(blobs) == 1 + len(op.attributes)


@by_op
def test_copies_live_on_their_own(host: PluginHost, op: OpSchema) -> None:
    """A clone answers as its original did, after that is gone."""
    plugin = created(host, op)
    blob = plugin.serialize()
    inputs, outputs = descs(op)
    copies = [plugin.clone(), plugin.attach(), host.restore(blob)]
    plugin.close()
    filler = [created(host, op, {**ATTRIBUTES, "eps": 9.0, "head_dim": 8}) for _ in range(64)]
    for copy in copies:
        assert copy.serialize() == blob
        assert [item.dims for item in copy.output_descs(inputs)] == [item.dims for item in outputs]
        copy.on_shape_change(inputs, outputs)
    assert len(filler) == 64


def test_a_shortened_plan_is_refused(host: PluginHost) -> None:
    blob = created(host, schema_of("packed_plane_attention")).serialize()
    for size in range(len(blob)):
        with pytest.raises(HostError, match=f"{size} bytes that are no serialised plugin"):
            host.restore(blob[:size])
    with pytest.raises(HostError, match="no serialised plugin"):
        host.restore(blob + b"\0")


@given(place=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_damaged_plan_never_ends_the_process(place: int, byte: int) -> None:
    """It is refused, or makes a plugin of other attributes that still serialises."""
    host = plugin_host()
    blob = bytearray(created(host, schema_of("packed_plane_attention")).serialize())
    blob[place % len(blob)] = byte
    with contextlib.suppress(HostError):
        assert host.restore(bytes(blob)).serialize() == bytes(blob)


# The whole way into a plan.


@by_op
@by_dtype
def test_a_layer_is_built_and_read_back(host: PluginHost, op: OpSchema, dtype: torch.dtype) -> None:
    inputs, outputs = ranged(op, dtype)
    layer = host.build_layer(op.name, ATTRIBUTES, inputs)
    assert layer.outputs == tuple(outputs)
    assert 0 <= layer.workspace_bytes < 2**40
    context = layer.context()
    assert context.plugin.serialize() == layer.blob
    context.plugin.on_shape_change(*descs(op, dtype))
    assert not host.messages()


@given(data=st.data())
def test_a_plans_workspace_suffices_for_every_step(data: st.DataObject) -> None:
    """What a plan reserves for its greatest step is enough for each smaller one."""
    host, op = plugin_host(), schema_of("packed_plane_attention")
    attributes = ATTRIBUTES | {"head_dim": data.draw(st.sampled_from([64, 96, 128]))}
    greatest = GREATEST | {name: data.draw(st.integers(1, 3000)) for name in ("R", "N")}
    greatest |= {"max_pages": data.draw(st.integers(1, 3000))}
    sizes = {name: data.draw(st.integers(1, most)) for name, most in greatest.items()}
    plugin = created(host, op, attributes)
    points = [shapes(op, point, attributes) for point in (LEAST, LEAST, greatest)]
    every = [
        TensorDesc(dtype, (DYNAMIC,) * len(profile[0]), profile)
        for dtype, *profile in zip(dtypes(op, BF16), *points, strict=True)
    ]
    reserved = plugin.workspace_bytes(every[:-1], every[-1:])
    assert reserved >= plugin.workspace_bytes(*descs(op, BF16, sizes, attributes))


def test_a_launch_without_a_gpu_comes_back_as_an_error(host: PluginHost) -> None:
    """Also shows that nothing is thrown through `noexcept`, which would end the process."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    memory = ctypes.create_string_buffer(1 << 20)
    address = (ctypes.addressof(memory) + 255) // 256 * 256
    for op in OPS:
        inputs, outputs = descs(op)
        count = len(inputs) + len(outputs)
        with pytest.raises(HostError, match=rf"enqueue gave .*looptrt::{op.name} .*cudaError\w+:"):
            created(host, op).enqueue(inputs, outputs, [address] * count, address)


# On a GPU: the launchers' bits.

HEADS = ((4, 2, 64), (16, 16, 128), (5, 5, 96), (4, 4, 16))
WIDTHS = (64, 96, 2048, 5280)
ROWS = ((1, 1), (2, 1), (7, 5), (16, 16), (300, 41))


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def operands(
    op: OpSchema, dtype: torch.dtype, sizes: Sizes, attributes: Attributes, table: torch.dtype
) -> list[Tensor]:
    """Random floats, and integers that mean something."""
    every = {**sizes, **derived_sizes(attributes)}
    generator = torch.Generator().manual_seed(sum(sizes.values()))
    results = []
    for seed, tensor in enumerate(op.inputs):
        shape = shape_of(tensor.shape, every)
        if tensor.kind in (Kind.FLOAT, Kind.TABLE):
            results.append(random(shape, table if tensor.kind is Kind.TABLE else dtype, seed))
        elif tensor.name == "rows":
            rows = torch.randperm(sizes["T"], generator=generator)[: sizes["R"]]
            results.append(rows.int().cuda())
        elif tensor.name == "seeds":
            low, high = -(2**63), 2**63 - 1
            results.append(torch.randint(low, high, shape, generator=generator).cuda())
        else:
            limit = sizes["max_positions"]
            results.append(torch.randint(limit, shape, generator=generator).int().cuda())
    return results


def assert_equals_launcher(
    host: PluginHost, op: OpSchema, tensors: list[Tensor], attributes: Attributes
) -> None:
    """Every output of a plugin that went through a plan has the launcher's bits."""
    attributes = attributes_of(op, attributes)
    want = getattr(torch.ops.looptrt, op.name)(*tensors, **attributes)
    want = want if isinstance(want, tuple) else (want,)
    inputs = [TensorDesc.of(tensor) for tensor in tensors]
    context = host.build_layer(op.name, attributes, inputs).context()
    for got, expected in zip(context(*tensors), want, strict=True):
        assert expected.numel() == 0 or expected.isfinite().any()
        assert_bitwise(got, expected)


@pytest.mark.gpu
@by_dtype
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "op", [op for op in OPS if op.name != "packed_plane_attention"], ids=lambda op: op.name
)
def test_enqueue_has_the_launchers_bits(
    host: PluginHost, op: OpSchema, rows: tuple[int, int], dtype: torch.dtype
) -> None:
    uses_heads = any(name == "num_heads" for name, _ in op.attributes)
    for form in HEADS if uses_heads else WIDTHS:
        attributes = dict(ATTRIBUTES)
        sizes = {**USUAL, "T": rows[0], "R": rows[1]}
        if isinstance(form, tuple):
            attributes |= dict(zip(("num_heads", "num_kv_heads", "head_dim"), form, strict=True))
        else:
            sizes |= {"H": form, "I": form}
        has_table = any(tensor.kind is Kind.TABLE for tensor in op.inputs)
        for table in {dtype, F32} if has_table else {dtype}:
            for interleaved in (0, 1) if "interleaved" in dict(op.attributes) else (0,):
                attributes["interleaved"] = interleaved
                tensors = operands(op, dtype, sizes, attributes, table)
                assert_equals_launcher(host, op, tensors, attributes)


@pytest.mark.gpu
@by_dtype
@pytest.mark.parametrize("page_size", [4, 32])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_has_the_launchers_bits_in_results_and_pool(
    host: PluginHost, heads: tuple[int, int, int], page_size: int, dtype: torch.dtype
) -> None:
    """Prefill of one sequence and decode of others over pages in disorder, cached K and V."""
    op = schema_of("packed_plane_attention")
    attributes = {**ATTRIBUTES, "page_size": page_size, "scale": heads[2] ** -0.5}
    attributes |= dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    unit_shape = (3, 2, page_size, heads[1], heads[2])
    lengths, counts = (77, 300, 1), (40, 1, 1)  # of each sequence: tokens at the end, rows now
    pages = -(-max(lengths) // page_size)
    table_shape = (4, 4, pages)
    num_units = 1 + math.prod(table_shape)
    order = torch.randperm(num_units - 1, generator=torch.Generator().manual_seed(0)) + 1
    positions = [torch.arange(end - n, end) for end, n in zip(lengths, counts, strict=True)]
    num_rows = sum(counts)
    width = (heads[0] + 2 * heads[1]) * heads[2]
    cached = random((num_units, *unit_shape), dtype, 1)

    def call(pool: Tensor) -> list[Tensor]:
        return [
            random((num_rows, width), dtype, 2),
            torch.cat(positions).int().cuda(),
            int32([0, *itertools.accumulate(counts)]).cuda(),
            int32([3, 0, 2]).cuda(),
            order.view(table_shape).int().cuda(),
            torch.tensor([pool.data_ptr(), num_units], device="cuda"),
            int32([2]).cuda(),
        ]

    want_pool, got_pool = cached.clone(), cached.clone()
    want = torch.ops.looptrt.packed_plane_attention(
        *call(want_pool), **attributes_of(op, attributes)
    )
    tensors = call(got_pool)
    inputs = [TensorDesc.of(tensor) for tensor in tensors]
    layer = host.build_layer(op.name, attributes_of(op, attributes), inputs)
    (got,) = layer.context()(*tensors)
    assert want.isfinite().all()
    assert_bitwise(got, want)
    assert_bitwise(got_pool, want_pool)
    assert not torch.equal(got_pool, cached)


@pytest.mark.gpu
def test_a_context_follows_changing_shapes(host: PluginHost) -> None:
    """Case D4: no step runs with the shapes of the one before."""
    op = schema_of("fenced_rms_norm")
    weight = random((2048,), BF16, 9)
    profile = ((1, 2048), (4, 2048), (300, 2048))
    inputs = [TensorDesc.ranged(BF16, *profile), TensorDesc.of(weight)]
    context = host.build_layer(op.name, {"eps": 1e-6}, inputs).context()
    for rows in (4, 300, 1, 300, 7):
        x = random((rows, 2048), BF16, rows)
        want = torch.ops.looptrt.fenced_rms_norm(x, weight, eps=1e-6)
        assert_bitwise(context(x, weight)[0], want)


@pytest.mark.gpu
def test_a_captured_enqueue_replays_on_new_values(host: PluginHost) -> None:
    """Fails with a plugin that enqueues on another stream than the one it is given."""
    op = schema_of("fenced_silu_mul")
    x = random((3, 192), BF16, 0)
    context = host.build_layer(op.name, {}, [TensorDesc.of(x)]).context()
    context(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,) = context(x)
    x.copy_(random((3, 192), BF16, 1))
    graph.replay()
    assert_bitwise(y, torch.ops.looptrt.fenced_silu_mul(x))


@pytest.mark.gpu
def test_what_a_kernel_cannot_serve_is_logged_by_name(host: PluginHost) -> None:
    x, weight = random((4, 30), BF16, 0), random((30,), BF16, 1)
    inputs = [TensorDesc.of(x), TensorDesc.of(weight)]
    context = host.build_layer("fenced_rms_norm", {"eps": 1e-6}, inputs).context()
    with pytest.raises(HostError, match=r"looptrt::fenced_rms_norm .*cudaErrorInvalidValue"):
        context(x, weight)
