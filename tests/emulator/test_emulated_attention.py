"""The attention kernels' own source on the CPU, against float64 and their promise about bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.emulator import attention_checks as checks
from tests.emulator.conftest import Library
from tests.emulator.emulated import ORDERS, Emulated, Order, name_of
from tests.plugins.attention_cases import Geometry

# A kernel that never ends cannot be interrupted: the limit ends the process.
pytestmark = pytest.mark.timeout(method="thread")

CHECKS = [
    checks.results_are_near_float64,
    checks.bits_do_not_depend_on_the_call,
    checks.twin_agrees,
    checks.later_nan_reaches_no_earlier_row,
    checks.only_places_of_new_tokens_are_written,
    checks.null_units_hold_nothing,
    checks.rows_reach_the_end_of_the_table,
    checks.out_of_range_gives_nan_and_writes_nothing,
]
full = pytest.mark.full
# The fast tier takes every kernel in one order each.
QUICK = list(zip((*checks.FAST[:3], checks.GENERIC[1]), (*ORDERS,), strict=True))
SLOW = [(sizes, order) for sizes in checks.FAST[:3] for order in (ORDERS[0], ORDERS[3])]
SLOW += [(checks.FAST[3], ORDERS[0]), (checks.GENERIC[0], ORDERS[3])]
CASES = [*QUICK, *(pytest.param(*case, marks=full) for case in SLOW if case not in QUICK)]


@pytest.fixture
def attention(library: Library) -> Emulated:
    return library("packed_plane_attention")


@pytest.mark.parametrize(("sizes", "order"), CASES, ids=name_of)
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_every_kernel_keeps_its_promises(
    attention: Emulated, check: Callable[[Geometry], None], sizes: Geometry, order: Order
) -> None:
    with attention.in_use(order):
        check(sizes)


@full
@pytest.mark.parametrize("check", CHECKS[:2], ids=name_of)
@pytest.mark.parametrize(("num_sms", "kilobytes"), [(200, 227), (3, 99), (200, 163)])
def test_the_gpu_s_sizes_break_no_promise(
    attention: Emulated, check: Callable[[Geometry], None], num_sms: int, kilobytes: int
) -> None:
    """More tiles on their way where there are more multiprocessors than work; fewer warps."""
    for sizes in checks.FAST[:3]:
        with attention.in_use(Order(num_sms=num_sms, shared_bytes=kilobytes * 1024)):
            check(sizes)


@full
@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[3]], ids=name_of)
def test_many_sequences_decode_as_one_does(attention: Emulated, order: Order) -> None:
    with attention.in_use(order):
        checks.many_sequences_decode_as_one_does(checks.FAST[0])


@full
@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[3]], ids=name_of)
@pytest.mark.parametrize("sizes", checks.FAST[:3], ids=name_of)
def test_long_rows_are_near_float64(attention: Emulated, sizes: Geometry, order: Order) -> None:
    with attention.in_use(order):
        checks.long_rows_are_near_float64(sizes)
