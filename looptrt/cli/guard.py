"""Around every command: exit codes, standard streams, signals, log messages.

Owns what happens to errors, interrupts and closed streams; leaves the work to the commands.
Invariant: an error is one line on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from looptrt.errors import LooptrtError

DIFFERS = 1
ANSWER_FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE


def guard(prog: str, arguments: list[str], run: Callable[[], int]) -> int:
    """Turn whatever a command raises into an exit code."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # answers can hold what a terminal cannot show
    try:
        _check_encoding(arguments)
        return _flushed(run)
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (LooptrtError, OSError) as error:
        _drop_output()
        with contextlib.suppress(OSError):  # there may be no one to tell
            print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT


def _flushed(run: Callable[[], int]) -> int:
    try:
        return run()
    finally:
        sys.stdout.flush()


def _drop_output() -> None:
    """Let Python's flush at exit go nowhere if what is left cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _ClosedOutput(io.TextIOWrapper):
    """A standard output that its caller closed: using it is an error, having it is not."""

    def write(self, _text: str) -> int:
        raise OSError("the standard output is closed")


def _open_closed_streams() -> None:
    """Stand in for streams that are closed; else the next file opened would take their place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = _ClosedOutput(io.BytesIO(), encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8")


def _check_encoding(arguments: Sequence[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise LooptrtError(f"{os.fsencode(argument)!r}: expected UTF-8") from None


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, so that it cleans up."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        for name in before:
            signal.signal(name, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGHUP)
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    if threading.current_thread() is not threading.main_thread():
        before.clear()  # only the main thread may set handlers
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def show_logs(level: int) -> Iterator[None]:
    """Show messages of ours from `level` on, until the command ends."""
    root, ours = logging.getLogger(), logging.getLogger("looptrt")
    handlers, level_before = [*root.handlers], ours.level
    logging.basicConfig(format="%(levelname)s %(message)s")
    ours.setLevel(level)
    try:
        yield
    finally:
        ours.setLevel(level_before)
        root.handlers[:] = handlers
