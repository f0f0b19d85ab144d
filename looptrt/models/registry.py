"""Families by architecture name: those in the tree and those other packages add.

Owns the look-up; leaves everything about a model to its Family. A package adds an architecture
with an entry point in group `looptrt.families`, named like the architecture and pointing at a
Family. Invariant: an architecture has one family.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from looptrt.errors import CheckpointError
from looptrt.models import ouro, raven
from looptrt.models.family import Family

ENTRY_POINT_GROUP = "looptrt.families"

_IN_TREE = {family.architecture: family for family in (ouro.FAMILY, raven.FAMILY)}


def family_of(architecture: str) -> Family:
    """Find an architecture's family; only its own entry point is loaded.

    Raises:
        CheckpointError: nobody knows the architecture, two do, or its entry point is broken.
    """
    points = tuple(entry_points(group=ENTRY_POINT_GROUP))
    mine = [point for point in points if point.name == architecture]
    homes = [_describe(point) for point in mine]
    if architecture in _IN_TREE:
        homes.insert(0, "looptrt itself")
    if not homes:
        known = sorted({*_IN_TREE, *(point.name for point in points)})
        raise CheckpointError(
            f"architecture {architecture!r} is unknown, expected one of {', '.join(known)}"
        )
    if len(homes) > 1:
        raise CheckpointError(
            f"architecture {architecture!r} is defined twice: {', '.join(homes)}; uninstall one"
        )
    return _load(mine[0]) if mine else _IN_TREE[architecture]


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
