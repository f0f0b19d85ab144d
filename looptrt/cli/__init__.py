"""The command line: `looptrt` with its subcommands, and `trtllm-build`.

Owns arguments, what is printed and exit codes; leaves the work to `builder`, `runtime` and
`doctor`. One module a command; `guard` is around all of them.
"""

from __future__ import annotations

try:  # an interrupt before `guard` is up ends without a traceback, too
    import argparse
    import sys
    from collections.abc import Callable

    from looptrt import __version__
    from looptrt.cli import bench, build, convert, doctor, generate, inspect, serve, triton, verify
    from looptrt.cli.guard import guard
    from looptrt.cli.terminal import Parser
except KeyboardInterrupt:
    raise SystemExit(130) from None

_COMMANDS = (convert, verify, generate, serve, triton, bench, inspect, doctor)  # as in --help


def main(argv: list[str] | None = None) -> int:
    """Run `looptrt`; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["build"]:
        prog = "looptrt build"
        return guard(prog, arguments, lambda: build.run(arguments[1:], prog))
    return guard("looptrt", arguments, lambda: _run(arguments))


def trtllm_build(argv: list[str] | None = None) -> int:
    """Run `trtllm-build`; returns the exit code."""
    arguments, prog = sys.argv[1:] if argv is None else argv, "trtllm-build"

    def run() -> int:
        code = build.hand_over(arguments)
        return build.run(arguments, prog) if code is None else code

    return guard(prog, arguments, run)


def _run(arguments: list[str]) -> int:
    args = _make_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="looptrt",
        description="Compile looped language models and run them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"looptrt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    commands.add_parser("build", help="checkpoint to engine directory (see looptrt build --help)")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser
