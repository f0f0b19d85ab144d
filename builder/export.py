"""The phases as ONNX graphs, each custom operator one plugin node.

Owns tracing, the graphs' input and output names and the references to weights; leaves the
arithmetic to `looptrt.models` and the nodes to `builder.lowering`. A model is exported
without its weights (on the meta device): a graph names bytes of rank0.safetensors instead.
Invariant: equal models give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir
import torch
from torch.export import Dim, ExportedProgram

from looptrt import __version__
from looptrt.builder.lowering import Dims, Lowering, onnx_dtype
from looptrt.builder.progress import progress
from looptrt.builder.weights import WeightsLayout
from looptrt.errors import BuildError
from looptrt.kv_layout import PlaneLayout
from looptrt.manifest import PHASES, WEIGHTS_NAME, PhaseGraph
from looptrt.models.blocks import LoopedModel, Phase, stored_names

_IR_VERSION = 10  # ONNX 1.16's file format, which every parser in use reads

# Names of the sizes that change from step to step, with the example sizes that tracing
# wants: T new tokens, R rows of one loop, M rows of logits, N sequences. The examples differ,
# so that no two sizes are taken for one; 0 and 1 would be taken for constants.
_SIZES = {"T": 7, "R": 5, "M": 3, "N": 2, "N_plus_1": 11, "max_slots": 13, "max_pages": 17}


def export_phases(
    model: LoopedModel, layout: PlaneLayout, weights: WeightsLayout, directory: Path
) -> dict[str, PhaseGraph]:
    """Write rank0.{prelude,core,coda}.onnx.

    Args:
        model: on the meta device.
        layout: its KV geometry.
        weights: where rank0.safetensors holds its tensors.
        directory: where to write; the graphs refer to rank0.safetensors beside them.

    Raises:
        BuildError: a phase does something that has no place in a graph (see `lowering`).
    """
    names = stored_names(model)
    graphs = {}
    with progress("export", len(PHASES)) as advance:
        for name in PHASES:
            phase: Phase = getattr(model, name)
            inputs = {item: _input_dims(item, phase, layout)[1] for item in phase.input_names}
            program = _trace(phase, layout)
            weight = _references(name, names, weights, directory)
            graph = Lowering(program, inputs, phase.output_names, weight).graph(name)
            file_name = f"rank0.{name}.onnx"
            ir.save(_model(graph), directory / file_name)
            graphs[name] = PhaseGraph(file_name, phase.input_names, phase.output_names)
            advance(1)
    return graphs


def _input_dims(name: str, phase: Phase, layout: PlaneLayout) -> tuple[torch.dtype | None, Dims]:
    """Dtype (None for the model's) and shape of an input; strings are sizes that change."""
    rows = "R" if "rows" in phase.input_names else "T"
    stream: Dims = ("T", phase.spec.hidden_size)
    inputs: dict[str, tuple[torch.dtype | None, Dims]] = {
        "input_ids": (torch.int32, ("T",)),
        "positions": (torch.int32, (rows,)),
        "cu_seqlens": (torch.int32, ("N_plus_1",)),
        "seq_slots": (torch.int32, ("N",)),
        "block_table": (torch.int32, ("max_slots", layout.num_rows, "max_pages")),
        "kv_pool": (torch.int64, (2,)),
        "plane": (torch.int32, (1,)),
        "noise_seeds": (torch.int64, ("T",)),
        "initial_state": (None, stream),
        "state": (None, stream),
        "injection": (None, stream),
        "rows": (torch.int32, ("R",)),
        "logit_rows": (torch.int32, ("M",)),
    }
    return inputs[name]


def _trace(phase: Phase, layout: PlaneLayout) -> ExportedProgram:
    model_dtype = getattr(torch, layout.dtype)
    examples, dynamic = [], []
    for name in phase.input_names:
        dtype, dims = _input_dims(name, phase, layout)
        sizes = [_SIZES[dim] if isinstance(dim, str) else dim for dim in dims]
        examples.append(torch.empty(sizes, dtype=dtype or model_dtype, device="meta"))
        dynamic.append({i: Dim.DYNAMIC for i, dim in enumerate(dims) if isinstance(dim, str)})
    return torch.export.export(
        phase.eval(), tuple(examples), dynamic_shapes=(tuple(dynamic),), strict=False
    )


def _references(
    phase: str, names: Mapping[str, str], weights: WeightsLayout, directory: Path
) -> Callable[[str], ir.Value]:
    """Makes references into rank0.safetensors for the parameters of a phase."""

    def reference(name: str) -> ir.Value:
        stored = names.get(f"{phase}.{name}")
        if stored is None:
            raise BuildError(f"{phase}.{name}: used by the graph, but not a stored tensor")
        tensor, place = weights.tensors[stored], weights.places[stored]
        shape = ir.Shape(tensor.shape)
        external = ir.ExternalTensor(
            WEIGHTS_NAME,
            place.begin,
            place.num_bytes,
            onnx_dtype(stored, tensor.dtype),
            shape=shape,
            name=stored,
            base_dir=directory,
        )
        return ir.Value(
            name=stored,
            shape=shape,
            type=ir.TensorType(external.dtype),
            const_value=external,
        )

    return reference


def _model(graph: ir.Graph) -> ir.Model:
    return ir.Model(
        graph, ir_version=_IR_VERSION, producer_name="looptrt", producer_version=__version__
    )
