"""The emulated libraries of a session, compiled once each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulator.build import build, compiler
from tests.emulator.emulated import Emulated
from tests.support.absent import absent

Library = Callable[..., Emulated]


@pytest.fixture(scope="session", autouse=True)
def needs_a_compiler() -> None:
    if compiler() is None:
        absent("no C++ compiler: kernels are compiled for the CPU with g++ or clang++")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Library:
    """Opens a library with the kernels whose sources' names begin so."""
    given: Path | None = pytestconfig.getoption("emulated_library", None)
    opened: dict[tuple[str, ...], Emulated] = {}

    def open_library(*kernels: str) -> Emulated:
        if kernels not in opened:
            path = given or build(tmp_path_factory.mktemp("emulated"), kernels)
            opened[kernels] = Emulated(path)
        return opened[kernels]

    return open_library
