"""Whether a joined product has the bits of its parts' own products, at an engine's row counts.

Owns operands and the comparison; leaves verdicts to `probe` and what follows from one to
`runtime`. Which kernel computes a product, and so the order of its sums, is the BLAS library's
choice by its sizes: nothing but a comparison tells. Invariant: what is compared is what would
run, `F.linear` on the joined weight and `products.apart` on views of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from looptrt.plugins.probe import Clock, OpCall, Verdict, num_different
from looptrt.plugins.products import JoinedProduct, apart
from looptrt.plugins.schema import Exactness

JOINED = "joined_product"  # no operator: products are plain nodes of a graph


def probe_products(
    products: Iterable[JoinedProduct],
    rows: Sequence[int],
    dtype: str,
    device: torch.device,
    clock: Clock,
) -> list[Verdict]:
    """Compare joined products with their parts', all of them at a row count before the next.

    Args:
        products: of an engine.
        rows: row counts, those that matter most first.
        dtype: the model's, as torch names it.
        device: where to run.
        clock: when to stop; the first row count is always compared.

    Returns:
        A verdict for each, in order; equals_torch, as the parts are what PyTorch's own module
        of such a checkpoint multiplies.
    """
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator(device=device).manual_seed(0)

    def drawn(count: int, inputs: int) -> torch.Tensor:
        return torch.randn(count, inputs, generator=generator, device=device).to(kind)

    against = "its parts' own products"
    compared = [
        (
            product,
            drawn(sum(product.sizes), product.inputs),
            Verdict(call_of(product, dtype), Exactness.EQUALS_TORCH, against),
        )
        for product in products
    ]
    for index, count in enumerate(rows):
        if index and clock.is_over():
            break
        for product, weight, verdict in compared:
            x = drawn(count, product.inputs)
            got, want = F.linear(x, weight), apart(x, weight, product)
            verdict.rows.append(count)
            case = f"{dtype} {list(x.shape)}, {' + '.join(map(str, product.sizes))}"
            verdict.count(case, num_different(got, want), want.numel())
    return [verdict for _, _, verdict in compared]


def call_of(product: JoinedProduct, dtype: str) -> OpCall:
    """The product as verdicts name it: its K, then the rows of each part."""
    parts = ((f"N{index}", size) for index, size in enumerate(product.sizes))
    return OpCall(JOINED, (("K", product.inputs), *parts), (), dtype, dtype)


def product_of(verdict: Verdict) -> JoinedProduct:
    """What a verdict of `probe_products` is about."""
    (_, inputs), *parts = verdict.call.sizes
    return JoinedProduct(inputs, tuple(size for _, size in parts))
