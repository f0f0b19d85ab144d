"""The free units of the KV pool, row by row of the block table.

Owns which unit ids are free and which of them a row of a page gets; leaves who owns the others
to `PagePool`. Invariant: every id from 1 to num_units - 1 is either free or handed out exactly
once; 0 is the null unit.

The pool is cut into one stretch of ids a row. A page's units come from its rows' stretches as
long as those last, so that a loop, which reads one row of all pages, reads memory that lies
together: page after page of one plane 33 units apart costs Huginn's decode attention three
times its time in address translation (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from looptrt.errors import InvariantError

NULL_UNIT = 0


class UnitPool:
    """Hands out unit ids; a shortage is None, never an exception.

    Args:
        num_units: units in the pool, the null unit included; at least 2.
        num_rows: rows of the block table.
    """

    def __init__(self, num_units: int, num_rows: int = 1) -> None:
        if num_units < 2:
            raise InvariantError(f"num_units: expected at least 2, got {num_units}")
        self.num_units = num_units
        self._stretch = -(-(num_units - 1) // num_rows)
        self._free = [
            list(range(min(begin + self._stretch, num_units) - 1, begin - 1, -1))
            for begin in range(1, num_rows * self._stretch + 1, self._stretch)
        ]
        self._num_free = num_units - 1
        self._is_free = bytearray([0] + [1] * (num_units - 1))

    @property
    def num_free(self) -> int:
        """Units that can be handed out now."""
        return self._num_free

    def allocate(self, count: int) -> list[int] | None:
        """Take units for the rows 0..count-1 of a page, or None when fewer are free."""
        if count > self._num_free:
            return None
        self._num_free -= count
        units = []
        for row in range(count):
            stretch = self._free[row]
            if not stretch:  # taken by other rows: any unit serves as well, only slower
                stretch = max(self._free, key=len)
            units.append(stretch.pop())
        for unit in units:
            self._is_free[unit] = 0
        return units

    def release(self, units: Sequence[int]) -> None:
        """Give units back.

        Raises:
            InvariantError: a unit is the null unit, unknown or already free.
        """
        for unit in units:
            if not NULL_UNIT < unit < self.num_units or self._is_free[unit]:
                raise InvariantError(f"unit {unit} is released but not held")
            self._is_free[unit] = 1
            self._free[(unit - 1) // self._stretch].append(unit)
            self._num_free += 1

    def is_free(self, unit: int) -> bool:
        """Whether a unit is in the free list."""
        return bool(self._is_free[unit])
