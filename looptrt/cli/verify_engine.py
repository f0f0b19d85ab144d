"""`looptrt verify ENGINE_DIR`: its files and this machine's kernels, as a table."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict
from typing import Any

from rich.table import Table

from looptrt.cli.guard import DIFFERS, show_logs
from looptrt.cli.terminal import make_console
from looptrt.runtime.config import EngineConfig

JOINED = "joined_product"  # as verdicts of `plugins.probe_products`, which needs torch, say
# With --strict: nothing differs, but no GPU's kernels were there to be tested.
NOT_TESTED = 3


def run(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    from looptrt.runtime.engine_checks import check_engine  # noqa: PLC0415 - see cli.build

    with show_logs(logging.WARNING):
        report = check_engine(args.engine_dir, EngineConfig(device=args.device).device)
    rows, joined = (
        [_row(asdict(verdict), holds=verdict.holds) for verdict in verdicts]
        for verdicts in (report.verdicts, report.joined)
    )
    if args.json:
        facts = {name: getattr(report, name) for name in ("num_files", "gpu", "why_no_gpu")}
        print(json.dumps({**facts, "checks": rows, "joined_products": joined}, indent=2))
    else:
        _print(report.num_files, report.gpu, report.why_no_gpu, rows + joined)
    if not args.strict:
        return 0
    if not all(row["holds"] for row in rows):
        return DIFFERS
    return 0 if report.gpu else NOT_TESTED


def _row(verdict: dict[str, Any], *, holds: bool) -> dict[str, Any]:
    call = verdict.pop("call")
    return {
        "operator": call["op"],
        "shapes": _shapes(dict(call["sizes"]), dict(call["attributes"]), verdict["rows"]),
        "dtype": call["dtype"],
        **verdict,
        "rows": sorted(set(verdict["rows"])),
        "attributes": dict(call["attributes"]),
        "holds": holds,
    }


def _shapes(sizes: dict[str, int], attributes: dict[str, float], rows: list[int]) -> str:
    """Row counts and what makes the width."""
    span = f"{min(rows, default=0)}..{max(rows, default=0)} rows"
    if "head_dim" in attributes:
        heads = "{num_heads:.0f}/{num_kv_heads:.0f} heads of {head_dim:.0f}".format(**attributes)
        return f"{span}, {heads}"
    if "K" in sizes:
        parts = " + ".join(str(size) for name, size in sizes.items() if name != "K")
        return f"{span} of {sizes['K']} to {parts}"
    return f"{span} of {sizes.get('H') or sizes.get('I')}"


def _print(num_files: int, gpu: dict[str, str], reason: str, rows: list[dict[str, Any]]) -> None:
    console = make_console()
    console.print(f"{num_files} files are as they were built")
    if gpu:
        facts = "{gpu}, driver {driver}, torch {torch}, CUDA {cuda}".format(**gpu)
        console.print(f"tested on {facts}, plugin library {gpu['library'][:12]}")
    else:
        console.print(f"NO GPU WAS TESTED: {reason}")
        console.print(
            "The CPU runs PyTorch's own operators; only its attention is compared, with torch's."
        )
    table = Table("operator", "promise", "shapes", "elements", "mismatches", "verdict")
    table.columns[0].no_wrap = True
    for row in rows:
        # A product that lacks its parts' bits is no fault of the machine's: it is not joined.
        failure = "apart" if row["operator"] == JOINED else "FAILS"
        table.add_row(
            row["operator"],
            f"{row['level']}: {row['against']}",
            f"{row['shapes']} {row['dtype']}",
            f"{row['elements']:,}",
            f"{row['mismatches']:,}",
            "holds" if row["holds"] else f"{failure}: {row['first'] or 'nothing was compared'}",
        )
    console.print(table)
