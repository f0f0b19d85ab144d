"""Tiny models from random checkpoints, and a step loop over their phases without a runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import LoopSpec, NoiseMode
from looptrt.models.blocks import LoopedModel, Phase, stored_names
from looptrt.models.family import fuse
from looptrt.models.registry import family_of
from tests.plugins.pools import Pool, int32

MAX_POSITIONS = 64


def spec_and_layout(config: dict[str, Any], dtype: str = "float32") -> tuple[LoopSpec, PlaneLayout]:
    """A config's spec and a layout of 4-token pages."""
    spec = family_of(config["architectures"][0]).parse_config(config, "config.json")
    layout = PlaneLayout.of(
        spec, page_size=4, max_loops=spec.num_loops, dtype=dtype, kv_planes="latest"
    )
    return spec, layout


def build(
    config: dict[str, Any],
    *,
    dtype: str = "float32",
    noise_mode: NoiseMode = NoiseMode.POSITION,
    device: str = "cpu",
) -> LoopedModel:
    """A model of a config, its weights uninitialised."""
    spec, layout = spec_and_layout(config, dtype)
    return family_of(spec.architecture).build(
        spec,
        layout,
        max_positions=MAX_POSITIONS,
        dtype=getattr(torch, dtype),
        noise_mode=noise_mode,
        device=device,
    )


def fill(model: LoopedModel, tensors: dict[str, Tensor]) -> LoopedModel:
    """Copy checkpoint tensors into a model by its family's recipes."""
    recipes = family_of(model.spec.architecture).weight_map(model.spec)
    state, stored = model.state_dict(keep_vars=True), stored_names(model)
    for name, tensor in state.items():
        if stored[name] in recipes:
            recipe = recipes[stored[name]]
            tensor.copy_(fuse(recipe, [tensors[source] for source in recipe.sources]))
    return model


@dataclass
class Sequences:
    """Runs steps of a model; sequence i owns table slot i."""

    model: LoopedModel
    layout: PlaneLayout
    num_seqs: int = 1

    def __post_init__(self) -> None:
        pages = MAX_POSITIONS // self.layout.page_size
        count = self.num_seqs * self.layout.num_rows * pages
        dtype = getattr(torch, self.layout.dtype)
        self.pool = Pool.of(count + 1, self.layout.unit_shape, dtype)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
        units = order.add(1).to(torch.int32)
        self.table = units.view(self.num_seqs, self.layout.num_rows, pages)

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        first_positions: Sequence[int],
        depths: Sequence[Sequence[int]] | None = None,
        **extra: Tensor,
    ) -> Tensor:
        """Logits of every new token, [T, V]; depths are the model's own unless given."""
        depths = depths or [[self.model.spec.num_loops] * len(part) for part in tokens]
        flat_depths = torch.tensor([depth for part in depths for depth in part])
        positions = [
            first + i
            for first, part in zip(first_positions, tokens, strict=True)
            for i in range(len(part))
        ]
        seq_of_row = torch.tensor([seq for seq, part in enumerate(tokens) for _ in part])
        all_rows = torch.arange(len(positions))
        inputs = {
            "input_ids": int32([token for part in tokens for token in part]),
            "noise_seeds": torch.zeros(len(positions), dtype=torch.int64),
            "logit_rows": all_rows.int(),
            **self._kv_inputs(positions, seq_of_row, all_rows, 0),
            **extra,
        }
        tensors = run(self.model.prelude, inputs)
        for loop in range(int(flat_depths.max())):
            rows = all_rows[flat_depths > loop]
            kv_inputs = self._kv_inputs(positions, seq_of_row, rows, loop)
            looped = run(self.model.core, {**tensors, "rows": rows.int(), **kv_inputs})
            tensors["state"] = looped["next_state"]
        return run(self.model.coda, {**inputs, **tensors})["logits"]

    def _kv_inputs(
        self, positions: list[int], seq_of_row: Tensor, rows: Tensor, plane: int
    ) -> dict[str, Tensor]:
        counts = torch.bincount(seq_of_row[rows], minlength=self.num_seqs)
        return {
            "positions": int32(positions)[rows],
            "cu_seqlens": torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int(),
            "seq_slots": torch.arange(self.num_seqs, dtype=torch.int32),
            "block_table": self.table,
            "kv_pool": self.pool.kv_pool,
            "plane": int32([plane]),
        }


def run(phase: Phase, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Call a phase with its inputs out of a larger set; its outputs by name."""
    outputs = phase(*(tensors[name] for name in phase.input_names))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return dict(zip(phase.output_names, outputs, strict=True))
