"""The command line of `looptrt build` and `trtllm-build`.

Owns reading it, the --build_config file under it, and the exit code; leaves the flags to
`flag_table` and the build to `builder.build`. Invariant: bad input ends in one line on stderr
and exit code 2, with nothing written.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from looptrt.builder.build import BuildConfig, build, plan_build
from looptrt.builder.build_config_file import read_build_config
from looptrt.builder.flag_table import FLAGS, GROUPS, Flag, Form
from looptrt.builder.handover import foreign_architecture, hand_over
from looptrt.errors import BuildError, LooptrtError

BAD_INPUT = 2

_KIB_PER_MIB = 1024

_logger = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are BuildErrors, so that they end in one line."""

    def error(self, message: str) -> NoReturn:
        raise BuildError(message)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `looptrt build` and `trtllm-build`: every flag as a word.

    Its `parse_args` raises BuildError instead of leaving the process.
    """
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Build an engine directory from a checkpoint of a looped language model.",
        epilog="docs/trtllm_build.md lists the flags with TensorRT-LLM's defaults.",
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.form is not Form.NONE:
                _add(group, flag)
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    names = [f"--{name}" for name in (flag.name, *flag.aliases)]
    default = flag.here or flag.default
    text = flag.note if flag.read is not None else f"{flag.verdict}; {flag.note}"
    if default is not None and flag.form is Form.VALUE:
        text += f" (default: {default})"
    text = text.replace("%", "%%")
    if flag.form is Form.SWITCH:
        group.add_argument(*names, dest=flag.name, action="store_const", const="enable", help=text)
    else:
        nargs = "+" if flag.form is Form.LIST else None
        group.add_argument(*names, dest=flag.name, nargs=nargs, metavar="VALUE", help=text)


def parse_config(argv: Sequence[str], prog: str) -> tuple[BuildConfig, dict[str, Any]]:
    """Read a command line.

    Returns:
        The build, and {flag name: value} of the flags that were given.

    Raises:
        BuildError: an unknown, foreign or malformed flag; says why.
    """
    words = _words(argv, prog)
    if "build_config" in words:
        file_words = read_build_config(FLAGS["build_config"].value_of(words["build_config"]))
        words = file_words | words
    values = {name: FLAGS[name].value_of(word) for name, word in words.items()}
    defaults = {"checkpoint_dir": None, "output_dir": Path(str(FLAGS["output_dir"].default))}
    fields = BuildConfig.__dataclass_fields__
    given = {name: value for name, value in values.items() if name in fields and value is not None}
    return BuildConfig(**(defaults | given)), values


def _words(argv: Sequence[str], prog: str) -> dict[str, str]:
    """The flags of a command line as words."""
    args, rest = make_parser(prog).parse_known_args(argv)
    if rest:
        raise BuildError(f"{rest[0].partition('=')[0]}: unknown flag; see --help")
    given: dict[str, str | list[str]] = vars(args)
    return {name: word if isinstance(word, str) else " ".join(word) for name, word in given.items()}


def main(argv: Sequence[str], prog: str = "trtllm-build") -> int:
    """Run a build from a command line; returns the process's exit code."""
    try:
        if prog == "trtllm-build" and foreign_architecture(argv) is not None:
            return hand_over(argv)
        config, values = parse_config(argv, prog)
        _start_logging(values)
        if values.get("dry_run"):
            sys.stdout.write(plan_build(config).describe())
        else:
            build(config)
        if values.get("monitor_memory"):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            _logger.info("peak memory of the build: %d MiB", peak // _KIB_PER_MIB)
    except (LooptrtError, OSError) as error:
        sys.stderr.write(f"{prog}: error: {' '.join(str(error).split())}\n")
        return BAD_INPUT
    return 0


def _start_logging(values: Mapping[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("looptrt").setLevel(values.get("log_level", logging.INFO))
