"""The free list of KV units.

Owns which unit ids are free; leaves who owns the others to `PagePool`. Invariant: every
id from 1 to num_units - 1 is either free or handed out exactly once; 0 is the null unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from looptrt.errors import InvariantError

NULL_UNIT = 0


class UnitPool:
    """Hands out unit ids; a shortage is None, never an exception.

    Args:
        num_units: units in the pool, the null unit included; at least 2.
    """

    def __init__(self, num_units: int) -> None:
        if num_units < 2:
            raise InvariantError(f"num_units: expected at least 2, got {num_units}")
        self.num_units = num_units
        self._free = list(range(num_units - 1, NULL_UNIT, -1))
        self._is_free = bytearray([0] + [1] * (num_units - 1))

    @property
    def num_free(self) -> int:
        """Units that can be handed out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` units, or None when fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        units = self._free[-count:]
        del self._free[-count:]
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
        self._free.extend(units)

    def is_free(self, unit: int) -> bool:
        """Whether a unit is in the free list."""
        return bool(self._is_free[unit])
