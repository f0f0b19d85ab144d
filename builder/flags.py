"""The command line of `looptrt build` and `trtllm-build`, read.

Owns reading it and the --build_config file under it; leaves the flags to `flag_table`, the
build to `builder.build`, and errors and exit codes to `looptrt.cli`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from looptrt.builder.build_config import BuildConfig
from looptrt.builder.build_config_file import read_build_config
from looptrt.builder.flag_table import FLAGS, GROUPS, Flag, Form
from looptrt.errors import BuildError


@dataclass(frozen=True)
class BuildCommand:
    """A command line that was read: the build, and how it is run."""

    config: BuildConfig
    dry_run: bool = False
    monitor_memory: bool = False
    log_level: int = logging.INFO


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `looptrt build` and `trtllm-build`: every flag as a word."""
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        exit_on_error=False,
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


def read_command(argv: Sequence[str], prog: str) -> BuildCommand:
    """Read a command line.

    Raises:
        BuildError: an unknown, foreign or malformed flag; says why.
    """
    words = _words(argv, prog)
    if "build_config" in words:
        file_words = read_build_config(FLAGS["build_config"].value_of(words["build_config"]))
        words = file_words | words
    values = {name: FLAGS[name].value_of(word) for name, word in words.items()}
    defaults = {"checkpoint_dir": None, "output_dir": Path(str(FLAGS["output_dir"].default))}
    given = {name: value for name, value in values.items() if value is not None}
    fields = {name: given.pop(name) for name in BuildConfig.__dataclass_fields__ if name in given}
    options = {name: given[name] for name in BuildCommand.__dataclass_fields__ if name in given}
    return BuildCommand(BuildConfig(**(defaults | fields)), **options)


def _words(argv: Sequence[str], prog: str) -> dict[str, str]:
    """The flags of a command line as words."""
    try:
        args, rest = make_parser(prog).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise BuildError(str(error)) from None
    if rest:
        raise BuildError(f"{rest[0].partition('=')[0]}: unknown flag; see --help")
    given: dict[str, str | list[str]] = vars(args)
    return {name: word if isinstance(word, str) else " ".join(word) for name, word in given.items()}
