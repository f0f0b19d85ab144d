"""Verdicts about this machine's kernels, kept between starts.

Owns what makes a verdict valid again and the files; leaves making verdicts to `probe`.
Invariant: a file that cannot be read, or was written for anything else, counts as absent.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from looptrt.manifest import sha256_of
from looptrt.plugins import launch
from looptrt.plugins.probe import OpCall, Verdict
from looptrt.plugins.schema import Exactness

FORMAT = 1
_FOLDER = "kernel_verdicts"
_VERSION_BYTES = 96

_logger = logging.getLogger(__name__)


def machine(device: torch.device) -> dict[str, str] | None:
    """What the bits of a GPU's kernels depend on; None where the driver has no version."""
    driver = driver_version()
    return None if driver is None else {**gpu_facts(device), "driver": driver}


def gpu_facts(device: torch.device) -> dict[str, str]:
    """The GPU, PyTorch and the plugin library."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "library": sha256_of(launch.load().path),
    }


def driver_version() -> str | None:
    """The NVIDIA driver's version, asked of its management library."""
    version = ctypes.create_string_buffer(_VERSION_BYTES)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, _VERSION_BYTES):
            return None
    except (OSError, AttributeError):
        return None
    return version.value.decode(errors="replace")


class VerdictCache:
    """Verdicts of one question in one folder.

    Args:
        cache_dir: the user's cache directory of looptrt; made when something is kept.
        question: the machine, the calls and the row counts that verdicts are about.
    """

    def __init__(self, cache_dir: Path, question: Mapping[str, Any]) -> None:
        self._question = {"format": FORMAT, **question}
        text = json.dumps(self._question, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        self.path = cache_dir / _FOLDER / f"{name}.json"

    def load(self) -> list[Verdict] | None:
        """The verdicts kept, or None."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["question"] != json.loads(json.dumps(self._question)):
                return None
            return [_verdict(entry) for entry in data["verdicts"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _logger.warning("%s: cannot be read, checking again: %r", self.path, error)
            return None

    def keep(self, verdicts: Sequence[Verdict]) -> None:
        """Write the verdicts, whole or not at all; a folder that takes none is only logged."""
        entries = [asdict(verdict) for verdict in verdicts]
        text = json.dumps({"question": self._question, "verdicts": entries}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _logger.warning("kernel verdicts are not kept: %s", error)


def _verdict(entry: dict[str, Any]) -> Verdict:
    call = entry.pop("call")
    return Verdict(
        OpCall(
            str(call["op"]),
            tuple((str(name), int(size)) for name, size in call["sizes"]),
            tuple((str(name), value) for name, value in call["attributes"]),
            str(call["dtype"]),
            str(call["table_dtype"]),
        ),
        Exactness(entry.pop("level")),
        **entry,
    )
