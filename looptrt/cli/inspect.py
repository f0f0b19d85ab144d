"""`looptrt inspect`: what an engine directory holds and what a memory can."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from looptrt.cli.terminal import Commands, byte_count, make_console, size_text
from looptrt.errors import LooptrtError
from looptrt.manifest import Manifest


def add_parser(commands: Commands) -> None:
    """Declare `looptrt inspect`."""
    parser = commands.add_parser("inspect", help="describe an engine directory")
    parser.description = "Describe an engine directory: phases, KV units, what a memory can hold."
    parser.set_defaults(command=run)
    parser.add_argument("engine_dir", type=Path, metavar="ENGINE_DIR")
    parser.add_argument(
        "--memory",
        type=byte_count,
        default="8GiB",
        metavar="SIZE",
        help="KV memory (default: 8GiB)",
    )
    parser.add_argument("--loops", type=int, metavar="S", help="loops of generated tokens")
    parser.add_argument("--prefill-loops", type=int, metavar="P", help="loops of prompt tokens")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    manifest = Manifest.load(args.engine_dir)
    max_loops = manifest.layout.max_loops
    loops = min(manifest.spec.num_loops, max_loops) if args.loops is None else args.loops
    prefill_loops = loops if args.prefill_loops is None else args.prefill_loops
    if not 1 <= prefill_loops <= loops <= max_loops:
        raise LooptrtError(
            f"inspect: expected 1 <= --prefill-loops <= --loops <= {max_loops}, "
            f"got {prefill_loops} and {loops}"
        )
    report = _report(manifest, args.memory, loops, prefill_loops)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(manifest, report)
    return 0


def _report(manifest: Manifest, memory: int, loops: int, prefill_loops: int) -> dict[str, Any]:
    layout = manifest.layout
    null_unit = 1
    num_units = max(memory // layout.unit_bytes - null_unit, 0)
    return {
        "architecture": manifest.spec.architecture,
        "backend": manifest.backend,
        "dtype": manifest.dtype,
        "logits_dtype": manifest.logits_dtype,
        "fingerprint": manifest.fingerprint,
        "limits": dataclasses.asdict(manifest.limits),
        "end_tokens": {"ids": list(manifest.tokens.eos), "source": manifest.tokens.source},
        "phases": {name: dataclasses.asdict(phase) for name, phase in manifest.phases.items()},
        "kv": {
            "strategy": layout.strategy.name,
            "page_tokens": layout.page_size,
            "max_loops": layout.max_loops,
            "unit_shape": list(layout.unit_shape),
            "unit_bytes": layout.unit_bytes,
            "boundary_rows": layout.boundary_units,
            "plane_rows": layout.num_planes,
        },
        "memory": {
            "bytes": memory,
            "units": num_units,
            "prompt": _per_token(manifest, num_units, prefill_loops),
            "generated": _per_token(manifest, num_units, loops),
        },
    }


def _per_token(manifest: Manifest, num_units: int, depth: int) -> dict[str, int]:
    layout, spec = manifest.layout, manifest.spec
    all_layers = spec.prelude_layers + spec.core_layers + spec.coda_layers
    return {
        "loops": depth,
        "bytes_per_token": layout.bytes_per_token(depth),
        "bytes_per_token_all_layers": all_layers * depth * layout.slot_bytes_per_token,
        "capacity_tokens": num_units // layout.units_of_page(depth) * layout.page_size,
    }


def _print_report(manifest: Manifest, report: dict[str, Any]) -> None:
    console = make_console()
    console.print(
        f"{report['architecture']}, {report['backend']} backend, {report['dtype']} "
        f"(logits {report['logits_dtype']}), built by looptrt {manifest.version}"
    )
    phases = Table("phase", "inputs", "outputs", "files", title="Phases")
    for name, phase in manifest.phases.items():
        files = phase.onnx
        if phase.engine is not None:
            gpus = ", ".join(phase.engine.compute_capabilities)
            files += f", {phase.engine.file} (TensorRT {phase.engine.tensorrt}, GPUs of {gpus})"
        phases.add_row(name, ", ".join(phase.inputs), ", ".join(phase.outputs), files)
    console.print(phases, _kv_table(report), _memory_table(report))


def _kv_table(report: dict[str, Any]) -> Table:
    kv, limits = report["kv"], report["limits"]
    table = Table("", "", title="KV and limits", show_header=False)
    table.add_row("unit [slots, K/V, tokens, heads, dim]", " × ".join(map(str, kv["unit_shape"])))
    table.add_row("bytes of a unit", f"{kv['unit_bytes']} ({size_text(kv['unit_bytes'])})")
    rows = kv["boundary_rows"] + kv["plane_rows"]
    table.add_row(
        "rows of the block table",
        f"{rows}: {kv['boundary_rows']} boundary, {kv['plane_rows']} planes ({kv['strategy']})",
    )
    table.add_row("deepest loop count", str(kv["max_loops"]))
    for name, value in limits.items():
        table.add_row(name, str(value))
    table.add_row("ids that end an answer", f"{report['end_tokens']['ids']}")
    return table


def _memory_table(report: dict[str, Any]) -> Table:
    memory = report["memory"]
    title = f"{size_text(memory['bytes'])} of KV memory: {memory['units']} units"
    table = Table("tokens", "loops", "bytes a token", "all layers at each loop", "fit", title=title)
    for kind in ("prompt", "generated"):
        row = memory[kind]
        ratio = row["bytes_per_token_all_layers"] / row["bytes_per_token"]
        table.add_row(
            kind,
            str(row["loops"]),
            str(row["bytes_per_token"]),
            f"{row['bytes_per_token_all_layers']} ({ratio:.2f} ×)",
            str(row["capacity_tokens"]),
        )
    return table
