"""How many units the KV pool gets.

Owns the rules for host and GPU memory; leaves the allocation to the executor. Invariant: a
pool holds at least one page of the deepest loop count and the null unit.
"""

from __future__ import annotations

import math

from looptrt.errors import EngineError
from looptrt.kv_layout import DTYPE_BYTES
from looptrt.manifest import WEIGHTS_NAME, BuildLimits, Manifest
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.executor.graph_cache import graphs_kept
from looptrt.runtime.padding import MAX_READ_SAMPLES, StepShape, graph_rows, usual_shapes

_DEFAULT_HOST_BYTES = 1 << 30
# The books about units are host memory; only units of tiny models reach this.
_MOST_DEFAULT_UNITS = 1 << 20
# CUDA's context grows by loaded kernels and cuBLAS's workspaces, and by every graph.
_CUDA_BYTES = 256 << 20
_GRAPH_BYTES = 4 << 20


def pool_units(
    manifest: Manifest, config: EngineConfig, limits: BuildLimits, free_bytes: int | None
) -> int:
    """Units of the pool, the null unit included.

    Args:
        manifest: the engine.
        config: asks for bytes, or for a share of a GPU's memory.
        limits: of the running engine.
        free_bytes: free memory of the GPU before weights are loaded; None on the CPU.

    Raises:
        EngineError: less than a page fits, or more is asked for than is there; has the numbers.
    """
    layout = manifest.layout
    page_units = layout.units_of_page(layout.max_loops)
    if config.kv_cache_bytes is not None:
        num_units = config.kv_cache_bytes // layout.unit_bytes
        if num_units < page_units + 1:
            raise EngineError(
                f"kv_cache_bytes: {config.kv_cache_bytes} bytes hold {num_units} units of "
                f"{layout.unit_bytes} bytes; one page of {layout.max_loops} loops and the null "
                f"unit need {page_units + 1}"
            )
        if free_bytes is not None:
            left, account = _left(manifest, config, limits, free_bytes)
            if config.kv_cache_bytes > left:
                raise EngineError(f"kv_cache_bytes: {account}")
        return num_units
    if free_bytes is None:
        sequence_units = layout.num_pages(limits.max_seq_len) * page_units
        affordable = max(_DEFAULT_HOST_BYTES // layout.unit_bytes, page_units)
        return min(limits.max_batch_size * sequence_units, affordable) + 1
    left, account = _left(manifest, config, limits, free_bytes)
    share = config.kv_cache_free_gpu_memory_fraction
    num_units = math.floor(share * left) // layout.unit_bytes
    if num_units < page_units + 1:
        raise EngineError(
            f"kv_cache_free_gpu_memory_fraction: {account}; one page and the null unit need "
            f"{(page_units + 1) * layout.unit_bytes}"
        )
    return min(num_units, _MOST_DEFAULT_UNITS)


def step_bytes(manifest: Manifest, config: EngineConfig, limits: BuildLimits) -> int:
    """An upper estimate of what a step needs on a GPU beside weights and KV.

    Per row: the stream, the injection and their copies, the packed projection before and after
    the rotation, the MLP's three buffers. Per sampled row: logits in both dtypes and, while
    they are checked, a third copy.
    """
    spec, width = manifest.spec, DTYPE_BYTES[manifest.dtype]
    row = 8 * spec.hidden_size + 2 * spec.qkv_size + 3 * spec.intermediate_size
    sample = (width + 2 * DTYPE_BYTES[manifest.logits_dtype]) * spec.vocab_size
    # Graphs keep the memory of the largest of them beside that of steps without a graph, which a
    # captured step is at first.
    shapes = graph_shapes(config, limits)
    most = max(shape.rows for shape in shapes)
    num_rows = max(limits.max_num_tokens, most) + most
    context = _CUDA_BYTES + graphs_kept(len(shapes)) * _GRAPH_BYTES
    # Filled-up steps sample as many rows as they have sequences; logits that are read are kept.
    num_samples = max(limits.max_batch_size, *(shape.samples for shape in shapes))
    kept = min(num_samples, MAX_READ_SAMPLES) * spec.vocab_size * DTYPE_BYTES[manifest.logits_dtype]
    return context + num_rows * row * width + 2 * num_samples * sample + kept


def graph_shapes(config: EngineConfig, limits: BuildLimits) -> list[StepShape]:
    """Shapes of the usual steps that are graphs, if the engine has graphs."""
    most = graph_rows(min(limits.max_num_tokens, config.max_graph_rows))
    return usual_shapes(limits.max_batch_size, most)


def _left(
    manifest: Manifest, config: EngineConfig, limits: BuildLimits, free_bytes: int
) -> tuple[int, str]:
    """Bytes that weights and a step leave to the KV, at least 0, and how they were reckoned."""
    weights, step = manifest.files[WEIGHTS_NAME][1], step_bytes(manifest, config, limits)
    left = max(0, free_bytes - weights - step)
    return left, (
        f"of {free_bytes} free bytes on the GPU, weights take {weights} and a step of "
        f"{limits.max_num_tokens} rows up to {step}, which leaves {left} bytes"
    )
