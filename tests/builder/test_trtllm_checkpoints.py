"""TensorRT-LLM checkpoint directories: read, refused when damaged (G1), converted without loss."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from looptrt.builder.build import BuildConfig, build, plan_build
from looptrt.builder.convert import convert
from looptrt.cli import main
from looptrt.errors import BuildError, CheckpointError
from looptrt.models.checkpoint import Checkpoint, Naming
from tests.support.checkpoints import (
    Config,
    Tensors,
    huginn_config,
    huginn_tensors,
    llama_config,
    llama_tensors,
    olmo_config,
    olmo_tensors,
    ouro_config,
    ouro_tensors,
    tiny_huginn,
    tiny_ouro,
    trtllm_tensors,
    write_checkpoint,
    write_tokenizer,
    write_trtllm_checkpoint,
)

RANK = "rank0.safetensors"
GATE = "transformer.layers.1.mlp.gate.weight"
FAMILIES = {
    "ouro": (ouro_config, ouro_tensors),
    "huginn": (huginn_config, huginn_tensors),
    "olmo": (olmo_config, olmo_tensors),
    "llama": (llama_config, llama_tensors),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = ouro_config()
    return write_trtllm_checkpoint(tmp_path / "checkpoint", config, ouro_tensors(config))


def refuse(directory: Path, *words: str) -> None:
    """A build fails with one error that has all the words, and writes nothing."""
    before = sorted(directory.parent.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        build(BuildConfig(directory, directory.parent / "engine"))
    for word in words:
        assert word in str(caught.value)
    assert sorted(directory.parent.rglob("*")) == before


def same_tensors(found: Tensors, expected: Tensors) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


# G1: a damaged file of rank 0.


def edit_tensors(edit: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / RANK)
        edit(tensors)
        save_file(tensors, directory / RANK)

    return damage


def edit_bytes(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / RANK).write_bytes(edit((directory / RANK).read_bytes()))

    return damage


def move_offsets(content: bytes) -> bytes:
    """Let the last tensor end past the file, its size unchanged."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    last = max(
        (name for name in header if name != "__metadata__"),
        key=lambda name: header[name]["data_offsets"][1],
    )
    header[last]["data_offsets"] = [offset + 64 for offset in header[last]["data_offsets"]]
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + content[8 + length :]


