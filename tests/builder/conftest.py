"""Engine directories that the builder's tests look at, each built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from looptrt.builder.build import BuildConfig, build
from looptrt.manifest import Manifest
from tests.support.checkpoints import tiny_huginn, tiny_ouro

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{name: engine directory} of the trained examples and of tiny random models."""
    root = tmp_path_factory.mktemp("built")
    checkpoints = {
        "trained_ouro": EXAMPLES / "tiny-ouro",
        "trained_huginn": EXAMPLES / "tiny-huginn",
        "ouro": tiny_ouro(root / "ouro", shards=2, num_key_value_heads=2),
        "huginn": tiny_huginn(root / "huginn", shards=3),
    }
    for name, checkpoint in checkpoints.items():
        build(BuildConfig(checkpoint, root / "engines" / name, tokens_per_block=8, workers=2))
    return {name: root / "engines" / name for name in checkpoints}


@pytest.fixture(params=["ouro", "huginn"])
def engine(request: pytest.FixtureRequest, engines: dict[str, Path]) -> tuple[Path, Manifest]:
    """One random engine and its manifest."""
    directory = engines[request.param]
    return directory, Manifest.load(directory)
