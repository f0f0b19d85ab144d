"""Compiled engines as far as they go without a GPU that TensorRT-RTX runs on.

Cases D1, D2 and D4. Everything up to deserialisation is the real TensorRT-RTX; what comes after is
driven through `ScriptedTensorRt`, which keeps TensorRT's rules on shapes and records calls.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from looptrt.builder.build import build
from looptrt.builder.build_config import BuildConfig
from looptrt.errors import EngineError, ManifestError
from looptrt.manifest import EngineFile, Manifest, PhaseGraph, ShapeRange
from looptrt.plugins.creators import SCHEMA_SHA256
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.executor.tensorrt_engine import PhaseEngine, check_engines, choose_profile
from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.checkpoints import tiny_huginn
from tests.support.tensorrt import plugin_library, run_python, tensorrt_libraries

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny Huginn, compiled."""
    plugin_library()
    tensorrt_libraries()
    root = tmp_path_factory.mktemp("engine")
    checkpoint = tiny_huginn(root / "checkpoint")
    limits = {"max_batch_size": 4, "max_num_tokens": 64, "tokens_per_block": 8}
    build(BuildConfig(checkpoint, root / "engine", backend="tensorrt_rtx", **limits))
    return root / "engine"


def copied(engine_dir: Path, to: Path) -> Path:
    """The directory again, of links that a test replaces by files."""
    to.mkdir()
    for path in engine_dir.iterdir():
        (to / path.name).symlink_to(path)
    return to


def replaced(engine_dir: Path, name: str, content: bytes) -> None:
    (engine_dir / name).unlink()
    (engine_dir / name).write_bytes(content)


# D4: profiles, as pure functions.

PROFILES = {
    "decode": {
        "tokens": ShapeRange((1,), (8,), (32,)),
        "table": ShapeRange((1, 5), (8, 5), (32, 5)),
    },
    "prefill": {
        "tokens": ShapeRange((1,), (64,), (512,)),
        "table": ShapeRange((1, 5), (8, 5), (32, 5)),
    },
}


@pytest.mark.parametrize(
    ("tokens", "batch", "number"), [(1, 1, 0), (32, 32, 0), (33, 32, 1), (512, 1, 1)]
)
def test_the_narrowest_profile_that_fits_is_taken(tokens: int, batch: int, number: int) -> None:
    assert choose_profile("core", PROFILES, {"tokens": (tokens,), "table": (batch, 5)}) == number


