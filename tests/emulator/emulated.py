"""`looptrt.plugins.launch` on CPU tensors, with an emulated library.

Owns opening such a library, the order in which its machine does things, and turning a fault into an
error. Invariant: while a library is in use, everything that `torch.empty` gives is NaN, or the
largest integer, so that what a kernel leaves unwritten shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from looptrt.plugins import launch
from tests.plugins.attention_world import Geometry


class EmulatorError(Exception):
    """What went wrong in a kernel: block, thread and text."""


@dataclass(frozen=True)
class Order:
    """What CUDA leaves open, at one of its ends, and the GPU's sizes.

    Attributes:
        is_descending: the last thread, warp and block first.
        copies_late: `cp.async` and `wgmma` read and write when a wait demands it, or else at once.
        has_warpgroups: the machine code is that of sm_90a, or else of another GPU.
        num_sms: multiprocessors.
        shared_bytes: that a block may have.
    """

    is_descending: bool = False
    copies_late: bool = True
    num_sms: int = 3
    shared_bytes: int = 227 * 1024
    has_warpgroups: bool = True


def name_of(value: object) -> str | None:
    """An order, a geometry or a function in the name of a test."""
    if isinstance(value, Order):
        way = "down" if value.is_descending else "up"
        return f"{way}-{'late' if value.copies_late else 'early'}"
    if isinstance(value, Geometry):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{value.num_heads}:{value.num_kv_heads}x{value.head_dim}-{kind}"
    return getattr(value, "__name__", None)


# A wait that is missing shows in one of them: whoever makes a thing runs last in one, and whoever
# needs it runs first.
ORDERS = (
    Order(),
    Order(is_descending=True),
    Order(copies_late=False),
    Order(is_descending=True, copies_late=False, has_warpgroups=False),
)


class Emulated(launch.Library):
    """An opened library of `build.build`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._library.emulator_synchronize.restype = ctypes.c_char_p
        self._waits = True
        self._on_their_way: list[object] = []  # operands of launches that have not run

    @contextmanager
    def in_use(self, order: Order = ORDERS[0]) -> Iterator[None]:
        """Give `launch` this library."""
        self._library.emulator_configure(
            order.num_sms,
            order.shared_bytes,
            order.is_descending,
            order.copies_late,
            order.has_warpgroups,
        )
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "_enqueue", self._enqueue)
            patch.setattr(launch, "load", lambda: self)
            patch.setattr(launch, "check_placement", lambda *_: None)
            torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
            try:
                yield
                self.synchronize()
            finally:
                torch.use_deterministic_algorithms(was_deterministic)

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Let launches wait for the next ones instead of running them at once.

        Of a kernel that may start before its predecessor has ended, one block does; results are
        there at the end.
        """
        self._waits = False
        self.let_kernels_overlap(2**31 - 1)
        try:
            yield
            self.synchronize()
        finally:
            self._waits = True
            self.let_kernels_overlap(0)

    def synchronize(self) -> None:
        """Run what is enqueued.

        Raises:
            EmulatorError: a kernel did something that it must not do.
        """
        error = self._library.emulator_synchronize()
        self._on_their_way.clear()
        if error is not None:
            raise EmulatorError(error.decode())

    def _enqueue(self, name: str, *arguments: Tensor | float | None) -> None:
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        self._on_their_way.extend(arguments)
        self.call(name, 0, *values)
        if self._waits:
            self.synchronize()
