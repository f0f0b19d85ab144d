"""The block table: which unit holds each page of each sequence in each row.

Owns the host copy and the columns changed since the last step; leaves the device copy to
the executor. Invariant: rows beyond the planes a page owns point at its deepest plane.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.kv.page_pool import Page
from looptrt.runtime.kv.unit_pool import NULL_UNIT
from looptrt.runtime.step_plan import TableUpdates


class BlockTable:
    """[max_slots, num_rows, max_pages] unit ids, changed one column (page) at a time."""

    def __init__(self, layout: PlaneLayout, max_slots: int, max_pages: int) -> None:
        self.num_rows = layout.num_rows
        self.units: NDArray[np.int32] = np.full(
            (max_slots, layout.num_rows, max_pages), NULL_UNIT, np.int32
        )
        self._slots: list[int] = []
        self._pages: list[int] = []
        self._columns: list[tuple[int, ...]] = []

    def set_page(self, slot: int, page_idx: int, page: Page) -> None:
        """Point a sequence's page at its units; shallower pages alias their last plane."""
        units = page.units
        column = units + units[-1:] * (self.num_rows - len(units))
        self.units[slot, :, page_idx] = column
        self._slots.append(slot)
        self._pages.append(page_idx)
        self._columns.append(column)

    def take_updates(self) -> TableUpdates:
        """Columns changed since the last call, in order."""
        if not self._slots:
            return self._no_updates()
        updates = TableUpdates(
            np.array(self._slots, np.int32),
            np.array(self._pages, np.int32),
            np.array(self._columns, np.int32),
        )
        self._slots, self._pages, self._columns = [], [], []
        return updates

    def _no_updates(self) -> TableUpdates:
        empty = np.empty(0, np.int32)
        return TableUpdates(empty, empty, np.empty((0, self.num_rows), np.int32))
