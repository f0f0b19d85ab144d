"""Plane copies and table updates: the runtime's launchers outside graphs."""

from __future__ import annotations

import pytest
import torch

from looptrt.errors import PluginError
from looptrt.plugins.reference import plane_copy, update_tables
from tests.plugins.pools import Pool, assert_bitwise, int32

UNIT_SHAPE = (3, 2, 4, 2, 8)


def filled(dtype: torch.dtype) -> Pool:
    pool = Pool.of(6, UNIT_SHAPE, dtype)
    pool.units.copy_(torch.arange(pool.units.numel()).view(pool.units.shape) % 251)
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plane_copy_moves_token_ranges_of_all_slots(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    want = pool.units.clone()
    want[2, :, :, 1:3] = want[1, :, :, 1:3]
    want[5, :, :, 0:4] = want[3, :, :, 0:4]
    ranges = int32([1, 3, 4]), int32([2, 5, 1]), int32([1, 0, 2]), int32([3, 4, 2])
    plane_copy(pool.kv_pool, *ranges, UNIT_SHAPE, dtype)
    assert_bitwise(pool.units, want)
    pool.assert_guards_intact()


def test_copies_of_one_call_read_before_they_write() -> None:
    pool = filled(torch.float32)
    before = pool.units.clone()
    ranges = int32([1, 2]), int32([2, 3]), int32([0, 0]), int32([4, 4])
    plane_copy(pool.kv_pool, *ranges, UNIT_SHAPE, torch.float32)
    assert_bitwise(pool.units[2], before[1])
    assert_bitwise(pool.units[3], before[2])


def test_no_copies_change_nothing() -> None:
    pool = filled(torch.float32)
    before = pool.units.clone()
    plane_copy(pool.kv_pool, *[int32([])] * 4, UNIT_SHAPE, torch.float32)
    assert_bitwise(pool.units, before)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (([0], [2], [0], [1]), "src_units: expected 1..5, got 0"),
        (([1], [6], [0], [1]), "dst_units: expected 1..5, got 6"),
        (([1], [2], [-1], [1]), "token_begin: expected 0..4, got -1"),
        (([1], [2], [0], [5]), "token_end: expected 0..4, got 5"),
        (([1], [2], [3], [1]), "token_end - token_begin: expected 0..4, got -2"),
    ],
)
def test_a_copy_outside_the_pool_is_refused(ranges: tuple[list[int], ...], message: str) -> None:
    pool = filled(torch.float32)
    with pytest.raises(PluginError, match=f"plane_copy: {message}"):
        plane_copy(pool.kv_pool, *map(int32, ranges), UNIT_SHAPE, torch.float32)


def test_update_tables_writes_whole_columns() -> None:
    table = torch.zeros(3, 2, 4, dtype=torch.int32)
    update_tables(table, int32([2, 0]), int32([1, 3]), int32([[7, 8], [9, 10]]))
    assert table[2, :, 1].tolist() == [7, 8]
    assert table[0, :, 3].tolist() == [9, 10]
    assert int(table.count_nonzero()) == 4


def test_update_outside_the_table_is_refused() -> None:
    table = torch.zeros(3, 2, 4, dtype=torch.int32)
    with pytest.raises(PluginError, match=r"update_tables: slots: expected 0..2, got 3"):
        update_tables(table, int32([3]), int32([0]), int32([[1, 1]]))
    with pytest.raises(PluginError, match=r"update_tables: pages: expected 0..3, got -1"):
        update_tables(table, int32([0]), int32([-1]), int32([[1, 1]]))
