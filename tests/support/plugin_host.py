"""TensorRT's part around the plugin library, from Python: `liblooptrt_plugin_host.so` by ctypes.

`PluginHost` finds creators and makes plugins; `HostedPlugin` is one object, each method one call of
TensorRT's plugin interface; `build_layer` and `Layer.context` put those calls in the order in which
TensorRT builds an engine and runs it. Only `enqueue` needs a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from looptrt.plugins import launch
from looptrt.plugins.creators import check_library
from looptrt.plugins.schema import NAMESPACE
from tests.support.absent import absent
from tests.support.tensorrt import plugin_library

HOST_NAME = "liblooptrt_plugin_host.so"
DYNAMIC = -1
LINEAR = 0

# nvinfer1::DataType and nvinfer1::PluginFieldType, of what operators use.
DATA_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.bfloat16: 7,
    torch.int64: 8,
}
FIELD_FLOAT16, FIELD_FLOAT32, FIELD_FLOAT64, FIELD_INT32, FIELD_INT64 = 0, 1, 2, 5, 10
_DTYPES = {code: dtype for dtype, code in DATA_TYPES.items()}
_FIELD_VALUES: dict[int, Any] = {
    FIELD_FLOAT16: ctypes.c_uint16,
    FIELD_FLOAT32: ctypes.c_float,
    FIELD_FLOAT64: ctypes.c_double,
    FIELD_INT32: ctypes.c_int32,
    FIELD_INT64: ctypes.c_int64,
}

Dims = tuple[int, ...]
Profile = tuple[Dims, Dims, Dims]


class HostError(Exception):
    """A call of the interface failed; has the messages that were logged."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
        ("min", ctypes.c_int64 * 8),
        ("opt", ctypes.c_int64 * 8),
        ("max", ctypes.c_int64 * 8),
    )


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Field:
    """A plugin field: one value unless told otherwise."""

    name: str
    value: float | None
    type: int
    length: int = 1


@dataclass(frozen=True)
class TensorDesc:
    """A tensor as a plugin is told of it.

    Attributes:
        dims: sizes, `DYNAMIC` where each step decides.
        profile: dims at the least, usual and greatest step; None for a step's own tensor.
    """

    dtype: torch.dtype
    dims: Dims
    profile: Profile | None = None
    format: int = LINEAR

    @staticmethod
    def ranged(dtype: torch.dtype, low: Dims, usual: Dims, high: Dims) -> TensorDesc:
        """A tensor of a network with dynamic sizes: those that differ are."""
        dims = tuple(size if size == low[i] == usual[i] else DYNAMIC for i, size in enumerate(high))
        return TensorDesc(dtype, dims, (low, usual, high))

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorDesc:
        """The description of a step's tensor."""
        return TensorDesc(tensor.dtype, tuple(tensor.shape))

    def packed(self) -> _Tensor:
        """The same for the C API."""
        low, usual, high = self.profile or (self.dims,) * 3
        packed = _Tensor(DATA_TYPES[self.dtype], self.format, len(self.dims))
        for name, sizes in (("dims", self.dims), ("min", low), ("opt", usual), ("max", high)):
            getattr(packed, name)[: len(sizes)] = sizes
        return packed


def _array(descs: Sequence[TensorDesc]) -> Any:
    return (_Tensor * max(1, len(descs)))(*(desc.packed() for desc in descs))


