"""`looptrt convert`: a checkpoint under the other layout's names."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from looptrt.cli.guard import ended_by_signals, show_logs
from looptrt.cli.terminal import Commands


def add_parser(commands: Commands) -> None:
    """Declare `looptrt convert`."""
    parser = commands.add_parser("convert", help="checkpoint to the other layout's names")
    parser.description = (
        "Write a checkpoint under TensorRT-LLM's names, or one under those back under Hugging "
        "Face's. Every tensor keeps its bits unless --dtype is given."
    )
    parser.set_defaults(command=run)
    parser.add_argument("--checkpoint_dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--to", choices=("hf", "trtllm"), help="(default: the other one)")
    parser.add_argument("--dtype", metavar="{float32,bfloat16}", help="cast the model's tensors")


def run(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    from looptrt.builder.convert import convert  # noqa: PLC0415 - see cli.build

    with show_logs(logging.INFO), ended_by_signals():
        convert(args.checkpoint_dir, args.output_dir, args.to, args.dtype)
    return 0
