"""Damaged, incomplete and dangerous checkpoint directories are refused by name (G1, G6)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from looptrt.errors import CheckpointError
from looptrt.models.checkpoint import Checkpoint, cast
from tests.support.checkpoints import (
    ouro_config,
    ouro_tensors,
    tiny_ouro,
    write_checkpoint,
)

SHARD_1 = "model-00001-of-00002.safetensors"
SHARD_2 = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5268344\n"


def refused(directory: Path, *words: str) -> None:
    """Opening names every one of `words` in one error."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    for word in words:
        assert word in str(caught.value)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file's header, leaving its data alone."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])


def edit_index(directory: Path, edit: Callable[[dict[str, str]], None]) -> None:
    """Rewrite the weight map of an index."""
    path = directory / INDEX
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_ouro(tmp_path / "sharded", shards=2)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny_ouro(tmp_path / "single")


def test_one_file_and_shards_list_the_same_tensors(sharded: Path, single: Path) -> None:
    one, two = Checkpoint.open(single), Checkpoint.open(sharded)
    assert sorted(one.tensors) == sorted(two.tensors)
    for name in one.tensors:
        assert torch.equal(one.read(name), two.read(name))


def test_missing_shard(sharded: Path) -> None:
    (sharded / SHARD_2).unlink()
    refused(sharded, SHARD_2, "missing", INDEX)


@pytest.mark.parametrize("keep", [lambda size: size - 1, lambda size: size // 2])
def test_cut_shard_names_file_and_tensor(sharded: Path, keep: Callable[[int], int]) -> None:
    path = sharded / SHARD_1
    content = path.read_bytes()
    path.write_bytes(content[: keep(len(content))])
    refused(sharded, SHARD_1, "tensor 'model.", "it is cut", f"{keep(len(content))} bytes")


def test_bytes_after_the_last_tensor(single: Path) -> None:
    with (single / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    refused(single, "model.safetensors", "after the last tensor")


def test_lfs_pointer(sharded: Path) -> None:
    (sharded / SHARD_2).write_bytes(POINTER)
    refused(sharded, SHARD_2, "LFS pointer", "git lfs pull")


def test_lfs_pointer_in_place_of_config(single: Path) -> None:
    (single / "config.json").write_bytes(POINTER)
    refused(single, "config.json", "JSON")


def test_empty_and_absent_directories(tmp_path: Path) -> None:
    refused(tmp_path, "config.json", "no such file")
    refused(tmp_path / "nowhere", "no such checkpoint directory")


def test_config_without_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    refused(single, "found no weights")


@pytest.mark.parametrize("content", [b"", b"\1\2", b"\xff" * 64])
def test_file_that_is_no_safetensors_file(single: Path, content: bytes) -> None:
    (single / "model.safetensors").write_bytes(content)
    refused(single, "model.safetensors")


def test_header_longer_than_the_file(single: Path) -> None:
    path = single / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes((len(content) * 2).to_bytes(8, "little") + content[8:])
    refused(single, "model.safetensors", f"claims {len(content) * 2} bytes")


def test_offset_past_the_end(single: Path) -> None:
    path = single / "model.safetensors"

    def move(header: dict[str, Any]) -> None:
        entry = header["model.norm.weight"]
        entry["data_offsets"] = [offset + 10**9 for offset in entry["data_offsets"]]

    edit_header(path, move)
    refused(single, "model.safetensors", "'model.norm.weight'", "it is cut")


def test_overlapping_tensors(single: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        header["model.norm.weight"]["data_offsets"] = [0, 256]

    edit_header(single / "model.safetensors", overlap)
    refused(single, "overlap or leave a gap")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [65], "data_offsets": [0, 256]}, "takes 260 bytes"),
        ({"dtype": "F99", "shape": [64], "data_offsets": [0, 256]}, "unknown dtype 'F99'"),
        ({"dtype": "F32", "shape": [-64], "data_offsets": [0, 256]}, "expected a shape"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "expected a shape"),
        ({"dtype": "F32", "shape": [64], "data_offsets": [256, 0]}, "[begin, end]"),
        ({"dtype": "F32", "shape": [64], "data_offsets": [0]}, "[begin, end]"),
        ({"dtype": "F32", "shape": [64]}, "expected dtype, shape and data_offsets"),
        ("F32", "expected dtype, shape and data_offsets"),
    ],
)
def test_malformed_entry(single: Path, entry: object, words: str) -> None:
    edit_header(
        single / "model.safetensors",
        lambda header: header.update({"model.norm.weight": entry}),
    )
    refused(single, "model.safetensors", "'model.norm.weight'", words)


@pytest.mark.parametrize("raw", [b"[1]", b"{", b'{"a": 1, "a": 2}', b"\xff\xfe", b"[" * 100_000])
def test_malformed_header(single: Path, raw: bytes) -> None:
    path = single / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    refused(single, "model.safetensors", "header")