def put_nan(tensors: Tensors) -> None:
    tensors[GATE][3, 5] = float("nan")


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "file deleted": (lambda path: (path / RANK).unlink(), (RANK, "no such file")),
    "one byte cut": (edit_bytes(lambda content: content[:-1]), (RANK, "tensor", "is cut")),
    "half cut": (edit_bytes(lambda content: content[: len(content) // 2]), (RANK, "is cut")),
    "LFS pointer": (edit_bytes(lambda _: b"version https://git-lfs.github.com"), ("LFS pointer",)),
    "header too long": (
        edit_bytes(lambda content: (10**12).to_bytes(8, "little") + content[8:]),
        (RANK, "claims 1000000000000 bytes"),
    ),
    "offset past the end": (edit_bytes(move_offsets), (RANK, "tensor", "is cut")),
    "config deleted": (lambda path: (path / "config.json").unlink(), ("no such file",)),
    "tensor removed": (
        edit_tensors(lambda tensors: tensors.pop(GATE)),
        (RANK, GATE, "missing", "[96, 64]"),
    ),
    "wrong shape": (
        edit_tensors(lambda tensors: tensors.update({GATE: torch.zeros(97, 64)})),
        (RANK, GATE, "expected shape [96, 64]", "found [97, 64]"),
    ),
    "NaN": (edit_tensors(put_nan), (RANK, GATE, "found nan")),
    "integers": (
        edit_tensors(lambda tensors: tensors.update({GATE: torch.zeros(96, 64, dtype=torch.int8)})),
        (RANK, GATE, "quantised"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(checkpoint: Path, damage: str) -> None:
    act, words = DAMAGES[damage]
    act(checkpoint)
    refuse(checkpoint, *words)


def test_weights_of_further_ranks_are_refused(checkpoint: Path) -> None:
    (checkpoint / "rank1.safetensors").touch()
    refuse(checkpoint, "rank1.safetensors", "split over ranks")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mapping": {"world_size": 2, "tp_size": 2}}, "mapping.world_size: expected 1, found 2"),
        ({"mapping": {"pp_size": 2}}, "mapping.pp_size"),
        ({"mapping": 3}, "mapping: expected an object"),
        ({"quantization": {"quant_algo": "FP8"}}, "quantization.quant_algo: expected null"),
        ({"quantization": {"kv_cache_quant_algo": "INT8"}}, "kv_cache_quant_algo"),
        ({"hf_config": ...}, "hf_config: expected the model's own config.json"),
        ({"architecture": "RavenForCausalLM"}, "architecture: expected what hf_config says"),
        ({"architecture": 3}, "architecture: expected"),
        ({"dtype": "float16"}, "dtype: expected what hf_config says, ['float32']"),
        ({"hidden_size": 32}, "hidden_size: expected 64 as hf_config says, found 32"),
        ({"num_hidden_layers": 12}, "num_hidden_layers: expected 3"),
        ({"rotary_base": 1e4}, "rotary_base: expected 1000000.0"),
        ({"position_embedding_type": "rope_gptj"}, "position_embedding_type"),
    ],
)
def test_config_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = ouro_config()
    refuse(
        write_trtllm_checkpoint(tmp_path / "c", config, ouro_tensors(config), **changes),
        "config.json",
        words,
    )


def test_engine_directory_is_no_checkpoint(tmp_path: Path) -> None:
    build(BuildConfig(tiny_ouro(tmp_path / "c"), tmp_path / "built"))
    refuse(tmp_path / "built", "config.json", "found an engine directory's")


# Both layouts make the same engine.


@pytest.mark.parametrize("family", FAMILIES)
def test_both_layouts_build_the_same_engine(tmp_path: Path, family: str) -> None:
    make_config, make_tensors = FAMILIES[family]
    config = make_config()
    hf = write_checkpoint(tmp_path / "hf", config, make_tensors(config))
    trtllm = write_trtllm_checkpoint(tmp_path / "trtllm", config, make_tensors(config))
    assert Checkpoint.open(trtllm).naming is Naming.TRTLLM
    one = build(BuildConfig(hf, tmp_path / "one"))
    other = build(BuildConfig(trtllm, tmp_path / "other"))
    assert one == other
    assert len(one.fingerprint) == 64


# convert


def converted(directory: Path, target: str, **arguments: Any) -> Path:
    output = directory.parent / target
    convert(directory, output, arguments.get("to"), arguments.get("dtype"))
    return output


@pytest.mark.parametrize(("shards", "dtype"), [(1, "bfloat16"), (3, "float16"), (1, "float64")])
@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_and_back_keep_every_bit(
    tmp_path: Path, family: str, shards: int, dtype: str
) -> None:
    make_config, make_tensors = FAMILIES[family]
    config = make_config(torch_dtype=dtype)
    tensors = make_tensors(config, dtype=getattr(torch, dtype))
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if "norm_1" in name}
    source = write_checkpoint(tmp_path / "source", config, tensors, shards=shards)
    there = converted(source, "there")
    same_tensors(load_file(there / RANK), trtllm_tensors(config, tensors))
    outer = json.loads((there / "config.json").read_text())
    assert (outer["architecture"], outer["dtype"]) == (config["architectures"][0], dtype)
    assert outer["mapping"]["world_size"] == 1
    back = converted(there, "back")
    same_tensors(load_file(back / "model.safetensors"), tensors)
    assert json.loads((back / "config.json").read_text()) == config
    again = converted(back, "again", to="trtllm")
    assert (again / RANK).read_bytes() == (there / RANK).read_bytes()


@pytest.mark.parametrize("head", ["equal", "different"])
def test_conversion_keeps_a_head_beside_the_embedding(tmp_path: Path, head: str) -> None:
    config = ouro_config(tie_word_embeddings=True)
    tensors = ouro_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (head == "different")
    source = write_checkpoint(tmp_path / "source", config, tensors)
    back = converted(converted(source, "there"), "back")
    same_tensors(load_file(back / "model.safetensors"), tensors)


def test_conversion_carries_the_tokenizer_and_the_code(tmp_path: Path) -> None:
    source = tiny_ouro(tmp_path / "source")
    write_tokenizer(source, {"<s>": 0})
    (source / "modeling.py").write_text("raise SystemExit(9)")
    (source / "pytorch_model.bin").touch()
    there = converted(source, "there")
    expected = {"config.json", RANK, "tokenizer.json", "modeling.py"}
    assert {path.name for path in there.iterdir()} == expected


def test_conversion_casts_once_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = huginn_config()
    tensors = huginn_tensors(config)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    there = converted(source, "there", dtype="bfloat16")
    found = load_file(there / RANK)
    expected = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    expected["freqs_cis"] = tensors["freqs_cis"]  # rounding this one is the harm of case G6
    same_tensors(found, trtllm_tensors(config, expected))
    count = len(tensors) - 1
    assert caplog.text.count(f"cast {count} tensors from torch.float32 to torch.bfloat16") == 1
    back = converted(there, "back")
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"
    same_tensors(load_file(back / "model.safetensors"), expected)


@pytest.mark.parametrize(("to", "file"), [("hf", "model.safetensors"), ("trtllm", RANK)])
def test_conversion_to_the_same_names(tmp_path: Path, to: str, file: str) -> None:
    config = ouro_config()
    write = write_checkpoint if to == "hf" else write_trtllm_checkpoint
    source = write(tmp_path / "source", config, ouro_tensors(config))
    there = converted(source, "there", to=to)
    same_tensors(load_file(there / file), load_file(source / file))


def mixed(config: Config) -> Tensors:
    tensors = ouro_tensors(config)
    name = "model.layers.0.self_attn.k_proj.weight"
    return tensors | {name: tensors[name].bfloat16()}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dtype": "float16"}, BuildError, "--dtype float16: expected float32 or bfloat16"),
        ({}, CheckpointError, "expected one dtype"),
    ],
)
def test_failed_conversion_writes_nothing(
    tmp_path: Path, arguments: dict[str, str], error: type[Exception], words: str
) -> None:
    config = ouro_config()
    source = write_checkpoint(tmp_path / "source", config, mixed(config))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=words):
        converted(source, "a/b/there", **arguments)
    assert sorted(tmp_path.rglob("*")) == before


