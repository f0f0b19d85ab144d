"""Which operators an engine calls, and how: read off its own modules.

Owns the recording; leaves what is done with the calls to others. Invariant: nothing is listed by
hand, so a block that calls something new is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from looptrt.kv_layout import PlaneLayout
from looptrt.manifest import PHASES, Manifest
from looptrt.models.blocks import LoopedModel, Phase
from looptrt.models.weights import empty_model
from looptrt.plugins import ops, schema
from looptrt.plugins.probe import OpCall
from looptrt.plugins.schema import NAMESPACE

_NUM_ROWS = 3


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every call of an operator of ours, in order, once each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[OpCall, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's signature
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        if func.namespace == NAMESPACE:
            op = next(op for op in schema.OPS if op.name == func._opname)
            attributes = dict(kwargs or {})
            sizes = ops.bind(op, args, attributes)
            dtypes = {
                tensor.kind: operand.dtype for tensor, operand in zip(op.inputs, args, strict=True)
            }
            self.calls.setdefault(OpCall.of(op, sizes, attributes, dtypes))
        return func(*args, **(kwargs or {}))


def operator_calls(manifest: Manifest) -> list[OpCall]:
    """Every different call of an operator in the engine's phases."""
    return calls_of(empty_model(manifest), manifest.layout)


def calls_of(model: LoopedModel, layout: PlaneLayout) -> list[OpCall]:
    """Every different call of an operator in a model's phases.

    Args:
        model: on the meta device; no weights are needed.
        layout: the KV geometry it was built for.
    """
    inputs, recorder = _inputs(model, layout), _Recorder()
    with torch.inference_mode(), recorder:
        for name in PHASES:
            phase: Phase = getattr(model, name)
            phase(*(inputs[item] for item in phase.input_names))
    return list(recorder.calls)


def _inputs(model: LoopedModel, layout: PlaneLayout) -> dict[str, Tensor]:
    """Inputs of all phases, shapes only: one sequence of a few rows."""
    dtype = getattr(torch, layout.dtype)
    stream = torch.empty(_NUM_ROWS, model.spec.hidden_size, dtype=dtype, device="meta")
    row_list = torch.empty(_NUM_ROWS, dtype=torch.int32, device="meta")
    return {
        **dict.fromkeys(("initial_state", "state", "injection"), stream),
        **dict.fromkeys(("input_ids", "positions", "rows", "logit_rows"), row_list),
        "noise_seeds": row_list.long(),
        "cu_seqlens": row_list[:2],
        "seq_slots": row_list[:1],
        "block_table": torch.empty(1, layout.num_rows, 1, dtype=torch.int32, device="meta"),
        "kv_pool": row_list[:2].long(),
        "plane": row_list[:1],
    }
