"""The kernel of `skinny_linear` on the CPU: its sums, and whose bits they are."""

from __future__ import annotations

import pytest
import torch

from tests.emulator import linear_checks as checks
from tests.emulator.conftest import Library
from tests.emulator.emulated import ORDERS, Emulated, Order, name_of

# A kernel that never ends cannot be interrupted: the limit ends the process.
pytestmark = pytest.mark.timeout(method="thread")

by_order = pytest.mark.parametrize("order", ORDERS, ids=name_of)
by_shape = pytest.mark.parametrize(("outputs", "inputs"), checks.SHAPES)


@pytest.fixture
def linear(library: Library) -> Emulated:
    return library("skinny_linear")


@by_order
@by_shape
def test_sums_are_near_float64(linear: Emulated, outputs: int, inputs: int, order: Order) -> None:
    with linear.in_use(order):
        for dtype in (checks.BF16, checks.F16, checks.F32):
            for rows in (1, 3, 8, 9, 16):
                checks.is_near_float64(rows, outputs, inputs, dtype)


@by_order
@by_shape
@pytest.mark.parametrize("dtype", [checks.BF16, checks.F16], ids=str)
def test_a_row_has_its_bits_alone_and_among_neighbours(
    linear: Emulated, outputs: int, inputs: int, dtype: torch.dtype, order: Order
) -> None:
    with linear.in_use(order):
        checks.bits_do_not_depend_on_neighbours(outputs, inputs, dtype)


@pytest.mark.parametrize("dtype", [checks.BF16, checks.F16], ids=str)
def test_how_much_is_on_its_way_changes_no_bits(linear: Emulated, dtype: torch.dtype) -> None:
    with linear.in_use():
        checks.every_depth_has_the_same_bits(linear, dtype)


@by_order
@pytest.mark.parametrize("rows", [2, 16])
def test_a_chain_of_early_starts_reads_what_it_wrote(
    linear: Emulated, rows: int, order: Order
) -> None:
    with linear.in_use(order):
        checks.a_chain_reads_what_it_wrote(linear, rows)


def test_the_number_of_blocks_changes_no_bits(linear: Emulated) -> None:
    checks.bits_do_not_depend_on_the_grid(linear)