def test_conversion_replaces_nothing(tmp_path: Path) -> None:
    source = tiny_ouro(tmp_path / "source")
    build(BuildConfig(source, tmp_path / "engine"))
    for target in ("source", "engine"):
        with pytest.raises(BuildError, match="not empty"):
            converted(source, target)


@pytest.mark.parametrize("damage", ["one byte cut", "tensor removed", "NaN", "half cut"])
def test_conversion_makes_the_same_checks(checkpoint: Path, damage: str) -> None:
    act, words = DAMAGES[damage]
    act(checkpoint)
    before = sorted(checkpoint.parent.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        converted(checkpoint, "there")
    assert all(word in str(caught.value) for word in words)
    assert sorted(checkpoint.parent.rglob("*")) == before


def test_convert_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_huginn(tmp_path / "source")
    flags = ["convert", "--checkpoint_dir", str(source), "--output_dir", str(tmp_path / "there")]
    assert main(flags) == 0
    assert main(flags) == 2
    err = capsys.readouterr().err
    assert "looptrt: error: --output_dir" in err
    assert main([*flags, "--to", "gguf"]) == 2


# A config alone.


@pytest.mark.parametrize("layout", ["hf", "trtllm"])
def test_config_alone_builds_an_engine_of_random_weights(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = huginn_config()
    write = write_checkpoint if layout == "hf" else write_trtllm_checkpoint
    path = write(tmp_path / "c", config, {}) / "config.json"
    one = build(BuildConfig(None, tmp_path / "one", model_config=path))
    other = build(BuildConfig(None, tmp_path / "other", model_config=path, workers=2))
    assert one == other
    assert one.build_flags["weights"] == "random, seed 0"
    assert "the weights are random" in caplog.text
    stored = load_file(tmp_path / "one" / RANK)
    assert all(tensor.isfinite().all() and tensor.any() for tensor in stored.values())
    assert (stored["coda.norm.weight"] == 1).all()


def test_config_alone_says_so_in_the_plan(tmp_path: Path) -> None:
    path = tiny_ouro(tmp_path / "c") / "config.json"
    made = plan_build(BuildConfig(None, tmp_path / "engine", model_config=path))
    assert "(random, seed 0)" in made.describe()
    made = plan_build(BuildConfig(path.parent, tmp_path / "engine"))
    assert "(checkpoint)" in made.describe()


def test_weights_have_one_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    directory = tiny_ouro(tmp_path / "c")
    path = directory / "config.json"
    with pytest.raises(BuildError, match="leave out one"):
        plan_build(BuildConfig(directory, tmp_path / "engine", model_config=path))
    with pytest.raises(BuildError, match="one of them is required"):
        plan_build(BuildConfig(None, tmp_path / "engine"))
    with pytest.raises(CheckpointError, match="no such file"):
        plan_build(BuildConfig(None, tmp_path / "engine", model_config=tmp_path / "absent.json"))
