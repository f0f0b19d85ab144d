"""Linear layers of a few rows by our own kernel: how near to the exact sum, and whose bits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.plugins import launch
from looptrt.plugins.products import MAX_SKINNY_BYTES, Products
from tests.plugins.pools import assert_bitwise

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# (N, K): models' products, tails of a tile and of a piece, K that allows no 16-byte accesses, and
# rows too many for shared memory.
SHAPES = [
    (2048, 2048),
    (2048, 5632),
    (5280, 5280),
    (640, 17920),
    (37, 200),
    (9, 72),
    (3, 8),
    (50, 33),
    (1, 1),
]

gpu = pytest.mark.gpu


def operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and weight; nothing is on its way any more, as the kernel asks of a weight."""
    generator = torch.Generator(device="cuda").manual_seed(rows + outputs + inputs)
    x, weight = (
        torch.randn(shape, generator=generator, device="cuda").to(dtype)
        for shape in ((rows, inputs), (outputs, inputs))
    )
    torch.cuda.synchronize()
    return x, weight


@gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
def test_sums_are_exact_but_for_float32_and_one_rounding(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """Fails with the last piece of a row left out: `piece < args.pieces - 1`.

    The bound: a float32 sum of K products in any order is off by at most K * 2^-24 of the sum
    of their magnitudes (products of 16-bit numbers are exact); a tensor core cuts where a
    processor rounds, 2^-22 to be safe. Then half a step of dtype.
    """
    x, weight = operands(rows, outputs, inputs, dtype)
    poison = torch.full((rows, outputs), math.nan, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    del poison
    got = launch.skinny_linear(x, weight).double()
    want = x.double() @ weight.double().T
    magnitudes = x.double().abs() @ weight.double().abs().T
    rounding = want.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny
    allowed = magnitudes * inputs * 2.0**-22 + rounding * 1.01
    worst = ((got - want).abs() / allowed).max().item()
    assert worst <= 1.0, f"{worst} of what is allowed"


@gpu
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_row_has_its_bits_alone_and_among_neighbours(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """Fails with the pieces of a tall block dealt to kWarps - 1 warps."""
    x, weight = operands(16, outputs, inputs, dtype)
    alone = torch.cat([launch.skinny_linear(x[i : i + 1], weight) for i in range(16)])
    for rows in (2, 4, 7, 8, 9, 16):
        assert_bitwise(launch.skinny_linear(x[:rows], weight), alone[:rows])
    x[1:] = math.nan
    torch.cuda.synchronize()
    assert_bitwise(launch.skinny_linear(x, weight)[:1], alone[:1])


@gpu
def test_a_chain_of_products_replays_in_a_graph_on_new_inputs() -> None:
    """Each product reads what the one before it wrote. Fails without waitForInputs()."""
    layers = [operands(2, 4096, 2048, BF16)[1], operands(2, 2048, 4096, BF16)[1]] * 8
    layers = [weight * weight.shape[1] ** -0.5 for weight in layers]
    x, _ = operands(2, 1, 2048, BF16)

    def chain(h: Tensor) -> Tensor:
        for weight in layers:
            h = launch.skinny_linear(h, weight)
        return h

    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    x.copy_(x.flip(1) + 0.5)
    graph.replay()
    want = x
    for weight in layers:
        torch.cuda.synchronize()
        want = launch.skinny_linear(want, weight)
    assert_bitwise(y, want)


@gpu
def test_what_it_cannot_take_is_refused_by_name() -> None:
    x, weight = operands(17, 8, 16, BF16)
    with pytest.raises(PluginError, match="skinny_linear: cudaErrorInvalidValue"):
        launch.skinny_linear(x, weight)
    with pytest.raises(PluginError, match=r"skinny_linear: weight: expected torch\.bfloat16"):
        launch.skinny_linear(x[:2], weight.float())
    with pytest.raises(PluginError, match="skinny_linear: x: expected a contiguous tensor"):
        launch.skinny_linear(x[:2, :8], weight[:, :8].contiguous())


@gpu
def test_the_switch_takes_few_rows_and_leaves_the_rest_to_torch() -> None:
    skinny = Products(max_skinny_rows=4)
    x, weight = operands(5, 96, 64, BF16)
    assert_bitwise(skinny.linear(x[:4], weight), launch.skinny_linear(x[:4], weight))
    assert_bitwise(skinny.linear(x, weight), F.linear(x, weight))
    wide = x[:2].float(), weight.float()
    assert_bitwise(skinny.linear(*wide), F.linear(*wide))
    assert weight.nbytes <= MAX_SKINNY_BYTES
    large = operands(2, MAX_SKINNY_BYTES // 4096 + 64, 2048, BF16)
    assert_bitwise(skinny.linear(*large), F.linear(*large))
    assert not torch.equal(launch.skinny_linear(*large), F.linear(*large))


def test_the_switch_has_a_limit_of_rows() -> None:
    for count in (17, -1):
        with pytest.raises(PluginError, match=rf"expected 0..16 rows, got {count}"):
            Products(max_skinny_rows=count)


def test_products_are_torchs_on_the_cpu_and_in_a_traced_graph() -> None:
    skinny = Products(max_skinny_rows=4)
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    assert_bitwise(skinny.linear(x, weight), F.linear(x, weight))
    assert skinny.linear(x.to("meta"), weight.to("meta")).shape == (2, 3)

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return skinny.linear(x, weight)

    exported = torch.export.export(Layer(), (x.bfloat16(), weight.bfloat16()))
    assert "aten.linear" in str(exported.graph)
