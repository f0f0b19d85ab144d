"""Pytest plugin for children: tests of the emulator use a library that was compiled before."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulated-library", dest="emulated_library", type=Path, required=True)
