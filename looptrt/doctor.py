"""What is installed on this machine, and which backends can work here and why not.

Owns the probes; leaves their display to `cli`. Invariant: no probe can fail, hang or crash
the caller: what might is asked in a child process with a deadline.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROBE_TIMEOUT_S = 60.0
_SCRIPT = "trtllm-build"
_TENSORRT_LLM = "tensorrt_llm"
_TORCH_CUDA = """
import torch
if torch.version.cuda is None:
    raise SystemExit(f"torch {torch.__version__} is built without CUDA")
if not torch.cuda.is_available():
    raise SystemExit(f"torch is built for CUDA {torch.version.cuda}, but finds no usable GPU")
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(torch.version.cuda + " on " + ", ".join(names))
"""
_LIBRARY = """
from looptrt.errors import PluginError
from looptrt.plugins import launch
try:
    print(launch.load().path)
except PluginError as error:
    raise SystemExit(str(error))
"""
_KERNELS = """
from looptrt.runtime.device import why_no_gpu
if reason := why_no_gpu():
    raise SystemExit(reason)
print("run on the first GPU")
"""


@dataclass(frozen=True)
class Finding:
    """One thing looked for.

    Attributes:
        found: version or place, None where it is not there or does not work.
        reason: why not; empty where it was found.
    """

    name: str
    found: str | None
    reason: str = ""


def installed() -> list[Finding]:
    """Look for everything that a part of looptrt can use; takes a few seconds."""
    probes: list[Callable[[], Finding]] = [
        lambda: Finding("python", platform.python_version()),
        lambda: _module("torch"),
        lambda: _python("CUDA (torch)", _TORCH_CUDA),
        lambda: _module("cuda.bindings"),
        lambda: _python("plugin library", _LIBRARY),
        lambda: _python("CUDA kernels", _KERNELS),
        lambda: _module("onnx"),
        lambda: _module("tensorrt"),
        lambda: _module("tensorrt_rtx"),
        lambda: _program("nvcc", "--version"),
        _tritonserver,
        lambda: _module("nixl"),
        _owner_of_script,
    ]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda probe: probe(), probes))


def backends(findings: list[Finding]) -> list[Finding]:
    """Which backends can work here, by what was found."""
    by_name = {finding.name: finding for finding in findings}
    torch, cuda, library = by_name["torch"], by_name["CUDA (torch)"], by_name["plugin library"]
    executor = _part("runtime.executor.tensorrt")
    return [
        Finding("pytorch on cpu", "works" if torch.found else None, torch.reason),
        _first_lack("pytorch on cuda", [torch, cuda, library, by_name["CUDA kernels"]]),
        _first_lack("tensorrt", [by_name["tensorrt"], cuda, library, executor]),
        _first_lack("tensorrt_rtx", [by_name["tensorrt_rtx"], cuda, library, executor]),
    ]


def _first_lack(name: str, needs: list[Finding]) -> Finding:
    for need in needs:
        if need.found is None:
            return Finding(name, None, f"{need.name}: {need.reason}")
    return Finding(name, "works")


def _part(name: str) -> Finding:
    is_there = importlib.util.find_spec(f"looptrt.{name}") is not None
    return Finding(name, "there" if is_there else None, "not a part of this looptrt")


def _module(name: str) -> Finding:
    if not _is_installed(name):
        return Finding(name, None, "not installed")
    return _python(name, f"import {name}; print(getattr({name}, '__version__', 'installed'))")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _python(name: str, program: str) -> Finding:
    return _run(name, [sys.executable, "-P", "-c", program])


def _program(name: str, *arguments: str) -> Finding:
    path = shutil.which(name)
    return Finding(name, None, "not on PATH") if path is None else _run(name, [path, *arguments])


def _run(name: str, command: list[str]) -> Finding:
    """Last line that a program writes: what was found, or why not."""
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(name, None, f"no answer within {PROBE_TIMEOUT_S:g} s")
    except OSError as error:
        return Finding(name, None, str(error))
    if result.returncode == 0:
        return Finding(name, _last_line(result.stdout))
    return Finding(name, None, _last_line(result.stderr) or f"exit code {result.returncode}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _tritonserver() -> Finding:
    name = "tritonserver"
    if path := shutil.which(name):
        return Finding(name, path)
    try:
        version = importlib.metadata.version("nvidia-pytriton")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, None, "not on PATH, and nvidia-pytriton is not installed")
    return Finding(name, f"in nvidia-pytriton {version}")


def _owner_of_script() -> Finding:
    """Whose `trtllm-build` runs: what the script on PATH imports, as both packages install one."""
    path = shutil.which(_SCRIPT) or shutil.which(_SCRIPT, path=str(Path(sys.executable).parent))
    if path is None:
        return Finding(_SCRIPT, None, "neither on PATH nor beside this Python")
    try:
        match = re.search(r"^from (\w+)", Path(path).read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        return Finding(_SCRIPT, None, f"{path}: {error}")
    owner = match[1] if match else "an unknown package"
    return Finding(_SCRIPT, f"{path}, of {owner}{_other_owner(owner)}")


def _other_owner(owner: str) -> str:
    """What becomes of the other package's architectures."""
    if owner == _TENSORRT_LLM:
        return ", which knows no looped architectures; use `looptrt build` for those"
    if importlib.util.find_spec(_TENSORRT_LLM) is None:
        return f"; {_TENSORRT_LLM} is not installed"
    return f", which hands architectures that are not looped to {_TENSORRT_LLM}"
