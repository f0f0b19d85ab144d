"""What a test does when the machine lacks what it needs and CI must have.

Owns the choice between a skip and a failure; leaves to look for the thing to its user.
"""

from __future__ import annotations

import os  # CI's own variable
from typing import NoReturn

import pytest


def absent(reason: str) -> NoReturn:
    """Skip a test for something that CI must have; fail there."""
    if os.environ.get("CI"):  # noqa: TID251 - see the import
        pytest.fail(reason)
    pytest.skip(reason)
