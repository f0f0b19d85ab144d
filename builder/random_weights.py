"""Weights of a build without a checkpoint: shapes to measure with, the same every time.

Owns the distribution and the seed; leaves saying so to `builder.build`. Invariant: a tensor
depends on its name, its shape and the seed alone, not on the order or the number of workers.
"""

from __future__ import annotations

import hashlib

import torch

RANDOM_SEED = 0


def random_weight(name: str, stand_in: torch.Tensor) -> torch.Tensor:
    """A tensor of the stand-in's shape and dtype: 1 for norms, else normal by its width."""
    if "norm" in name:
        return torch.ones(stand_in.shape, dtype=stand_in.dtype)
    digest = hashlib.sha256(f"{RANDOM_SEED} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    drawn = torch.randn(stand_in.shape, generator=generator)
    return drawn.mul_(stand_in.shape[-1] ** -0.5).to(stand_in.dtype)
