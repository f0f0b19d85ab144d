"""Progress of the stages of a build, on the standard error stream.

Owns how progress looks: a bar on a terminal, plain lines in a log. Leaves what is counted
to the caller. Invariant: a stage shorter than a second shows nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_QUIET_S = 1.0
_LINE_EVERY_S = 5.0

Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """Show a stage of `total` steps; the yielded function reports steps, from any thread."""
    console = Console(stderr=True)
    with _bar(console, label, total) if console.is_terminal else _lines(label, total) as advance:
        yield advance


@contextlib.contextmanager
def _bar(console: Console, label: str, total: int) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task(label, total=total)
    opener = threading.Timer(_QUIET_S, bar.start)
    opener.daemon = True
    opener.start()
    try:
        yield lambda steps: bar.advance(task, steps)
    finally:
        opener.cancel()
        opener.join()
        bar.stop()


@contextlib.contextmanager
def _lines(label: str, total: int) -> Iterator[Advance]:
    lock = threading.Lock()
    done, next_line_s = 0, time.monotonic() + _QUIET_S

    def advance(steps: int) -> None:
        nonlocal done, next_line_s
        with lock:
            done += steps
            if time.monotonic() >= next_line_s:
                next_line_s = time.monotonic() + _LINE_EVERY_S
                sys.stderr.write(f"{label}: {done}/{total}\n")
                sys.stderr.flush()

    yield advance
