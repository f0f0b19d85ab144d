"""Free units: each is handed out once."""

from __future__ import annotations

import random

import pytest

from looptrt.errors import InvariantError
from looptrt.runtime.kv.unit_pool import UnitPool


@pytest.mark.parametrize("most", [1, 4, 33])
@pytest.mark.parametrize("num_units", [2, 35, 400])
def test_every_unit_is_handed_out_once(num_units: int, most: int) -> None:
    pool, draw = UnitPool(num_units), random.Random(num_units + most)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and draw.random() < 0.45:
            pool.release(held.pop(draw.randrange(len(held))))
            continue
        count, before = draw.randint(0, most), pool.num_free
        units = pool.allocate(count)
        assert (units is None) is (count > before)
        held += [] if units is None else [units]
        owned = [unit for page in held for unit in page]
        assert len(set(owned)) == len(owned) == num_units - 1 - pool.num_free
        assert not any(map(pool.is_free, owned))
        assert all(0 < unit < num_units for unit in owned)


def test_a_unit_released_twice_is_noticed() -> None:
    pool = UnitPool(5)
    units = pool.allocate(2)
    assert units is not None
    pool.release(units)
    for wrong in (units, [0], [5]):
        with pytest.raises(InvariantError, match="released but not held"):
            pool.release(wrong)
