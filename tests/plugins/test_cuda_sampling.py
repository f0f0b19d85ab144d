"""The sampling kernel against runtime/sampler.py: the same token for the same seed and position."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.plugins import launch
from looptrt.runtime.request import SamplerParams
from looptrt.runtime.sampler import draw, uniform

pytestmark = pytest.mark.gpu

FILTERS = [
    SamplerParams(temperature=1.0),
    SamplerParams(temperature=0.7, top_k=50),
    SamplerParams(temperature=1.3, top_p=0.9),
    SamplerParams(temperature=0.8, min_p=0.05),
    SamplerParams(temperature=1.0, top_k=7, top_p=0.6, min_p=0.01),
    SamplerParams(temperature=5.0, top_k=1),
    SamplerParams(temperature=1e-30, top_p=0.5),
    SamplerParams(temperature=2.0, top_p=1e-9),
    SamplerParams(temperature=100.0, top_k=10**6, top_p=0.999),
]
SIZES = [1, 2, 33, 1024, 49_152, 152_064]

by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def random_logits(rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows + vocab)
    return (torch.randn(rows, vocab, generator=generator) * 3.0).to(dtype)


def chosen(logits: Tensor, params: list[SamplerParams], positions: list[int]) -> Tensor:
    """What the kernel chooses, on the CPU; fails if it calls a row failed."""

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).cuda()

    tokens, failed = launch.sample(
        logits.cuda(),
        column([p.temperature for p in params], torch.float64),
        column([p.top_k for p in params], torch.int32),
        column([p.top_p for p in params], torch.float64),
        column([p.min_p for p in params], torch.float64),
        column([p.seed for p in params], torch.int64),
        column(positions, torch.int32),
    )
    assert not failed.any()
    return tokens.cpu()


@by_dtype
@pytest.mark.parametrize("vocab", SIZES)
def test_draws_are_those_of_the_runtime(vocab: int, dtype: torch.dtype) -> None:
    """Fails with another constant of the stream, or ties taken from the largest id."""
    rows = 8 * len(FILTERS)
    logits = random_logits(rows, vocab, dtype)
    logits[1::2] = (logits[1::2] * 2).round() / 2  # many equal ones
    params = [replace(FILTERS[i % len(FILTERS)], seed=i * 7919) for i in range(rows)]
    positions = [i * 31 for i in range(rows)]
    seeds = np.array([p.seed for p in params], np.uint64)
    want = draw(logits.double(), params, uniform(seeds, np.array(positions, np.int32)))
    assert chosen(logits, params, positions).tolist() == want.tolist()


@by_dtype
@pytest.mark.parametrize("vocab", SIZES)
def test_greedy_takes_the_smallest_id_of_equal_logits(vocab: int, dtype: torch.dtype) -> None:
    """Fails with the token's id in place of its complement in the compared number."""
    logits = random_logits(6, vocab, dtype)
    logits[1] = logits[1].round()
    logits[2] = -7.0
    logits[3] = -0.0
    logits[3, vocab // 2 :] = 0.0
    logits[4, -1] = logits[4].max()
    got = chosen(logits, [SamplerParams()] * 6, [0] * 6)
    assert got.tolist() == [int((row == row.max()).nonzero()[0, 0]) for row in logits]


def test_a_seed_s_draws_follow_the_distribution() -> None:
    """Chi-squared of 20,000 draws of eight tokens, at 7 degrees of freedom below 40."""
    weights = torch.tensor([1.0, 2.0, 4.0, 8.0, 1.0, 3.0, 5.0, 8.0])
    rows = 20_000
    logits = weights.log().expand(rows, 8).contiguous()
    params = [SamplerParams(temperature=1.0, seed=5)] * rows
    counts = torch.bincount(chosen(logits, params, list(range(rows))).long(), minlength=8)
    expected = weights / weights.sum() * rows
    assert float(((counts - expected) ** 2 / expected).sum()) < 40


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_reported(bad: float) -> None:
    """Fails if the check looks at one stretch of the row only."""
    for token in (0, 31, 999):
        logits = random_logits(3, 1000, torch.float32)
        clean = logits.clone()
        logits[1, token] = bad
        for temperature in (0.0, 1.0):
            column = torch.full((3,), temperature, dtype=torch.float64).cuda()
            ones, zeros = torch.ones_like(column), torch.zeros(3, dtype=torch.int32).cuda()
            rest = (zeros, ones, ones * 0, zeros.long(), zeros)
            tokens, failed = launch.sample(logits.cuda(), column, *rest)
            assert failed.tolist() == [0, 1, 0]
            want, _ = launch.sample(clean.cuda(), column, *rest)
            assert tokens.tolist() == [int(want[0]), 0, int(want[2])]


def test_neighbours_do_not_move_a_draw() -> None:
    """Fails with the row's index in the random number."""
    logits = random_logits(9, 5000, torch.bfloat16)
    params = [replace(FILTERS[i % 5], seed=i) for i in range(9)]
    together = chosen(logits, params, list(range(9)))
    for row in range(9):
        assert chosen(logits[row : row + 1], [params[row]], [row])[0] == together[row]


def test_a_captured_call_replays_on_new_values() -> None:
    """Fails with a parameter read on the host."""
    logits = random_logits(2, 3000, torch.float32).cuda()
    ones = torch.ones(2, dtype=torch.float64).cuda()
    zeros = torch.zeros(2, dtype=torch.int32).cuda()
    operands = [logits, ones.clone(), zeros.clone(), ones.clone(), ones * 0]
    operands += [zeros.long(), zeros.clone()]
    launch.sample(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = launch.sample(*operands)
    for step in range(1, 30):
        operands[0].copy_(random_logits(2 * step, 3000, torch.float32)[:2])
        operands[1].fill_(step % 3)
        operands[6].fill_(step)
        graph.replay()
        assert tokens.tolist() == launch.sample(*operands)[0].tolist()


def test_what_it_cannot_serve_is_refused() -> None:
    wide = torch.zeros(1, 2**19 + 1, dtype=torch.bfloat16).cuda()
    one = torch.zeros(1, dtype=torch.float64).cuda()
    rest = (one.int(), one, one, one.long(), one.int())
    with pytest.raises(PluginError, match="sample: cudaErrorInvalidValue"):
        launch.sample(wide, one, *rest)
    with pytest.raises(PluginError, match=r"sample: temperatures: expected torch\.float64 \[1\]"):
        launch.sample(wide[:, :10].contiguous(), one.float(), *rest)
    with pytest.raises(PluginError, match=r"sample: logits: expected torch\.float32 or"):
        launch.sample(wide[:, :10].double(), one, *rest)