class _Api:
    """The host library's functions, typed; those of a plugin take its address first."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, text, int32, int64 = (
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.c_int64,
        )
        texts = [ctypes.POINTER(text)] * 3
        tensors = [ctypes.POINTER(_Tensor), int32] * 2
        signatures = {
            "take_messages": (text, []),
            "dimension_operation": (int32, [int32, int64, int64, ctypes.POINTER(int64)]),
            "open": (pointer, [text]),
            "num_creators": (int32, [pointer]),
            "creator": (int32, [pointer, int32, *texts, ctypes.POINTER(int32)]),
            "creator_field": (int32, [pointer, int32, int32, texts[0], ctypes.POINTER(int32)]),
            "create": (pointer, [pointer, text, text, text, ctypes.POINTER(_Field), int32]),
            "serialize": (int64, [pointer, text, int64]),
            "restore": (pointer, [pointer, text, int64]),
            "clone": (pointer, [pointer]),
            "attach": (pointer, [pointer]),
            "destroy": (None, [pointer]),
            "identity": (None, [pointer, *texts]),
            "num_outputs": (int32, [pointer]),
            "output_types": (int32, [pointer, *tensors]),
            "output_shapes": (int32, [pointer, *tensors]),
            "supports": (int32, [pointer, int32, ctypes.POINTER(_Tensor), int32, int32]),
            "configure": (int32, [pointer, *tensors]),
            "workspace_bytes": (int64, [pointer, *tensors]),
            "on_shape_change": (int32, [pointer, *tensors]),
            "enqueue": (
                int32,
                [pointer, *tensors, *[ctypes.POINTER(pointer)] * 2, pointer, pointer],
            ),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, f"looptrt_host_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


class PluginHost:
    """An opened plugin library.

    Args:
        host: liblooptrt_plugin_host.so.
        plugins: liblooptrt_plugins.so.

    Attributes:
        creators: {(namespace, name, version): {field: type}} in the library's order.

    Raises:
        HostError: it is no plugin library.
    """

    def __init__(self, host: Path, plugins: Path) -> None:
        self.path, self.plugins_path = host, plugins
        self.api: Any = _Api(host)
        self._library = self.api.open(str(plugins).encode())
        self.check(self._library, f"{plugins}: cannot be opened")
        self.creators: dict[tuple[str, str, str], dict[str, int]] = {}
        for index in range(self.api.num_creators(self._library)):
            name, version, namespace = ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_char_p()
            count = ctypes.c_int32()
            code = self.api.creator(self._library, index, name, version, namespace, count)
            self.check(code == 0, f"creator {index}")
            key = _text(namespace), _text(name), _text(version)
            self.check(key not in self.creators, f"a second creator of {key}")
            self.creators[key] = dict(self._field(index, i) for i in range(count.value))

    def _field(self, creator: int, index: int) -> tuple[str, int]:
        name, kind = ctypes.c_char_p(), ctypes.c_int32()
        code = self.api.creator_field(self._library, creator, index, name, kind)
        self.check(code == 0, f"field {index} of creator {creator}")
        return _text(name), kind.value

    def check(self, good: object, what: str) -> None:
        """HostError with what was logged, unless `good`."""
        if not good:
            raise HostError(f"{what}: {' | '.join(self.messages()) or 'nothing was logged'}")

    def messages(self) -> list[str]:
        """What was logged since the last call, each after its severity."""
        text: bytes = self.api.take_messages()
        return text.decode(errors="replace").rstrip("\n").split("\n") if text else []

    def dimension_operation(self, operation: int, first: int, second: int) -> int | None:
        """What an expression of sizes is worth; None for a division by zero."""
        result = ctypes.c_int64()
        code = self.api.dimension_operation(operation, first, second, result)
        return result.value if code == 0 else None

    def create(
        self, name: str, fields: Sequence[Field], version: str = "1", namespace: str = NAMESPACE
    ) -> HostedPlugin:
        """A plugin for building.

        Raises:
            HostError: there is no such creator, or it refused the fields.
        """
        values = [_value(item) for item in fields]
        packed = (_Field * max(1, len(fields)))(
            *(
                _Field(
                    item.name.encode(),
                    ctypes.cast(value, ctypes.c_void_p) if value is not None else None,
                    item.type,
                    item.length,
                )
                for item, value in zip(fields, values, strict=True)
            )
        )
        key = name.encode(), version.encode(), namespace.encode()
        address = self.api.create(self._library, *key, packed, len(fields))
        self.check(address, f"{name}: not created")
        return HostedPlugin(self, address)

    def node_fields(
        self, name: str, attributes: Mapping[str, float], version: str = "1"
    ) -> list[Field]:
        """Fields of an ONNX node as the parser makes them: of the names its creator gives."""
        wanted = self.creators.get((NAMESPACE, name, version), {})  # `create` refuses others
        return [
            Field(item, attributes[item], kind)
            for item, kind in wanted.items()
            if item in attributes
        ]

    def restore(self, blob: bytes) -> HostedPlugin:
        """A plugin for running, from what `serialize` gave.

        Raises:
            HostError: these are no such bytes, or the creator refused them.
        """
        address = self.api.restore(self._library, blob, len(blob))
        self.check(address, "not restored")
        return HostedPlugin(self, address)

    def build_layer(
        self, name: str, attributes: Mapping[str, float], inputs: Sequence[TensorDesc]
    ) -> Layer:
        """A node's way into a plan, as TensorRT's parser and builder take it.

        Raises:
            HostError: the plugin refuses what it is given, or contradicts itself.
        """
        plugin = self.create(name, self.node_fields(name, attributes))
        outputs = plugin.output_descs(inputs)
        for pos in range(len(inputs) + len(outputs)):
            supported = plugin.supports(pos, inputs, outputs)
            self.check(supported, f"{name}: tensor {pos} in no supported format")
        plugin.configure(inputs, outputs)
        workspace_bytes = plugin.workspace_bytes(inputs, outputs)
        blob = plugin.serialize()
        plugin.close()
        return Layer(self, blob, workspace_bytes, tuple(inputs), outputs)


class HostedPlugin:
    """One plugin object; freed by `close` or with the last reference."""

    def __init__(self, host: PluginHost, address: int) -> None:
        self._host, self._api, self._address = host, host.api, address

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Destroy the object."""
        if self._address:
            self._api.destroy(self._address)
            self._address = 0

    @property
    def identity(self) -> tuple[str, str, str]:
        """Namespace, name, version."""
        name, version, namespace = ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_char_p()
        self._api.identity(self._address, name, version, namespace)
        return _text(namespace), _text(name), _text(version)

    @property
    def num_outputs(self) -> int:
        """As the build capability says."""
        return int(self._api.num_outputs(self._address))

    def output_descs(self, inputs: Sequence[TensorDesc]) -> tuple[TensorDesc, ...]:
        """Dtypes and shapes of the outputs, at every point of the inputs' profile."""
        outputs = (_Tensor * self.num_outputs)()
        for name in ("output_types", "output_shapes"):
            code = getattr(self._api, name)(
                self._address, _array(inputs), len(inputs), outputs, len(outputs)
            )
            self._check(code, name)
        return tuple(
            TensorDesc(
                _DTYPES[item.type],
                tuple(item.dims[: item.rank]),
                (
                    tuple(item.min[: item.rank]),
                    tuple(item.opt[: item.rank]),
                    tuple(item.max[: item.rank]),
                ),
            )
            for item in outputs
        )

    def supports(
        self, pos: int, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]
    ) -> bool:
        """Whether the tensor at `pos`, inputs first, may be as it is, given those before it."""
        every = _array([*inputs, *outputs])
        return bool(self._api.supports(self._address, pos, every, len(inputs), len(outputs)))

    def configure(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> None:
        """configurePlugin; HostError if it refuses."""
        self._check(self._api.configure(*self._call(inputs, outputs)), "configurePlugin")

    def workspace_bytes(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> int:
        """getWorkspaceSize."""
        return int(self._api.workspace_bytes(*self._call(inputs, outputs)))

    def serialize(self) -> bytes:
        """What a plan holds of it."""
        size = self._api.serialize(self._address, None, 0)
        self._host.check(size >= 0, "getFieldsToSerialize")
        buffer = ctypes.create_string_buffer(size)
        self._api.serialize(self._address, buffer, size)
        return buffer.raw

    def clone(self) -> HostedPlugin:
        """Another object with its attributes."""
        return self._made(self._api.clone(self._address), "clone")

    def attach(self) -> HostedPlugin:
        """The object that an execution context runs."""
        return self._made(self._api.attach(self._address), "attachToContext")

    def on_shape_change(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> None:
        """onShapeChange; HostError if it refuses."""
        self._check(self._api.on_shape_change(*self._call(inputs, outputs)), "onShapeChange")

    def enqueue(
        self,
        inputs: Sequence[TensorDesc],
        outputs: Sequence[TensorDesc],
        addresses: Sequence[int],
        workspace: int = 0,
        stream: int = 0,
    ) -> None:
        """Enqueue with the addresses of all tensors, inputs first; HostError if it refuses."""
        pointers = [
            (ctypes.c_void_p * max(1, len(part)))(*part)
            for part in (addresses[: len(inputs)], addresses[len(inputs) :])
        ]
        code = self._api.enqueue(*self._call(inputs, outputs), *pointers, workspace, stream)
        self._check(code, "enqueue")

    def _call(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> list[Any]:
        return [self._address, _array(inputs), len(inputs), _array(outputs), len(outputs)]

    def _check(self, code: int, what: str) -> None:
        self._host.check(code == 0, f"{self.identity[1]}: {what} gave {code}")

    def _made(self, address: int, what: str) -> HostedPlugin:
        self._host.check(address, what)
        return HostedPlugin(self._host, address)


@dataclass(frozen=True)
class Layer:
    """A plugin in a plan.

    Attributes:
        blob: what the plan holds of it.
        workspace_bytes: what it may use at any point of the profile.
    """

    host: PluginHost
    blob: bytes
    workspace_bytes: int
    inputs: tuple[TensorDesc, ...]
    outputs: tuple[TensorDesc, ...]

    @property
    def workspace(self) -> TensorDesc:
        """The workspace as a tensor."""
        return TensorDesc(torch.uint8, (self.workspace_bytes,))

    def context(self) -> LayerContext:
        """The plan read back, and an execution context of it."""
        return LayerContext(self, self.host.restore(self.blob).attach())


@dataclass
class LayerContext:
    """Runs a plugin on CUDA tensors, on torch's current stream."""

    layer: Layer
    plugin: HostedPlugin
    _inputs: list[TensorDesc] = field(default_factory=list)
    _outputs: tuple[TensorDesc, ...] = ()

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Results of one step; outputs and workspace hold 0xFF before it.

        Raises:
            HostError: the plugin refuses the shapes, or its launch fails.
            ValueError: an input is not contiguous or not on a GPU.
        """
        for tensor in inputs:
            if not tensor.is_contiguous() or not tensor.is_cuda:
                raise ValueError(f"expected contiguous CUDA tensors, got {tensor.stride()}")
        device = inputs[0].device
        with torch.cuda.device(device):
            descs = self.follow(inputs)
            outputs = tuple(_unwritten(desc, device) for desc in descs)
            workspace = _unwritten(self.layer.workspace, device)
            self.plugin.enqueue(
                self._inputs,
                descs,
                [tensor.data_ptr() for tensor in (*inputs, *outputs)],
                workspace.data_ptr(),
                torch.cuda.current_stream().cuda_stream,
            )
        return outputs

    def follow(self, inputs: Sequence[torch.Tensor]) -> tuple[TensorDesc, ...]:
        """Tell the plugin of a step's shapes if they are others than before; its outputs.

        Raises:
            HostError: the plugin refuses them.
        """
        descs = [TensorDesc.of(tensor) for tensor in inputs]
        if descs != self._inputs:
            self._outputs = tuple(
                TensorDesc(item.dtype, item.dims) for item in self.plugin.output_descs(descs)
            )
            self.plugin.on_shape_change(descs, self._outputs)
            self._inputs = descs
        return self._outputs


def _unwritten(desc: TensorDesc, device: torch.device) -> torch.Tensor:
    tensor = torch.empty(desc.dims, dtype=desc.dtype, device=device)
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor


def _text(value: ctypes.c_char_p) -> str:
    return (value.value or b"").decode()


def _value(item: Field) -> Any:
    if item.value is None:
        return None
    return (_FIELD_VALUES[item.type] * item.length)(*itertools.repeat(item.value, item.length))


@functools.cache
def plugin_host() -> PluginHost:
    """The host over the plugin library that looptrt itself would open, one a process.

    Skips the test where one of both is not built, unless in CI.
    """
    plugins = plugin_library()
    host = plugins.parent / HOST_NAME
    if not host.is_file():
        absent(f"no {host}; build it: {launch.BUILD_COMMAND}")
    check_library(plugins)
    return PluginHost(host, plugins)
