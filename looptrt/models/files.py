"""Files of a checkpoint that anybody may have written: only regular ones, only sound JSON.

Owns opening them and showing parts of them in an error; leaves what they say to the callers.
Invariant: no file here can make a reader wait, run out of memory or lose one of two equal keys.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

from looptrt.errors import CheckpointError

_MOST_BYTES = 100_000_000  # of a text; the largest published tokenizer has 33 MB
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict = 3, 8, 8, 8
_short.maxstring = _short.maxother = _short.maxlong = 100


def shown(value: object) -> str:
    """A value for an error message: its repr, cut short at every level."""
    return _short.repr(value)


def file_bytes(path: Path) -> int:
    """Size of a regular file; opening anything else could wait for ever.

    Raises:
        CheckpointError: there is no file, or something else than a regular one.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        what = "a link to a file that is missing" if path.is_symlink() else "no such file"
        raise CheckpointError(f"{path}: {what}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(f"{path}: expected a regular file, found {kind}")
    return status.st_size


def is_there(path: Path) -> bool:
    """Whether a directory has an entry of this name, be it a broken link."""
    return os.path.lexists(path)


def read_text(path: Path) -> str:
    """Read a UTF-8 text.

    Raises:
        CheckpointError: the file is missing, not a regular one, too large or not UTF-8.
    """
    size = file_bytes(path)
    if size > _MOST_BYTES:
        raise CheckpointError(f"{path}: expected at most {_MOST_BYTES} bytes, found {size}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file cannot be read, holds something else, or a key twice.
    """
    text = read_text(path)
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON in which no object has a key twice.

    Raises:
        ValueError: malformed, a key appears twice, or a number is too long.
        RecursionError: nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{shown(name)} appears twice")
        result[name] = value
    return result
