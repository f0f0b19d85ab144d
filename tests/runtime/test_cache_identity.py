"""Case C1 at the engine's level: what separates the pages of two engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from looptrt.builder.build import BuildConfig, build
from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import NoiseMode
from looptrt.manifest import Manifest
from looptrt.runtime.engine_core import cache_identity
from tests.support.checkpoints import tiny_huginn, tiny_ouro


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    root = tmp_path_factory.mktemp("identity")
    return build(BuildConfig(tiny_huginn(root / "c"), root / "e"))


def layout_like(manifest: Manifest, **changes: object) -> PlaneLayout:
    return PlaneLayout.from_json({**manifest.layout.to_json(), **changes})


@pytest.mark.parametrize(
    "change",
    ["fingerprint", "dtype", "strategy", "page_size", "noise_mode", "state_std", "state_scale"],
)
def test_every_input_of_a_page_is_in_its_key(manifest: Manifest, change: str) -> None:
    spec = manifest.spec
    other = {
        "fingerprint": lambda: replace(manifest, fingerprint="0" * 64),
        "dtype": lambda: replace(manifest, dtype="bfloat16"),
        "strategy": lambda: replace(manifest, layout=layout_like(manifest, strategy="shared")),
        "page_size": lambda: replace(manifest, layout=layout_like(manifest, page_size=64)),
        "noise_mode": lambda: replace(manifest, noise_mode=NoiseMode.SEQUENTIAL),
        "state_std": lambda: replace(manifest, spec=replace(spec, state_std=0.0)),
        "state_scale": lambda: replace(manifest, spec=replace(spec, state_scale=1.0)),
    }[change]()
    ours, theirs = cache_identity(manifest), cache_identity(other)
    assert ours.root(None, 0) != theirs.root(None, 0)


def test_salt_and_seed_are_in_the_key(manifest: Manifest) -> None:
    root = cache_identity(manifest).root
    salts = [None, b"", b"\0", b"X", b"\0\0"]
    assert len({root(salt, seed) for salt in salts for seed in (0, 1, 2**63 - 1)}) == 15


def test_models_without_noise_share_pages_across_seeds(tmp_path: Path) -> None:
    root = cache_identity(build(BuildConfig(tiny_ouro(tmp_path / "c"), tmp_path / "e"))).root
    assert root(None, 0) == root(None, 1)


def test_fields_cannot_be_shifted_into_each_other(manifest: Manifest) -> None:
    ours = cache_identity(manifest)
    shifted = replace(ours, model=("".join(ours.model[:2]), "", *ours.model[2:]))
    assert ours.root(None, 0) != shifted.root(None, 0)
