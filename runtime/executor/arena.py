"""Transfers of a step between host and GPU through pinned memory that is used again and again.

Owns packed arrays on their way to fixed addresses, and results on their way back; leaves what
they mean to the executor. Invariant: pinned memory is written only after the transfer that last
read it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

Fields = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_ALIGNMENT = 16
_NUM_HOST_COPIES = 2  # one can be written while the GPU reads the other


class Arena:
    """Tensors on a GPU that captured graphs read.

    Args:
        fields: dtype and shape by name.
        device: a CUDA device.

    Attributes:
        tensors: by name, all in one allocation.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        places, end = {}, 0
        for name, (dtype, shape) in fields.items():
            places[name] = slice(end, end + math.prod(shape) * dtype.itemsize)
            end += -(-places[name].stop // _ALIGNMENT) * _ALIGNMENT - end
        self._memory = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = _views(self._memory, places, fields)
        self._hosts = [_Host(end, places, fields) for _ in range(_NUM_HOST_COPIES)]

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Enqueue the transfer of all fields' values on the current stream.

        Args:
            arrays: of the fields' shapes, one for every field.
        """
        host = self._hosts.pop(0)
        self._hosts.append(host)
        host.transferred.synchronize()
        for name, array in arrays.items():
            host.arrays[name][...] = array
        self._memory.copy_(host.memory, non_blocking=True)
        host.transferred.record()


class Transfers:
    """Copies of small device tensors to the host, enqueued one after another."""

    def __init__(self) -> None:
        self._free: dict[torch.Size, list[tuple[torch.Tensor, torch.cuda.Event]]] = {}

    def to_host(self, there: torch.Tensor) -> Callable[[], NDArray[np.int32]]:
        """Enqueue the copy of an int32 tensor on the current stream.

        Returns:
            Waits for it and gives the values; called once.
        """
        free = self._free.setdefault(there.shape, [])
        if not free:
            memory = torch.empty(there.shape, dtype=torch.int32, pin_memory=True)
            free.append((memory, _event()))
        memory, done = free.pop()
        memory.copy_(there, non_blocking=True)
        done.record()

        def values() -> NDArray[np.int32]:
            done.synchronize()
            copied: NDArray[np.int32] = memory.numpy().copy()
            free.append((memory, done))
            return copied

        return values


class _Host:
    """Pinned memory laid out as the arena."""

    def __init__(self, num_bytes: int, places: Mapping[str, slice], fields: Fields) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        views = _views(self.memory, places, fields)
        self.arrays = {name: view.numpy() for name, view in views.items()}
        self.transferred = _event()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _views(
    memory: torch.Tensor, places: Mapping[str, slice], fields: Fields
) -> dict[str, torch.Tensor]:
    return {
        name: memory[places[name]].view(dtype).view(shape)
        for name, (dtype, shape) in fields.items()
    }
