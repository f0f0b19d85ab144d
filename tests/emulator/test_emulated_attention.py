"""The attention kernels' own source on the CPU, against float64 and their promise about bits."""

from __future__ import annotations

import pytest

from tests.emulator.attention_checks import (
    FAST,
    GENERIC,
    a_chain_reads_what_it_stored,
    new_world,
)
from tests.emulator.conftest import Library
from tests.emulator.emulated import ORDERS, Emulated, Order, name_of
from tests.plugins.attention_cases import CHECKS, LONG_CHECKS, Check
from tests.plugins.attention_world import Geometry

# A kernel that never ends cannot be interrupted: the limit ends the process.
pytestmark = pytest.mark.timeout(method="thread")

full = pytest.mark.full
# The fast tier takes every kernel in one order each; at head_dim 128 prefill by warpgroups and, for
# other GPUs than those of 9.0, by warps.
QUICK = [*zip((*FAST[:3], GENERIC[1]), ORDERS, strict=True), (FAST[1], ORDERS[3])]
SLOW = [(sizes, order) for sizes in FAST[:3] for order in (ORDERS[0], ORDERS[3])]
SLOW += [(FAST[3], ORDERS[0]), (GENERIC[0], ORDERS[3])]
CASES = [*QUICK, *(pytest.param(*case, marks=full) for case in SLOW if case not in QUICK)]


@pytest.fixture
def attention(library: Library) -> Emulated:
    return library("packed_plane_attention")


@pytest.mark.parametrize(("sizes", "order"), CASES, ids=name_of)
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_every_kernel_keeps_its_promises(
    attention: Emulated, check: Check, sizes: Geometry, order: Order
) -> None:
    with attention.in_use(order):
        check(new_world, sizes)


@full
@pytest.mark.parametrize(("sizes", "order"), SLOW, ids=name_of)
@pytest.mark.parametrize("check", LONG_CHECKS, ids=name_of)
def test_every_kernel_keeps_its_promises_to_longer_calls(
    attention: Emulated, check: Check, sizes: Geometry, order: Order
) -> None:
    with attention.in_use(order):
        check(new_world, sizes)


@full
@pytest.mark.parametrize("check", CHECKS[:2], ids=name_of)
@pytest.mark.parametrize(("num_sms", "kilobytes"), [(200, 227), (3, 99), (200, 163)])
def test_the_gpu_s_sizes_break_no_promise(
    attention: Emulated, check: Check, num_sms: int, kilobytes: int
) -> None:
    """More tiles on their way where there are more multiprocessors than work; fewer warps."""
    for sizes in FAST[:3]:
        with attention.in_use(Order(num_sms=num_sms, shared_bytes=kilobytes * 1024)):
            check(new_world, sizes)


@pytest.mark.parametrize(("sizes", "order"), CASES, ids=name_of)
def test_a_chain_reads_what_it_stored(attention: Emulated, sizes: Geometry, order: Order) -> None:
    with attention.in_use(order):
        a_chain_reads_what_it_stored(attention, sizes)
