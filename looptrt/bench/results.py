"""The form of a result: what ran where, and what came out.

Owns the JSON, the sums over records and the tables; leaves what is measured to the kinds of
benchmark. Invariant: a result names the machine, the versions, the engine, every setting and
every failed request.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from looptrt import __version__
from looptrt.bench.arms import Arm
from looptrt.bench.runs import Record, Run
from looptrt.bench.statistics import spread
from looptrt.manifest import Manifest
from looptrt.plugins.verdict_cache import driver_version
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM

FORMAT = 1
GOOD_TTFT_S = 1.0
_GIT_TIMEOUT_S = 10.0


def machine(commit: str | None = None, device: str = "auto") -> dict[str, Any]:
    """GPU, driver, versions and the commit of the source tree.

    Args:
        commit: where git cannot say it: a copy of the tree, an installed package.
        device: `EngineConfig.device`, whose GPU is named; of `cpu` none is.
    """
    has_gpu = device != "cpu" and torch.cuda.is_available()
    index = 0 if device == "auto" else torch.device(device).index or 0
    return {
        "gpu": torch.cuda.get_device_name(index) if has_gpu else None,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "looptrt": __version__,
        "commit": commit or source_commit(),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def source_commit() -> str | None:
    """Short hash of the tree that this package lies in, marked when files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(
            command,
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def engine(manifest: Manifest) -> dict[str, Any]:
    """What tells an engine directory from others."""
    spec, layout = manifest.spec, manifest.layout
    return {
        "architecture": spec.architecture,
        "fingerprint": manifest.fingerprint,
        "built_by": manifest.version,
        "backend": manifest.backend,
        "dtype": manifest.dtype,
        "loops": layout.max_loops,
        "kv_planes": layout.strategy.name,
        "tokens_per_block": layout.page_size,
        "unit_bytes": layout.unit_bytes,
    }


def result(
    kind: str,
    *,
    manifest: Manifest,
    config: EngineConfig,
    workload: Mapping[str, Any],
    arms: Mapping[str, Any],
    commit: str | None = None,
    **more: Any,  # noqa: ANN401 - a kind's own JSON values
) -> dict[str, Any]:
    """A whole result as JSON values.

    Args:
        kind: of benchmark.
        manifest: of the engine directory.
        config: of the default arm.
        workload: everything that says what was asked.
        arms: what came out, arm by arm.
        commit: see `machine`.
        more: top-level entries of the kind.
    """
    return {
        "format": FORMAT,
        "kind": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(commit, config.device),
        "engine": engine(manifest),
        "config": config.to_json(),
        "workload": dict(workload),
        "arms": dict(arms),
        **more,
    }


def described(arm: Arm, llm: LLM) -> dict[str, Any]:
    """An arm's settings and its engine's figures since it started, graphs captured among them."""
    return {**arm.to_json(), "engine_config": llm.config.to_json(), "engine_stats": llm.stats()}


def summary(run: Run) -> dict[str, Any]:
    """Sums of one run.

    Throughput counts whole answers only, from the start of the run to the last one's end;
    times are milliseconds, spreads over the requests that were answered.
    """
    answered = run.answered
    output_tokens = sum(len(record.token_ids) for record in answered)
    prompt_tokens = sum(record.num_prompt for record in answered)
    cached_tokens = sum(record.num_cached for record in answered)
    ttfts = _present(record.ttft_s for record in answered)
    return {
        "requests": len(run.records),
        "answered": len(answered),
        "failed": failures(run),
        "wall_s": run.wall_s,
        "prompt_tokens": prompt_tokens,
        "cached_prompt_tokens": cached_tokens,
        "cached_share": cached_tokens / prompt_tokens if prompt_tokens else None,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / run.wall_s if run.wall_s > 0 else None,
        "preemptions": sum(record.num_preemptions for record in answered),
        "ttft_ms": _ms(ttfts),
        "tpot_ms": _ms(_present(record.tpot_s for record in answered)),
        "latency_per_token_ms": _ms(_present(record.latency_per_token_s for record in answered)),
        "share_ttft_up_to_1_s": sum(ttft <= GOOD_TTFT_S for ttft in ttfts) / len(ttfts)
        if ttfts
        else None,
    }


def failures(run: Run) -> list[dict[str, Any]]:
    """Which requests failed, and why."""
    return [{"index": record.index, "error": record.error} for record in run.failed]


def failed_requests(data: object, where: str = "") -> list[str]:
    """Every failed request of a result, as text with its place."""
    found: list[str] = []
    if isinstance(data, Mapping):
        for name, value in data.items():
            if name == "failed" and isinstance(value, list):
                found += [f"{where.strip('/')}: {entry}" for entry in value]
            else:
                found += failed_requests(value, f"{where}/{name}")
    elif isinstance(data, list):
        for index, value in enumerate(data):
            found += failed_requests(value, f"{where}/{index}")
    return found


def identical(records: Sequence[Record], reference: Sequence[Record]) -> dict[str, int]:
    """Answers with the reference's token ids, of those that both have whole."""
    pairs = [
        (one, other)
        for one, other in zip(records, reference, strict=True)
        if one.error is None and other.error is None
    ]
    same = sum(one.token_ids == other.token_ids for one, other in pairs)
    return {"identical": same, "total": len(pairs)}


def write_json(data: Mapping[str, Any], path: Path) -> None:
    """Write a result, whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown, ending in a newline."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ms(seconds: Sequence[float]) -> dict[str, float] | None:
    return spread([1e3 * value for value in seconds])
