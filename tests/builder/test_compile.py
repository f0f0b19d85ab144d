"""TensorRT-RTX engines built for real from tiny checkpoints; cases D4 and D5 of a build."""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from looptrt.builder import compile as compile_module
from looptrt.builder.build import build, plan_build
from looptrt.builder.build_config import BuildConfig
from looptrt.builder.compile_engine import CompileJob
from looptrt.builder.profiles import Sizes, shape_ranges
from looptrt.cli import trtllm_build
from looptrt.errors import BuildError
from looptrt.manifest import PHASES, Manifest
from looptrt.plugins import launch
from looptrt.plugins.creators import SCHEMA_SHA256
from looptrt.runtime.executor.tensorrt import TensorRtExecutor
from tests.support.checkpoints import tiny_huginn, tiny_llama, tiny_olmo, tiny_ouro
from tests.support.tensorrt import plugin_library, tensorrt_libraries

CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "ouro": tiny_ouro,
    "huginn": tiny_huginn,
    "olmo": tiny_olmo,
    "llama": tiny_llama,
}
LIMITS = {"max_batch_size": 4, "max_num_tokens": 64, "tokens_per_block": 8}
KV_INPUTS = {"positions", "cu_seqlens", "seq_slots", "block_table", "kv_pool", "plane"}


def layers(count: int, **others: int) -> dict[str, int]:
    """Plugin layers of `count` decoder layers, norms and rope aside."""
    if count:
        others |= {"packed_plane_attention": count, "fenced_silu_mul": count}
    return others


def sandwich(count: int) -> dict[str, int]:
    """Of Huginn: each of its norms but the last of a phase is joined with the next."""
    norms = {"fenced_rms_norm": 1, "fenced_add_rms_norm_rms_norm": 2 * count - 1}
    return layers(count, fenced_bias_rope=count, fenced_add_rms_norm=1, **norms)


# By hand from the models' definitions: tiny Ouro has (0, 3, 0) layers, tiny Huginn (2, 4, 2), the
# retrofitted ones (2, 3, 1).
ROWS = {"compact_gather": 2, "compact_scatter": 1}
NOISE = {"position_keyed_noise": 1}
PLUGINS: dict[str, dict[str, dict[str, int]]] = {
    "ouro": {
        "prelude": {},
        "core": layers(3, fenced_rope=3, fenced_rms_norm=1, fenced_rms_norm_add_rms_norm=6)
        | {"compact_gather": 1, "compact_scatter": 1},
        "coda": {"compact_gather": 1},
    },
    "huginn": {
        "prelude": sandwich(2) | NOISE,
        "core": sandwich(4) | ROWS,
        "coda": sandwich(2) | {"fenced_rms_norm": 3, "compact_gather": 1},
    },
    "olmo": {
        "prelude": layers(2, fenced_rope=2, fenced_qk_norm=2, fenced_rms_norm=4) | NOISE,
        "core": layers(3, fenced_rope=3, fenced_qk_norm=3, fenced_rms_norm=6) | ROWS,
        "coda": layers(1, fenced_rope=1, fenced_qk_norm=1, fenced_rms_norm=3)
        | {"compact_gather": 1},
    },
    "llama": {
        "prelude": layers(2, fenced_rope=2, fenced_rms_norm=4) | NOISE,
        "core": layers(3, fenced_rope=3, fenced_rms_norm=6) | ROWS,
        "coda": layers(1, fenced_rope=1, fenced_rms_norm=3) | {"compact_gather": 1},
    },
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    plugin_library()
    tensorrt_libraries()
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make(root / name) for name, make in CHECKPOINTS.items()}


