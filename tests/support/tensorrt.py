"""TensorRT-RTX and the plugin library under test, and programs that use them.

What TensorRT registers and logs belongs to a process, and a fault in it ends one: tests run it in
children. `plugin_library` and `tensorrt_libraries` skip where something is not there, except in CI.
"""

from __future__ import annotations

import importlib.util
import os  # a child's environment
import subprocess
import sys
from pathlib import Path

from looptrt.errors import PluginError
from looptrt.plugins import launch
from tests.support.absent import absent

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 120


def plugin_library() -> Path:
    """The plugin library that looptrt itself would open."""
    try:
        return launch.find_library()
    except PluginError as error:
        absent(str(error))


def tensorrt_libraries() -> Path:
    """The folder of TensorRT-RTX's shared libraries."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None or not spec.submodule_search_locations:
        absent("tensorrt_rtx is not installed: pip install 'looptrt[tensorrt-rtx]'")
    return Path(spec.submodule_search_locations[0])


def run_python(
    program: str, *arguments: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a child process."""
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},  # noqa: TID251 - see the import
    )
