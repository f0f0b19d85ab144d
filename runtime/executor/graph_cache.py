"""Captured CUDA graphs by what they run, the least recently used out first.

Owns capture, replay and the counters; leaves what is captured, and the memory it reads and
writes, to the executor. Invariants: all graphs share one memory pool, so no tensor made inside
one is read after another has run; no garbage is collected during a capture.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from looptrt.errors import EngineError, PluginError

_LEAST_KEPT = 64
# Of other depths, of steps whose logits are read, of preludes and loops.
_UNUSUAL_KEPT = 16


@dataclass
class GraphCounters:
    """Since the start.

    Attributes:
        captures: graphs captured.
        hits: replays of a graph that was there.
        evictions: graphs given up for newer ones.
        eager_steps: steps, or parts of steps, that ran without a graph.
        capture_s: seconds spent on captures.
    """

    captures: int = 0
    hits: int = 0
    evictions: int = 0
    eager_steps: int = 0
    capture_s: float = 0.0


def graphs_kept(num_usual: int) -> int:
    """Graphs to keep at a time where so many are usual: all of those, and room for others."""
    return max(_LEAST_KEPT, num_usual + _UNUSUAL_KEPT)


def _is_shortage(error: Exception) -> bool:
    """Whether an error says that a GPU's memory is full.

    Torch's allocator has a class for it; CUDA itself (loading a kernel, instantiating a graph),
    cuBLAS (its handle and workspace) and the plugin library say so in their text alone.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error)
        for text in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")
    )


@contextmanager
def memory_for(what: str, device: torch.device) -> Iterator[None]:
    """What there is no GPU memory for inside, graphs or what they need, is one clear error.

    Raises:
        EngineError: there is no memory for it; has the numbers.
    """
    try:
        yield
    except (RuntimeError, PluginError) as error:
        if not _is_shortage(error):
            raise
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        raise EngineError(
            f"no memory for {what}: {free_bytes} of {total_bytes} bytes are free; lower "
            "kv_cache_free_gpu_memory_fraction, kv_cache_bytes or max_graph_rows, or set "
            "cuda_graphs to off"
        ) from error


class _CollectorPause:
    """Holds the process's collector off while anybody captures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_captures = 0
        self._was_enabled = False

    def begin(self) -> None:
        with self._lock:
            if self._num_captures == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_captures += 1

    def end(self) -> None:
        with self._lock:
            self._num_captures -= 1
            if self._num_captures == 0 and self._was_enabled:
                gc.enable()


_pause = _CollectorPause()


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection of garbage begins by itself inside, in whichever thread.

    What only a collection frees may be a graph, or other memory of the GPU's, of an engine that
    was let go: CUDA refuses to free it in a thread that captures, and the capture is lost.
    """
    _pause.begin()
    try:
        yield
    finally:
        _pause.end()


class GraphCache:
    """Graphs of one device.

    Args:
        device: a CUDA device.
        max_graphs: graphs kept at a time.
    """

    def __init__(self, device: torch.device, max_graphs: int = _LEAST_KEPT) -> None:
        self.counters = GraphCounters()
        self._device = device
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work on the device's current stream, by its graph if it has one.

        The first time a key is seen its work runs without a graph, the second time it is
        captured as well: work that comes once costs no capture.

        Args:
            key: equal keys do equal work on equal addresses.
            work: enqueues on the current stream; reads and writes fixed addresses only, and waits
                for nothing.

        Raises:
            EngineError: there is no memory for it or its capture; has the numbers.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self.counters.hits += 1
            graph.replay()
        elif key in self._seen:
            self.capture(key, work)
        else:
            self._seen[key] = None
            if len(self._seen) > 16 * self._max_graphs:
                self._seen.popitem(last=False)
            self.counters.eager_steps += 1
            with memory_for(f"the first run of {key}", self._device):
                work()

    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work once, so that all it loads is there, and capture it as a graph.

        Raises:
            EngineError: there is no memory for it; has the numbers.
        """
        begin = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        # torch waits for the current device before a capture, whichever the stream's is.
        with memory_for(f"a CUDA graph of {key}", self._device), torch.cuda.device(self._device):
            work()
            with (
                collector_paused(),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                work()
        while len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
            self.counters.evictions += 1
        self._graphs[key] = graph
        self.counters.captures += 1
        self.counters.capture_s += time.monotonic() - begin

    def clear(self) -> None:
        """Give all graphs and their memory up."""
        self._graphs.clear()
        self._seen.clear()
