"""`looptrt verify`: a checkpoint's logits against Transformers."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from rich.table import Table

from looptrt.cli.guard import DIFFERS, show_logs
from looptrt.cli.terminal import Commands, make_console


def add_parser(commands: Commands) -> None:
    """Declare `looptrt verify`."""
    parser = commands.add_parser("verify", help="checkpoint against the reference's logits")
    parser.description = (
        "Compare our logits of a Hugging Face checkpoint with those of this Python's own "
        "Transformers, in float32 and in the checkpoint's dtype. Exit code 1: they differ by "
        "more than rounding."
    )
    parser.set_defaults(command=run)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--reference", choices=("hf",), required=True)
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
