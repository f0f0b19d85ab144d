"""A result as a picture.

Owns what is drawn of each kind; leaves numbers to the results. Matplotlib is an extra: it is
loaded when a picture is asked for, and asked for before anything is measured.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looptrt.errors import LooptrtError

_INCHES = (7.0, 4.2)
_DPI = 150

Result = Mapping[str, Any]


def require_matplotlib(path: Path) -> None:
    """Fail now rather than after the measurement.

    Args:
        path: of the picture to come.

    Raises:
        LooptrtError: matplotlib is not installed, or does not know the format.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise LooptrtError("--plot: matplotlib is not installed; pip install 'looptrt[bench]'")
    base = importlib.import_module("matplotlib.backend_bases")
    known = sorted(base.FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known:
        raise LooptrtError(f"--plot {path}: expected a name that ends in one of {', '.join(known)}")


def draw(result: Result, path: Path) -> None:
    """Draw a result into a file, whose ending says the format.

    Raises:
        LooptrtError: matplotlib is not installed, or does not know the format.
    """
    require_matplotlib(path)
    pictures = importlib.import_module("matplotlib.figure")
    figure = pictures.Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    _DRAWN[result["kind"]](axes, result)
    facts = result["machine"]
    axes.set_title(
        f"{result['engine']['architecture']}, {facts['gpu'] or 'CPU'}, {result['date'][:10]}",
        fontsize=9,
    )
    figure.savefig(path)


def _lines(axes: Any, result: Result, across: str, *value: str) -> None:  # noqa: ANN401 - no stubs
    """One line an arm: a median by the cells' variable."""
    for name, arm in result["arms"].items():
        points = []
        for cell in arm["cells"]:
            found: Any = cell["median"]
            for key in value:
                found = (found or {}).get(key)
            if found is not None:
                points.append((cell[across], found))
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _burst(axes: Any, result: Result) -> None:  # noqa: ANN401
    _lines(axes, result, "concurrency", "output_tokens_per_s")
    axes.set(xlabel="requests at once", ylabel="output tokens/s, prefill included")


def _latency(axes: Any, result: Result) -> None:  # noqa: ANN401
    _lines(axes, result, "batch", "ms_per_token")
    axes.set(xlabel="requests that decode together", ylabel="ms per output token")


def _poisson(axes: Any, result: Result) -> None:  # noqa: ANN401
    _lines(axes, result, "rate", "latency_per_token_ms", "p50")
    threshold = result["workload"]["threshold_ms"]
    if threshold is not None:
        axes.axhline(threshold, linestyle="--", color="black", linewidth=1)
    axes.set(xlabel="requests/s", ylabel="median latency per output token, ms")


def _sessions(axes: Any, result: Result) -> None:  # noqa: ANN401
    shares = {
        name: 100 * (arm["cells"][0]["median"].get("cached_share") or 0.0)
        for name, arm in result["arms"].items()
    }
    axes.bar(list(shares), list(shares.values()))
    axes.set(ylabel="prompt tokens reused, %", ylim=(0, 100))


def _ladder(axes: Any, result: Result) -> None:  # noqa: ANN401
    names = list(result["arms"])
    counts = result["workload"]["concurrency"]
    height = 0.8 / len(counts)
    for place, count in enumerate(counts):
        ratios = [result["arms"][name]["cells"][place]["throughput_ratio"] or 0 for name in names]
        offsets = [row + height * place for row in range(len(names))]
        axes.barh(offsets, ratios, height=height, label=f"{count} requests")
    rungs = [f"{name} ({result['arms'][name]['rung']})" for name in names]
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], rungs)
    axes.invert_yaxis()
    axes.axvline(1.0, linestyle="--", color="black", linewidth=1)
    axes.set(xlabel="throughput with the change / without")
    axes.legend()


_DRAWN = {
    "burst": _burst,
    "latency": _latency,
    "poisson": _poisson,
    "sessions": _sessions,
    "ladder": _ladder,
}
