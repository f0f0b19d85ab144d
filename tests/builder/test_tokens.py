"""The ids that end an answer are the union of all that a checkpoint says (case A1)."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from looptrt.builder.source import open_checkpoint
from looptrt.builder.tokens import token_ids
from looptrt.errors import CheckpointError
from looptrt.manifest import TokenIds
from tests.support.checkpoints import VOCAB, tiny_huginn, tiny_ouro, write_tokenizer

OURO_SPECIALS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
HUGINN_SPECIALS = {"<|begin_text|>": 4, "<|end_text|>": 5, "<|end_turn|>": 8, "<|pad|>": 9}


def ids_of(directory: Path) -> TokenIds:
    source = open_checkpoint(directory)
    return token_ids(source.checkpoint, VOCAB, source.family.end_tokens)


def generation_config(directory: Path, **keys: object) -> None:
    (directory / "generation_config.json").write_text(json.dumps(keys))


def test_ouro_stops_at_the_end_of_a_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_ouro(tmp_path)  # its config says bos = eos = pad = 0
    write_tokenizer(tmp_path, OURO_SPECIALS)
    with caplog.at_level(logging.INFO, "looptrt"):
        tokens = ids_of(tmp_path)
    assert tokens.eos == (0, 2)
    assert (tokens.bos, tokens.pad) == (None, 0)
    assert "config.json eos_token_id 0" in tokens.source
    assert "tokenizer.json <|im_end|> 2" in tokens.source
    assert tokens.source in caplog.text


def test_huginn_stops_at_text_and_turn_ends(tmp_path: Path) -> None:
    tiny_huginn(tmp_path)
    write_tokenizer(tmp_path, HUGINN_SPECIALS, bos="<|begin_text|>")
    generation_config(tmp_path, bos_token_id=4, pad_token_id=9, eos_token_id=[5, 8])
    tokens = ids_of(tmp_path)
    assert (tokens.bos, tokens.eos, tokens.pad) == (4, (5, 8), 9)
    assert "generation_config.json eos_token_id 5, 8" in tokens.source


def test_without_tokenizer_the_configs_decide(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_ouro(tmp_path, eos_token_id=None, pad_token_id=None)
    generation_config(tmp_path, eos_token_id=7)
    tokens = ids_of(tmp_path)
    assert (tokens.bos, tokens.eos, tokens.pad) == (None, (7,), None)
    assert "token ids only" in caplog.text


def test_no_end_token_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = ids_of(tiny_huginn(tmp_path))
    assert tokens.eos == ()
    assert "no token id ends an answer" in caplog.text


@pytest.mark.parametrize("bad", [-1, VOCAB, "2", True, 1.0, [2, None]])
def test_unusable_ids_are_refused(tmp_path: Path, bad: object) -> None:
    tiny_ouro(tmp_path)
    generation_config(tmp_path, eos_token_id=bad)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id: expected"):
        ids_of(tmp_path)


def test_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_ouro(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a usable tokenizer"):
        ids_of(tmp_path)
