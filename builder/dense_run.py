"""A checkpoint run through our own modules, whole prompts at once.

Owns weights, KV memory and step inputs of such a run; leaves arithmetic to
`looptrt.models.blocks`. Invariant: no runtime, no engine directory, and an initial state of
zeros where a model would draw one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from looptrt.builder.casts import TORCH_DTYPES, CastLog
from looptrt.builder.source import Source
from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import NoiseMode
from looptrt.models.blocks import LoopedModel, Phase, build, stored_names

_PAGE_SIZE = 16

Tensors = dict[str, torch.Tensor]


class DenseModel:
    """A model with a checkpoint's weights, on the CPU.

    Args:
        source: the opened checkpoint.
        dtype: weights and activations.
        max_positions: tokens of the longest prompt.
    """

    def __init__(self, source: Source, dtype: str, max_positions: int) -> None:
        self._spec = source.spec
        self._dtype = TORCH_DTYPES[dtype]
        self._layout = PlaneLayout.of(
            source.spec,
            page_size=_PAGE_SIZE,
            max_loops=source.spec.num_loops,
            dtype=dtype,
            kv_planes="latest",
        )
        self._model = build(
            source.spec,
            self._layout,
            max_positions=max_positions,
            dtype=self._dtype,
            noise_mode=NoiseMode.SEQUENTIAL,
        ).eval()
        _fill(self._model, source, self._dtype)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits of every position at the model's own depth, [tokens, vocab] float32."""
        pool, inputs = self._inputs(token_ids)
        carried = inputs | _run(self._model.prelude, inputs)
        for loop in range(self._spec.num_loops):
            carried["plane"] = _int32(self._layout.strategy.plane(loop))
            carried["state"] = _run(self._model.core, carried)["next_state"]
        carried["plane"] = _int32(0)
        logits = _run(self._model.coda, carried)["logits"]
        del pool  # the phases write to its address until here
        return logits

    def _inputs(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, Tensors]:
        """KV memory, which the caller keeps alive, and the inputs of all phases."""
        layout, num_tokens = self._layout, len(token_ids)
        pages = layout.num_pages(num_tokens)
        num_units = 1 + layout.num_rows * pages  # unit 0 is the null unit
        pool = torch.zeros(num_units, *layout.unit_shape, dtype=self._dtype)
        rows = torch.arange(num_tokens, dtype=torch.int32)
        return pool, {
            "input_ids": torch.tensor(token_ids, dtype=torch.int32),
            "positions": rows,
            "rows": rows,
            "logit_rows": rows,
            "cu_seqlens": _int32(0, num_tokens),
            "seq_slots": _int32(0),
            "block_table": torch.arange(1, num_units, dtype=torch.int32).view(
                1, layout.num_rows, pages
            ),
            "kv_pool": torch.tensor([pool.data_ptr(), num_units]),
            "plane": _int32(0),
            "initial_state": torch.zeros(num_tokens, self._spec.hidden_size, dtype=self._dtype),
        }


def _fill(model: LoopedModel, source: Source, dtype: torch.dtype) -> None:
    casts, names = CastLog(), stored_names(model)
    for name, tensor in model.state_dict().items():
        if names[name] == name and name in source.recipes:
            tensor.copy_(casts.fused(source.checkpoint, source.recipes[name], dtype))


def _run(phase: Phase, inputs: Tensors) -> Tensors:
    outputs = phase(*(inputs[name] for name in phase.input_names))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return dict(zip(phase.output_names, outputs, strict=True))


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
