"""How an engine's matrix products run here: what was asked, held against device and probe.

Owns that decision and its refusals; leaves the comparison to `plugins.probe_products` and running
to `plugins.products`. Invariant: a product is joined although its parts are apart in the
checkpoint only where its bits were compared and equal, or where the configuration says so, or on
a CPU, where nothing is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict

import torch

from looptrt.errors import EngineError
from looptrt.manifest import TENSORRT_BACKENDS, Manifest
from looptrt.models.weights import empty_model
from looptrt.plugins.probe import QUICK_ROWS, Clock, Verdict
from looptrt.plugins.probe_products import probe_products, product_of
from looptrt.plugins.products import MAX_SKINNY_BYTES, JoinedProduct, Products
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.kernel_checks import recalled
from looptrt.runtime.padding import PACKED_SIZES, SIZES, size_for

_SIXTEEN_BITS = ("bfloat16", "float16")
_ROWS_BY_DEFAULT = 8  # of our own products: more rows gain nothing

_logger = logging.getLogger(__name__)


def check_asked(config: EngineConfig, dtype: str, backend: str, device: torch.device) -> None:
    """Refuse settings of products, kernels and graphs that nothing here could follow.

    Args:
        config: what was asked.
        dtype: the engine's.
        backend: that runs it.
        device: where.

    Raises:
        EngineError: names the field and why.
    """
    rows = config.skinny_linear_rows
    if backend in TENSORRT_BACKENDS:
        if not config.fused_kernels:
            raise EngineError(
                f"fused_kernels: expected true, got false: backend {backend} runs what was compiled"
            )
        if config.cuda_graphs in ("step", "loop"):
            raise EngineError(
                f"cuda_graphs: expected auto or off, got {config.cuda_graphs}: "
                f"backend {backend} has none"
            )
        own = f"backend {backend} computes matrix products its own way"
        if rows:
            raise EngineError(f"skinny_linear_rows: expected 0, got {rows}: {own}")
        if config.joined_projections != "exact":
            raise EngineError(
                f"joined_projections: expected exact, got {config.joined_projections}: {own}"
            )
    if rows and device.type != "cuda":
        raise EngineError(
            f"skinny_linear_rows: expected 0, got {rows}: the engine runs on device {device}, "
            "the kernel on a GPU"
        )
    if rows and dtype not in _SIXTEEN_BITS:
        raise EngineError(
            f"skinny_linear_rows: expected 0, got {rows}: the engine's dtype is {dtype}, the "
            f"kernel takes {' and '.join(_SIXTEEN_BITS)}"
        )


def settle_products(manifest: Manifest, config: EngineConfig, device: torch.device) -> Products:
    """Decide how the model's products are computed, checking those that are joined on a GPU.

    Args:
        manifest: of an engine whose phases run as torch modules.
        config: what was asked; see `check_asked`.
        device: where the engine runs.
    """
    apart: Sequence[JoinedProduct] = ()
    if config.joined_projections == "never":
        apart = empty_model(manifest).joined_products()
    elif config.joined_projections == "exact" and device.type == "cuda":
        apart = act_on(_verdicts(manifest, config, device), row_counts(manifest))
        torch.cuda.empty_cache()
    return Products(skinny_rows(config, manifest, device), frozenset(apart))


def skinny_rows(config: EngineConfig, manifest: Manifest, device: torch.device) -> int:
    """Rows up to which products of an engine are our own kernel's; see `EngineConfig`.

    0 by default where the kernel does not run, or every layer's matrices are too large for it.
    """
    if config.skinny_linear_rows is not None:
        return config.skinny_linear_rows
    runs_here = device.type == "cuda" and manifest.dtype in _SIXTEEN_BITS
    if not runs_here or config.require_exact:
        return 0
    weights = [one for one in empty_model(manifest).core.parameters() if one.ndim == 2]
    return _ROWS_BY_DEFAULT if any(one.nbytes <= MAX_SKINNY_BYTES for one in weights) else 0


def act_on(verdicts: Sequence[Verdict], rows: Sequence[int]) -> list[JoinedProduct]:
    """Products to compute part by part: those that differ, or were not compared at all `rows`."""
    failed = [one for one in verdicts if not one.holds or len(one.rows) < len(rows)]
    for verdict in failed:
        unseen = f"{len(verdict.rows)} of {len(rows)} row counts were compared in time"
        _logger.warning(
            "projections run apart, as joined they lack the bits of their own products, or may "
            "lack them (joined_projections always joins them all the same): %s",
            verdict.first or unseen,
        )
    if verdicts:
        held = len(verdicts) - len(failed)
        _logger.info("%d of %d joined products have their parts' bits", held, len(verdicts))
    return [product_of(verdict) for verdict in failed]


def row_counts(manifest: Manifest, quick: Sequence[int] = QUICK_ROWS) -> list[int]:
    """Row counts to compare: `quick`, all that graphs may have, and the largest step's.

    Steps that are no graphs have any row count: of theirs it is a sample.
    """
    largest = manifest.limits.max_num_tokens
    most = max(largest, size_for(largest, PACKED_SIZES) or 0)  # graphs may be larger than steps
    counts = dict.fromkeys((*quick, *SIZES, *PACKED_SIZES, largest))
    return [count for count in counts if count <= most]


def _verdicts(manifest: Manifest, config: EngineConfig, device: torch.device) -> list[Verdict]:
    products, rows = empty_model(manifest).joined_products(), row_counts(manifest)
    if not products:
        return []

    def probe(clock: Clock) -> list[Verdict]:
        return probe_products(products, rows, manifest.dtype, device, clock)

    question = {"products": list(map(asdict, products)), "rows": rows, "dtype": manifest.dtype}
    return recalled(question, probe, device, config)
