"""The plugin library in TensorRT's registry: every operator of the schema, once.

Owns finding TensorRT, its log, loading the library and the check that what TensorRT then has is
what the schema says; leaves engines to `builder` and `runtime`, which both come here first.
TensorRT is handed on as a module, so that `tensorrt` and `tensorrt_rtx` take one way. Invariant:
after `load_creators` a graph with our operators parses, and a plan with them deserialises as far
as plugins matter.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from looptrt.errors import PluginError
from looptrt.plugins.schema import NAMESPACE, OPS
from looptrt.plugins.schema_header import schema_text

SCHEMA_SHA256 = hashlib.sha256(schema_text().encode()).hexdigest()
RTX = "tensorrt_rtx"
# Libraries that an ONNX parser opens by a name without version, which wheels do not carry.
UNVERSIONED = {RTX: "libtensorrt_rtx.so"}
PACKAGES = {"tensorrt": "looptrt[tensorrt]", "tensorrt_rtx": "looptrt[tensorrt-rtx]"}


def import_tensorrt(backend: str) -> Any:  # noqa: ANN401 - a module without types
    """TensorRT's Python module, which is called as the backend is.

    Raises:
        PluginError: it is not installed or cannot be loaded; says how to install it.
    """
    try:
        module = importlib.import_module(backend)
    except (ImportError, OSError, RuntimeError) as error:
        raise PluginError(
            f"{backend} cannot be imported ({error}); pip install '{PACKAGES[backend]}'"
        ) from error
    if not hasattr(module, "Builder"):  # PyPI has placeholders of some of its packages
        raise PluginError(f"{module.__file__}: {backend} is installed without its library")
    return module


def make_logger(trt: Any, tell: Callable[[str, str], None]) -> Any:  # noqa: ANN401
    """A logger of TensorRT's that tells each message: severity's name, text."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:  # noqa: ANN401
            tell(severity.name, text)

    return Logger()


def is_error(severity: str) -> bool:
    """Whether a severity's name means that something failed."""
    return severity in ("ERROR", "INTERNAL_ERROR")


def check_parser(backend: str) -> None:
    """Require what TensorRT's ONNX parser opens; without it, making one ends the process.

    Raises:
        PluginError: the loader does not find it; says what to do.
    """
    name = UNVERSIONED.get(backend)
    if name is None:
        return
    try:
        ctypes.CDLL(name)
    except OSError as error:
        raise PluginError(
            f"{backend}'s ONNX parser opens {name}, which the loader does not find ({error}): put "
            "a link of that name to its versioned library into a folder of LD_LIBRARY_PATH"
        ) from None


def check_library(path: Path) -> None:
    """Require a plugin library with adapters, made from the schema of this looptrt.

    Raises:
        PluginError: it cannot be opened, or was built from another schema.
    """
    try:
        library = ctypes.CDLL(str(path.resolve()))
        text = library.looptrt_schema_text
    except (OSError, AttributeError) as error:
        raise PluginError(f"{path}: no plugin library with TensorRT adapters: {error}") from error
    text.restype = ctypes.c_char_p
    found = hashlib.sha256(text()).hexdigest()
    if found != SCHEMA_SHA256:
        raise PluginError(
            f"{path}: built from another schema of the operators (expected {SCHEMA_SHA256:.12}, "
            f"found {found:.12}); build it again with `cmake --build`"
        )


def load_creators(trt: Any, path: Path) -> None:  # noqa: ANN401 - see import_tensorrt
    """Register the library's creators with TensorRT, unless they are there already.

    Whoever registered them first, from whatever copy of the library, is left alone: TensorRT
    refuses a second creator of the same name, version and namespace.

    Args:
        trt: TensorRT's module.
        path: the plugin library.

    Raises:
        PluginError: TensorRT does not take it, or an operator is missing afterwards.
    """
    check_library(path)
    registry = trt.get_plugin_registry()
    if missing_plugins(trt) and registry.load_library(str(path.resolve())) is None:
        raise PluginError(f"{path}: TensorRT does not load it; its log says why")
    missing = missing_plugins(trt)
    if missing:
        raise PluginError(f"TensorRT has no plugin {missing[0]}; looked in {path}")


def missing_plugins(trt: Any, plugins: Mapping[str, str] | None = None) -> list[str]:  # noqa: ANN401
    """Operators that TensorRT's registry has no creator for, named in full.

    Args:
        trt: TensorRT's module.
        plugins: {name: version} that are wanted; without them all of the schema.
    """
    wanted = {op.name: op.version for op in OPS} if plugins is None else plugins
    registered = {
        (creator.plugin_namespace, creator.name, creator.plugin_version)
        for creator in trt.get_plugin_registry().all_creators
    }
    return [
        f"{name}, version {version}, namespace {NAMESPACE}"
        for name, version in wanted.items()
        if (NAMESPACE, name, version) not in registered
    ]