def test_shards_without_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    refused(sharded, SHARD_1, SHARD_2, "without an index")


def test_index_beside_a_single_file(sharded: Path, single: Path) -> None:
    (single / "model.safetensors").rename(sharded / "model.safetensors")
    refused(sharded, "both", "stale")


def test_index_that_misses_a_tensor_of_a_shard(sharded: Path) -> None:
    edit_index(sharded, lambda places: places.pop("model.norm.weight"))
    refused(sharded, "'model.norm.weight'", INDEX, "None")


def test_index_that_names_a_tensor_no_shard_has(sharded: Path) -> None:
    edit_index(sharded, lambda places: places.update({"model.ghost": SHARD_1}))
    refused(sharded, "'model.ghost'", SHARD_1, "does not have it")


def test_index_that_places_a_tensor_in_the_other_shard(sharded: Path) -> None:
    def swap(places: dict[str, str]) -> None:
        name = "model.norm.weight"
        places[name] = SHARD_2 if places[name] == SHARD_1 else SHARD_1

    edit_index(sharded, swap)
    refused(sharded, "'model.norm.weight'", "places it in")


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 3, None, "x\\y", "p.bin"],
)
def test_index_that_leaves_the_directory(sharded: Path, shard: object) -> None:
    edit_index(sharded, lambda places: places.update({"model.norm.weight": shard}))
    refused(sharded, INDEX, "'model.norm.weight'", repr(shard))


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "nope"])
def test_malformed_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    refused(sharded, INDEX)


def test_pickles_alone_are_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "pytorch_model.bin").write_bytes(b"never opened")
    refused(single, "pytorch_model.bin", "pickles can run code")


def test_pickles_beside_safetensors_are_ignored_with_a_line(
    single: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (single / "pytorch_model.bin").write_bytes(b"never opened")
    with caplog.at_level(logging.INFO, "looptrt"):
        Checkpoint.open(single)
    assert "pytorch_model.bin: ignored" in caplog.text


def test_remote_code_is_never_run(single: Path, caplog: pytest.LogCaptureFixture) -> None:
    marker = single / "ran"
    (single / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((single / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (single / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "looptrt"):
        Checkpoint.open(single)
    assert "auto_map" in caplog.text
    assert not marker.exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_reading_a_tensor_that_is_not_finite(tmp_path: Path, bad: float) -> None:
    config = ouro_config()
    tensors = ouro_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"][95, 63] = bad
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config, tensors))
    with pytest.raises(
        CheckpointError, match=re.escape(f"found {bad} at flat index 6143")
    ) as error:
        checkpoint.read("model.layers.1.mlp.up_proj.weight")
    assert "model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight'" in str(error.value)


def test_check_wants_exactly_the_needed_tensors(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    needed = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    checkpoint.check(needed, ())

    with pytest.raises(CheckpointError, match=r"'model\.ghost': missing, expected shape \[7\]"):
        checkpoint.check({**needed, "model.ghost": (7,)}, ())
    with pytest.raises(CheckpointError, match=r"expected shape \[65\], found \[64\]"):
        checkpoint.check({**needed, "model.norm.weight": (65,)}, ())
    del needed["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': unknown"):
        checkpoint.check(needed, ())
    checkpoint.check(needed, ("model.n?rm.*",))


def test_quantised_tensors_are_refused(single: Path) -> None:
    path = single / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, path)
    checkpoint = Checkpoint.open(single)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': expected one of .*found I8"):
        checkpoint.check({"model.norm.weight": (64,)}, ("*",))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": ..., "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float32", "dtype": "float32"}, "float32"),
        ({"torch_dtype": None, "dtype": "float32"}, "float32"),
    ],
)
def test_declared_dtype_comes_from_either_key(
    tmp_path: Path, keys: dict[str, object], expected: str
) -> None:
    config = ouro_config(**keys)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config, ouro_tensors(config)))
    assert checkpoint.declared_dtype == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"torch_dtype": ...}, "neither dtype nor torch_dtype"),
        ({"dtype": "bfloat16"}, "disagree"),
    ],
)
def test_undecidable_dtype_is_refused(tmp_path: Path, keys: dict[str, object], words: str) -> None:
    config = ouro_config(**keys)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config, ouro_tensors(config)))
    with pytest.raises(CheckpointError, match=words):
        _ = checkpoint.declared_dtype


def test_cast_reports_the_largest_error() -> None:
    tensor = torch.tensor([1.0, 1 + 2**-8, -3.0])
    result, error = cast(tensor, torch.bfloat16)
    assert result.tolist() == [1.0, 1.0, -3.0]
    assert error == 2**-8
    assert cast(tensor, torch.float32) == (tensor, 0.0)
    assert cast(torch.tensor([1e39], dtype=torch.float64), torch.float32)[1] == float("inf")
