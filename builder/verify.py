"""Exported phases, executed: ONNX's reference evaluator, plugin nodes by their CPU twins.

Owns running a graph of an engine directory node by node; leaves what the result is compared
with to the caller. Slow and exact: for verification, never for serving. Invariant: what runs
is the file, its weights included, not the module it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator

from looptrt.builder.onnx_ops import evaluators, register_definitions
from looptrt.errors import BuildError
from looptrt.manifest import Manifest, PhaseGraph

_BFLOAT16 = onnx.TensorProto.BFLOAT16


class PhaseEvaluator:
    """One exported phase.

    Args:
        engine_dir: the engine directory.
        graph: which of its graphs, from the manifest.

    Raises:
        BuildError: ONNX's checker refuses the graph, or a tensor of it is bfloat16.
    """

    def __init__(self, engine_dir: Path, graph: PhaseGraph) -> None:
        register_definitions()
        path = engine_dir / graph.onnx
        try:
            onnx.checker.check_model(path, check_custom_domain=True)
        except onnx.checker.ValidationError as error:
            raise BuildError(f"{path}: not a valid graph: {error}") from error
        model = onnx.load(path, load_external_data=False)
        if _BFLOAT16 in _types(model.graph):
            raise BuildError(
                f"{path}: bfloat16: ONNX's reference evaluator computes in float32 only; verify an "
                "engine built with --dtype float32 --logits_dtype float32"
            )
        self._graph = graph
        self._session = ReferenceEvaluator(onnx.load(path), new_ops=evaluators())

    def run(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the phase on CPU tensors.

        Args:
            inputs: {name: tensor}; names beyond the graph's inputs are left out, so that one
                mapping serves all phases.

        Returns:
            The outputs in the graph's order.

        Raises:
            BuildError: an input is missing.
        """
        missing = [name for name in self._graph.inputs if name not in inputs]
        if missing:
            raise BuildError(f"{self._graph.onnx}: inputs missing: {', '.join(missing)}")
        feeds = {name: inputs[name].numpy() for name in self._graph.inputs}
        results = self._session.run(list(self._graph.outputs), feeds)
        return tuple(torch.from_numpy(np.ascontiguousarray(result)) for result in results)


def _types(graph: onnx.GraphProto) -> set[int]:
    """Element types of all that goes in or comes out, weights included."""
    values = [*graph.input, *graph.output]
    types = {value.type.tensor_type.elem_type for value in values}
    return types | {tensor.data_type for tensor in graph.initializer}


def open_phases(engine_dir: Path, manifest: Manifest) -> dict[str, PhaseEvaluator]:
    """Every phase of an engine directory."""
    return {name: PhaseEvaluator(engine_dir, graph) for name, graph in manifest.phases.items()}
