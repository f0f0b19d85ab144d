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
        self._changed: dict[tuple[int, int], tuple[int, ...]] = {}

    def set_page(self, slot: int, page_idx: int, page: Page) -> None:
        """Point a sequence's page at its units; shallower pages alias their last plane."""
        units = page.units
        column = units + units[-1:] * (self.num_rows - len(units))
        self.units[slot, :, page_idx] = column
        self._changed[slot, page_idx] = column

    def take_updates(self) -> TableUpdates:
        """Columns changed since the last call, each once."""
        changed, self._changed = self._changed, {}
        places = np.array(list(changed), np.int32).reshape(-1, 2)
        columns = np.array(list(changed.values()), np.int32).reshape(-1, self.num_rows)
        return TableUpdates(places[:, 0].copy(), places[:, 1].copy(), columns)
