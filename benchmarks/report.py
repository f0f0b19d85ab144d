"""The performance table of README.md, from the JSON that benchmarks/serving.py wrote.

    python benchmarks/report.py [--results FILE] [--readme README.md]

Prints the table; with --readme it also replaces what lies between the two marker lines there.
`--check` writes nothing and exits 1 where the file differs from the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from looptrt.bench.results import markdown_table

BEGIN = "<!-- performance: made by benchmarks/report.py, do not edit -->"
END = "<!-- end of performance -->"
_PLAIN = {"Ouro-1.4B": "ouro-plain", "Huginn-0125": "huginn-plain"}
_DEFAULT = Path(__file__).parent / "results" / "serving.json"


def number(value: float | None) -> str:
    """Three to five digits; verdicts are taken from the whole value."""
    if value is None:
        return "not measured"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f}"


def verdict(figure: dict[str, Any]) -> str:
    """Met, or by how much missed."""
    value, target = figure["value"], figure["target"]
    if target is None:
        return ""
    if value is None:
        return "not measured"
    if figure["met"]:
        return "met"
    return f"missed by {abs(value - target) / target:.1%}"


def beside(figure: dict[str, Any], rows: dict[str, Any]) -> str:
    """The model's matrix products alone and the same model as plain compiled PyTorch."""
    if not figure["beside"]:
        return ""
    model, count = figure["beside"][0], str(figure["beside"][1])
    notes, value = [], figure["value"]
    limits = rows.get("limits", {}).get("detail", {})
    gemms = limits.get("gemm_ms", {}).get(model, {}).get(count)
    weights_ms = limits.get("weights_over_bandwidth_ms", {}).get(model)
    if weights_ms and figure["unit"] == "ms":
        notes.append(f"weights / bandwidth {weights_ms:.2f} ms")
    if gemms and value and figure["unit"] == "ms":
        notes.append(f"GEMMs alone {gemms:.2f} ms, {value / gemms:.2f} ×")
    plain = rows.get(_PLAIN.get(model, ""), {}).get("detail", {}).get(count)
    if plain and value:
        key = "ms_per_token" if figure["unit"] == "ms" else "output_tokens_per_s"
        notes.append(f"plain torch.compile {number(plain[key])} {figure['unit']}")
    return "; ".join(notes)


def table(result: dict[str, Any]) -> str:
    """All rows as Markdown, with the machines that they ran on."""
    rows: dict[str, Any] = result["rows"]
    lines: list[list[str]] = []
    machines: dict[str, list[str]] = {}
    for name, row in rows.items():
        facts = row["machine"]
        place = f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}"
        machines.setdefault(place, []).append(facts["commit"] or "unknown")
        if "error" in row:
            lines.append([name, "failed: " + row["error"].replace("|", "/"), "", "", ""])
        for figure in row["figures"]:
            bound = figure["bound"]
            target = f"{bound} {figure['target']:,g}" if bound else ""
            value = f"{number(figure['value'])} {figure['unit']}"
            lines.append([figure["name"], value, target, verdict(figure), beside(figure, rows)])
    heads = [
        f"{place}; commits {', '.join(dict.fromkeys(commits))}."
        for place, commits in machines.items()
    ]
    note = "Random weights of the released shapes, bfloat16, 512-token random prompts, greedy."
    shown = markdown_table(["", "measured", "target", "", "beside it"], lines)
    return f"{note} {' '.join(heads)}\n\n{shown}"


def replaced(text: str, new: str) -> str:
    """A file's text with the part between the markers replaced.

    Raises:
        SystemExit: the markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"report: expected one line {BEGIN} and after it one line {END}")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{before}{BEGIN}\n\n{new}\n{after}"


def main() -> int:
    """Print the table and put it into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=_DEFAULT, help="(default: %(default)s)")
    parser.add_argument("--readme", type=Path, help="file with the two marker lines")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    new = table(json.loads(options.results.read_text(encoding="utf-8")))
    print(new, end="")
    if options.readme is None:
        return 0
    text = options.readme.read_text(encoding="utf-8")
    updated = replaced(text, new)
    if options.check:
        return 0 if updated == text else 1
    options.readme.write_text(updated, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
