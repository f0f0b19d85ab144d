"""One ONNX graph into one TensorRT engine: the program that `compile` runs in a child process.

Owns every call of TensorRT that a build makes, and is the builder's only importer of it; leaves
profiles, deadlines and what becomes of a crash to `compile`. Imports neither torch nor ONNX,
which would cost the child's memory. Invariant: a result without error means that the engine file
is there whole, with every plugin of the graph in it.
"""

from __future__ import annotations

import ctypes
import json
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from looptrt.errors import BuildError, LooptrtError
from looptrt.plugins.creators import (
    RTX,
    check_parser,
    import_tensorrt,
    is_error,
    load_creators,
    make_logger,
)

_OLDEST_GPU = 80  # the plugin library's
_MOST_ERRORS = 3
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class CompileJob:
    """What is to be compiled; plain JSON values.

    Attributes:
        backend: TensorRT's module.
        library: the plugin library.
        onnx: the graph; its weights lie beside it.
        engine: where the plan goes.
        profiles: {profile: {input: (min, opt, max)}}, in the order of their numbers.
        plugins: {operator: nodes of it in the graph}.
        profiling_verbosity: none, layer_names_only or detailed.
        strip_plan: leave the weights out of the plan.
        input_timing_cache: a file of earlier timings.
        output_timing_cache: where timings go.
        network: where a description of the parsed network goes.
    """

    backend: str
    library: str
    onnx: str
    engine: str
    profiles: dict[str, dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]]
    plugins: dict[str, int]
    profiling_verbosity: str = "layer_names_only"
    strip_plan: bool = False
    input_timing_cache: str | None = None
    output_timing_cache: str | None = None
    network: str | None = None


@dataclass(frozen=True)
class CompileResult:
    """What became of it.

    Attributes:
        error: why there is no engine, in one line; empty if there is one.
        tensorrt: TensorRT's version.
        compute_capabilities: GPUs that the engine runs on.
        seconds: of parsing and building.
        peak_bytes: most memory that the process held.
        timing_cache: what the timing cache did, in words; empty without one.
    """

    error: str = ""
    tensorrt: str = ""
    compute_capabilities: tuple[str, ...] = ()
    seconds: float = 0.0
    peak_bytes: int = 0
    timing_cache: str = ""


