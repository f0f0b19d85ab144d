"""What the golden file onnx_ops.json records: the operators of every exported phase."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx

from looptrt.builder.build import BuildConfig, plan_build
from looptrt.builder.export import export_phases
from tests.support.checkpoints import tiny_huginn, tiny_ouro

MAKERS = {"tiny_ouro": tiny_ouro, "tiny_huginn": tiny_huginn}


def phase_ops(path: Path) -> list[str]:
    """Operators of a graph in order, `domain.op` for those that are not ONNX's own."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    return [f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes]


def onnx_ops() -> dict[str, dict[str, list[str]]]:
    """{model: {phase: operators}} of the tiny random models in bfloat16."""
    result = {}
    for name, make in MAKERS.items():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            config = BuildConfig(make(root / "c"), root / "engine", dtype="bfloat16")
            plan = plan_build(config)
            graphs = export_phases(plan.model, plan.layout, plan.weights, root)
            result[name] = {phase: phase_ops(root / g.onnx) for phase, g in graphs.items()}
    return result
