"""From a checkpoint to an engine directory that loads, the same every time."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from looptrt.builder.build import BuildConfig, BuildPlan, build, make_weights, plan_build
from looptrt.builder.weights import fingerprint
from looptrt.errors import BuildError, ManifestError
from looptrt.loop_spec import NoiseMode
from looptrt.manifest import Manifest
from looptrt.models.checkpoint import CONFIG_NAME
from looptrt.models.safetensors_header import read_header
from looptrt.models.weights import load_model
from tests.support.checkpoints import tiny_huginn, tiny_ouro

GRAPHS = {"rank0.prelude.onnx", "rank0.core.onnx", "rank0.coda.onnx"}
REPOSITORY = Path(__file__).parents[2]


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


@pytest.mark.parametrize("name", ["trained_ouro", "trained_huginn"])
def test_trained_models_build_and_load(engines: dict[str, Path], name: str) -> None:
    directory = engines[name]
    manifest = Manifest.load(directory)
    tokenizer_files = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert set(manifest.files) == GRAPHS | tokenizer_files | {"rank0.safetensors"}
    assert {path.name for path in directory.iterdir()} == {*manifest.files, CONFIG_NAME}
    assert (manifest.tokens.bos, manifest.tokens.eos, manifest.tokens.pad) == (1, (2,), 0)
    model = load_model(directory, manifest)
    assert all(not tensor.is_meta for tensor in model.state_dict().values())
    assert not model.training


def test_ouro_weights_are_fused_and_stored_once(engines: dict[str, Path]) -> None:
    directory = engines["ouro"]
    checkpoint: dict[str, torch.Tensor] = {}
    for path in (directory.parents[1] / "ouro").glob("*.safetensors"):
        checkpoint |= load_file(path)
    stored = load_file(directory / "rank0.safetensors")
    layer = "model.layers.2."
    projections = [checkpoint[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(stored["core.layers.2.qkv.weight"], torch.cat(projections))
    gate_up = [checkpoint[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(stored["core.layers.2.gate_up.weight"], torch.cat(gate_up))
    tables = {name for name in stored if ".rope." in name}
    assert {name.rpartition(".")[2] for name in tables} == {"cos", "sin"}
    num_stored = sum(stored[name].numel() for name in stored.keys() - tables)
    assert num_stored == sum(tensor.numel() for tensor in checkpoint.values())


def test_tied_head_is_one_tensor_in_the_file_and_in_the_model(engines: dict[str, Path]) -> None:
    directory = engines["huginn"]
    model = load_model(directory, Manifest.load(directory))
    assert model.coda.head.weight is model.prelude.embedding.weight
    assert "coda.head.weight" not in load_file(directory / "rank0.safetensors")


def test_loaded_weights_are_the_mapped_file(engines: dict[str, Path]) -> None:
    directory = engines["ouro"]
    state = load_model(directory, Manifest.load(directory)).state_dict()
    addresses = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in state.values())
    span = addresses[-1][0] + addresses[-1][1] - addresses[0][0]
    assert span <= (directory / "rank0.safetensors").stat().st_size
    assert addresses[0][0] % 256 == 0


@pytest.mark.parametrize("name", ["trained_ouro", "huginn"])
def test_stored_tensors_are_as_aligned_as_their_sizes(engines: dict[str, Path], name: str) -> None:
    for entry in read_header(engines[name] / "rank0.safetensors").values():
        size = entry.end - entry.begin
        assert entry.begin % min(size & -size, 256) == 0


def test_two_builds_give_identical_bytes_and_replace_each_other(tmp_path: Path) -> None:
    checkpoint, output = tiny_huginn(tmp_path / "c"), tmp_path / "engine"
    build(BuildConfig(checkpoint, output))
    first = digests(output)
    program = "import sys; from looptrt.cli import trtllm_build; sys.exit(trtllm_build())"
    flags = ["--checkpoint_dir", str(checkpoint), f"--output_dir={output}", "--workers=2"]
    subprocess.run(
        [sys.executable, "-c", program, *flags],
        check=True,
        capture_output=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    )
    assert digests(output) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "engine"]


def model_id(plan: BuildPlan, path: Path) -> str:
    return fingerprint(plan.spec, plan.weights, make_weights(plan, path), plan.recipes)


def test_fingerprint_is_the_models_and_not_the_builds(tmp_path: Path) -> None:
    config = BuildConfig(tiny_huginn(tmp_path / "a"), tmp_path / "engine")

    def id_of(config: BuildConfig) -> str:
        return model_id(plan_build(config), tmp_path / "weights")

    same = id_of(config)
    flags = {"tokens_per_block": 8, "max_seq_len": 64, "max_loops": 9, "kv_planes": "shared"}
    assert id_of(replace(config, noise=NoiseMode.SEQUENTIAL, **flags)) == same
    assert id_of(replace(config, checkpoint_dir=tiny_huginn(tmp_path / "b", shards=2))) == same
    others = {
        id_of(replace(config, dtype="bfloat16")),
        id_of(replace(config, checkpoint_dir=tiny_huginn(tmp_path / "c", seed=1))),
        id_of(replace(config, checkpoint_dir=tiny_huginn(tmp_path / "d", mean_recurrence=5))),
    }
    assert len(others | {same}) == 4


def test_missing_tokenizer_is_allowed(engines: dict[str, Path]) -> None:
    manifest = Manifest.load(engines["ouro"])
    assert set(manifest.files) == GRAPHS | {"rank0.safetensors"}
    assert manifest.tokens.bos is None


def test_recorded_flags_restore_the_build(engine: tuple[Path, Manifest]) -> None:
    directory, manifest = engine
    flags = manifest.build_flags
    assert flags["tokens_per_block"] == manifest.layout.page_size == 8
    assert not {"checkpoint_dir", "output_dir", "workers"} & flags.keys()
    assert json.loads((directory / CONFIG_NAME).read_text())["version"] == manifest.version


def test_failure_during_export_leaves_the_old_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BuildError("no graph")

    monkeypatch.setattr("looptrt.builder.build.export_phases", fail)
    output = tmp_path / "engine"
    output.mkdir()
    (output / CONFIG_NAME).write_text('{"looptrt": {}}')
    with pytest.raises(BuildError, match="no graph"):
        build(BuildConfig(tiny_ouro(tmp_path / "c"), output))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "engine"]
    assert [path.name for path in output.iterdir()] == [CONFIG_NAME]


@pytest.mark.parametrize("name", [*sorted(GRAPHS), "rank0.safetensors"])
def test_changed_file_is_found_when_loading(
    tmp_path: Path, engines: dict[str, Path], name: str
) -> None:
    for path in engines["ouro"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=name):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tied_head": True}, "'coda.head.weight': unknown to the model"),
        ({"qk_bias": True}, "qk_bias': missing"),
        ({"vocab_size": 257}, r"'coda\.head\.weight': expected torch.float32 \[257, 64\]"),
    ],
)
def test_weights_that_are_not_the_models_are_refused(
    engines: dict[str, Path], changes: dict[str, object], words: str
) -> None:
    manifest = Manifest.load(engines["ouro"])
    other = replace(manifest, spec=replace(manifest.spec, **changes))
    with pytest.raises(ManifestError, match=words):
        load_model(engines["ouro"], other)


def test_unreadable_weights_are_refused(tmp_path: Path, engines: dict[str, Path]) -> None:
    manifest = Manifest.load(engines["ouro"])
    with pytest.raises(ManifestError, match="cannot be read"):
        load_model(tmp_path, manifest)
