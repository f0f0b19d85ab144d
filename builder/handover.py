"""Handing architectures that are not looped to TensorRT-LLM's own build.

Owns telling whose a checkpoint is and starting the other program; leaves everything else to
it. Invariant: tensorrt_llm is never imported, and never started for an architecture of ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from looptrt.errors import CheckpointError
from looptrt.models.checkpoint import CONFIG_NAME
from looptrt.models.files import read_json
from looptrt.models.registry import ENTRY_POINT_GROUP, family_of

_PACKAGE = "tensorrt_llm"
_SIGNALLED = 128

_logger = logging.getLogger(__name__)


def foreign_architecture(argv: Sequence[str]) -> str | None:
    """The architecture of a command line's checkpoint, if it is one for TensorRT-LLM.

    Returns:
        None if tensorrt_llm is not installed, the architecture is ours or there is none: then
        the command line is ours to serve or refuse.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    name = _architecture(argv)
    return None if name is None or _is_ours(name) else name


def hand_over(argv: Sequence[str]) -> int:
    """Run TensorRT-LLM's build on the same command line; returns its exit code."""
    _logger.warning("not a looped architecture: handed to %s", _PACKAGE)
    command = [sys.executable, "-m", f"{_PACKAGE}.commands.build", *argv]
    code = subprocess.run(command, check=False).returncode
    return code if code >= 0 else _SIGNALLED - code


def _architecture(argv: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--checkpoint_dir", "--model_config", "--model_cls_file"):
        parser.add_argument(flag, nargs="?")
    args, _ = parser.parse_known_args(argv)
    place = args.checkpoint_dir or args.model_config
    if place is None or args.model_cls_file is not None:
        return None
    path = Path(place)
    try:
        config = read_json(path if path.is_file() else path / CONFIG_NAME)
    except CheckpointError:
        return None
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else config.get("architecture")
    return name if isinstance(name, str) else None


def _is_ours(name: str) -> bool:
    if any(point.name == name for point in entry_points(group=ENTRY_POINT_GROUP)):
        return True
    try:
        family_of(name)
    except CheckpointError:
        return False
    return True
