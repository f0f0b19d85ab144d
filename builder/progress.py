"""Progress of the stages of a build: a bar on a terminal, lines of the log elsewhere.

Owns how progress looks; leaves what is counted to the caller. Invariant: a stage shorter than
a second shows nothing, and nothing is shown where the log says less than `info`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_QUIET_S = 1.0
_LINE_EVERY_S = 5.0

Advance = Callable[[int], None]

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """Show a stage of `total` steps; the yielded function reports steps, from any thread."""
    console = Console(stderr=True)
    has_bar = console.is_terminal and _logger.isEnabledFor(logging.INFO)
    with _bar(console, label, total) if has_bar else _lines(label, total) as advance:
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
    done, shown = 0, 0
    next_line_s = time.monotonic() + _QUIET_S

    def advance(steps: int) -> None:
        nonlocal done, shown, next_line_s
        with lock:
            done += steps
            if time.monotonic() >= next_line_s:
                next_line_s = time.monotonic() + _LINE_EVERY_S
                shown = done
                _logger.info("%s: %d/%d", label, done, total)

    yield advance
    if 0 < shown < done:
        _logger.info("%s: %d/%d", label, done, total)
