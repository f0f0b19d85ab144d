"""Free units: handed out once, and near the other units of their row while that lasts."""

from __future__ import annotations

import random

import pytest

from looptrt.errors import InvariantError
from looptrt.runtime.kv.unit_pool import UnitPool


def test_the_units_of_a_row_lie_together() -> None:
    """Fails with one free list: page after page of a row is then num_rows units apart."""
    pool = UnitPool(1 + 33 * 100, num_rows=33)
    pages = [pool.allocate(33) for _ in range(60)]
    for row in range(33):
        units = [page[row] for page in pages if page is not None]
        assert units == list(range(units[0], units[0] + 60))


@pytest.mark.parametrize("num_rows", [1, 4, 33])
@pytest.mark.parametrize("num_units", [2, 35, 400])
def test_every_unit_is_handed_out_once_whatever_rows_ask(num_units: int, num_rows: int) -> None:
    pool, draw = UnitPool(num_units, num_rows), random.Random(num_units + num_rows)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and draw.random() < 0.45:
            pool.release(held.pop(draw.randrange(len(held))))
            continue
        count, before = draw.randint(0, num_rows), pool.num_free
        units = pool.allocate(count)
        assert (units is None) is (count > before)
        held += [] if units is None else [units]
        owned = [unit for page in held for unit in page]
        assert len(set(owned)) == len(owned) == num_units - 1 - pool.num_free
        assert not any(map(pool.is_free, owned))
        assert all(0 < unit < num_units for unit in owned)


def test_a_unit_released_twice_is_noticed() -> None:
    pool = UnitPool(5, num_rows=2)
    units = pool.allocate(2)
    assert units is not None
    pool.release(units)
    for wrong in (units, [0], [5]):
        with pytest.raises(InvariantError, match="released but not held"):
            pool.release(wrong)
