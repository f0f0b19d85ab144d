"""Writing a directory as one step: the old one, or the whole new one, never a mixture.

Owns the life of the directory being written and what may be replaced; leaves its content to
`builder.build`. Invariant: after a failure the target is as it was and nothing is left beside
it, and no file is ever removed that a build did not write.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from looptrt.errors import BuildError
from looptrt.manifest import foreign_content, is_engine_dir

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CHECKPOINT_SUFFIXES = (".safetensors", ".json", ".jinja", ".bin", ".pt", ".pth", ".ckpt", ".py")


def resolve_target(target: Path) -> Path:
    """The place that a path of --output_dir stands for, links followed.

    Raises:
        BuildError: a rename cannot put a directory there, or its name is not UTF-8.
    """
    check_path(target, "--output_dir")
    resolved = Path(os.path.realpath(target))
    if Path.cwd().is_relative_to(resolved):
        raise BuildError(
            f"--output_dir {target}: the working directory is in it and would be replaced; name "
            "a directory below, such as ./engine"
        )
    if os.path.ismount(resolved):
        raise BuildError(
            f"--output_dir {target}: a mount point cannot be replaced in one step; name a "
            f"directory below, such as {target / 'engine'}"
        )
    return resolved


def check_path(path: Path, flag: str) -> None:
    """Refuse a path that messages and other programs could not be told.

    Raises:
        BuildError: with links and parents resolved, its name is not UTF-8.
    """
    try:
        os.path.realpath(path).encode()
    except UnicodeEncodeError:
        raise BuildError(f"{flag} {os.fsencode(path)!r}: expected a path in UTF-8") from None


def check_beside_checkpoint(target: Path, checkpoint: Path) -> None:
    """Refuse a target that the checkpoint's readers would take for one of its files.

    Raises:
        BuildError: it lies in the checkpoint and is named like a config or weights.
    """
    resolved = resolve_target(target)
    is_inside = resolved.parent == Path(os.path.realpath(checkpoint))
    if is_inside and resolved.suffix in _CHECKPOINT_SUFFIXES:
        raise BuildError(
            f"--output_dir {target}: would look like a file of the checkpoint around it; choose "
            "another name"
        )


def check_target(target: Path, *, replaces: bool = True, inputs: Iterable[Path] = ()) -> None:
    """Check that `target` may be written: absent, empty, or an engine directory to replace.

    Args:
        target: the directory.
        replaces: whether an engine directory that is there may be replaced.
        inputs: files that are read for it.

    Raises:
        BuildError: something else is there, files that no build wrote are in it, an input is
            in it, or no directory can be made there.
    """
    resolved = resolve_target(target)
    if resolved.is_dir():
        _check_content(target, replaces=replaces)
    elif resolved.is_symlink() or resolved.exists():
        raise BuildError(f"--output_dir {target}: expected a directory, found something else")
    for path in inputs:
        if Path(os.path.realpath(path)).is_relative_to(resolved):
            raise BuildError(
                f"--output_dir {target}: {path} is in it, is read for the build and would be "
                "replaced; choose another directory"
            )
    ancestor = next(path for path in resolved.parents if path.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        raise BuildError(f"--output_dir {target}: {ancestor} is not a writable directory")


def _check_content(target: Path, *, replaces: bool) -> None:
    if not any(target.iterdir()):
        return
    if not replaces or not is_engine_dir(target):
        what = "not empty and not an engine directory of looptrt" if replaces else "not empty"
        raise BuildError(f"--output_dir {target}: {what}; choose another or empty it")
    foreign = foreign_content(target)
    if foreign:
        others = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise BuildError(
            f"--output_dir {target}: {foreign[0]!r}{others} is not of the engine that is there and "
            "would be lost; move it away or choose another directory"
        )


@contextlib.contextmanager
def atomic_directory(
    target: Path, *, replaces: bool = True, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """Yield a fresh directory beside `target` that takes its place when the block succeeds.

    Files are flushed to the disk first. An engine directory that is there is exchanged for
    the new one in a single rename and then removed, if `replaces` says so. What builds that
    were killed left beside the target is removed.

    Raises:
        BuildError: `target` must not be written (see `check_target`).
    """
    inputs = tuple(inputs)
    check_target(target, replaces=replaces, inputs=inputs)
    target = resolve_target(target)
    new_parents = [path for path in target.parents if not path.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        with _draft_beside(target) as draft:
            yield draft
            _sync(draft)
            check_target(target, replaces=replaces, inputs=inputs)
            _publish(draft, target)
    except BaseException:
        for path in new_parents:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


@contextlib.contextmanager
def _draft_beside(target: Path) -> Iterator[Path]:
    """A fresh directory, locked as long as its builder lives, and removed if that fails."""
    descriptor = None
    while descriptor is None:
        draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        draft.mkdir()
        try:
            descriptor = _lock(draft)
        except OSError:  # a file system without locks, where nothing is swept either
            descriptor = os.open(draft, os.O_RDONLY)
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _sweep(target: Path) -> None:
    """Remove the drafts of builders that are dead; a living one holds its draft's lock."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.tmp")
    for path in [*target.parent.iterdir()]:
        if not pattern.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):
            descriptor = _lock(path)
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def _lock(directory: Path) -> int | None:
    """Lock a directory until the descriptor is closed, by the end of the process at the latest.

    Returns:
        The descriptor; None where another process has the lock or removed the directory.

    Raises:
        OSError: the directory is not ours, or its file system has no locks.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), directory.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


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
