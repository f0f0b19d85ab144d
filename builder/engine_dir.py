"""Writing a directory as one step: the old one, or the whole new one, never a mixture.

Owns the life of the directory being written; leaves its content to `builder.build`.
Invariant: after a failure the target is as it was and nothing is left beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from looptrt.errors import BuildError
from looptrt.manifest import is_engine_dir

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_target(target: Path, *, replaces: bool = True) -> None:
    """Check that `target` may be written: absent, empty, or an engine directory to replace.

    Args:
        target: the directory.
        replaces: whether an engine directory that is there may be replaced.

    Raises:
        BuildError: something else is there, or no directory can be made there.
    """
    if target.is_dir():
        if any(target.iterdir()) and not (replaces and is_engine_dir(target)):
            what = "not empty and not an engine directory of looptrt" if replaces else "not empty"
            raise BuildError(f"--output_dir {target}: {what}; choose another or empty it")
    elif target.is_symlink() or target.exists():
        raise BuildError(f"--output_dir {target}: expected a directory, found something else")
    ancestor = next(path for path in target.parents if path.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        raise BuildError(f"--output_dir {target}: {ancestor} is not a writable directory")


@contextlib.contextmanager
def atomic_directory(target: Path, *, replaces: bool = True) -> Iterator[Path]:
    """Yield a fresh directory beside `target` that takes its place when the block succeeds.

    Files are flushed to the disk first. An engine directory that is there is exchanged for
    the new one in a single rename and then removed, if `replaces` says so.

    Raises:
        BuildError: `target` must not be written (see `check_target`).
    """
    target = target.resolve()
    check_target(target, replaces=replaces)
    new_parents = [path for path in target.parents if not path.exists()]
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        _sync(draft)
        check_target(target, replaces=replaces)
        _publish(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        for path in new_parents:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _sync(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _publish(draft: Path, target: Path) -> None:
    if not target.exists():
        draft.rename(target)
    elif _exchange(draft, target):
        shutil.rmtree(draft, ignore_errors=True)
    else:
        _replace_in_two_steps(draft, target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(draft: Path, target: Path) -> bool:
    """Swap two directories in one step; False where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(draft), os.fsencode(target)
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))


def _replace_in_two_steps(draft: Path, target: Path) -> None:
    old = draft.with_suffix(".old")
    target.rename(old)
    try:
        draft.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
