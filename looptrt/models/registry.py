"""Families by architecture name: those in the tree and those that others add.

Owns the look-up; leaves everything about a model to its Family. A package adds an architecture
with an entry point in group `looptrt.families`, named like the architecture and pointing at a
Family; a person adds one for a process by naming a Python file. Reading a checkpoint needs the
family, running an engine does not: the engine's LoopSpec says all, so the engine process loads
no code but ours. Invariant: an architecture has one family.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from looptrt.errors import CheckpointError
from looptrt.models import ouro, raven
from looptrt.models.family import Family
from looptrt.models.files import shown

ENTRY_POINT_GROUP = "looptrt.families"

_IN_TREE = {family.architecture: family for family in (ouro.FAMILY, raven.FAMILY)}
_from_files: dict[str, Family] = {}


def family_of(architecture: str) -> Family:
    """Find an architecture's family; only its own entry point is loaded.

    A family from a file that this process was told to load comes first.

    Raises:
        CheckpointError: nobody knows the architecture, two do, or its entry point is broken.
    """
    if architecture in _from_files:
        return _from_files[architecture]
    points = tuple(entry_points(group=ENTRY_POINT_GROUP))
    mine = [point for point in points if point.name == architecture]
    homes = [_describe(point) for point in mine]
    if architecture in _IN_TREE:
        homes.insert(0, "looptrt itself")
    if not homes:
        known = sorted({*_IN_TREE, *(point.name for point in points)})
        raise CheckpointError(
            f"architecture {shown(architecture)} is unknown, expected one of {', '.join(known)}"
        )
    if len(homes) > 1:
        raise CheckpointError(
            f"architecture {shown(architecture)} is defined twice: {', '.join(homes)}; uninstall "
            "one"
        )
    return _load(mine[0]) if mine else _IN_TREE[architecture]


def load_family_file(path: Path, name: str) -> Family:
    """Run a Python file that the caller named and take a Family from it.

    The file runs as a module of its own, with this process's rights; nothing beside it is
    imported for it. Until the process ends, `family_of` finds the family first. Engines
    built with it run without the file.

    Args:
        path: the file (`--model_cls_file`).
        name: its attribute that is the Family (`--model_cls_name`).

    Raises:
        CheckpointError: the file is missing, fails, or `name` is not a Family of it.
    """
    family = getattr(_import_file(path), name, None)
    if not isinstance(family, Family):
        raise CheckpointError(f"{path}: {name}: expected a Family, found {family!r}")
    _from_files[family.architecture] = family
    return family


def _import_file(path: Path) -> ModuleType:
    if path.suffix != ".py" or not path.is_file():
        raise CheckpointError(f"{path}: expected a Python file")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"looptrt_family_{digest}", path)
    assert spec is not None  # a suffix that importlib knows
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        del sys.modules[spec.name]
        raise CheckpointError(f"{path}: cannot be loaded: {error!r}") from error
    return module


def _load(point: EntryPoint) -> Family:
    try:
        family = point.load()
    except Exception as error:  # foreign code may raise anything
        raise CheckpointError(f"{_describe(point)} cannot be loaded: {error!r}") from error
    if not isinstance(family, Family) or family.architecture != point.name:
        raise CheckpointError(
            f"{_describe(point)}: expected a Family of architecture {point.name!r}, got {family!r}"
        )
    return family


def _describe(point: EntryPoint) -> str:
    return f"entry point {point.name} = {point.value} of group {point.group}"