class _Compiler:
    """TensorRT's objects of one build."""

    def __init__(self, job: CompileJob) -> None:
        self.job = job
        self.trt = import_tensorrt(job.backend)
        self.errors: list[str] = []
        check_parser(job.backend)
        self._logger = make_logger(self.trt, self._tell)
        self._builder = self.trt.Builder(self._logger)
        load_creators(self.trt, Path(job.library))

    def _tell(self, severity: str, text: str) -> None:
        print(f"{severity}: {text}", file=sys.stderr, flush=True)  # noqa: T201
        if is_error(severity):
            self.errors.append(text)

    def failure(self, what: str) -> BuildError:
        """An error with what TensorRT logged."""
        reasons = "; ".join(self.errors[:_MOST_ERRORS]) or "it gave no reason"
        return BuildError(f"{what}: {reasons}")

    def run(self) -> CompileResult:
        """Parse, build and write.

        Raises:
            BuildError: TensorRT refuses the graph or the flags, or lost a plugin.
        """
        begin_s = time.monotonic()
        network = self._parse()
        self._check_plugins(network)
        if self.job.network is not None:
            description = json.dumps(self._describe(network), indent=1)
            Path(self.job.network).write_text(description + "\n", encoding="utf-8")
        config = self._configure(network)
        cache = self._read_cache(config)
        plan = self._builder.build_serialized_network(network, config)
        if plan is None:
            hint = " without its weights, for which TensorRT-RTX needs a GPU's driver"
            is_stripped = self.job.strip_plan and self.job.backend == RTX
            raise self.failure(f"TensorRT made no engine{hint if is_stripped else ''}")
        self._check_plan(network, plan)
        with Path(self.job.engine).open("wb") as file:
            file.write(plan)
        return CompileResult(
            tensorrt=self.trt.__version__,
            compute_capabilities=self._capabilities(),
            seconds=time.monotonic() - begin_s,
            peak_bytes=_peak_bytes(),
            timing_cache=self._write_cache(config, cache),
        )

    def _parse(self) -> Any:  # noqa: ANN401
        trt = self.trt
        # Newer versions know typed networks only, and no flag for them.
        typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        network = self._builder.create_network(0 if typed is None else 1 << int(typed))
        network.name = Path(self.job.onnx).stem
        parser = trt.OnnxParser(network, self._logger)
        if not parser.parse_from_file(self.job.onnx):
            errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
            self.errors[:0] = errors
            raise self.failure(f"{self.job.onnx}: TensorRT does not parse it")
        self._parser = parser  # holds the weights until the engine is built
        return network

    def _plugin_of(self, layer: Any) -> str | None:  # noqa: ANN401
        if layer.type != self.trt.LayerType.PLUGIN_V3:
            return None
        layer.__class__ = self.trt.IPluginV3Layer  # how TensorRT's bindings cast
        core = layer.plugin.get_capability_interface(self.trt.PluginCapabilityType.CORE)
        return str(core.plugin_name)

    def _check_plugins(self, network: Any) -> None:  # noqa: ANN401
        layers = (network.get_layer(index) for index in range(network.num_layers))
        found = Counter(filter(None, map(self._plugin_of, layers)))
        if found != self.job.plugins:
            raise BuildError(
                f"{self.job.onnx}: expected plugin layers {_counts(self.job.plugins)}, TensorRT's "
                f"network has {_counts(found)}"
            )

    def _check_plan(self, network: Any, plan: Any) -> None:  # noqa: ANN401
        """Look for every plugin layer by its name; only TensorRT-RTX always writes those."""
        if self.job.backend != RTX:
            return
        content = memoryview(plan)
        layers = (network.get_layer(index) for index in range(network.num_layers))
        names = [layer.name for layer in layers if self._plugin_of(layer) is not None]
        # Names end in numbers: one must not be found in a longer one.
        patterns = {name: re.compile(re.escape(name.encode()) + rb"(?!\d)") for name in names}
        lost = [name for name, pattern in patterns.items() if pattern.search(content) is None]
        if lost:
            raise BuildError(f"{self.job.onnx}: TensorRT left {', '.join(lost)} out of its engine")

    def _configure(self, network: Any) -> Any:  # noqa: ANN401
        trt = self.trt
        config = self._builder.create_builder_config()
        config.profiling_verbosity = getattr(
            trt.ProfilingVerbosity, self.job.profiling_verbosity.upper()
        )
        config.clear_flag(trt.BuilderFlag.TF32)  # the graph says float32
        if self.job.strip_plan:
            config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        if self.job.backend == RTX:
            targets = self._rtx_targets()
            config.num_compute_capabilities = len(targets)
            for index, target in enumerate(targets.values()):
                if not config.set_compute_capability(target, index):
                    raise self.failure(f"TensorRT does not build for {target.name}")
        for inputs in self.job.profiles.values():
            config.add_optimization_profile(self._profile(network, inputs))
        return config

    def _profile(
        self,
        network: Any,  # noqa: ANN401
        inputs: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    ) -> Any:  # noqa: ANN401
        profile = self._builder.create_optimization_profile()
        names = [network.get_input(index).name for index in range(network.num_inputs)]
        if names != list(inputs):
            raise BuildError(
                f"{self.job.onnx}: expected inputs {', '.join(inputs)}, TensorRT's network has "
                f"{', '.join(names)}"
            )
        for name, ends in inputs.items():
            profile.set_shape(name, *ends)
            if [tuple(shape) for shape in profile.get_shape(name)] != list(map(tuple, ends)):
                raise self.failure(f"{name}: TensorRT does not take the sizes {ends}")
        return profile

    def _rtx_targets(self) -> dict[str, Any]:
        """{compute capability: TensorRT's name of it} of all GPUs that an engine can serve."""
        targets = {}
        for name, target in self.trt.ComputeCapability.__members__.items():
            match = re.fullmatch(r"SM(\d+)", name)
            if match and int(match[1]) >= _OLDEST_GPU:
                targets[f"{match[1][:-1]}.{match[1][-1]}"] = target
        return targets

    def _capabilities(self) -> tuple[str, ...]:
        if self.job.backend == RTX:
            return tuple(self._rtx_targets())
        # A plan of classic TensorRT is for the GPU that it was built on, the first one.
        driver = ctypes.CDLL("libcuda.so.1")
        device, value, parts = ctypes.c_int(), ctypes.c_int(), []
        failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            parts.append(str(value.value))
        if failed:
            raise BuildError("the GPU that the engine was built on does not tell its version")
        return (".".join(parts),)

    def _read_cache(self, config: Any) -> bytes:  # noqa: ANN401
        if self.job.input_timing_cache is None and self.job.output_timing_cache is None:
            return b""
        path = self.job.input_timing_cache
        content = b"" if path is None else Path(path).read_bytes()
        cache = config.create_timing_cache(content)
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            raise self.failure(f"{path}: not a timing cache of this TensorRT and GPU")
        return bytes(config.get_timing_cache().serialize())

    def _write_cache(self, config: Any, before: bytes) -> str:  # noqa: ANN401
        if not before:
            return ""
        after = bytes(config.get_timing_cache().serialize())
        if self.job.output_timing_cache is not None:
            Path(self.job.output_timing_cache).write_bytes(after)
        if after == before:
            return (
                "every timing came from the cache: the same choices as in the build that filled it"
            )
        return "timings were added: kernels may differ from those of the build that filled it"

    def _describe(self, network: Any) -> dict[str, Any]:  # noqa: ANN401
        def tensor(item: Any) -> dict[str, Any]:  # noqa: ANN401
            return {"name": item.name, "dtype": item.dtype.name, "shape": list(item.shape)}

        layers = []
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            plugin = self._plugin_of(layer)
            inputs = (layer.get_input(i) for i in range(layer.num_inputs))
            layers.append(
                {
                    "name": layer.name,
                    "type": layer.type.name,
                    "plugin": plugin,
                    "inputs": [tensor(item) for item in inputs if item is not None],
                    "outputs": [tensor(layer.get_output(i)) for i in range(layer.num_outputs)],
                }
            )
        return {
            "name": network.name,
            "inputs": [tensor(network.get_input(i)) for i in range(network.num_inputs)],
            "outputs": [tensor(network.get_output(i)) for i in range(network.num_outputs)],
            "layers": layers,
        }


def _counts(plugins: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(plugins.items())) or "none"


def _peak_bytes() -> int:
    """Most memory that this program held; getrusage counts what its parent held before it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(job_path: str, result_path: str) -> None:
    """Run the job of one JSON file and write the result to another."""
    _end_with_parent()
    job = CompileJob(**json.loads(Path(job_path).read_text(encoding="utf-8")))
    try:
        result = _Compiler(job).run()
    except (LooptrtError, OSError) as error:
        result = CompileResult(error=str(error))
    Path(result_path).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
