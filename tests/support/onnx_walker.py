"""Exported phases executed node by node, in TensorRT's place.

`PhaseWalker` runs one graph of an engine directory: nodes of our domain by what `plugins` makes of
them (the plugin library's `enqueue` on CUDA, the CPU twins anywhere), ONNX's own by torch after
the letter of its specification; an operator outside that closed set is an error. What runs is the
file, its weights included. A walker has the interface of the runtime's `PhaseEngine`, so that on a
GPU the product's own TensorRtExecutor runs walkers; `WalkingHarness` sets that up.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from looptrt.builder.onnx_ops import register_definitions
from looptrt.manifest import BuildLimits
from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators
from looptrt.plugins.schema import NAMESPACE
from looptrt.runtime.executor.base import Tensors
from looptrt.runtime.executor.tensorrt import TensorRtExecutor
from looptrt.runtime.executor.torch import TorchExecutor
from tests.support.engines import Harness
from tests.support.plugin_host import LayerContext, PluginHost, TensorDesc

_DTYPES = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.BOOL: torch.bool,
}

Run = Callable[..., tuple[Tensor, ...]]
# A value of the graph as meta tensors where all sizes are least, usual and greatest.
Ranged = tuple[Tensor, Tensor, Tensor]
Size = tuple[int, int, int]


class WalkError(Exception):
    """A graph, or what is fed to it, that cannot be executed."""


class Plugins(Protocol):
    """What plugin nodes become."""

    def layer(
        self, name: str, attributes: Mapping[str, float], inputs: Sequence[Ranged]
    ) -> tuple[Run, list[Ranged]]:
        """A node as a callable on its inputs, and its outputs' ranges."""
        ...


class TwinPlugins:
    """The operators as torch has them: on the CPU their reference twins."""

    def layer(
        self, name: str, attributes: Mapping[str, float], inputs: Sequence[Ranged]
    ) -> tuple[Run, list[Ranged]]:
        """See `Plugins`."""
        operator = getattr(torch.ops.looptrt, name)

        def run(*operands: Tensor) -> tuple[Tensor, ...]:
            result = operator(*operands, **attributes)
            return result if isinstance(result, tuple) else (result,)

        return run, _at_every_point(run, inputs)


@dataclass(frozen=True)
class HostedPlugins:
    """The plugin library's own objects, each through a plan and back; CUDA tensors only."""

    host: PluginHost

    def layer(
        self, name: str, attributes: Mapping[str, float], inputs: Sequence[Ranged]
    ) -> tuple[Run, list[Ranged]]:
        """See `Plugins`."""
        context, outputs = _hosted(self.host, name, attributes, inputs)
        return context, outputs


@dataclass(frozen=True)
class FollowedTwins:
    """The twins' results, while the library's objects go along in everything but `enqueue`."""

    host: PluginHost

    def layer(
        self, name: str, attributes: Mapping[str, float], inputs: Sequence[Ranged]
    ) -> tuple[Run, list[Ranged]]:
        """See `Plugins`."""
        context, outputs = _hosted(self.host, name, attributes, inputs)
        twin, _ = TwinPlugins().layer(name, attributes, inputs)

        def run(*operands: Tensor) -> tuple[Tensor, ...]:
            results = twin(*operands)
            told, found = context.follow(operands), tuple(map(TensorDesc.of, results))
            if told != found:
                raise WalkError(f"{name}: the plugin says {told}, its twin gives {found}")
            return results

        return run, outputs


def _hosted(
    host: PluginHost, name: str, attributes: Mapping[str, float], inputs: Sequence[Ranged]
) -> tuple[LayerContext, list[Ranged]]:
    descs = [
        TensorDesc.ranged(value[0].dtype, *(tuple(point.shape) for point in value))
        for value in inputs
    ]
    layer = host.build_layer(name, attributes, descs)
    outputs = [_ranged(desc.dtype, desc.profile or (desc.dims,) * 3) for desc in layer.outputs]
    return layer.context(), outputs


# ONNX's operators, of opset 20. Attributes have ONNX's names and defaults.


def _add(a: Tensor, b: Tensor) -> Tensor:
    return torch.add(a, b)


def _cast(x: Tensor, *, to: int) -> Tensor:
    return x.to(_DTYPES[to])


def _concat(*tensors: Tensor, axis: int) -> Tensor:
    return torch.cat(tensors, dim=axis)


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return torch.eq(a, b)


