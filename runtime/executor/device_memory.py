"""Memory straight from cudaMalloc, which transfers and other processes can register.

Owns one allocation and its end; leaves its size to `pool_size`. Invariant: never from torch's
caching allocator, whose memory may be virtual and moves badly over NIXL.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import torch

from looptrt.errors import EngineError


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
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        self._freed = weakref.finalize(self, _free, runtime, self.address, device)

    def tensor(self, device: torch.device) -> torch.Tensor:
        """[num_bytes] uint8 over the allocation."""
        return torch.as_tensor(self, device=device)

    def free(self) -> None:
        """Give the memory back now; what still points at it must not be used again."""
        self._freed()


def _free(runtime: Any, address: int, device: torch.device) -> None:  # noqa: ANN401 - see above
    with torch.cuda.device(device):
        runtime.cudaSetDevice(device.index)
        runtime.cudaDeviceSynchronize()
        runtime.cudaFree(address)
