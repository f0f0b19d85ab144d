"""`looptrt verify`: an engine on this machine, or a checkpoint's logits against Transformers."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from rich.table import Table

from looptrt.cli import verify_engine
from looptrt.cli.guard import DIFFERS, show_logs
from looptrt.cli.terminal import Commands, make_console
from looptrt.errors import LooptrtError


def add_parser(commands: Commands) -> None:
    """Declare `looptrt verify`."""
    parser = commands.add_parser("verify", help="engine or checkpoint against its reference")
    parser.description = (
        "With ENGINE_DIR: check its files, and every kernel it would use on this machine's GPU "
        "against the installed PyTorch, on the engine's shapes. With --checkpoint: compare our "
        "logits of a Hugging Face checkpoint with those of this Python's own Transformers, in "
        "float32 and in the checkpoint's dtype; exit code 1 says that they differ by more than "
        "rounding."
    )
    parser.set_defaults(command=run)
    engine = parser.add_argument_group("an engine")
    engine.add_argument("engine_dir", type=Path, nargs="?", metavar="ENGINE_DIR")
    engine.add_argument(
        "--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N"
    )
    engine.add_argument(
        "--strict",
        action="store_true",
        help="exit code 1 on a mismatch, 3 if no GPU could be tested",
    )
    engine.add_argument("--json", action="store_true", help="print JSON")
    _add_checkpoint(parser)


def _add_checkpoint(whole: argparse.ArgumentParser) -> None:
    parser = whole.add_argument_group("a checkpoint")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR")
    parser.add_argument("--reference", choices=("hf",), help="needed with --checkpoint")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the checkpoint's modelling code"
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompts", type=int, default=3, metavar="N", help="random prompts (default: 3)"
    )
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeatable")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="float32 difference that passes, in parts of the largest logit (default: 0.001)",
    )


def run(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    if (args.engine_dir is None) == (args.checkpoint is None):
        raise LooptrtError("verify: expected ENGINE_DIR or --checkpoint, one of them")
    if args.checkpoint is None:
        return verify_engine.run(args)
    if args.reference is None:
        raise LooptrtError("verify: --checkpoint needs --reference hf")
    from looptrt.builder.compare import verify_checkpoint  # noqa: PLC0415 - see cli.build

    with show_logs(logging.WARNING):
        rows = verify_checkpoint(
            args.checkpoint,
            texts=args.prompt,
            num_prompts=args.prompts,
            tolerance=args.tolerance,
            trust_remote_code=args.trust_remote_code,
        )
    headings = ("prompt", "dtype", "positions", "max diff", "allowed", "same top-1", "first beyond")
    table = Table(*headings, title="Our logits against the float32 reference's")
    for row in rows:
        table.add_row(
            row.prompt,
            row.dtype,
            str(row.num_positions),
            f"{row.max_diff:.3g}",
            f"{row.allowed:.3g}",
            f"{row.num_same_top1} of {row.num_positions}",
            "none" if row.passes else f"position {row.first_beyond}",
        )
    make_console().print(table)
    return 0 if all(row.passes for row in rows) else DIFFERS
