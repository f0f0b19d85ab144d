"""A phase compiled by TensorRT: from its file to outputs.

Owns the checks before a plan is deserialised, its contexts, and the choice of a profile; leaves
memory and the order of a step to the executor. TensorRT is handed in as a module. Invariant:
nothing is enqueued with shapes outside a profile, or with shapes of an earlier step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from looptrt.errors import EngineError, PluginError
from looptrt.manifest import EngineFile, Manifest, PhaseGraph, ShapeRange
from looptrt.plugins import launch
from looptrt.plugins.creators import (
    SCHEMA_SHA256,
    check_parser,
    import_tensorrt,
    is_error,
    load_creators,
    make_logger,
    missing_plugins,
)
from looptrt.plugins.schema import OPS

Shapes = Mapping[str, tuple[int, ...]]

_MOST_ERRORS = 3


def choose_profile(phase: str, profiles: Mapping[str, Mapping[str, ShapeRange]], of: Shapes) -> int:
    """The number of the first profile that takes these input shapes.

    Args:
        phase: its name, for the error.
        profiles: of the engine, the narrowest first.
        of: {input: shape}.

    Raises:
        EngineError: none does; names an input that the widest does not take.
    """
    for index, ranges in enumerate(profiles.values()):
        if all(_fits(ranges[name], shape) for name, shape in of.items()):
            return index
    widest, ranges = list(profiles.items())[-1]
    name = next(name for name, shape in of.items() if not _fits(ranges[name], shape))
    raise EngineError(
        f"{phase}: {name}: shape {list(of[name])} is outside the engine's profiles, of which "
        f"{widest} takes from {list(ranges[name].min)} to {list(ranges[name].max)}"
    )


def _fits(sizes: ShapeRange, shape: tuple[int, ...]) -> bool:
    return len(shape) == len(sizes.min) and all(
        low <= size <= high for low, size, high in zip(sizes.min, shape, sizes.max, strict=True)
    )


def check_engines(manifest: Manifest, trt: Any, capability: str) -> None:  # noqa: ANN401
    """Check that this TensorRT on this GPU loads a manifest's engines.

    Args:
        manifest: of an engine directory with engines.
        trt: TensorRT's module.
        capability: the GPU's, as `8.9`.

    Raises:
        EngineError: another TensorRT, GPU or schema of the operators; has expected and found.
    """
    for name, engine in _engines(manifest).items():
        where = f"{name}: {engine.file}"
        if engine.tensorrt != trt.__version__:
            raise EngineError(
                f"{where}: built by {manifest.backend} {engine.tensorrt}, installed is "
                f"{trt.__version__}; install that version or rebuild the engine directory"
            )
        if capability not in engine.compute_capabilities:
            raise EngineError(
                f"{where}: built for GPUs of compute capability "
                f"{', '.join(engine.compute_capabilities)}, this one has {capability}; rebuild it "
                "for this GPU, or say backend pytorch"
            )
        if engine.schema != SCHEMA_SHA256:
            raise EngineError(
                f"{where}: built with another schema of the operators (expected "
                f"{SCHEMA_SHA256:.12}, found {engine.schema:.12}); rebuild the engine directory"
            )


def _engines(manifest: Manifest) -> dict[str, EngineFile]:
    engines = {
        name: graph.engine for name, graph in manifest.phases.items() if graph.engine is not None
    }
    if not engines:
        raise EngineError(
            f"the engine directory has no TensorRT engines, its backend is {manifest.backend}; "
            "rebuild it with --backend tensorrt or tensorrt_rtx"
        )
    return engines


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class PhaseEngine:
    """One deserialised engine with a context for each profile.

    Args:
        trt: TensorRT's module, with our creators in its registry.
        engine_dir: the engine directory.
        name: of the phase.
        graph: what the manifest says of it.
        is_stripped: whether the plan's weights are put in from the graph's.
        current_stream: gives the cudaStream_t of the current device that work is enqueued on.

    Raises:
        EngineError: it cannot be deserialised, or is not the engine that the manifest describes;
            has TensorRT's reasons.
    """

    def __init__(
        self,
        trt: Any,  # noqa: ANN401
        engine_dir: Path,
        name: str,
        graph: PhaseGraph,
        *,
        is_stripped: bool = False,
        current_stream: Callable[[], int] = _current_stream,
    ) -> None:
        assert graph.engine is not None
        self._current_stream = current_stream
        self._trt, self._name, self._graph = trt, name, graph
        self._file = graph.engine
        self._errors: list[str] = []
        self._logger = make_logger(trt, self._note)
        self._check_plugins()
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._deserialise(engine_dir / self._file.file)
        if is_stripped:
            self._refit(engine_dir / graph.onnx)
        self._check_tensors()
        self._contexts = []
        for index in range(len(self._file.profiles)):
            context = self._engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(
                index, current_stream()
            ):
                raise self._failure(f"no execution context for profile {index}")
            self._contexts.append(context)

    def _note(self, severity: str, text: str) -> None:
        if is_error(severity):
            self._errors.append(text)

    def _failure(self, what: str) -> EngineError:
        reasons = "; ".join(self._errors[:_MOST_ERRORS]) or "TensorRT gave no reason"
        self._errors.clear()
        return EngineError(f"{self._name}: {what}: {reasons}")

    def _check_plugins(self) -> None:
        versions = {op.name: op.version for op in OPS if op.name in self._file.plugins}
        missing = missing_plugins(self._trt, versions)
        if missing:
            raise EngineError(
                f"{self._name}: {self._file.file} has the plugin {missing[0]}, which no library "
                f"has registered; looked for {launch.LIBRARY_NAME}"
            )

    def _deserialise(self, path: Path) -> Any:  # noqa: ANN401
        what = f"{path} cannot be deserialised"
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan,
            ):
                engine = self._runtime.deserialize_cuda_engine(plan)
        except (OSError, ValueError) as error:  # an empty file has no mapping
            raise EngineError(f"{self._name}: {what}: {error}") from error
        if engine is None:
            raise self._failure(what)
        return engine

    def _refit(self, graph: Path) -> None:
        check_parser(self._trt.__name__)
        refitter = self._trt.Refitter(self._engine, self._logger)
        parser = self._trt.OnnxParserRefitter(refitter, self._logger)
        if not parser.refit_from_file(str(graph)) or not refitter.refit_cuda_engine():
            raise self._failure(f"{graph}: the weights cannot be put into the engine")

    def _check_tensors(self) -> None:
        engine, trt = self._engine, self._trt
        found: dict[str, list[str]] = {"inputs": [], "outputs": []}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            found["inputs" if is_input else "outputs"].append(name)
        for side, names in found.items():
            expected = getattr(self._graph, side)
            if sorted(names) != sorted(expected):
                raise EngineError(
                    f"{self._name}: {side}: expected {', '.join(expected)}, the engine has "
                    f"{', '.join(names)}"
                )
        if engine.num_optimization_profiles != len(self._file.profiles):
            raise EngineError(
                f"{self._name}: expected {len(self._file.profiles)} profiles, the engine has "
                f"{engine.num_optimization_profiles}"
            )
        dtypes = {
            trt.DataType.FLOAT: torch.float32,
            trt.DataType.BF16: torch.bfloat16,
            trt.DataType.HALF: torch.float16,
            trt.DataType.INT32: torch.int32,
            trt.DataType.INT64: torch.int64,
        }
        self._dtypes = {
            name: dtypes[engine.get_tensor_dtype(name)]
            for names in found.values()
            for name in names
        }

    def run(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Enqueue the phase on torch's current stream of the inputs' GPU.

        Args:
            tensors: its inputs by name, contiguous and on the GPU; others are left alone.

        Returns:
            Its outputs by name.

        Raises:
            EngineError: an input's shape is outside the profiles or its dtype is not the
                engine's; nothing was enqueued. Or TensorRT failed.
        """
        inputs = {name: tensors[name] for name in self._graph.inputs}
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        index = choose_profile(self._name, self._file.profiles, shapes)
        context = self._contexts[index]
        for name, tensor in inputs.items():
            if tensor.dtype != self._dtypes[name] or not tensor.is_contiguous():
                raise EngineError(
                    f"{self._name}: {name}: expected contiguous {self._dtypes[name]}, got "
                    f"{tensor.dtype} with strides {tensor.stride()}"
                )
            if not context.set_input_shape(name, shapes[name]):
                raise self._failure(f"{name}: shape {list(shapes[name])} is refused")
        unknown = context.infer_shapes()
        if unknown:
            raise self._failure(f"the shapes of {', '.join(unknown)} are not known")
        first = next(iter(inputs.values()))
        outputs = {
            name: torch.empty(
                tuple(context.get_tensor_shape(name)),
                dtype=self._dtypes[name],
                device=first.device,
            )
            for name in self._graph.outputs
        }
        for name, tensor in (*inputs.items(), *outputs.items()):
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise self._failure(f"{name}: its address is refused")
        # TensorRT and its plugins launch on the current GPU.
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            if not context.execute_async_v3(self._current_stream()):
                raise self._failure("TensorRT did not run it")
        return outputs


def open_engines(
    engine_dir: Path, manifest: Manifest, backend: str, device: torch.device
) -> dict[str, PhaseEngine]:
    """Deserialise the engines of an engine directory for one GPU.

    Args:
        engine_dir: engine directory, whose checksums were compared.
        manifest: its manifest.
        backend: TensorRT's module.
        device: a CUDA device with an index.

    Raises:
        EngineError: TensorRT, the plugin library or the GPU is not one that they can run on.
    """
    if manifest.backend != backend:
        raise EngineError(
            f"backend {backend}: the engine directory was built for {manifest.backend}; rebuild it "
            f"with --backend {backend}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    try:
        trt = import_tensorrt(backend)
        check_engines(manifest, trt, f"{major}.{minor}")
        load_creators(trt, launch.find_library())
    except PluginError as error:
        raise EngineError(f"backend {backend}: {error}") from error
    is_stripped = bool(manifest.build_flags.get("strip_plan"))
    with torch.cuda.device(device):
        return {
            name: PhaseEngine(trt, engine_dir, name, graph, is_stripped=is_stripped)
            for name, graph in manifest.phases.items()
        }