@pytest.mark.parametrize(
    ("tokens", "table", "words"),
    [
        (
            (513,),
            (1, 5),
            r"core: tokens: shape \[513\] is outside .* prefill takes from \[1\] to \[512",
        ),
        ((0,), (1, 5), r"core: tokens: shape \[0\]"),
        ((1,), (33, 5), r"core: table: shape \[33, 5\] .* from \[1, 5\] to \[32, 5\]"),
        ((1,), (1, 6), r"core: table: shape \[1, 6\]"),
        ((1, 1), (1, 5), r"core: tokens: shape \[1, 1\]"),
    ],
)
def test_a_shape_outside_the_profiles_names_the_input(
    tokens: tuple[int, ...], table: tuple[int, ...], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        choose_profile("core", PROFILES, {"tokens": tokens, "table": table})


# D4: a step through TensorRT's own objects.


class ScriptedTensorRt:
    """The part of TensorRT's module that runs an engine of one input and one output.

    Attributes:
        calls: what was asked of contexts, in order.
        refuses: whether `set_input_shape` says no.
    """

    INPUT = "input"

    def __init__(self, profiles: dict[str, dict[str, ShapeRange]]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = False
        self._profiles = list(profiles.values())
        self.ILogger = type("ILogger", (), {})
        self.TensorIOMode = SimpleNamespace(INPUT=self.INPUT)
        self.DataType = SimpleNamespace(
            FLOAT="FLOAT", BF16="BF16", HALF="HALF", INT32="INT32", INT64="INT64"
        )
        self.Runtime = lambda _logger: SimpleNamespace(deserialize_cuda_engine=self._engine)

    def get_plugin_registry(self) -> SimpleNamespace:
        return SimpleNamespace(all_creators=[])

    def _engine(self, _plan: object) -> SimpleNamespace:
        contexts = iter(range(9))
        return SimpleNamespace(
            num_io_tensors=2,
            num_optimization_profiles=len(self._profiles),
            get_tensor_name=["tokens", "doubled"].__getitem__,
            get_tensor_mode=lambda name: self.INPUT if name == "tokens" else "output",
            get_tensor_dtype=lambda name: "INT32",
            create_execution_context=lambda: ScriptedContext(self, next(contexts)),
        )


class ScriptedContext:
    """A context that doubles its input; its shapes are those that were set last."""

    def __init__(self, module: ScriptedTensorRt, number: int) -> None:
        self._module, self._number = module, number
        self._shape: tuple[int, ...] | None = None
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._module.calls.append(("profile", self._number, index, stream))
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self._module.refuses:
            return False
        self._module.calls.append(("shape", self._number, name, shape))
        self._shape = shape
        return True

    def infer_shapes(self) -> list[str]:
        return [] if self._shape is not None else ["doubled"]

    def get_tensor_shape(self, _name: str) -> tuple[int, ...]:
        assert self._shape is not None
        return self._shape

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert self._shape is not None
        self._module.calls.append(("execute", self._number, self._shape, stream))
        return True


@pytest.fixture
def scripted(tmp_path: Path) -> tuple[ScriptedTensorRt, PhaseEngine]:
    profiles = {
        "decode": {"tokens": ShapeRange((1,), (8,), (32,))},
        "prefill": {"tokens": ShapeRange((1,), (64,), (512,))},
    }
    (tmp_path / "a.engine").write_bytes(b"plan")
    file = EngineFile("a.engine", "1", ("8.9",), {}, SCHEMA_SHA256, "", profiles)
    graph = PhaseGraph("a.onnx", ("tokens",), ("doubled",), file)
    module = ScriptedTensorRt(profiles)
    engine = PhaseEngine(module, tmp_path, "core", graph, current_stream=lambda: 7)
    module.calls.clear()
    return module, engine


def rows(count: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.zeros(count, dtype=torch.int32), "of another phase": torch.zeros(0)}


def test_steps_that_alternate_between_profiles_set_their_own_shapes(
    scripted: tuple[ScriptedTensorRt, PhaseEngine],
) -> None:
    module, engine = scripted
    for count in (500, 3, 500, 3, 33, 32):
        outputs = engine.run(rows(count))
        assert outputs["doubled"].shape == (count,)
        context = 0 if count <= 32 else 1
        shape, execute = module.calls[-2:]
        assert shape == ("shape", context, "tokens", (count,))
        assert execute == ("execute", context, (count,), 7)


def test_the_gpu_of_the_inputs_is_the_current_one_while_tensorrt_enqueues(
    scripted: tuple[ScriptedTensorRt, PhaseEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, engine = scripted

    @contextmanager
    def entered(tensor: torch.Tensor) -> Iterator[None]:
        module.calls.append(("enter", tensor.data_ptr()))
        yield
        module.calls.append(("leave",))

    monkeypatch.setattr(torch.cuda, "device_of", entered)
    given = rows(3)
    engine.run(given)
    enter = "enter", given["tokens"].data_ptr()
    assert module.calls[-3:] == [enter, ("execute", 0, (3,), 7), ("leave",)]


@pytest.mark.parametrize("count", [0, 513])
def test_an_out_of_profile_step_enqueues_nothing(
    scripted: tuple[ScriptedTensorRt, PhaseEngine], count: int
) -> None:
    module, engine = scripted
    with pytest.raises(EngineError, match=rf"tokens: shape \[{count}\] is outside"):
        engine.run(rows(count))
    assert module.calls == []
    assert engine.run(rows(5))["doubled"].shape == (5,)


def test_a_shape_that_tensorrt_refuses_never_runs_with_the_one_before(
    scripted: tuple[ScriptedTensorRt, PhaseEngine],
) -> None:
    module, engine = scripted
    engine.run(rows(5))
    module.refuses = True
    with pytest.raises(EngineError, match=r"core: tokens: shape \[6\] is refused"):
        engine.run(rows(6))
    assert [call[0] for call in module.calls] == ["shape", "execute"]


def test_an_input_of_another_dtype_or_with_strides_is_refused(
    scripted: tuple[ScriptedTensorRt, PhaseEngine],
) -> None:
    module, engine = scripted
    odd = [torch.zeros(4), torch.zeros(8, dtype=torch.int32)[::2]]
    for tensor in odd:
        with pytest.raises(EngineError, match=r"tokens: expected contiguous torch\.int32, got"):
            engine.run({"tokens": tensor})
    assert module.calls == []


def test_what_the_scheduler_may_submit_fits_the_widest_profile(engine_dir: Path) -> None:
    """Limits of a running engine are the built engine's or lower, and so are its sizes."""
    manifest = Manifest.load(engine_dir)
    limits, layout = manifest.limits, manifest.layout
    pages = layout.num_pages(limits.max_seq_len)
    for tokens in (1, limits.max_batch_size, limits.max_num_tokens):
        sizes = {"T": tokens, "R": tokens, "M": 1, "N": min(tokens, limits.max_batch_size)}
        table = {"block_table": (limits.max_batch_size, layout.num_rows, pages)}
        for name, graph in manifest.phases.items():
            assert graph.engine is not None
            shapes = {
                item: table.get(item) or step_shape(item, graph, sizes) for item in graph.inputs
            }
            assert choose_profile(name, graph.engine.profiles, shapes) == (
                tokens > limits.max_batch_size
            )


def step_shape(item: str, graph: PhaseGraph, sizes: dict[str, int]) -> tuple[int, ...]:
    assert graph.engine is not None
    fixed = graph.engine.profiles["decode"][item].min[1:]
    firsts = {"cu_seqlens": sizes["N"] + 1, "seq_slots": sizes["N"], "kv_pool": 2, "plane": 1}
    firsts |= {"logit_rows": sizes["M"], "rows": sizes["R"]}
    return (firsts.get(item, sizes["T"]), *fixed)


# D2: plans of another version, device, or damaged.


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda plan: plan[:-1024], r"core\.engine: expected \d+ bytes, found \d+"),
    "flipped": (
        lambda plan: plan[:9] + bytes([plan[9] ^ 1]) + plan[10:],
        "expected SHA-256 .*, found",
    ),
    "empty": (lambda plan: b"", r"core\.engine: expected \d+ bytes, found 0"),
    "pointer": (
        lambda plan: b"version https://git-lfs.github.com/spec/v1\n",
        "expected .* bytes, found 43",
    ),
}


@pytest.fixture
def damaged(engine_dir: Path, tmp_path: Path) -> dict[str, Path]:
    """{damage: engine directory} with that done to the core's plan."""
    plan = (engine_dir / "rank0.core.engine").read_bytes()
    directories = {}
    for name, (damage, _) in DAMAGES.items():
        directories[name] = copied(engine_dir, tmp_path / name)
        replaced(directories[name], "rank0.core.engine", damage(plan))
    return directories


def test_a_damaged_plan_is_found_by_its_checksum(damaged: dict[str, Path]) -> None:
    for name, directory in damaged.items():
        with pytest.raises(ManifestError, match=DAMAGES[name][1]):
            EngineCore(directory, EngineConfig())


def test_another_tensorrt_gpu_or_schema_is_refused_with_what_was_found(engine_dir: Path) -> None:
    manifest = Manifest.load(engine_dir)
    file = manifest.phases["prelude"].engine
    assert file is not None
    installed = SimpleNamespace(__version__=file.tensorrt)
    check_engines(manifest, installed, "8.9")
    with pytest.raises(
        EngineError, match=rf"built by tensorrt_rtx {file.tensorrt}, installed is 2"
    ):
        check_engines(manifest, SimpleNamespace(__version__="2.0"), "8.9")
    with pytest.raises(EngineError, match=r"compute capability 8\.0, .*, this one has 9\.0"):
        check_engines(manifest, installed, "9.0")
    older = dataclasses.replace(file, schema="0" * 64)
    phases = manifest.phases | {
        "prelude": dataclasses.replace(manifest.phases["prelude"], engine=older)
    }
    with pytest.raises(EngineError, match=r"another schema of the operators .*found 0{12}"):
        check_engines(dataclasses.replace(manifest, phases=phases), installed, "8.9")


# A child that deserialises the core of engine directories whose checksums nobody compared.
DESERIALISE = """
import json, sys
from pathlib import Path
import tensorrt_rtx as trt
from looptrt.errors import EngineError
from looptrt.manifest import Manifest
from looptrt.plugins.creators import load_creators
from looptrt.runtime.executor.tensorrt_engine import PhaseEngine
library, *directories = map(Path, sys.argv[1:])
if library.name:
    load_creators(trt, library)
for path in directories:
    manifest = Manifest.from_json(json.loads((path / "config.json").read_text()), path)
    try:
        PhaseEngine(trt, path, "core", manifest.phases["core"], current_stream=lambda: 0)
        print("deserialised")
    except EngineError as error:
        print(error)
"""


def deserialised(library: Path | str, *directories: Path) -> list[str]:
    child = run_python(DESERIALISE, library, *directories)
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    assert len(lines) == len(directories), child.stdout
    return lines


@no_gpu
def test_without_a_driver_deserialisation_is_one_error_that_says_so(engine_dir: Path) -> None:
    (line,) = deserialised(plugin_library(), engine_dir)
    assert line.startswith(f"core: {engine_dir}/rank0.core.engine cannot be deserialised: ")
    assert "CUDA driver version is insufficient" in line


def test_a_damaged_plan_that_reaches_tensorrt_is_an_error_and_no_crash(
    damaged: dict[str, Path],
) -> None:
    for line in deserialised(plugin_library(), *damaged.values()):
        assert "rank0.core.engine cannot be deserialised" in line


def test_a_plan_whose_plugins_nobody_registered_names_the_first(engine_dir: Path) -> None:
    (line,) = deserialised("", engine_dir)
    plugin = "core: rank0.core.engine has the plugin fenced_rms_norm, version 1, namespace looptrt"
    assert line.startswith(plugin)
    assert line.endswith("looked for liblooptrt_plugins.so")


# Which backend runs.


def edited(directory: Path, **changes: object) -> None:
    """Change keys of the manifest's `looptrt` section, checksum aside."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["looptrt"] |= changes
    replaced(directory, "config.json", json.dumps(config).encode())


def test_a_manifest_that_was_edited_is_refused(engine_dir: Path, tmp_path: Path) -> None:
    directory = copied(engine_dir, tmp_path / "engine")
    edited(directory, backend="pytorch")
    with pytest.raises(ManifestError, match="changed since it was built"):
        EngineCore(directory, EngineConfig())


@no_gpu
@pytest.mark.parametrize("config", [{}, {"backend": "tensorrt_rtx"}, {"device": "cuda"}])
def test_compiled_engines_without_a_gpu_are_refused_and_not_replaced(
    engine_dir: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(EngineError, match=r"backend tensorrt_rtx: .*backend pytorch runs the same"):
        EngineCore(engine_dir, EngineConfig(**config))


def test_compiled_engines_on_the_cpu_are_refused(engine_dir: Path) -> None:
    with pytest.raises(EngineError, match="TensorRT engines run on a GPU, got device cpu"):
        EngineCore(engine_dir, EngineConfig(device="cpu"))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(
        EngineError, match="backend: expected auto, pytorch, tensorrt, tensorrt_rtx"
    ):
        EngineConfig(backend="cuda")


def test_the_same_directory_runs_with_pytorch(engine_dir: Path) -> None:
    config = EngineConfig(backend="pytorch", device="cpu")
    with LLM(engine_dir, config, in_process=True) as llm:
        answer = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert len(answer.outputs[0].token_ids) == 4
    assert math.isfinite(sum(answer.outputs[0].token_ids))
