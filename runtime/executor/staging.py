"""Host arrays on their way to a device: many of them, one transfer.

Owns the packing and the pinned memory; leaves which arrays belong together to the executor.
Invariant: an array may change as soon as `stage` returns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGNMENT = 16


class Staging:
    """Copies arrays to one device on its current stream.

    Args:
        device: where the tensors go; on the CPU they stay in the packed memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stage(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Tensors with the arrays' values, shapes and dtypes, all in one allocation.

        On CUDA the transfer is enqueued, not awaited; torch keeps the pinned memory until it
        is done.
        """
        packed = {name: array.tobytes() for name, array in arrays.items()}
        places, end = {}, 0
        for name, content in packed.items():
            places[name] = slice(end, end + len(content))
            end += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
        host = torch.empty(end, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        memory = host.numpy()
        for name, content in packed.items():
            memory[places[name]] = np.frombuffer(content, np.uint8)
        there = host.to(self._device, non_blocking=True)
        return {
            name: there[places[name]].view(_torch_dtype(array)).view(array.shape)
            for name, array in arrays.items()
        }


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
