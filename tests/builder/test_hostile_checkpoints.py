"""Checkpoints made to hurt: every one is refused in one short line, and soon."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from looptrt.builder.build import plan_build
from looptrt.builder.build_config import BuildConfig
from looptrt.errors import BuildError, CheckpointError
from looptrt.models.checkpoint import Checkpoint
from tests.support.checkpoints import (
    huginn_config,
    huginn_tensors,
    olmo_config,
    olmo_tensors,
    ouro_config,
    ouro_tensors,
    tiny_huginn,
    tiny_ouro,
    write_checkpoint,
    write_trtllm_checkpoint,
)

WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"


def refused(directory: Path, *words: str) -> str:
    """Planning names every one of `words` in one error, which is short."""
    with pytest.raises((CheckpointError, BuildError)) as caught:
        plan_build(BuildConfig(directory, directory.parent / "e"))
    message = str(caught.value)
    for word in words:
        assert word in message
    assert len(message) < 600
    return message


# Headers.


def write_header(path: Path, raw: str) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    data = content[8 + length :]
    path.write_bytes(len(raw.encode()).to_bytes(8, "little") + raw.encode() + data)


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


HUGE = 10**4000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": ["F32"]}, "unknown dtype ['F32']"),
        ({"dtype": {"F32": 1}}, "unknown dtype {'F32': 1}"),
        ({"dtype": None}, "unknown dtype None"),
        ({"dtype": "F" * 10**5}, "unknown dtype 'FFF"),
        ({"shape": [HUGE]}, "expected a shape"),
        ({"shape": [2**62, 2**62]}, "expected a shape"),
        ({"shape": [2**62] * 10**4}, "expected a shape"),
        ({"shape": [1] * 10**5}, "expected a shape"),
        ({"shape": [0] * 10**5}, "expected a shape"),
        ({"shape": {"0": 64}}, "expected a shape"),
        ({"shape": [[64]]}, "expected a shape"),
        ({"shape": [2**63 - 1]}, "takes 36893488147419103228 bytes"),
        ({"data_offsets": [0, HUGE]}, "[begin, end]"),
        ({"data_offsets": [0, 2**63]}, "[begin, end]"),
        ({"data_offsets": [0, 2**63 - 1]}, "takes 256 bytes"),
        ({"data_offsets": "ab"}, "[begin, end]"),
    ],
)
def test_hostile_entry(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    header = header_of(checkpoint / WEIGHTS)
    header[NORM] |= change
    write_header(checkpoint / WEIGHTS, json.dumps(header))
    refused(checkpoint, WEIGHTS, NORM, words)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": {"dtype": "F32", "dtype": "F16"}}', "'dtype' appears twice"),
        ("{" + '"x": 1, ' * 3 + '"y": 2}', "'x' appears twice"),
        (
            "{" + "".join(f'"t{i}": 1, ' for i in range(200_000)) + '"z": 1, "z": 2}',
            "'z' appears twice",
        ),
        ('{"a": ' * 100_000, "not valid JSON"),
    ],
)
def test_hostile_header(tmp_path: Path, raw: str, words: str) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    write_header(checkpoint / WEIGHTS, raw)
    refused(checkpoint, WEIGHTS, words)


def test_header_beyond_the_formats_limit_is_not_read(tmp_path: Path) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    with (checkpoint / WEIGHTS).open("r+b") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)  # sparse
    refused(checkpoint, WEIGHTS, "expected a header of at most 100000000 bytes")


# Numbers and other values of a config.


def with_text(directory: Path, key: str, literal: str) -> Path:
    """A tiny Ouro in whose config.json one value is a literal that `json.dumps` has not."""
    checkpoint = tiny_ouro(directory, **{key: "@"})
    path = checkpoint / "config.json"
    path.write_text(path.read_text().replace('"@"', literal))
    return checkpoint


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize(
    "literal",
    ["NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400, "1e39", "-1e39", "1e-60", "true"],
)
def test_numbers_that_float32_does_not_hold(tmp_path: Path, key: str, literal: str) -> None:
    refused(with_text(tmp_path / "c", key, literal), "config.json", key, "a positive number")


@pytest.mark.parametrize(
    "literal", ["NaN", "1e400", "1e15", "1" + "0" * 400, "2147483648", "4.0", '[[[["4"]]]]']
)
@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "total_ut_steps",
    ],
)
def test_integers_beyond_int32(tmp_path: Path, key: str, literal: str) -> None:
    source = tiny_ouro(tmp_path / "sound")
    checkpoint = with_text_of(source, key, literal)
    refused(checkpoint, "config.json", key, "expected an integer")


def with_text_of(checkpoint: Path, key: str, literal: str) -> Path:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text()) | {key: "@"}
    path.write_text(json.dumps(config).replace('"@"', literal))
    return checkpoint


def test_integers_too_long_for_python(tmp_path: Path) -> None:
    refused(with_text(tmp_path / "c", "rope_theta", "9" * 5000), "config.json", "cannot be read")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_base": 1e39}, "rope_base"),
        ({"norm_eps": 10**400}, "norm_eps"),
        ({"init_scale": 1e39}, "init_scale"),
        ({"init_scale": 3e38, "n_embd": 64}, ""),
    ],
)
def test_huginn_floats(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = huginn_config(**changes)
    checkpoint = write_checkpoint(tmp_path / "c", config, huginn_tensors(huginn_config()))
    refused(checkpoint, "config.json", words, "float32 holds")


@pytest.mark.parametrize(
    "values", [{"std": 1e39}, {"embed_scale": 10**400}, {"std": 1e30, "embed_scale": 1e30}]
)
def test_init_values_that_float32_does_not_hold(tmp_path: Path, values: dict[str, Any]) -> None:
    init_values = {"embed_scale": 1.0} | values
    checkpoint = write_checkpoint(
        tmp_path / "c", olmo_config(init_values=init_values), olmo_tensors(olmo_config())
    )
    refused(checkpoint, "config.json", "float32 holds")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 2e-38, "rope_scaling": {"rope_type": "linear", "factor": 1e-30}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2e-38}},
    ],
)
def test_rotations_that_are_not_finite(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = write_checkpoint(
        tmp_path / "c", olmo_config(**changes), olmo_tensors(olmo_config())
    )
    refused(checkpoint, "the rotation of 128 positions is not finite")


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": 3},
        {"layer_types": {"a": 1}},
        {"layer_types": [["full_attention"]]},
        {"rope_scaling": [1]},
        {"hidden_act": ["silu"]},
        {"torch_dtype": ["float32"]},
        {"torch_dtype": {"a": 1}},
        {"eos_token_id": {"a": 1}},
        {"eos_token_id": [[[]]]},
        {"tie_word_embeddings": "no"},
    ],
)
def test_values_of_other_types(tmp_path: Path, changes: dict[str, Any]) -> None:
    (key,) = changes
    config = ouro_config(**changes)
    message = refused(write_checkpoint(tmp_path / "c", config, ouro_tensors(ouro_config())), key)
    assert message.count("config.json") == 1


def test_key_twice_in_the_config(tmp_path: Path) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    path = checkpoint / "config.json"
    path.write_text('{"total_ut_steps": 1, ' + path.read_text().lstrip()[1:])
    refused(checkpoint, "config.json", "'total_ut_steps' appears twice")


@pytest.mark.parametrize(
    "architectures",
    [..., None, [], ["A", "B"], "A", [3], [["A"]], ["A"], {"A": 1}, ["A" * 10**5], 10**400],
)
@pytest.mark.parametrize("write", [write_checkpoint, write_trtllm_checkpoint])
def test_architectures_are_refused_with_the_path_once(
    tmp_path: Path, architectures: object, write: Callable[..., Path]
) -> None:
    sound = ouro_config()
    checkpoint = write(tmp_path / "c", sound, ouro_tensors(sound))
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    inner = config.get("hf_config", config)
    inner.pop("architectures")
    if architectures is not ...:
        inner["architectures"] = architectures
    path.write_text(json.dumps(config))
    assert refused(checkpoint, "architecture").count(str(path)) == 1


# Things that are no files.


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # the name of a socket may have 107 bytes
        server.bind(path.name)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (Path.mkdir, "a directory"),
    "pipe": (os.mkfifo, "a pipe"),
    "socket": (make_socket, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "pipe behind a link": (
        lambda path: (os.mkfifo(path.with_suffix(".p")), path.symlink_to(path.with_suffix(".p"))),
        "a pipe",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("config.json", 1),
        (WEIGHTS, 1),
        ("model.safetensors.index.json", 2),
        ("model-00002-of-00002.safetensors", 2),
    ],
)
def test_only_regular_files_are_opened(
    tmp_path: Path, kind: str, name: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, words = KINDS[kind]
    checkpoint = tiny_ouro(tmp_path / "c", shards=shards)
    (checkpoint / name).unlink()
    make(checkpoint / name)
    with pytest.raises(CheckpointError, match=f"{name}: expected a regular file, found {words}"):
        Checkpoint.open(checkpoint)


def test_endless_config_is_not_read(tmp_path: Path) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    with (checkpoint / "config.json").open("r+b") as file:
        file.truncate(2**41)  # sparse
    refused(checkpoint, "config.json", "expected at most 100000000 bytes")


# Huginn's head_dim (G5; published files carry one of another model).


def huginn(directory: Path, weights_dim: int, head_dim: object) -> Path:
    """A Huginn of 4 heads and n_embd 64 whose projections have heads of `weights_dim`."""
    config = huginn_config()
    tensors = huginn_tensors(config)
    shapes = {
        "attn.Wqkv.weight": (12 * weights_dim, 64),
        "attn.proj.weight": (64, 4 * weights_dim),
        "attn.qk_bias": (2, 1, 4, weights_dim),
    }
    for name in tensors:
        for ending, shape in shapes.items():
            if name.endswith(ending):
                tensors[name] = torch.zeros(shape)
    return write_checkpoint(directory, config | {"head_dim": head_dim}, tensors)


@pytest.mark.parametrize(
    ("weights_dim", "head_dim", "used", "warns"),
    [(16, 16, 16, False), (16, None, 16, False), (16, 96, 16, True), (12, 12, 12, True)],
)
def test_huginn_head_dim_is_the_one_that_the_weights_show(
    tmp_path: Path,
    weights_dim: int,
    head_dim: int | None,
    used: int,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = huginn(tmp_path / "c", weights_dim, head_dim)
    plan = plan_build(BuildConfig(checkpoint, tmp_path / "e"))
    assert plan.spec.head_dim == plan.layout.head_dim == used
    lines = [item.getMessage() for item in caplog.records if "yet n_embd" in item.getMessage()]
    assert len(lines) == warns
    if warns:
        assert f"head_dim {head_dim}, yet n_embd 64 over 4 heads is 16: {used} is used" in lines[0]


def test_huginn_head_dim_that_the_weights_contradict(tmp_path: Path) -> None:
    refused(huginn(tmp_path / "a" / "c", 12, 8), "head_dim", "[144, 64]", "found 8")
    refused(huginn(tmp_path / "b" / "c", 16, 15.5), "head_dim: expected an integer")


def test_huginn_head_dim_of_a_config_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_huginn(tmp_path / "c", head_dim=99) / "config.json"
    plan = plan_build(BuildConfig(None, tmp_path / "e", model_config=config))
    assert plan.spec.head_dim == 16
    assert "head_dim 99, yet n_embd 64 over 4 heads is 16: 16 is used, there are no" in caplog.text


# Ouro's exits.


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, ()),
        ({"early_exit_threshold": None, "early_exit_step": None}, ()),
        ({"early_exit_threshold": 1}, ()),
        ({"early_exit_threshold": 0.5}, ("early_exit_threshold 0.5", "(exit_threshold)")),
        ({"early_exit_threshold": ...}, ()),
        ({"early_exit_step": 2}, ("early_exit_step 2", "(exit_at_step)")),
        ({"early_exit_threshold": [0.5]}, ("early_exit_threshold [0.5]",)),
    ],
)
def test_exits_of_a_config_are_not_passed_over_in_silence(
    tmp_path: Path,
    changes: dict[str, Any],
    warned: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "looptrt"):
        plan_build(BuildConfig(tiny_ouro(tmp_path / "c", **changes), tmp_path / "e"))
    lines = [item.getMessage() for item in caplog.records if "not applied" in item.getMessage()]
    assert len(lines) == bool(warned)
    for word in warned:
        assert word in lines[0]
