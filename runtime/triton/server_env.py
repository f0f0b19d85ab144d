"""A `tritonserver` and the Python that its models run in: found, or installed from wheels.

Owns which one is taken and the installed environment; leaves running it to `launcher`.
Invariant: an environment under its final name is complete, and belongs to the versions that
its stamp names.

The server in the nvidia-pytriton wheel passes arrays of numpy 1 only, so its models need an
interpreter of their own, while the engine process keeps this one (docs/triton.md).
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from looptrt.errors import LooptrtError

SUPPORTED = ((3, 11), (3, 12))
SERVER_REQUIREMENT = "nvidia-pytriton==0.7.0"
# What `model.py` files import: the part of looptrt's dependencies that clients of an engine use.
STUB_REQUIREMENTS = (
    *("numpy>=1.26,<2", "jinja2>=3.1", "msgpack>=1.0", "rich>=13.7", "tokenizers>=0.20"),
)
CONTAINER_WAY = "or use NVIDIA's container as triton_server_repo/README.md shows"

_STAMP = "looptrt.json"
_FORMAT = 1  # of the environment's layout
_LOCK_TIMEOUT_S = 900.0
_LOCK_POLL_S = 0.2
_INSTALL_TIMEOUT_S = 1200.0
_PROBE_TIMEOUT_S = 30.0
# What a stub needs of its interpreter: the version, the shared library, a way to make a venv.
_PROBE = """
import json, sys, sysconfig
import ensurepip, venv
names = ("LIBDIR", "INSTSONAME", "Py_ENABLE_SHARED")
print(json.dumps([list(sys.version_info[:2]), *map(sysconfig.get_config_var, names)]))
"""


@dataclass(frozen=True)
class TritonServer:
    """A server's binary and how its Python backend is fed.

    Attributes:
        binary: path of `tritonserver`.
        backends: folder of its backends, None for the server's own default.
        environment: variables to set; a value goes in front of what a search path holds.
    """

    binary: Path
    backends: Path | None = None
    environment: Mapping[str, str] | None = None


def find_server(given: Path | None, environment_dir: Path, search_path: str) -> TritonServer:
    """The server to run: the one named, the one on PATH, or the installed one.

    Args:
        given: path of a `tritonserver`, None for none.
        environment_dir: where `install_server` installs.
        search_path: the caller's PATH.

    Raises:
        LooptrtError: there is none, or the named one is no program.
    """
    if given is not None:
        if not os.access(given, os.X_OK) or given.is_dir():
            raise LooptrtError(f"{given}: expected a tritonserver program")
        return TritonServer(given.resolve())
    on_path = shutil.which("tritonserver", path=search_path)
    if on_path is not None:
        return TritonServer(Path(on_path))
    if not is_installed(environment_dir):
        raise LooptrtError(
            f"no tritonserver on PATH nor in {environment_dir}: run "
            f"`looptrt triton --install_server` once, {CONTAINER_WAY}"
        )
    return _installed(environment_dir)


def is_installed(environment_dir: Path) -> bool:
    """Whether the environment is there and made by this version of the recipe."""
    try:
        stamp = json.loads((environment_dir / _STAMP).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    is_current = isinstance(stamp, dict) and stamp.get("recipe") == _recipe()
    return is_current and Path(stamp["python"]).exists()


def install_server(environment_dir: Path, search_path: str) -> TritonServer:
    """Make the environment, or keep it if it is current.

    It is built beside its place and renamed; other processes that want it, too, wait.

    Args:
        environment_dir: where it goes; an older one there is replaced.
        search_path: where interpreters are looked for.

    Raises:
        LooptrtError: no fitting interpreter is at hand, the installation failed, or another
            process has been at it for too long.
    """
    environment_dir = environment_dir.absolute()
    environment_dir.parent.mkdir(parents=True, exist_ok=True)
    with _locked(environment_dir.with_name(f"{environment_dir.name}.lock")):
        if not is_installed(environment_dir):
            _make(environment_dir, _find_python(search_path))
    return _installed(environment_dir)


def _recipe() -> dict[str, object]:
    return {"format": _FORMAT, "requirements": [SERVER_REQUIREMENT, *STUB_REQUIREMENTS]}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    end_s = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise LooptrtError(
                        f"{path}: another process has held it for {_LOCK_TIMEOUT_S:g} s"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield


@dataclass(frozen=True)
class _Python:
    """An interpreter that stubs can embed."""

    executable: str
    version: str
    library: Path


def _find_python(search_path: str) -> _Python:
    """The first interpreter that runs and has what a stub needs."""
    names = [f"python{major}.{minor}" for major, minor in SUPPORTED]
    folders = search_path.split(os.pathsep)
    found = [shutil.which(name, path=folder) for name in names for folder in folders if folder]
    siblings = _sibling_versions(names)
    candidates = dict.fromkeys((sys.executable, *filter(None, found), *siblings))
    reasons = []
    for candidate in candidates:
        python = _probe(candidate)
        if isinstance(python, _Python):
            return python
        reasons.append(f"{candidate}: {python}")
    raise LooptrtError(
        "the server's stub needs a CPython 3.11 or 3.12 with its shared library, and none is at "
        f"hand ({'; '.join(reasons)}): install one (python3.11-venv and libpython3.11 on Debian), "
        f"{CONTAINER_WAY}"
    )


def _sibling_versions(names: list[str]) -> Iterator[str]:
    """Interpreters that version managers keep beside this one (.../versions/X/bin)."""
    versions = Path(sys.base_prefix).parent
    if versions.name == "versions":
        for name in names:
            yield from map(str, sorted(versions.glob(f"*/bin/{name}"), reverse=True))


def _probe(executable: str) -> _Python | str:
    """What an interpreter is, or why it will not do; shims of absent versions do not run."""
    try:
        run = subprocess.run(
            [executable, "-I", "-c", _PROBE],
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            encoding="utf-8",
            check=True,
        )
        version, library_dir, library_name, is_shared = json.loads(run.stdout)
    except subprocess.CalledProcessError as error:
        return str((error.stderr.strip().splitlines() or ["no output"])[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return str(error)
    release = f"{version[0]}.{version[1]}"
    if tuple(version) not in SUPPORTED:
        return f"is {release}"
    library = Path(library_dir) / library_name
    if not is_shared or not library.is_file():
        return f"has no shared library {library_name}"
    return _Python(executable, release, library)


def _make(target: Path, python: _Python) -> None:
    building = Path(mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    old = building.with_name(f"{building.name}.old")
    try:
        # Scripts of the environment name the folder it was made in; nothing here uses them.
        _run([python.executable, "-m", "venv", str(building / "venv")])
        pip = [str(building / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run([*pip, "--no-deps", SERVER_REQUIREMENT])  # its clients and frameworks are not used
        _run([*pip, *STUB_REQUIREMENTS])
        libraries = building / "lib"
        libraries.mkdir()
        (libraries / python.library.name).symlink_to(python.library)
        _copy_backend(building, python.version)
        stamp = {"recipe": _recipe(), "version": python.version, "python": str(python.library)}
        (building / _STAMP).write_text(json.dumps(stamp), "utf-8")
        if target.exists():
            target.rename(old)
        building.rename(target)
    finally:
        for folder in (building, old):
            shutil.rmtree(folder, ignore_errors=True)


def _copy_backend(environment_dir: Path, version: str) -> None:
    """The Python backend with the stub of one version, as the server looks for it."""
    server = _site_packages(environment_dir, version) / "pytriton" / "tritonserver"
    backend = environment_dir / "backends" / "python"
    backend.mkdir(parents=True)
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    for source in (*(server / "backends" / "python").iterdir(), stub):
        if source.is_file():
            shutil.copy2(source, backend / source.name)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            timeout=_INSTALL_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.CalledProcessError as error:
        said = " | ".join(error.stdout.strip().splitlines()[-3:])
        raise LooptrtError(f"{shlex.join(command)}: failed: {said}") from None
    except subprocess.TimeoutExpired:
        raise LooptrtError(f"{shlex.join(command)}: not done in {_INSTALL_TIMEOUT_S:g} s") from None


def _installed(environment_dir: Path) -> TritonServer:
    environment_dir = environment_dir.resolve()
    stamp = json.loads((environment_dir / _STAMP).read_text("utf-8"))
    packages = _site_packages(environment_dir, stamp["version"])
    libraries = (packages / "nvidia_pytriton.libs", environment_dir / "lib")
    return TritonServer(
        binary=packages / "pytriton" / "tritonserver" / "bin" / "tritonserver",
        backends=environment_dir / "backends",
        environment={
            "PATH": str(environment_dir / "venv" / "bin"),
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        },
    )


def _site_packages(environment_dir: Path, version: str) -> Path:
    return environment_dir / "venv" / "lib" / f"python{version}" / "site-packages"
