"""One-line faults of the kernels that their tests on the CPU must find."""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulator import linear_checks
from tests.emulator.attention_checks import FAST, a_chain_reads_what_it_stored, new_world
from tests.emulator.build import BuildError, Mutation, build
from tests.emulator.emulated import ORDERS, Emulated, EmulatorError
from tests.plugins.attention_cases import (
    bits_do_not_depend_on_the_call,
    decode_beside_prefill_is_as_alone,
    later_nan_reaches_no_earlier_row,
    results_are_near_float64,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

FOUND = 10  # exit status of a child whose check failed
CHILD_TIMEOUT_S = 200.0
DECODE = "kernels/packed_plane_attention_decode.cu"
FOLD = "kernels/packed_plane_attention_fold.cu"
ITEMS = "kernels/packed_plane_attention_items.cuh"
PREFILL = "kernels/packed_plane_attention_prefill.cu"
PRODUCTS = "kernels/packed_plane_attention_products.cuh"
TILE = "kernels/packed_plane_attention_tile.cuh"
WGMMA = "include/looptrt/wgmma.cuh"
LINEAR = "kernels/skinny_linear.cu"


def attention_is_right(_: Emulated) -> None:
    results_are_near_float64(new_world, FAST[0])


def attention_by_groups_is_right(_: Emulated) -> None:
    results_are_near_float64(new_world, FAST[2])


def attention_by_groups_of_chunks_is_right(_: Emulated) -> None:
    bits_do_not_depend_on_the_call(new_world, FAST[1])


def attention_of_many_is_right(_: Emulated) -> None:
    decode_beside_prefill_is_as_alone(new_world, FAST[0])


def attention_hides_nan(_: Emulated) -> None:
    later_nan_reaches_no_earlier_row(new_world, FAST[0])


def attention_chain_is_right(library: Emulated) -> None:
    a_chain_reads_what_it_stored(library, FAST[0])


def linear_is_right(_: Emulated) -> None:
    for rows in (3, 16):
        linear_checks.is_near_float64(rows, 37, 200, linear_checks.BF16)


def linear_chain_is_right(library: Emulated) -> None:
    linear_checks.a_chain_reads_what_it_wrote(library, 2)


MUTATIONS = {
    "a wait for one group too few": (
        Mutation(
            DECODE,
            "waitForCopiesBut<kStages - 2>();",
            "waitForCopiesBut<kStages - 1>();",
        ),
        attention_is_right,
    ),
    "no barrier between two tiles": (  # keys of the last tile are taken for addresses
        Mutation(
            PREFILL,
            "    products.showTile();\n    __syncthreads();\n    char* const key_tile",
            "    products.showTile();\n    char* const key_tile",
        ),
        attention_is_right,
    ),
    "scores that are not waited for": (
        Mutation(
            PRODUCTS,
            "    waitForProducts();\n    holdHere(scores);",
            "    holdHere(scores);",
        ),
        attention_by_groups_is_right,
    ),
    "chunks exchanged otherwise than the hardware does": (
        Mutation(WGMMA, "row / (8 / kSlabChunks) % kSlabChunks", "row % kSlabChunks"),
        attention_by_groups_is_right,
    ),
    "warps of a group that go through different tiles": (
        Mutation(
            PREFILL,
            "p.positions[min(group_end - 1, last_row)]",
            "p.positions[min(first_row + kRowsAWarp - 1, last_row)]",
        ),
        attention_by_groups_of_chunks_is_right,
    ),
    "a mask off by one": (
        Mutation(TILE, "i % 2 > positions[i / 2])", "i % 2 > positions[i / 2] + 1)"),
        attention_is_right,
    ),
    "splits folded before they are summed": (
        Mutation(FOLD, "  waitForInputs();\n  do {", "  do {"),
        attention_is_right,
    ),
    "a partial result in the place of another round's sequence": (
        Mutation(ITEMS, "item.sequence = base_ + owner;", "item.sequence = owner;"),
        attention_of_many_is_right,
    ),
    "a tile's notes of hidden V left over for a later one": (
        Mutation(DECODE, "if (threadIdx.x < 2) non_finite_[noted_][threadIdx.x] = 0;", ""),
        attention_hides_nan,
    ),
    "keys read before the call before has stored them": (
        Mutation(
            PREFILL, "  waitForInputsAlone();  // it stores K and V\n  QueryTile", "  QueryTile"
        ),
        attention_chain_is_right,
    ),
    "no barrier before sums are folded": (
        Mutation(
            LINEAR,
            "    __syncthreads();\n    int const folded_tile",
            "    int const folded_tile",
        ),
        linear_is_right,
    ),
    "x read before the kernel before has made it": (
        Mutation(LINEAR, "  waitForInputs();\n\n  Inputs<T> in", "  Inputs<T> in"),
        linear_chain_is_right,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_checks_find(name: str, tmp_path: Path) -> None:
    mutation, check = MUTATIONS[name]
    kernels = "skinny_linear" if mutation.file == LINEAR else "packed_plane_attention"
    library = Emulated(build(tmp_path, (kernels,), mutation=mutation, level=0))
    assert exit_status(library, check) in (FOUND, -signal.SIGSEGV, -signal.SIGABRT)


@pytest.mark.parametrize(
    ("kernels", "checks"),
    [
        (
            "packed_plane_attention",
            [
                attention_is_right,
                attention_by_groups_is_right,
                attention_by_groups_of_chunks_is_right,
                attention_of_many_is_right,
                attention_hides_nan,
                attention_chain_is_right,
            ],
        ),
        ("skinny_linear", [linear_is_right, linear_chain_is_right]),
    ],
)
def test_the_same_checks_find_nothing_in_what_is_sound(
    kernels: str, checks: list[Callable[[Emulated], None]], tmp_path: Path
) -> None:
    library = Emulated(build(tmp_path, (kernels,), level=0))
    assert [exit_status(library, check) for check in checks] == [0] * len(checks)


def exit_status(library: Emulated, check: Callable[[Emulated], None]) -> int | None:
    """Of a child that runs a check: what a fault does to addresses may end a process."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=run, args=(library, check), daemon=True)
    child.start()
    try:
        child.join(CHILD_TIMEOUT_S)
        return child.exitcode
    finally:
        child.kill()
        child.join()


def run(library: Emulated, check: Callable[[Emulated], None]) -> None:
    """Ends the process with `FOUND` if a check fails in some order."""
    faulthandler.disable()  # a fault is expected, and told by the exit status
    try:
        for order in ORDERS:
            with library.in_use(order):
                check(library)
    except (AssertionError, EmulatorError):
        sys.exit(FOUND)


def test_a_mutation_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    for mutation in (Mutation(LINEAR, "no such text", "x"), Mutation(LINEAR, "kWarps", "kWarps")):
        with pytest.raises(BuildError, match=r"is there \d+ times"):
            build(tmp_path, ("skinny_linear",), mutation=mutation)
