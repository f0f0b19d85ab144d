"""Memory straight from the CUDA runtime: a GPU's own, and the host's that a GPU maps.

Owns one allocation and its end; leaves its size, and when which side may write it, to who asks.
Invariant: never from torch's allocators, whose memory on a GPU may be virtual and moves badly
over NIXL, and on the host belongs to whichever GPU was first.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from looptrt.errors import EngineError, InvariantError


def cuda_runtime() -> Any:  # noqa: ANN401 - a module without types
    """cuda-python's bindings of the CUDA runtime.

    Raises:
        EngineError: the package is not installed, or its library does not load.
    """
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(
            f"cuda.bindings.runtime cannot be imported ({error}); pip install cuda-bindings"
        ) from error


class DeviceMemory:
    """One allocation on one GPU, freed by `free` or with the last reference.

    Args:
        num_bytes: at least 1.
        device: a CUDA device with an index.
        purpose: what it is for, for the error.

    Raises:
        EngineError: the GPU does not have that much; has the numbers.
    """

    def __init__(self, num_bytes: int, device: torch.device, purpose: str) -> None:
        runtime = cuda_runtime()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        with torch.cuda.device(device):
            runtime.cudaSetDevice(device.index)  # the bindings' own idea of the current device
            error, address = runtime.cudaMalloc(num_bytes)
        if int(error):
            raise EngineError(
                f"{purpose}: cudaMalloc of {num_bytes} bytes on {device}: {error.name}; "
                f"{free_bytes} of {total_bytes} bytes are free"
            )
        self.num_bytes = num_bytes
        self.address = int(address)
        # Read by torch.as_tensor, which keeps this object as long as the tensor lives.
        self.__cuda_array_interface__ = _interface(self.address, num_bytes)
        self._freed = weakref.finalize(self, _free, runtime, "cudaFree", self.address, device)

    def tensor(self, device: torch.device) -> torch.Tensor:
        """[num_bytes] uint8 over the allocation."""
        return torch.as_tensor(self, device=device)

    def free(self) -> None:
        """Give the memory back now; what still points at it must not be used again."""
        self._freed()


class MappedMemory:
    """Zeroed host memory that one GPU reads and writes where it lies; freed with its last view.

    Work on the GPU sees what the host wrote before it was enqueued; the host sees what work
    wrote once it has waited for an event behind it.

    Args:
        num_bytes: at least 1.
        device: a CUDA device with an index.

    Raises:
        EngineError: the host has no such memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        runtime = cuda_runtime()
        with torch.cuda.device(device):
            runtime.cudaSetDevice(device.index)  # whose memory torch takes it for
            error, address = runtime.cudaHostAlloc(num_bytes, runtime.cudaHostAllocMapped)
        if int(error):
            raise EngineError(
                f"host memory for steps: cudaHostAlloc of {num_bytes} bytes: {error.name}"
            )
        self._device = device
        # With unified addressing one address holds on both sides. Read by np.asarray and
        # torch.as_tensor, which keep this object as long as their views live.
        interface = _interface(int(address), num_bytes)
        self.__array_interface__ = self.__cuda_array_interface__ = interface
        weakref.finalize(self, _free, runtime, "cudaFreeHost", int(address), device)
        self.array()[...] = 0

    def array(self) -> NDArray[np.uint8]:
        """[num_bytes] the host's view."""
        return np.asarray(self)

    def tensor(self) -> torch.Tensor:
        """[num_bytes] uint8, the GPU's view.

        Raises:
            InvariantError: torch made a copy of it.
        """
        tensor = torch.as_tensor(self, device=self._device)
        address, _ = self.__cuda_array_interface__["data"]
        if tensor.data_ptr() != address:
            raise InvariantError(f"host memory mapped for {self._device} was copied by torch")
        return tensor


def _interface(address: int, num_bytes: int) -> dict[str, Any]:
    return {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _free(
    runtime: Any,  # noqa: ANN401 - a module without types
    free: str,
    address: int,
    device: torch.device,
) -> None:
    with torch.cuda.device(device):
        runtime.cudaSetDevice(device.index)
        runtime.cudaDeviceSynchronize()
        getattr(runtime, free)(address)
