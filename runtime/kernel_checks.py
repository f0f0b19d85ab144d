"""Checks of a GPU's kernels when an engine starts, and what follows from them.

Owns the decision to run an operator op by op, or not to start, and what is recalled of earlier
starts; leaves comparisons to `plugins.probe` and matrix products to `product_checks`. Invariant:
an engine never runs a kernel whose results are known to be wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from looptrt.errors import EngineError
from looptrt.manifest import Manifest
from looptrt.models.operator_calls import operator_calls
from looptrt.plugins import launch
from looptrt.plugins.probe import (
    QUICK_ROWS,
    Clock,
    OpCall,
    Operators,
    Verdict,
    failures,
    probe_rows,
)
from looptrt.plugins.probe_attention import probe_attention
from looptrt.plugins.schema import Exactness
from looptrt.plugins.verdict_cache import VerdictCache, machine
from looptrt.runtime.config import EngineConfig

_PROBE_S = 10.0

_logger = logging.getLogger(__name__)


def settle_kernels(
    manifest: Manifest, config: EngineConfig, device: torch.device
) -> frozenset[str]:
    """Check the engine's kernels on a GPU, or recall a check.

    Returns:
        Operators whose kernels fail: this engine runs them op by op.

    Raises:
        EngineError: the configuration requires exactness and a kernel lacks it.
    """
    calls = operator_calls(manifest)
    largest = manifest.limits.max_num_tokens
    rows = [*(count for count in QUICK_ROWS if count < largest), largest]

    def probe(clock: Clock) -> list[Verdict]:
        return probe_all(calls, rows, device, launch.OPERATORS, clock)

    question = {"calls": list(map(asdict, calls)), "rows": rows}
    verdicts = recalled(question, probe, device, config)
    torch.cuda.empty_cache()
    return act_on(verdicts, require_exact=config.require_exact)


def act_on(verdicts: Sequence[Verdict], *, require_exact: bool) -> frozenset[str]:
    """Operators to run op by op: those without a sound kernel.

    Bits of attention that change with its neighbours are reported only: torch's own attention
    promises no more.

    Raises:
        EngineError: exactness is required and a verdict does not hold.
    """
    failed = list(failures(verdicts))
    if failed and require_exact:
        raise EngineError("require_exact: " + "; ".join(map(_describe, failed)))
    for verdict in failed:
        is_kept = verdict.level is Exactness.BATCH_INVARIANT
        action = "still used" if is_kept else "replaced by torch's operators"
        _logger.warning("kernel %s: %s", action, _describe(verdict))
    elements = sum(verdict.elements for verdict in verdicts)
    _logger.info(
        "%d of %d kernel checks hold (%d results compared)",
        len(verdicts) - len(failed),
        len(verdicts),
        elements,
    )
    return frozenset(v.call.op for v in failed if v.level is not Exactness.BATCH_INVARIANT)


def probe_all(
    calls: Sequence[OpCall],
    rows: Sequence[int],
    device: torch.device,
    operators: Operators,
    clock: Clock,
) -> list[Verdict]:
    """Every operator's verdicts; attention's first, as its cases are few."""
    attention = probe_attention(calls, device, operators, clock)
    return [*probe_rows(calls, rows, device, operators, clock), *attention]


def _cache_dir(config: EngineConfig) -> Path | None:
    if config.cache_dir is not None:
        return Path(config.cache_dir)
    try:
        return Path.home() / ".cache" / "looptrt"
    except RuntimeError as error:
        _logger.warning("kernel verdicts are not kept: %s", error)
        return None


def recalled(
    question: Mapping[str, Any],
    probe: Callable[[Clock], list[Verdict]],
    device: torch.device,
    config: EngineConfig,
) -> list[Verdict]:
    """Verdicts on a GPU, from an earlier start if it asked the same, else made now.

    Args:
        question: what the verdicts are about, as JSON values; the machine is added.
        probe: makes them until a clock is over; what that cut short is not kept.
        device: the GPU.
        config: says where verdicts are kept.
    """
    cache_dir, known = _cache_dir(config), machine(device)
    cache = None
    if known is not None and cache_dir is not None:
        cache = VerdictCache(cache_dir, {"machine": known, **question})
        verdicts = cache.load()
        if verdicts is not None:
            return verdicts
    begin, clock = time.monotonic(), Clock(_PROBE_S)
    with torch.inference_mode(), torch.cuda.device(device):
        verdicts = probe(clock)
    _logger.info("checked against torch in %.1f s", time.monotonic() - begin)
    if cache is not None and not clock.is_over():
        cache.keep(verdicts)
    return verdicts


def _describe(verdict: Verdict) -> str:
    first = verdict.first or f"nothing was compared within {_PROBE_S:g} s"
    return f"{verdict.call.op} ({verdict.level}, against {verdict.against}): {first}"
