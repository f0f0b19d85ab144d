"""The phases of the retrofitted models as ONNX graphs: the module's numbers in every loop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.builder.verify import PhaseEvaluator
from looptrt.manifest import PHASES, Manifest
from looptrt.models.weights import load_model
from tests.models.phases import Sequences
from tests.support.checkpoints import tiny_llama, tiny_olmo

TOKENS = [(7 * i * i + 3) % 256 for i in range(13)]
MAKERS = {"olmo": tiny_olmo, "llama": tiny_llama}


class ExportedPhase:
    """A graph of an engine directory that is called like the phase it was made of."""

    def __init__(self, engine_dir: Path, manifest: Manifest, name: str) -> None:
        graph = manifest.phases[name]
        self.input_names, self.output_names = graph.inputs, graph.outputs
        self._evaluator = PhaseEvaluator(engine_dir, graph)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._evaluator.run(dict(zip(self.input_names, tensors, strict=True)))


def mixed_depths(model: Any, manifest: Manifest) -> torch.Tensor:
    """Logits of 8 tokens that stop at 2 loops and 5 that run 4."""
    seqs = Sequences(model, manifest.layout)
    plane_1 = manifest.layout.boundary_units + 1
    seqs.table[0, plane_1 + 1 :, :2] = seqs.table[0, plane_1, :2]
    return seqs.step([TOKENS], [0], [[2] * 8 + [4] * 5])


@pytest.mark.parametrize("mode", ["random", "embed-init", "skip-adapter"])
@pytest.mark.parametrize("name", MAKERS)
def test_exported_phases_compute_what_the_module_computes(
    tmp_path: Path, name: str, mode: str
) -> None:
    checkpoint = MAKERS[name](tmp_path / "c", initial_state_mode=mode)
    manifest = build(BuildConfig(checkpoint, tmp_path / "e", tokens_per_block=4))
    module = load_model(tmp_path / "e", manifest)
    parts = {phase: ExportedPhase(tmp_path / "e", manifest, phase) for phase in PHASES}
    exported: Any = SimpleNamespace(spec=module.spec, **parts)
    want, got = (mixed_depths(model, manifest) for model in (module, exported))
    assert want.isfinite().all()
    assert float((got - want).abs().max() / want.abs().max()) <= 1e-5


def test_the_first_loop_is_a_select_in_one_core_graph(tmp_path: Path) -> None:
    manifest = build(
        BuildConfig(tiny_olmo(tmp_path / "c", initial_state_mode="skip-adapter"), tmp_path / "e")
    )
    path = tmp_path / "e" / manifest.phases["core"].onnx
    ops = [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    assert ops[:7] == [
        "compact_gather",
        "compact_gather",
        "Concat",
        "Gemm",
        "Constant",
        "Equal",
        "Where",
    ]
    assert ops.count("fenced_qk_norm") == ops.count("fenced_rope") == 3
