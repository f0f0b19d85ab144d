"""A result as rows of text.

Owns what of each kind is shown; leaves the look to whoever prints. Invariant: a figure that a
result lacks is shown as a dash, never as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Cell = Mapping[str, Any]
Rows = list[list[str]]


def table(result: Mapping[str, Any]) -> tuple[list[str], Rows]:
    """Headers and rows of a result of any kind."""
    headers, rows = _SHOWN[result["kind"]]
    return headers, rows(result)


def number(value: float | None, digits: int = 1) -> str:
    """A figure with thousands marked, or a dash."""
    return "–" if value is None else f"{value:,.{digits}f}"


_SERVED = ["tokens/s", "TTFT ms", "p50", "p90", "p99", "≤ 1 s", "TPOT p50", "p90", "p99"]
_SERVED += ["cached", "KV peak", "answered", "×", "same"]


def _served(cell: Cell) -> list[str]:
    """What `burst.compared` makes of a cell."""
    median, against = cell["median"], cell.get("against_default", {})
    ttft, tpot = median.get("ttft_ms", {}), median.get("tpot_ms", {})
    same = against.get("identical")
    return [
        number(median.get("output_tokens_per_s")),
        *(number(ttft.get(name)) for name in ("mean", "p50", "p90", "p99")),
        _percent(median.get("share_ttft_up_to_1_s")),
        *(number(tpot.get(name), 2) for name in ("p50", "p90", "p99")),
        _percent(median.get("cached_share")),
        _percent(median["kv"]["peak_share"]),
        f"{median['answered']:g}/{median['requests']:g}",
        number(against.get("throughput_ratio"), 2),
        "–" if same is None else f"{same}/{against['total']}",
    ]


def _burst(result: Mapping[str, Any]) -> Rows:
    return [
        [name, f"{cell['concurrency']}", *_served(cell)]
        for name, arm in result["arms"].items()
        for cell in arm["cells"]
    ]


def _poisson(result: Mapping[str, Any]) -> Rows:
    rows = [
        [
            name,
            f"{cell['rate']:g}",
            number(cell["median"].get("latency_per_token_ms", {}).get("p50"), 2),
            *_served(cell),
        ]
        for name, arm in result["arms"].items()
        for cell in arm["cells"]
    ]
    blank = ["–"] * len(_SERVED)
    for name, arm in result["arms"].items():
        if search := arm.get("search"):
            held = number(search["highest_rate_held"], 3)
            under = f"≤ {search['threshold_ms']:g}"
            rows.append([f"{name}: highest rate", held, under, *blank])
    return rows


def _sessions(result: Mapping[str, Any]) -> Rows:
    rows = []
    for name, arm in result["arms"].items():
        cold = arm.get("against_cold")
        hits = "–" if cold is None else f"{cold['hits']['identical']}/{cold['hits']['total']}"
        rows += [[name, hits, *_served(cell)] for cell in arm["cells"]]
    return rows


def _latency(result: Mapping[str, Any]) -> Rows:
    rows = []
    for name, arm in result["arms"].items():
        for cell in arm["cells"]:
            step, ratio = cell["median"]["step_ms"], cell.get("against_default", {})
            figures = [cell["median"]["ms_per_token"], *(step[p] for p in ("p90", "p99"))]
            shown = [number(value, 3) for value in figures]
            rows.append([name, f"{cell['batch']}", *shown, number(ratio.get("time_ratio"), 2)])
        if mix := arm.get("saturation", {}).get("step_mix"):
            means = f"{mix['mean_decode_rows']:.1f} decode + {mix['mean_prompt_rows']:.1f} prompt"
            rows.append([name, "saturated", f"{means} rows a step", "–", "–", "–"])
    return rows


def _ladder(result: Mapping[str, Any]) -> Rows:
    rows = []
    for name, row in result["arms"].items():
        quality = row.get("quality")
        verdict = "–"
        if quality:
            error = quality["standard_error"]
            verdict = f"{quality['points']:+.2f} ± {error:.2f}: {quality['verdict']}"
        for cell in row["cells"]:
            rows.append(
                [
                    row["rung"],
                    name,
                    "yes" if row["is_default"] else "no",
                    f"{cell['concurrency']}",
                    f"{cell['identical']}/{cell['requests']}",
                    number(cell["throughput_ratio"], 2),
                    verdict,
                ]
            )
    return rows


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


_SHOWN = {
    "burst": (["arm", "requests", *_SERVED], _burst),
    "poisson": (["arm", "rate", "ms/token p50", *_SERVED], _poisson),
    "sessions": (["arm", "hits = cold", *_SERVED], _sessions),
    "latency": (["arm", "batch", "ms/token", "p90", "p99", "×"], _latency),
    "ladder": (
        ["rung", "change", "default", "requests", "identical", "×", "quality, points"],
        _ladder,
    ),
}
