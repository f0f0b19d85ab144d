"""Which device an engine runs on, and why not on a GPU.

Owns the choice and its reasons; leaves what runs there to the executors. Invariant: a GPU that
was asked for by name is used or refused with the reason; only `auto` may end on the CPU, with
the reason in one log line.
"""

from __future__ import annotations

import logging

import torch

from looptrt.errors import EngineError, LooptrtError
from looptrt.manifest import BuildLimits, Manifest
from looptrt.plugins import launch
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.executor.device_memory import cuda_runtime
from looptrt.runtime.pool_size import graph_shapes

AUTO = "auto"
CPU = torch.device("cpu")

_logger = logging.getLogger(__name__)


def choose_device(asked: str) -> torch.device:
    """The device that `EngineConfig.device` means on this machine.

    Args:
        asked: `auto`, `cpu`, `cuda` or `cuda:N`.

    Returns:
        The CPU, or a CUDA device with its index.

    Raises:
        EngineError: a GPU was asked for by name and cannot be used; says why.
    """
    if asked == CPU.type:
        return CPU
    index = (torch.device(asked).index or 0) if asked != AUTO else 0
    reason = why_no_gpu(index)
    if reason is None:
        return torch.device("cuda", index)
    if asked != AUTO:
        raise EngineError(f"device {asked}: {reason}")
    # A GPU that lies idle is worth a warning, a machine without one is not.
    level = logging.INFO if _no_gpu(index) else logging.WARNING
    _logger.log(level, "device auto: running on the CPU: %s", reason)
    return CPU


def why_no_gpu(index: int = 0) -> str | None:
    """Why the GPU of this index cannot run an engine; None when it can."""
    return _no_gpu(index) or _no_kernels(index)


def free_beside_scratch(
    device: torch.device, manifest: Manifest, config: EngineConfig, limits: BuildLimits
) -> int:
    """Free memory of a GPU beside the scratch memory of attention; see `scratch_bytes`."""
    scratch = scratch_bytes(manifest, config, limits)
    return max(0, torch.cuda.mem_get_info(device)[0] - scratch)


def scratch_bytes(manifest: Manifest, config: EngineConfig, limits: BuildLimits) -> int:
    """Scratch memory of attention: of the largest step, and once more of the largest graph.

    Graphs have a memory pool of their own, and may run more rows and sequences than a step has;
    so does their work when it runs before it is captured.
    """
    spec, layout = manifest.spec, manifest.layout
    num_pages = layout.num_pages(limits.max_seq_len)
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
    dtype = getattr(torch, manifest.dtype)

    def of_call(rows: int, seqs: int) -> int:
        return launch.attention_workspace_bytes(
            rows, seqs, num_pages, heads, layout.page_size, dtype
        )

    of_step = of_call(limits.max_num_tokens, limits.max_batch_size)
    if config.cuda_graphs == "off":
        return of_step
    of_graph = max(of_call(shape.rows, shape.seqs) for shape in graph_shapes(config, limits))
    return max(of_step, of_graph) + of_graph


def _no_gpu(index: int) -> str | None:
    """Why torch has no GPU of this index."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch is built for CUDA {torch.version.cuda}, but finds no usable GPU"
    count = torch.cuda.device_count()
    return None if index < count else f"there are {count} GPUs, the first is cuda:0"


def _no_kernels(index: int) -> str | None:
    """Why the plugin library cannot serve this GPU; one small call is tried."""
    device = torch.device("cuda", index)
    try:
        cuda_runtime()
        launch.load()
        rows = torch.zeros(1, dtype=torch.int32, device=device)
        launch.compact_gather(torch.zeros(1, 8, device=device), rows)
        torch.cuda.synchronize(device)
    except (LooptrtError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
        return str(error)
    return None
