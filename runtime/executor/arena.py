"""What captured steps read and give, in host memory that the GPU maps: no copies, no extra launch.

Owns the memory of both sides and which half of it a step takes; leaves what the fields mean to
the executor. Invariants: a slot is written only after the step that last took it is done; host
and GPU count the same turns.

A graph's addresses are fixed, and a step is enqueued before the host has seen the one before, so
the host's side has two slots. Which of them a step takes is counted on the GPU, by the step
itself; the host counts the steps that it has enqueued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from looptrt.errors import InvariantError
from looptrt.runtime.executor.device_memory import MappedMemory
from looptrt.runtime.executor.graph_cache import memory_for

Fields = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
_Kinds = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

_NUM_SLOTS = 2  # the turn is one bit
_ALIGNMENT = 16
_SLOT_ALIGNMENT = 256  # no cache line of the GPU's holds bytes of two slots


class Arena:
    """The inputs of one shape of work, and its result.

    For each run: `fill`, then work that begins with `load` and may end with `store`, enqueued
    on the device's current stream once, as a graph or not, then `submitted`.

    Args:
        fields: dtype and shape of the inputs by name.
        result_shape: of the int32 result; (0,) if there is none.
        device: a CUDA device.

    Attributes:
        tensors: the inputs by name, on the device; those of the run after its `load`.

    Raises:
        EngineError: the host or the device has no memory for it; has the numbers.
    """

    def __init__(self, fields: Fields, result_shape: tuple[int, ...], device: torch.device) -> None:
        places, end = {}, _ALIGNMENT  # a slot begins with its number
        for name, (dtype, shape) in fields.items():
            places[name] = slice(end, end + math.prod(shape) * dtype.itemsize)
            end = _aligned(places[name].stop, _ALIGNMENT)
        slot_bytes = _aligned(end, _SLOT_ALIGNMENT)
        results = _NUM_SLOTS * slot_bytes
        num_bytes = results + _NUM_SLOTS * math.prod(result_shape) * torch.int32.itemsize
        memory = MappedMemory(num_bytes, device)
        here, there = memory.array(), memory.tensor()
        given = here[results:].view(np.int32).reshape(_NUM_SLOTS, *result_shape)
        self._device = device
        self._slots = []
        for number in range(_NUM_SLOTS):
            inputs = torch.from_numpy(here[number * slot_bytes : (number + 1) * slot_bytes])
            inputs[:_ALIGNMENT].view(torch.int64)[0] = number
            self._slots.append(_Slot(_views(inputs, places, fields), given[number]))
        self._inputs_there = there[:results].view(torch.int64).view(_NUM_SLOTS, -1)
        self._results_there = there[results:].view(torch.int32).view(_NUM_SLOTS, *result_shape)
        with memory_for("the inputs of steps", device):
            self._loaded = torch.zeros(1, slot_bytes // 8, dtype=torch.int64, device=device)
            self._turn_there = torch.zeros(1, dtype=torch.int64, device=device)
        self._number = self._loaded[0, :1]
        self.tensors = _views(self._loaded[0].view(torch.uint8), places, fields)
        self._kinds = _kinds(self._slots[0].arrays)
        self._turn = 0
        self._is_filled = False

    # ---- on the host, once a run

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the inputs of the next run; waits for the last but one if that is not done.

        Args:
            arrays: of the fields' dtypes and shapes, one for every field.

        Raises:
            InvariantError: they are others, which assignment would cast or spread; nothing was
                written.
        """
        kinds = _kinds(arrays)
        if kinds != self._kinds:
            raise InvariantError(f"inputs of a step: {_first_difference(self._kinds, kinds)}")
        if self._is_filled:  # the run before failed, before its turn on the GPU or after it
            torch.cuda.synchronize(self._device)
            self.start_over()
        self._is_filled = True
        slot = self._slots[self._turn]
        slot.num_runs += 1
        if slot.is_running:
            slot.done.synchronize()
        for name, array in arrays.items():
            slot.arrays[name][...] = array

    def submitted(self) -> Callable[[], NDArray[np.int32]]:
        """Say that the work was enqueued.

        Returns:
            Waits for it and gives what it stored; to be called before the run after the next.
        """
        slot = self._slots[self._turn]
        run = slot.num_runs
        # Without a stream it would be the current device's, which may be another one.
        slot.done.record(torch.cuda.current_stream(self._device))
        slot.is_running = True
        self._turn ^= 1
        self._is_filled = False

        def result() -> NDArray[np.int32]:
            if slot.num_runs != run:
                raise InvariantError("the result of a step was overwritten before it was read")
            slot.done.synchronize()
            slot.is_running = False
            return slot.result.copy()

        return result

    def start_over(self) -> None:
        """Forget a run that was filled for; the GPU must be done with all that was enqueued."""
        self._turn_there.fill_(self._turn)
        self._is_filled = False

    # ---- on the GPU, within the work

    def load(self) -> None:
        """Enqueue that `tensors` are the run's inputs, and that the turn passes on."""
        torch.index_select(self._inputs_there, 0, self._turn_there, out=self._loaded)
        self._turn_there.bitwise_xor_(1)

    def store(self, result: torch.Tensor) -> None:
        """Enqueue the run's result."""
        self._results_there.index_copy_(0, self._number, result[None])


class _Slot:
    """The host's view of one half, and how far the run is that last took it."""

    def __init__(self, inputs: Mapping[str, torch.Tensor], result: NDArray[np.int32]) -> None:
        self.arrays = {name: view.numpy() for name, view in inputs.items()}
        self.result = result
        self.num_runs = 0
        self.is_running = False
        self.done = _event()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _kinds(arrays: Mapping[str, np.ndarray]) -> _Kinds:
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


def _first_difference(expected: _Kinds, got: _Kinds) -> str:
    name = next(name for name in {**expected, **got} if expected.get(name) != got.get(name))
    return f"{name}: expected {expected.get(name)}, got {got.get(name)}"


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _views(
    memory: torch.Tensor, places: Mapping[str, slice], fields: Fields
) -> dict[str, torch.Tensor]:
    return {
        name: memory[places[name]].view(dtype).view(shape)
        for name, (dtype, shape) in fields.items()
    }
