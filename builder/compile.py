"""The phases of an engine directory through TensorRT, each in a child process.

Owns deadlines, the children's surroundings and what their end means, and what the manifest says
of engines; leaves TensorRT itself to `compile_engine` and sizes to `profiles`. A child a phase:
memory is given back in between, and a crash of TensorRT is one error. Invariant: after a failure
no child is left, and no engine is named in a manifest.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import onnx_ir as ir

from looptrt.builder.build_config import BuildConfig
from looptrt.builder.compile_engine import CompileJob, CompileResult
from looptrt.builder.profiles import Sizes, profile_sizes, shape_ranges
from looptrt.builder.progress import progress
from looptrt.errors import BuildError, PluginError
from looptrt.kv_layout import PlaneLayout
from looptrt.manifest import BuildLimits, EngineFile, PhaseGraph, ShapeRange, sha256_of
from looptrt.plugins import launch
from looptrt.plugins.creators import PACKAGES, RTX, SCHEMA_SHA256, UNVERSIONED, check_library
from looptrt.plugins.schema import NAMESPACE

_LOADER_LETTERS = set(":;$")  # that mean something in LD_LIBRARY_PATH
_LOG_LINES = 12  # of a child that died
# INT64 inputs are bound as such by our executor.
_KNOWN_WARNING = re.compile(r"Make sure input \w+ has Int64 binding")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompilePlan:
    """Everything that compiling needs, checked.

    Attributes:
        library: the plugin library.
        profiles: {profile: sizes}.
    """

    config: BuildConfig
    library: Path
    profiles: Mapping[str, Sizes]

    def describe(self) -> dict[str, str]:
        """Facts for a person, by heading."""
        text = ", ".join(
            f"{name} {sizes['T'][0]} to {sizes['T'][2]} tokens (usually {sizes['T'][1]})"
            for name, sizes in self.profiles.items()
        )
        return {"plugin library": str(self.library), "profiles": text}


def plan_compile(config: BuildConfig, limits: BuildLimits, layout: PlaneLayout) -> CompilePlan:
    """Check that a backend can be built for here, and what for.

    Raises:
        BuildError: TensorRT or the plugin library is missing or of another version, or a flag
            asks for what this TensorRT does not have.
    """
    backend = config.backend
    if importlib.util.find_spec(backend) is None:
        raise BuildError(
            f"--backend {backend}: {backend} is not installed; pip install '{PACKAGES[backend]}'"
        )
    try:
        library = launch.find_library()
        check_library(library)
    except PluginError as error:
        raise BuildError(f"--backend {backend}: {error}") from error
    if backend == RTX:
        for name in ("input_timing_cache", "output_timing_cache"):
            if getattr(config, name) != getattr(BuildConfig, name):
                raise BuildError(
                    f"--{name}: TensorRT-RTX has no timing cache: it times nothing while it builds"
                )
    if config.input_timing_cache is not None and not config.input_timing_cache.is_file():
        raise BuildError(f"--input_timing_cache {config.input_timing_cache}: no such file")
    _check_written(config)
    return CompilePlan(config, library, profile_sizes(config, limits, layout))


def _check_written(config: BuildConfig) -> None:
    """Check the places of what is written beside the engine directory, which appears whole."""
    target = config.output_dir.resolve()
    for flag in ("output_timing_cache", "visualize_network"):
        path = getattr(config, flag)
        if path is not None and path.resolve().is_relative_to(target):
            raise BuildError(
                f"--{flag} {path}: lies in --output_dir, which holds the engine and nothing else"
            )
    folder = config.output_timing_cache.resolve().parent
    if config.backend != RTX and not os.access(folder, os.W_OK | os.X_OK):
        raise BuildError(
            f"--output_timing_cache {config.output_timing_cache}: {folder} is not a writable "
            "directory"
        )


def compile_phases(
    plan: CompilePlan, phases: Mapping[str, PhaseGraph], directory: Path
) -> dict[str, PhaseGraph]:
    """Write rank0.{prelude,core,coda}.engine beside the graphs.

    Returns:
        The phases with their engines.

    Raises:
        BuildError: TensorRT refuses a graph, dies, or is not done in time; has its reasons.
    """
    config = plan.config
    if config.visualize_network is not None:
        config.visualize_network.mkdir(parents=True, exist_ok=True)
    library = sha256_of(plan.library)
    compiled = {}
    with (
        _loader_folder(config.backend, directory) as folder,
        progress("compile", len(phases)) as advance,
    ):
        for name, phase in phases.items():
            job, ranges = _job(plan, phase, directory)
            result = _run(name, job, config.compile_timeout, folder)
            engine = EngineFile(
                file=Path(job.engine).name,
                tensorrt=result.tensorrt,
                compute_capabilities=tuple(result.compute_capabilities),
                plugins=job.plugins,
                schema=SCHEMA_SHA256,
                library=library,
                profiles=ranges,
            )
            compiled[name] = replace(phase, engine=engine)
            advance(1)
            config = _fill_next_cache(config)
            plan = replace(plan, config=config)
    return compiled


def _fill_next_cache(config: BuildConfig) -> BuildConfig:
    """Let the next phase begin with the timings of this one."""
    if config.backend == RTX:
        return config
    return replace(config, input_timing_cache=config.output_timing_cache)


def _job(
    plan: CompilePlan, phase: PhaseGraph, directory: Path
) -> tuple[CompileJob, dict[str, dict[str, ShapeRange]]]:
    config, path = plan.config, directory / phase.onnx
    graph = ir.load(path).graph
    inputs = {
        str(value.name): tuple(
            dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ()
        )
        for value in graph.inputs
    }
    ranges = shape_ranges(inputs, plan.profiles)
    nodes = Counter(node.op_type for node in graph if node.domain == NAMESPACE)
    has_cache = config.backend != RTX
    input_cache = config.input_timing_cache if has_cache else None
    output_cache = config.output_timing_cache if has_cache else None
    folder = config.visualize_network
    job = CompileJob(
        backend=config.backend,
        library=str(plan.library),
        onnx=str(path),
        engine=str(path.with_suffix(".engine")),
        profiles={
            name: {item: (sizes.min, sizes.opt, sizes.max) for item, sizes in shapes.items()}
            for name, shapes in ranges.items()
        },
        plugins=dict(nodes),
        profiling_verbosity=config.profiling_verbosity,
        strip_plan=config.strip_plan,
        input_timing_cache=_absolute(input_cache),
        output_timing_cache=_absolute(output_cache),
        network=_absolute(None if folder is None else folder / f"{path.stem}.json"),
    )
    return job, ranges


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


@contextlib.contextmanager
def _loader_folder(backend: str, directory: Path) -> Iterator[Path | None]:
    """A folder with the names without version that TensorRT's wheels lack.

    It lies in the directory being written, which goes with a build that is killed.

    Yields:
        None where TensorRT is no wheel: an installation has those names.
    """
    spec = importlib.util.find_spec(f"{backend}_libs")
    name = UNVERSIONED.get(backend)
    if spec is None or name is None or not spec.submodule_search_locations:
        yield None
        return
    versioned = sorted(Path(spec.submodule_search_locations[0]).glob(f"{name}.*"))
    is_usable = not set(str(directory)) & _LOADER_LETTERS
    parent = directory if is_usable else None
    with tempfile.TemporaryDirectory(prefix=".looptrt-loader-", dir=parent) as folder:
        if versioned:
            (Path(folder) / name).symlink_to(versioned[-1])
        yield Path(folder)


def _environment(folder: Path | None) -> dict[str, str]:
    """This process's environment; the loader looks into `folder` first."""
    environment = dict(os.environ)  # noqa: TID251 - a child's is the parent's and one entry more
    if folder is not None:
        rest = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{folder}:{rest}" if rest else str(folder)
    return environment


