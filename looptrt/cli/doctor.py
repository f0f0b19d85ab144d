"""`looptrt doctor`: what is installed, which backends work here."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.table import Table

from looptrt import __version__, doctor
from looptrt.cli.terminal import Commands, make_console


def add_parser(commands: Commands) -> None:
    """Declare `looptrt doctor`."""
    parser = commands.add_parser("doctor", help="what is installed, which backends work here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    findings = doctor.installed()
    backends = doctor.backends(findings)
    if args.json:
        sections = {"installed": findings, "backends": backends}
        as_json = {name: [dataclasses.asdict(f) for f in part] for name, part in sections.items()}
        print(json.dumps({"looptrt": __version__, **as_json}, indent=2))
        return 0
    console = make_console()
    console.print(f"looptrt {__version__}")
    for title, part in (("Installed", findings), ("Backends", backends)):
        table = Table("", "", title=title, show_header=False)
        for finding in part:
            table.add_row(finding.name, finding.found or f"no: {finding.reason}")
        console.print(table)
    return 0
