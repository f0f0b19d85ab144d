"""config.json says the truth or nothing: any change to it is found before it is believed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from looptrt import manifest as manifest_module
from looptrt.builder.build import BuildConfig, build
from looptrt.errors import ManifestError
from looptrt.manifest import EngineFile, Manifest, ShapeRange
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


# A manifest with engines that checks out but for one thing: whoever wrote it computed its sum.


def compiled(built: Path) -> dict[str, Any]:
    """The manifest as it would be with a compiled engine of each phase."""
    manifest = Manifest.load(built)
    phases = {}
    for name, graph in manifest.phases.items():
        sizes = {item: ShapeRange((1,), (2,), (3,)) for item in graph.inputs}
        file = f"rank0.{name}.engine"
        engine = EngineFile(file, "1.7", ("8.9",), {"fenced_rope": 3}, "s", "l", {"decode": sizes})
        phases[name] = replace(graph, engine=engine)
    files = manifest.files | {f"rank0.{name}.engine": ("0" * 64, 1) for name in phases}
    changed = replace(manifest, backend="tensorrt_rtx", phases=phases, files=files)
    return dict(json.loads(json.dumps(changed.to_json())))


def engine_of(data: dict[str, Any]) -> dict[str, Any]:
    engine: dict[str, Any] = data["looptrt"]["phases"]["core"]["engine"]
    return engine


def read(data: dict[str, Any]) -> Manifest:
    data["looptrt"]["checksum"] = manifest_module._checksum(data)
    return Manifest.from_json(data, Path("config.json"))


def test_engines_come_back_as_they_were_written(built: Path) -> None:
    data = compiled(built)
    engine = read(data).phases["core"].engine
    assert engine is not None
    assert engine.profiles["decode"]["plane"] == ShapeRange((1,), (2,), (3,))
    assert json.loads(json.dumps(read(data).to_json())) == data


ENGINE_EDITS: dict[str, Edit] = {
    "no file": lambda d: engine_of(d).pop("file"),
    "unknown key": lambda d: engine_of(d).update(more=1),
    "file not listed": lambda d: engine_of(d).update(file="other.engine"),
    "file elsewhere": lambda d: engine_of(d).update(file="../rank0.core.engine"),
    "capabilities": lambda d: engine_of(d).update(compute_capabilities=[8.9]),
    "plugin count": lambda d: engine_of(d)["plugins"].update(fenced_rope="3"),
    "no profiles": lambda d: engine_of(d).update(profiles={}),
    "profile of other inputs": lambda d: engine_of(d)["profiles"]["decode"].pop("plane"),
    "profile without max": lambda d: engine_of(d)["profiles"]["decode"]["plane"].pop("max"),
    "size": lambda d: engine_of(d)["profiles"]["decode"]["plane"].update(max=[1.5]),
    "an engine less": lambda d: d["looptrt"]["phases"]["core"].update(engine=None),
    "engines of pytorch": lambda d: d["looptrt"].update(backend="pytorch"),
    "unknown backend": lambda d: d["looptrt"].update(backend="cuda"),
}


@pytest.mark.parametrize("edit", ENGINE_EDITS.values(), ids=ENGINE_EDITS)
def test_an_engine_that_makes_no_sense_is_refused(built: Path, edit: Edit) -> None:
    data = compiled(built)
    edit(data)
    with pytest.raises(ManifestError, match="malformed manifest"):
        read(data)