@pytest.fixture(scope="module")
def built(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Engine directory of a family in a dtype, with descriptions of its networks beside it."""
    root = tmp_path_factory.mktemp("built")

    def directory(family: str, dtype: str) -> Path:
        target = root / f"{family}-{dtype}"
        if not target.exists():
            build(rtx(checkpoints[family], target, dtype=dtype, visualize_network=networks(target)))
        return target

    return directory


def rtx(checkpoint: Path, target: Path, **fields: Any) -> BuildConfig:
    return BuildConfig(checkpoint, target, backend="tensorrt_rtx", **LIMITS, **fields)


def networks(engine_dir: Path) -> Path:
    return engine_dir.with_name(f"{engine_dir.name}-networks")


def network(engine_dir: Path, phase: str) -> dict[str, Any]:
    path = networks(engine_dir) / f"rank0.{phase}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


# What a build writes.


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("ouro", "float32"),
        *(
            pytest.param(family, "float32", marks=pytest.mark.full)
            for family in CHECKPOINTS
            if family != "ouro"
        ),
        *((family, "bfloat16") for family in CHECKPOINTS),
    ],
)
def test_three_engines_with_every_plugin_of_the_model(
    built: Callable[[str, str], Path], family: str, dtype: str
) -> None:
    directory = built(family, dtype)
    manifest = Manifest.load(directory)
    assert manifest.backend == "tensorrt_rtx"
    for phase in PHASES:
        engine = manifest.phases[phase].engine
        assert engine is not None
        assert engine.plugins == PLUGINS[family][phase], phase
        assert f"rank0.{phase}.engine" == engine.file
        assert engine.file in manifest.files
        in_network = [layer["plugin"] for layer in network(directory, phase)["layers"]]
        found = {name: in_network.count(name) for name in set(in_network) - {None}}
        assert found == PLUGINS[family][phase]


def test_the_manifest_says_what_an_engine_needs(built: Callable[[str, str], Path]) -> None:
    engine = Manifest.load(built("huginn", "bfloat16")).phases["core"].engine
    assert engine is not None
    assert re.fullmatch(r"1\.\d+\.\d+\.\d+", engine.tensorrt)
    assert {"8.0", "8.9", "12.0"} <= set(engine.compute_capabilities)
    assert "9.0" not in engine.compute_capabilities
    assert engine.schema == SCHEMA_SHA256
    assert engine.library == hashlib.sha256(plugin_library().read_bytes()).hexdigest()
    decode, prefill = engine.profiles["decode"], engine.profiles["prefill"]
    assert list(engine.profiles) == ["decode", "prefill"]
    assert (decode["state"].min, decode["state"].opt, decode["state"].max) == (
        (1, 64),
        (4, 64),
        (4, 64),
    )
    assert prefill["state"].max == (64, 64)
    assert prefill["cu_seqlens"].max == (5,)
    assert prefill["block_table"].max == (4, 5, 16)


def test_a_second_build_differs_in_how_sizes_are_numbered_at_most(
    built: Callable[[str, str], Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """TensorRT-RTX has no timing cache, and numbers symbolic sizes as its hash tables lie."""
    again = tmp_path / "again"
    build(rtx(checkpoints["llama"], again, dtype="bfloat16"))
    for phase in PHASES:
        name = f"rank0.{phase}.engine"
        first, second = (
            np.fromfile(folder / name, np.int8) for folder in (built("llama", "bfloat16"), again)
        )
        assert first.size == second.size
        differs = first != second
        assert differs.sum() < 200, phase
        assert (
            max(np.abs(plan[differs], dtype=np.int16).max(initial=0) for plan in (first, second))
            < 64
        )


# D5: what is computed in which dtype.


@pytest.mark.parametrize("family", list(CHECKPOINTS))
def test_a_bfloat16_network_keeps_every_tensor_in_the_dtype_of_the_graph(
    built: Callable[[str, str], Path], family: str
) -> None:
    for phase in PHASES:
        found = network(built(family, "bfloat16"), phase)
        inputs = {tensor["name"]: tensor["dtype"] for tensor in found["inputs"]}
        whole = {"input_ids", "rows", "logit_rows", "noise_seeds"} | KV_INPUTS
        for name, dtype in inputs.items():
            expected = "INT32" if name in whole else "BF16"
            if name in ("kv_pool", "noise_seeds"):
                expected = "INT64"
            assert dtype == expected, (phase, name)
        for layer in found["layers"]:
            dtypes = {tensor["dtype"] for tensor in layer["outputs"]}
            if layer["type"] in ("MATRIX_MULTIPLY", "PLUGIN_V3"):
                assert dtypes == {"BF16"}, (phase, layer["name"])
            assert not dtypes & {"HALF", "INT8", "FP8"}
    assert [tensor["dtype"] for tensor in found["outputs"]] == ["FLOAT"]


def test_huginn_s_embedding_is_scaled_once_and_its_norms_are_plugins(
    built: Callable[[str, str], Path],
) -> None:
    """Squares never leave the plugins' float32, and the tied head is not scaled."""
    directory = built("huginn", "bfloat16")
    kinds = {
        phase: [layer["type"] for layer in network(directory, phase)["layers"]] for phase in PHASES
    }
    assert kinds["prelude"].count("ELEMENTWISE") == 1
    for phase in ("core", "coda"):
        assert "ELEMENTWISE" not in kinds[phase]
    for phase in PHASES:
        assert not {"REDUCE", "UNARY", "NORMALIZATION"} & set(kinds[phase])


def test_float16_is_refused_with_a_reason(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = f"--checkpoint_dir {checkpoints['huginn']} --output_dir {tmp_path / 'e'}"
    assert trtllm_build([*argv.split(), "--backend", "tensorrt_rtx", "--dtype", "float16"]) == 2
    assert "--dtype float16: expected float32 or bfloat16" in capsys.readouterr().err


# D4: profiles.


def test_a_profile_with_a_wrong_order_names_the_tensor() -> None:
    inputs = {"rows": ("R",), "state": ("T", 64)}
    sound = {"prefill": {"R": (1, 2, 3), "T": (1, 2, 3)}}
    ranges = shape_ranges(inputs, sound)["prefill"]["state"]
    assert (ranges.min, ranges.opt, ranges.max) == ((1, 64), (2, 64), (3, 64))
    for odd in ((2, 1, 3), (1, 4, 3), (0, 1, 2)):
        with pytest.raises(BuildError, match=r"state: profile prefill: expected 1 <= min"):
            shape_ranges(inputs, {"prefill": {"R": (1, 2, 3), "T": odd}})


def profiles(checkpoint: Path, folder: Path, **fields: Any) -> Mapping[str, Sizes]:
    plan = plan_build(rtx(checkpoint, folder / "engine", **fields)).compile
    assert plan is not None
    return plan.profiles


def test_profiles_follow_the_flags(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = checkpoints["ouro"]
    found = profiles(checkpoint, tmp_path)
    assert found["decode"]["T"] == (1, 4, 4)
    assert found["prefill"]["T"] == (1, 64, 64)
    found = profiles(
        checkpoint, tmp_path, max_seq_len=40, max_input_len=20, opt_batch_size=2, opt_num_tokens=7
    )
    assert found["decode"]["T"] == (1, 2, 4)
    assert found["prefill"]["T"] == (1, 7, 64)
    assert found["prefill"]["N_plus_1"] == (2, 3, 5)
    assert found["prefill"]["max_pages"] == (1, 5, 5)


def test_profiles_have_room_for_the_block_table_of_a_full_batch(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A row of null units beside the sequences', as steps with graphs need, does not fit."""
    rows = LIMITS["max_batch_size"] + TensorRtExecutor.num_null_slots
    found = profiles(checkpoints["ouro"], tmp_path)
    assert all(sizes["max_slots"][2] >= rows for sizes in found.values())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"opt_num_tokens": 65}, "--opt_num_tokens 65: expected at most max_num_tokens, 64"),
        ({"opt_batch_size": 5}, "--opt_batch_size 5: expected at most max_batch_size, 4"),
        ({"opt_num_tokens": 0}, "--opt_num_tokens: expected at least 1, got 0"),
        ({"input_timing_cache": Path("c")}, "--input_timing_cache: TensorRT-RTX has no timing"),
        ({"output_timing_cache": Path("c")}, "--output_timing_cache: TensorRT-RTX has no timing"),
        ({"visualize_network": "engine/net"}, "--visualize_network .*: lies in --output_dir"),
    ],
)
def test_a_flag_that_cannot_be_served_is_refused_before_anything_is_written(
    checkpoints: dict[str, Path], tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    if "visualize_network" in fields:
        fields = {"visualize_network": tmp_path / fields["visualize_network"]}
    with pytest.raises(BuildError, match=words):
        build(rtx(checkpoints["ouro"], tmp_path / "engine", **fields))
    assert not list(tmp_path.iterdir())


# The command.


def test_a_dry_run_says_what_would_be_compiled(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = f"--checkpoint_dir {checkpoints['ouro']} --output_dir {tmp_path / 'engine'} --dry_run"
    argv += " --backend tensorrt_rtx --max_batch_size 16 --max_num_tokens 99 --opt_num_tokens 33"
    assert trtllm_build(argv.split()) == 0
    out = capsys.readouterr().out
    assert "tensorrt_rtx" in out
    assert str(plugin_library()) in out
    assert "decode 1 to 16 tokens (usually 8), prefill 1 to 99 tokens (usually 33)" in out
    assert not list(tmp_path.iterdir())


def test_the_command_builds_and_reports_memory(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tmp_path / "a:b;$LIB" / "engine"  # what a loader's path cannot hold
    argv = f"--checkpoint_dir {checkpoints['ouro']} --output_dir {engine} --backend tensorrt_rtx"
    assert trtllm_build([*argv.split(), "--profiling_verbosity", "detailed"]) == 0
    lines = [record.getMessage() for record in caplog.records]
    for phase in PHASES:
        pattern = rf"{phase}: engine of \d+ bytes for GPUs of 8\.0, .* peak memory \d+ MiB"
        assert any(re.match(pattern, line) for line in lines), lines
    assert Manifest.load(engine).build_flags["profiling_verbosity"] == "detailed"


# What is missing.


def test_a_missing_tensorrt_names_its_package(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    config = replace(rtx(checkpoints["ouro"], tmp_path / "engine"), backend="tensorrt")
    with pytest.raises(BuildError, match=r"not installed; pip install 'looptrt\[tensorrt\]'"):
        build(config)
    assert not list(tmp_path.iterdir())


def test_a_missing_plugin_library_names_how_to_build_it(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "places", lambda: [tmp_path / "lib.so"])
    with pytest.raises(BuildError, match=rf"tried {tmp_path}/lib.so\); build it: cmake"):
        build(rtx(checkpoints["ouro"], tmp_path / "engine"))
    assert not list(tmp_path.iterdir())


# What TensorRT's process does wrong.


@pytest.fixture
def job(
    checkpoints: dict[str, Path], built: Callable[[str, str], Path], tmp_path: Path
) -> CompileJob:
    """The core of tiny Ouro, compiled once more."""
    directory = built("ouro", "bfloat16")
    plan = plan_build(rtx(checkpoints["ouro"], tmp_path / "engine", dtype="bfloat16")).compile
    assert plan is not None
    graph = Manifest.load(directory).phases["core"]
    job, _ = compile_module._job(plan, graph, directory)
    return replace(job, engine=str(tmp_path / "core.engine"))


def fail(job: CompileJob, folder: Path | None, timeout_s: float = 60.0) -> str:
    with pytest.raises(BuildError) as caught:
        compile_module._run("core", job, timeout_s, folder)
    assert not Path(job.engine).exists()
    return str(caught.value)


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[Path | None]:
    with compile_module._loader_folder("tensorrt_rtx", tmp_path) as folder:
        yield folder


def test_a_timing_cache_is_written_and_read_back(job: CompileJob, loader: Path | None) -> None:
    """As for classic TensorRT, whose calls TensorRT-RTX has and does nothing in."""
    cache = Path(job.engine).with_suffix(".cache")
    first = replace(job, output_timing_cache=str(cache))
    assert compile_module._run("core", first, 60.0, loader).timing_cache
    content = cache.read_bytes()
    assert content
    again = replace(first, input_timing_cache=str(cache))
    text = compile_module._run("core", again, 60.0, loader).timing_cache
    assert text.startswith("every timing came from the cache")
    assert cache.read_bytes() == content


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_stripped_plan_without_a_driver_is_refused_with_the_reason(
    job: CompileJob, loader: Path | None
) -> None:
    text = fail(replace(job, strip_plan=True), loader)
    assert "made no engine without its weights, for which TensorRT-RTX needs a GPU" in text


def test_a_lost_plugin_is_an_error(job: CompileJob, loader: Path | None) -> None:
    more = {**job.plugins, "fenced_silu_mul": 4}
    text = fail(replace(job, plugins=more), loader)
    assert "expected plugin layers 1 compact_gather" in text
    assert "4 fenced_silu_mul" in text
    assert "3 fenced_silu_mul" in text


def test_a_library_without_its_short_name_is_an_error_and_no_abort(job: CompileJob) -> None:
    text = fail(job, None)
    assert "ONNX parser opens libtensorrt_rtx.so, which the loader does not find" in text


def test_sizes_that_the_graph_does_not_have_are_tensorrt_s_error(
    job: CompileJob, loader: Path | None
) -> None:
    state = ((1, 63), (2, 63), (3, 63))
    odd = {name: inputs | {"state": state} for name, inputs in job.profiles.items()}
    text = fail(replace(job, profiles=odd), loader)
    assert "core: " in text
    assert "state" in text


def stand_in(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `tensorrt` of which importing is the fault under test."""
    (folder / "tensorrt.py").write_text(program, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_crash_of_tensorrt_is_one_error_with_its_last_words(
    job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os\nprint('terminate called', flush=True)\nos.abort()\n"
    stand_in(program, tmp_path, monkeypatch)
    text = fail(replace(job, backend="tensorrt"), None)
    assert "TensorRT's process was ended by SIGABRT; the last lines of its log: terminate" in text


def test_a_compiler_that_hangs_is_ended_at_the_deadline(
    job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "print('searching', flush=True)\nimport threading\nthreading.Event().wait()\n"
    stand_in(program, tmp_path, monkeypatch)
    text = fail(replace(job, backend="tensorrt"), None, timeout_s=2.0)
    assert "not compiled within --compile_timeout 2 s; the last lines of its log: search" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_ended_takes_its_compiler_with_it(
    checkpoints: dict[str, Path], tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    program = f"import os, threading\nopen({str(told)!r}, 'w').write(str(os.getpid()))\n"
    stand_in(program + "threading.Event().wait()\n", tmp_path, monkeypatch)
    command = "from looptrt.cli import trtllm_build; raise SystemExit(trtllm_build())"
    argv = f"--checkpoint_dir {checkpoints['ouro']} --output_dir engine --backend tensorrt"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", command, *argv.split()],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        compiler = os.pidfd_open(int(told.read_text(encoding="ascii")))
        process.send_signal(number)
        assert select.select([compiler], [], [], 60)[0]
        os.close(compiler)
        assert process.wait(60) != 0
    finally:
        process.kill()
    left = {path.name for path in tmp_path.iterdir()} - {"told", "tensorrt.py", "__pycache__"}
    # Of a build that had no time for it, the next one removes the draft.
    assert len(left) == (0 if number == signal.SIGTERM else 1), left


def test_a_failed_compilation_leaves_no_engine_directory(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "UNVERSIONED", {})
    with pytest.raises(BuildError, match="which the loader does not find"):
        build(rtx(checkpoints["ouro"], tmp_path / "engine"))
    assert not list(tmp_path.iterdir())
