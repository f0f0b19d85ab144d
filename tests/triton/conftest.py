"""The real server over a tiny engine whose tokens are bytes, and the Python API over the same.

The server comes from the environment that `looptrt triton --install_server` makes; where no
interpreter fits its stub, the tests that need it are skipped with that reason.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from looptrt.builder.build import BuildConfig, build
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from running_server import LOOPTRT, RunningServer, running_server
from tests.support.checkpoints import tiny_ouro

_INSTALL_TIMEOUT_S = 900
MAX_LEN = 128


@pytest.fixture(scope="session")
def server_env() -> None:
    """Installs the server where it is not yet."""
    run = subprocess.run(
        [LOOPTRT, "triton", "--install_server"],
        capture_output=True,
        encoding="utf-8",
        timeout=_INSTALL_TIMEOUT_S,
    )
    if run.returncode and "needs a CPython 3.11 or 3.12" in run.stderr:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="session")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Ouro of 4 loops; each of its 256 tokens is a byte of text."""
    root = tmp_path_factory.mktemp("triton")
    checkpoint = tiny_ouro(root / "checkpoint", max_position_embeddings=MAX_LEN)
    _write_byte_tokenizer(checkpoint)
    directory = root / "engine"
    build(
        BuildConfig(
            checkpoint_dir=checkpoint,
            output_dir=directory,
            max_batch_size=8,
            max_input_len=MAX_LEN,
            max_seq_len=MAX_LEN,
            tokens_per_block=8,
        )
    )
    return directory


@pytest.fixture(scope="session")
def llm(engine_dir: Path) -> Iterator[LLM]:
    """The Python API over the engine."""
    with LLM(engine_dir, EngineConfig(num_threads=1), in_process=True) as made:
        yield made


@pytest.fixture(scope="module")
def server(
    server_env: None, engine_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server for a module's tests, which leave nothing behind."""
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(engine_dir, log, "--num_threads=1") as running:
        yield running


def _write_byte_tokenizer(directory: Path) -> None:
    vocabulary = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
