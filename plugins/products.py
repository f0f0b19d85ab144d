"""Matrix products of a model's layers: which of them are joined, and who computes them.

Owns a model's choice and the ways there are; leaves sums to torch and to `launch.skinny_linear`,
and whether a joined product has the bits of its parts' own to `probe_products`. Invariant: a
choice belongs to one model, so engines of one process do not share it, and a traced graph holds
plain joined products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.plugins import launch

# Measured on an H200: ours wins up to Ouro's largest, 44 MiB; cuBLAS from Huginn's least, 53, on.
MAX_SKINNY_BYTES = 48 * 2**20
_SKINNY_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class JoinedProduct:
    """Matrices over the same input, kept as one weight: q, k and v, or gate and up.

    Attributes:
        inputs: columns of each, K.
        sizes: rows of each, in order.
    """

    inputs: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Products:
    """How one model computes its products.

    Attributes:
        max_skinny_rows: products of up to so many rows with a matrix of at most
            `MAX_SKINNY_BYTES` are `launch.skinny_linear` on a GPU; 0 is none,
            `launch.MAX_SKINNY_ROWS` the most. Its bits do not depend on what is joined.
        apart: joined products that are computed part by part.

    Raises:
        PluginError: more rows than the kernel takes.
    """

    max_skinny_rows: int = 0
    apart: frozenset[JoinedProduct] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.max_skinny_rows <= launch.MAX_SKINNY_ROWS:
            raise PluginError(
                f"skinny_linear: expected 0..{launch.MAX_SKINNY_ROWS} rows, "
                f"got {self.max_skinny_rows}"
            )

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Product x weight^T of [R, K] and [N, K]; our kernel takes 16-bit rows on a GPU only."""
        is_skinny = self._is_skinny(x, weight)
        return launch.skinny_linear(x, weight) if is_skinny else F.linear(x, weight)

    def joined(self, x: Tensor, weight: Tensor, product: JoinedProduct) -> Tensor:
        """Product of [R, K] with all matrices of `product`, [R, sum of sizes].

        Args:
            x: the input.
            weight: [sum of sizes, K], the matrices one below the other.
            product: what is joined in it.
        """
        if self.apart and product in self.apart and not self._is_skinny(x, weight):
            return apart(x, weight, product)
        return self.linear(x, weight)

    def _is_skinny(self, x: Tensor, weight: Tensor) -> bool:
        """Whether x is a real tensor of few enough rows, for a matrix that is small enough."""
        if not self.max_skinny_rows or not x.is_cuda or x.dtype not in _SKINNY_DTYPES:
            return False
        if torch.compiler.is_compiling() or weight.nbytes > MAX_SKINNY_BYTES:
            return False
        return len(x) <= self.max_skinny_rows


def apart(x: Tensor, weight: Tensor, product: JoinedProduct) -> Tensor:
    """The product of every matrix by itself, side by side; no weight is copied."""
    parts = torch.split(weight, list(product.sizes))
    return torch.cat([F.linear(x, part) for part in parts], dim=1)
