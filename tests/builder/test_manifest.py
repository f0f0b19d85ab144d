"""config.json says the truth or nothing: any change to it is found before it is believed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import ManifestError
from looptrt.manifest import Manifest
from tests.support.checkpoints import tiny_huginn

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("manifest")
    build(BuildConfig(tiny_huginn(root / "c"), root / "e"))
    return root / "e"


EDITS: dict[str, Edit] = {
    "field removed": lambda d: d["pretrained_config"]["loop_spec"].pop("embedding_scale"),
    "epsilon": lambda d: d["pretrained_config"]["loop_spec"].update(norm_eps=0.9),
    "loops": lambda d: d["pretrained_config"]["loop_spec"].update(num_loops=1),
    "end tokens": lambda d: d["looptrt"]["tokens"].update(eos=[7]),
    "page size": lambda d: d["looptrt"]["plane_layout"].update(page_size=16),
    "version": lambda d: d.update(version="99.0"),
    "backend": lambda d: d["looptrt"].update(backend="tensorrt"),
    "no files": lambda d: d["looptrt"].update(files={}),
    "no checksum": lambda d: d["looptrt"].pop("checksum"),
    "extra key": lambda d: d.update(note="x"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_any_edit_is_refused(built: Path, tmp_path: Path, edit: Edit) -> None:
    shutil.copytree(built, tmp_path / "e")
    path = tmp_path / "e" / "config.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ManifestError, match="changed since it was built"):
        Manifest.load(tmp_path / "e")


def test_formatting_is_no_edit(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "e")
    path = tmp_path / "e" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert Manifest.load(tmp_path / "e") == Manifest.load(built)