def _gather(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis %= data.dim()
    size = data.shape[axis]
    places = torch.where(indices < 0, indices + size, indices)
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return data.index_select(axis, places.flatten()).reshape(shape)


def _gemm(  # ONNX's names
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    a, b = a.t() if transA else a, b.t() if transB else b
    if c is not None:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    product = torch.mm(a, b)
    return product if alpha == 1.0 else product * alpha


def _identity(x: Tensor) -> Tensor:
    return x


def _mul(a: Tensor, b: Tensor) -> Tensor:
    return torch.mul(a, b)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


STANDARD: dict[str, Callable[..., Tensor]] = {
    "Add": _add,
    "Cast": _cast,
    "Concat": _concat,
    "Equal": _equal,
    "Gather": _gather,
    "Gemm": _gemm,
    "Identity": _identity,
    "Mul": _mul,
    "Where": _where,
}


@dataclass(frozen=True)
class _Step:
    """One node, ready to run; `done` are the values that nothing reads after it."""

    run: Run
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    done: tuple[str, ...]


class PhaseWalker:
    """One graph, built for sizes as TensorRT builds an engine for a profile.

    Args:
        path: an .onnx file; external data lies in its folder.
        device: where weights, inputs and results are.
        plugins: what runs the nodes of our domain.
        sizes: least, usual and greatest value of every size that its inputs name.

    Attributes:
        plugin_names: operators of the plugin nodes, in order.

    Raises:
        WalkError: the graph is not valid, has an operator or attribute outside the known set, or
            declares other shapes than its nodes give; names the node.
    """

    def __init__(
        self, path: Path, device: torch.device, plugins: Plugins, sizes: Mapping[str, Size]
    ) -> None:
        register_definitions()
        try:
            onnx.checker.check_model(path, check_custom_domain=True)
        except onnx.checker.ValidationError as error:
            raise WalkError(f"{path}: not a valid graph: {error}") from error
        self._path, self._device, self._plugins = path, device, plugins
        graph = onnx.load(path, load_external_data=False).graph
        self.plugin_names = [node.op_type for node in graph.node if node.domain == NAMESPACE]
        self._weights = {item.name: self._weight(item) for item in graph.initializer}
        ranges = {name: (weight.to("meta"),) * 3 for name, weight in self._weights.items()}
        self._inputs = {
            value.name: _input_range(value, sizes)
            for value in graph.input
            if value.name not in self._weights
        }
        ranges |= self._inputs
        self._outputs = [value.name for value in graph.output]
        self._steps = [
            self._step(node, done, ranges)
            for node, done in zip(graph.node, _last_uses(graph), strict=True)
        ]
        for value in (*graph.value_info, *graph.output):
            _check_declared(path, value, ranges[value.name])

    @torch.inference_mode()
    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the phase, as `PhaseEngine.run` does.

        Args:
            tensors: by name; names beyond the graph's inputs are left out.

        Returns:
            The outputs by name.

        Raises:
            WalkError: an input is missing, of another dtype or rank, or outside its profile.
        """
        values = dict(self._weights)
        for name, allowed in self._inputs.items():
            if name not in tensors:
                raise WalkError(f"{self._path.name}: input {name}: missing")
            _check_fed(self._path, name, tensors[name], allowed)
            values[name] = tensors[name]
        for step in self._steps:
            results = step.run(*(values[name] for name in step.inputs))
            values |= zip(step.outputs, results, strict=True)
            for name in step.done:
                del values[name]
        return {name: values[name] for name in self._outputs}

    def _weight(self, tensor: onnx.TensorProto) -> Tensor:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return _constant(tensor).to(self._device)
        place = {entry.key: entry.value for entry in tensor.external_data}
        dtype, count = _DTYPES[tensor.data_type], math.prod(tensor.dims)
        if int(place["length"]) != count * dtype.itemsize:
            raise WalkError(f"{self._path}: {tensor.name}: {place} for {count} of {dtype}")
        with (self._path.parent / place["location"]).open("rb") as file:
            file.seek(int(place["offset"]))
            content = bytearray(file.read(int(place["length"])))
        return torch.frombuffer(content, dtype=dtype).view(tuple(tensor.dims)).to(self._device)

    def _step(
        self, node: onnx.NodeProto, done: tuple[str, ...], ranges: dict[str, Ranged]
    ) -> _Step:
        """Make a node ready, and its outputs' ranges known."""
        where = f"{self._path.name}: {node.name or node.output[0]}: {node.domain}.{node.op_type}"
        if not all(node.input):
            raise WalkError(f"{where}: an input left out")
        inputs = [ranges[name] for name in node.input]
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        if node.domain == NAMESPACE:
            run, outputs = self._plugins.layer(node.op_type, attributes, inputs)
        else:
            run = self._standard(where, node, attributes)
            outputs = _at_every_point(run, inputs)
        ranges |= zip(node.output, outputs, strict=True)
        return _Step(run, tuple(node.input), tuple(node.output), done)

    def _standard(self, where: str, node: onnx.NodeProto, attributes: dict[str, Any]) -> Run:
        if (node.domain, node.op_type, attributes.keys()) == ("", "Constant", {"value"}):
            value = _constant(attributes["value"]).to(self._device)
            return lambda: (value,)
        if node.domain or node.op_type not in STANDARD:
            raise WalkError(f"{where}: expected one of Constant with value, {', '.join(STANDARD)}")
        call = STANDARD[node.op_type]
        try:
            inspect.signature(call).bind(*node.input, **attributes)
        except TypeError as error:
            raise WalkError(f"{where}: {error}") from error
        return lambda *inputs: (call(*inputs, **attributes),)


def _constant(tensor: onnx.TensorProto) -> Tensor:
    content = bytearray(numpy_helper.to_array(tensor).tobytes())
    return torch.frombuffer(content, dtype=_DTYPES[tensor.data_type]).view(tuple(tensor.dims))


def _ranged(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> Ranged:
    low, usual, high = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return low, usual, high


def _at_every_point(run: Run, inputs: Sequence[Ranged]) -> list[Ranged]:
    """Results' ranges of something that also runs on meta tensors."""
    points = [run(*(value[point] for value in inputs)) for point in range(3)]
    return [tuple(tensor.to("meta") for tensor in value) for value in zip(*points, strict=True)]


def _dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _input_range(value: onnx.ValueInfoProto, sizes: Mapping[str, Size]) -> Ranged:
    dims = _dims(value)
    shapes = [
        tuple(sizes[dim][point] if isinstance(dim, str) else dim for dim in dims)
        for point in range(3)
    ]
    return _ranged(_DTYPES[value.type.tensor_type.elem_type], shapes)


def _check_declared(path: Path, value: onnx.ValueInfoProto, found: Ranged) -> None:
    """Require the dtype, rank and fixed sizes that the file gives a value."""
    dims, dtype = _dims(value), _DTYPES[value.type.tensor_type.elem_type]
    for point in found:
        same = len(dims) == point.dim() and all(
            isinstance(dim, str) or dim == size for dim, size in zip(dims, point.shape, strict=True)
        )
        if not same or point.dtype != dtype:
            raise WalkError(
                f"{path.name}: {value.name}: declared {dtype} {dims}, "
                f"its node gives {point.dtype} {list(point.shape)}"
            )


def _check_fed(path: Path, name: str, tensor: Tensor, allowed: Ranged) -> None:
    low, _, high = allowed
    fits = tensor.dim() == low.dim() and all(
        least <= size <= most
        for least, size, most in zip(low.shape, tensor.shape, high.shape, strict=True)
    )
    if not fits or tensor.dtype != low.dtype:
        raise WalkError(
            f"{path.name}: input {name}: expected {low.dtype} from {list(low.shape)} to "
            f"{list(high.shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )


def _last_uses(graph: onnx.GraphProto) -> list[tuple[str, ...]]:
    """For each node the values that it, or nothing, is the last to read."""
    kept = {value.name for value in graph.output} | {item.name for item in graph.initializer}
    done: list[tuple[str, ...]] = []
    for node in reversed(graph.node):
        names = dict.fromkeys((*node.input, *node.output))
        done.append(tuple(name for name in names if name not in kept))
        kept.update(names)
    return done[::-1]


def profile(limits: BuildLimits, max_slots: int, max_pages: int) -> dict[str, Size]:
    """Sizes of a step: T tokens, R rows of a loop, M rows of logits, N sequences."""
    batch, tokens = limits.max_batch_size, limits.max_num_tokens
    return {
        "T": (1, batch, tokens),
        "R": (1, batch, tokens),
        "M": (0, batch, tokens),
        "N": (1, batch, batch),
        "N_plus_1": (2, batch + 1, batch + 1),
        "max_slots": (max_slots,) * 3,
        "max_pages": (max_pages,) * 3,
    }


class WalkerExecutor(TorchExecutor):
    """A TorchExecutor whose phases are graphs: what TensorRtExecutor is to CudaExecutor.

    Args:
        walkers: of all phases.
        others: as TorchExecutor's.
    """

    def __init__(self, walkers: Mapping[str, PhaseWalker], *others: Any, **named: Any) -> None:
        super().__init__(*others, **named)
        self._phases = walkers  # no module is left to run

    def run_phase(self, phase: str, tensors: Mapping[str, Tensor]) -> Tensors:
        """Run a phase's graph."""
        return self._phases[phase].run(tensors)


class WalkingHarness(Harness):
    """A harness whose engine runs graphs; on a GPU under the product's TensorRtExecutor.

    Args:
        engine_dir: engine directory.
        plugins: what runs plugin nodes; one instance may serve many engines.
        config: as Harness's.
    """

    def __init__(self, engine_dir: Path, plugins: Plugins, **config: Any) -> None:
        super().__init__(engine_dir, **config)
        core, replaced = self.core, self.core.executor
        is_cuda = replaced.device.type == "cuda"
        max_slots, max_pages = core.scheduler.config.max_batch_size, replaced.block_table.shape[2]
        sizes = profile(core.manifest.limits, max_slots, max_pages)
        if is_cuda:
            sizes["M"] = (1, *sizes["M"][1:])  # no profile of TensorRT's takes a size of 0
        self.walkers = {
            name: PhaseWalker(engine_dir / graph.onnx, replaced.device, plugins, sizes)
            for name, graph in core.manifest.phases.items()
        }
        core.executor = (TensorRtExecutor if is_cuda else WalkerExecutor)(
            self.walkers,
            engine_dir,
            core.manifest,
            max_slots=max_slots,
            max_seq_len=max_pages * core.manifest.layout.page_size,
            num_units=replaced.num_units,
            device=replaced.device,
        )
        # The sampler is the engine's own and being recorded; it holds nothing of its executor.
        core.executor.sampler = replaced.sampler
        replaced.close()
