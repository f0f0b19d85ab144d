"""Requests that wait for a slot, in the order in which they are served.

Owns that order; leaves whether the first one may start to `slot_starts`. Invariant: a higher
priority comes before a lower one and, among equals, the earlier arrival before the later, so a
preempted request waits at the place that it had.
"""

from __future__ import annotations

import heapq

from looptrt.runtime.request import Request

_Entry = tuple[int, int, Request]


class WaitingQueue:
    """Waiting requests by rank.

    Attributes:
        num_new: requests that never ran, which is all but the preempted ones.
    """

    def __init__(self) -> None:
        self.num_new = 0
        self._entries: list[_Entry] = []  # a heap

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> Request:
        """The next to be served, of at least one."""
        return self._entries[0][2]

    def push(self, request: Request) -> None:
        """Add a request, new or preempted."""
        self.num_new += request.num_preemptions == 0
        heapq.heappush(self._entries, _entry(request))

    def pop(self) -> None:
        """Take the head out."""
        self.num_new -= self.head.num_preemptions == 0
        heapq.heappop(self._entries)

    def remove(self, request: Request) -> None:
        """Take out a request, whatever its place."""
        self.num_new -= request.num_preemptions == 0
        self._entries.remove(_entry(request))
        heapq.heapify(self._entries)


def _entry(request: Request) -> _Entry:
    """Heap entry; arrival is unique, so requests are never compared."""
    return -request.priority, request.arrival, request
