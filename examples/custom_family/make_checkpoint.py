"""Writes a tiny random Echo checkpoint: `python make_checkpoint.py DIRECTORY`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["EchoForCausalLM"],
    "dtype": "float32",
    "vocabulary": 256,
    "width": 64,
    "inner_width": 96,
    "query_heads": 4,
    "memory_heads": 2,
    "longest": 128,
    "ring_layers": 2,
    "turns": 3,
    "epsilon": 1e-6,
    "rotation_base": 10000.0,
    "rotation_stretch": 2.0,
}


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights that keep activations near 1."""
    width, inner = config["width"], config["inner_width"]
    memory = width // config["query_heads"] * config["memory_heads"]
    shapes = {"words": (config["vocabulary"], width), "last_norm": (width,)}
    layers = ["stem.0", *(f"ring.{i}" for i in range(config["ring_layers"])), "crown.0"]
    for layer in layers:
        shapes |= {
            f"{layer}.look.norm": (width,),
            f"{layer}.look.query": (width, width),
            f"{layer}.look.key": (memory, width),
            f"{layer}.look.value": (memory, width),
            f"{layer}.look.out": (width, width),
            f"{layer}.think.norm": (width,),
            f"{layer}.think.gate": (inner, width),
            f"{layer}.think.up": (inner, width),
            f"{layer}.think.down": (width, inner),
        }
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: 1 + 0.1 * value if value.dim() == 1 else value * value.shape[-1] ** -0.5
        for name, value in drawn.items()
    }


def write(directory: Path) -> Path:
    """Write config.json and model.safetensors; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    save_file(tensors(CONFIG), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
