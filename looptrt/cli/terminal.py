"""What commands share on the terminal: the parser, sizes in bytes, the console."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn, TypeAlias

from rich.console import Console

from looptrt.errors import LooptrtError

_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_MOST_MEMORY = 2**60


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors of ours, so that they end in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise LooptrtError(f"{message}; see {self.prog} --help")


def byte_count(text: str) -> int:
    """Read a size such as 8GiB, as an argument type."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?", text.strip().lower())
    unit = _BYTES.get(match[2] or "b") if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 8GiB or 500MB, got {text!r:.40}")
    num_bytes = float(match[1]) * unit
    if num_bytes > _MOST_MEMORY:
        raise argparse.ArgumentTypeError(
            f"expected at most {size_text(_MOST_MEMORY)}, got {text!r:.40}"
        )
    return int(num_bytes)


def size_text(num_bytes: int) -> str:
    """A size in the largest unit it fills."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} bytes"


def make_console() -> Console:
    """A console that shows names as they are."""
    return Console(markup=False, emoji=False, highlight=False)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
