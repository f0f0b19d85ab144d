"""The trained tiny Ouro behind one server a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from looptrt.builder.build import BuildConfig, build
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from tests.support.endpoint import Endpoint, serving

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def ouro_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine directory of the trained tiny Ouro."""
    directory = tmp_path_factory.mktemp("openai") / "engine"
    build(BuildConfig(checkpoint_dir=EXAMPLES / "tiny-ouro", output_dir=directory))
    return directory


@pytest.fixture(scope="session")
def ouro(ouro_dir: Path) -> Iterator[LLM]:
    """An LLM of it."""
    with LLM(ouro_dir, EngineConfig(num_threads=1), in_process=True) as llm:
        yield llm


@pytest.fixture(scope="session")
def endpoint(ouro: LLM) -> Iterator[Endpoint]:
    """A server over it, for tests that leave nothing behind."""
    with serving(ouro) as made:
        yield made
