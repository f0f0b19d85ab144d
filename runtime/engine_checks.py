"""What `looptrt verify ENGINE_DIR` finds out: files, and every kernel on the engine's shapes.

Owns which row counts are compared and what is compared without a GPU; leaves comparisons to
`plugins.probe` and what a person sees to the command line. Invariant: the report says which
device was tested, and never calls an untested kernel sound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from looptrt.manifest import Manifest
from looptrt.models.operator_calls import operator_calls
from looptrt.models.weights import empty_model
from looptrt.plugins import launch, reference, schema
from looptrt.plugins.probe import ALL_ROWS, Clock, Verdict
from looptrt.plugins.probe_attention import probe_attention
from looptrt.plugins.probe_products import probe_products
from looptrt.plugins.verdict_cache import driver_version, gpu_facts
from looptrt.runtime.device import choose_device, why_no_gpu
from looptrt.runtime.kernel_checks import probe_all
from looptrt.runtime.product_checks import row_counts


@dataclass(frozen=True)
class EngineReport:
    """The outcome.

    Attributes:
        num_files: files whose size and checksum are those of the build.
        gpu: the GPU tested and its software, empty without one.
        why_no_gpu: the reason; empty when one was tested.
        verdicts: what was compared of operators.
        joined: what was compared of joined products; one that does not hold runs apart.
    """

    num_files: int
    gpu: dict[str, str]
    why_no_gpu: str
    verdicts: list[Verdict]
    joined: list[Verdict] = field(default_factory=list)


def check_engine(engine_dir: Path, asked: str = "auto") -> EngineReport:
    """Check an engine directory's files, then the kernels and joined products it would use here.

    Without a GPU there are no kernels to test: the CPU runs PyTorch's own operators, and only
    its attention is compared, with torch's.

    Args:
        engine_dir: directory written by `looptrt build`.
        asked: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ManifestError: the directory is damaged.
        EngineError: a GPU was asked for by name and cannot be used.
    """
    manifest = Manifest.load(engine_dir)
    device = choose_device(asked)
    calls = operator_calls(manifest)
    if device.type == "cpu":
        twins = {op.name: getattr(reference, op.name) for op in schema.OPS}
        with torch.inference_mode():
            verdicts = probe_attention(calls, device, twins, Clock(None))
        reason = "device cpu was asked for" if asked == "cpu" else why_no_gpu() or ""
        return EngineReport(len(manifest.files), {}, reason, verdicts)
    largest = manifest.limits.max_num_tokens
    rows = [*(count for count in ALL_ROWS if count < largest), largest]
    with torch.inference_mode(), torch.cuda.device(device):
        verdicts = probe_all(calls, rows, device, launch.OPERATORS, Clock(None))
        joined = probe_products(
            empty_model(manifest).joined_products(),
            row_counts(manifest, ALL_ROWS),
            manifest.dtype,
            device,
            Clock(None),
        )
    facts = {**gpu_facts(device), "driver": driver_version() or "unknown"}
    return EngineReport(len(manifest.files), facts, "", verdicts, joined)
