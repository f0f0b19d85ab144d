"""What the emulated `skinny_linear` is held to; each uses `launch` as it finds it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from looptrt.plugins import launch
from tests.emulator.emulated import Emulated, Order
from tests.plugins.pools import assert_bitwise

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# (N, K): tails of a tile and of a piece, fewer pieces than warps, fewer tiles than blocks, tiles in
# turn (K of 1024), whole ones, more pieces than are on their way, and K that allows no vectors.
SHAPES = ((37, 200), (9, 72), (3, 8), (1, 64), (50, 1024), (64, 520), (24, 6664), (17, 33), (1, 1))


def operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs + inputs)
    x, weight = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs))
    )
    return x, weight


def bits_do_not_depend_on_the_grid(library: Emulated) -> None:
    """In turn and in stretches, with blocks that have a tile less than others."""
    for inputs in (200, 1024):
        x, weight = operands(3, 203, inputs, BF16)
        results = []
        for num_sms in (1, 2, 3, 5, 7, 26, 132):
            with library.in_use(Order(num_sms=num_sms)):
                results.append(launch.skinny_linear(x, weight))
            assert_bitwise(results[-1], results[0])


def is_near_float64(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """The bound of the GPU's own test: a float32 sum in any order, and one rounding."""
    x, weight = operands(rows, outputs, inputs, dtype)
    got = launch.skinny_linear(x, weight).double()
    want = x.double() @ weight.double().T
    magnitudes = x.double().abs() @ weight.double().abs().T
    rounding = want.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny
    allowed = magnitudes * inputs * 2.0**-22 + rounding * 1.01
    assert bool(((got - want).abs() <= allowed).all())


def bits_do_not_depend_on_neighbours(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = operands(16, outputs, inputs, dtype)
    alone = torch.cat([launch.skinny_linear(x[i : i + 1], weight) for i in range(16)])
    for rows in (2, 7, 8, 9, 15, 16):
        assert_bitwise(launch.skinny_linear(x[:rows].clone(), weight), alone[:rows])
    x[1:] = math.nan
    assert_bitwise(launch.skinny_linear(x, weight)[:1], alone[:1])


def every_depth_has_the_same_bits(library: Emulated, dtype: torch.dtype) -> None:
    """From the least shared memory on: x in global memory, then FIFOs of every depth."""
    for rows in (3, 16):
        x, weight = operands(rows, 40, 1544, dtype)
        want = launch.skinny_linear(x, weight)
        for kilobytes in range(66, 228, 6):
            with library.in_use(Order(shared_bytes=kilobytes * 1024)):
                assert_bitwise(launch.skinny_linear(x, weight), want)


def a_chain_reads_what_it_wrote(library: Emulated, rows: int) -> None:
    """Products that start before their inputs are there."""
    sizes = ((40, 264), (1024, 40), (24, 1024), (17, 24))
    weights = [operands(1, *size, BF16)[1] * size[1] ** -0.5 for size in sizes]
    x, _ = operands(rows, 1, 264, BF16)
    want = got = x
    for weight in weights:
        want = launch.skinny_linear(want, weight)
    with library.overlapping():
        for weight in weights:
            got = launch.skinny_linear(got, weight)
    assert_bitwise(got, want)
