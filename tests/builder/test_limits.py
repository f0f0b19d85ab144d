"""Limits that no engine could start with or answer within are refused while planning."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from looptrt.builder.build import plan_build
from looptrt.builder.build_config import BuildConfig
from looptrt.errors import BuildError, CheckpointError
from looptrt.kv_layout import MAX_LOOPS
from looptrt.models.checkpoint import Checkpoint
from tests.support.checkpoints import ouro_config, ouro_tensors, tiny_ouro, write_checkpoint

BIG = 2**31 - 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_ouro(tmp_path_factory.mktemp("limits") / "c")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_num_tokens": 127}, "--max_num_tokens 127: expected at least max_batch_size, 128"),
        ({"max_seq_len": 1}, "--max_seq_len 1: expected from 2"),
        ({"max_loops": MAX_LOOPS + 1}, f"--max_loops: expected at most {MAX_LOOPS}"),
        ({"max_loops": 10**400}, f"--max_loops: expected at most {MAX_LOOPS}, got 1000"),
        ({"workers": 10**6}, "--workers: expected at most 1024"),
        *(
            ({name: BIG + 1}, f"--{name}: expected at most {BIG}")
            for name in ("max_batch_size", "max_num_tokens", "tokens_per_block", "max_input_len")
        ),
        ({"max_seq_len": BIG + 1}, f"--max_seq_len: expected at most {BIG}"),
        ({"tokens_per_block": BIG}, f"--tokens_per_block {BIG}: one KV page"),
        ({"max_batch_size": BIG, "max_num_tokens": BIG}, f"--max_batch_size {BIG}: the block"),
        ({"max_num_tokens": BIG}, f"--max_num_tokens {BIG}: the activations"),
    ],
)
def test_limits_that_no_engine_could_have(
    checkpoint: Path, flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(BuildError) as caught:
        plan_build(BuildConfig(checkpoint, checkpoint.parent / "e", **flags))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_smallest_limits_are_served(checkpoint: Path) -> None:
    flags: dict[str, Any] = {"max_batch_size": 1, "max_num_tokens": 1, "max_seq_len": 2}
    plan = plan_build(BuildConfig(checkpoint, checkpoint.parent / "e", **flags))
    assert dataclasses.astuple(plan.limits) == (1, 2, 2, 1)


# What the config says of positions and layers.


def write(directory: Path, **changes: object) -> Path:
    """A sound Ouro's weights beside a changed config."""
    return write_checkpoint(directory, ouro_config(**changes), ouro_tensors(ouro_config()))


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (10**15, "max_position_embeddings: expected an integer of at most 2147483647"),
        (BIG, f"--max_seq_len {BIG}: expected from 2"),
        (1, "--max_seq_len 1: expected from 2"),
    ],
)
def test_absurd_position_counts(tmp_path: Path, positions: int, words: str) -> None:
    source = write(tmp_path / "c", max_position_embeddings=positions)
    with pytest.raises((BuildError, CheckpointError)) as caught:
        plan_build(BuildConfig(source, tmp_path / "e"))
    assert words in str(caught.value)


def test_large_position_counts_cost_nothing_below_max_seq_len(tmp_path: Path) -> None:
    source = write(tmp_path / "c", max_position_embeddings=BIG)
    plan = plan_build(BuildConfig(source, tmp_path / "e", max_seq_len=64))
    assert plan.weights.tensors["core.rope.cos"].shape[0] == 64


def test_rotary_tables_are_bounded_by_their_bytes(tmp_path: Path) -> None:
    config = ouro_config(max_position_embeddings=2**24, head_dim=128, hidden_size=512)
    source = write_checkpoint(tmp_path / "c", config, ouro_tensors(config))
    with pytest.raises(BuildError, match="the rotary tables would take 8589934592 bytes"):
        plan_build(BuildConfig(source, tmp_path / "e"))


@pytest.mark.parametrize("layers", [10**7, 1000])
def test_layers_are_held_against_the_tensors(tmp_path: Path, layers: int) -> None:
    source = write(tmp_path / "c", num_hidden_layers=layers)
    found = len(Checkpoint.open(source).tensors)
    with pytest.raises(CheckpointError, match=rf"at most {found} layers, found {layers}; there"):
        plan_build(BuildConfig(source, tmp_path / "e"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**7}, "expected at most 4096 layers, found 10000000"),
        ({"vocab_size": BIG}, "model.embed_tokens.weight': expected at most"),
        ({"intermediate_size": BIG, "hidden_size": BIG - 63}, "expected at most"),
    ],
)
def test_config_alone_is_bounded_too(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = write(tmp_path / "c", **changes) / "config.json"
    with pytest.raises(CheckpointError) as caught:
        plan_build(BuildConfig(None, tmp_path / "e", model_config=config))
    assert words in str(caught.value)
