"""Families are found by architecture, in the tree and through entry points."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from looptrt.errors import CheckpointError
from looptrt.models import ouro, registry
from looptrt.models.registry import ENTRY_POINT_GROUP, family_of

OTHER = dataclasses.replace(ouro.FAMILY, architecture="OtherForCausalLM")
MISNAMED = ouro.FAMILY


def install(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Pretend that packages with these {architecture: object} entry points are installed."""
    found = EntryPoints(
        EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in points.items()
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: found.select(group=group))


def test_in_tree_families_are_known() -> None:
    for name in ("OuroForCausalLM", "RavenForCausalLM"):
        assert family_of(name).architecture == name


def test_a_package_adds_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OtherForCausalLM=f"{__name__}:OTHER")
    assert family_of("OtherForCausalLM") == OTHER
    assert family_of("OuroForCausalLM") is ouro.FAMILY


def test_an_unknown_architecture_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OtherForCausalLM="missing:F")
    known = "OtherForCausalLM, OuroForCausalLM, RavenForCausalLM"
    with pytest.raises(CheckpointError, match=f"'LlamaForCausalLM' is unknown, .* {known}"):
        family_of("LlamaForCausalLM")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:F", r"OtherForCausalLM = no_such_module:F .* cannot be loaded: Module"),
        (f"{__name__}:NO_SUCH", r"OtherForCausalLM = .*:NO_SUCH .* cannot be loaded: Attribute"),
        (f"{__name__}:MISNAMED", r"expected a Family of architecture 'OtherForCausalLM'"),
        ("math:pi", r"expected a Family of architecture 'OtherForCausalLM', got 3.14"),
    ],
)
def test_a_broken_entry_point_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    install(monkeypatch, OtherForCausalLM=value)
    with pytest.raises(CheckpointError, match=message):
        family_of("OtherForCausalLM")


def test_an_entry_point_cannot_shadow_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OuroForCausalLM=f"{__name__}:MISNAMED")
    with pytest.raises(CheckpointError, match="defined twice: looptrt itself, entry point Ouro"):
        family_of("OuroForCausalLM")