def _run(phase: str, job: CompileJob, timeout_s: float, folder: Path | None) -> CompileResult:
    """Run a job in a child; its log goes to ours when it is done."""
    beside = Path(job.engine).parent
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=beside) as scratch:
        job_path, result_path, log_path = (
            Path(scratch) / name for name in ("job.json", "result.json", "log")
        )
        job_path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        module = "looptrt.builder.compile_engine"
        command = [sys.executable, "-P", "-m", module, str(job_path), str(result_path)]
        with log_path.open("wb") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(folder),
            )
            try:
                code = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise BuildError(
                    f"{phase}: not compiled within --compile_timeout {timeout_s:g} s"
                    f"{_last_lines(log_path)}"
                ) from None
            finally:
                child.kill()
                child.wait()
        _show(phase, log_path)
        if code != 0 or not result_path.is_file():
            raise BuildError(f"{phase}: TensorRT's process {_end(code)}{_last_lines(log_path)}")
        result = CompileResult(**json.loads(result_path.read_text(encoding="utf-8")))
    if result.error:
        raise BuildError(f"{phase}: {result.error}")
    _logger.info(
        "%s: engine of %d bytes for GPUs of %s in %.1f s, peak memory %d MiB",
        phase,
        Path(job.engine).stat().st_size,
        ", ".join(result.compute_capabilities),
        result.seconds,
        result.peak_bytes >> 20,
    )
    if result.timing_cache:
        _logger.info("%s: %s", phase, result.timing_cache)
    return result


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _last_lines(log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"; the last lines of its log: {' | '.join(lines[-_LOG_LINES:])}" if lines else ""


def _show(phase: str, log_path: Path) -> None:
    """Pass the child's log on: warnings as they are, the rest for --log_level verbose."""
    for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines():
        is_warning = line.startswith("WARNING: ") and not _KNOWN_WARNING.search(line)
        level = logging.WARNING if is_warning else logging.DEBUG
        _logger.log(level, "%s: %s", phase, line)
