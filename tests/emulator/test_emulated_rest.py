"""The other kernels' own source on the CPU, against their twins.

Where a twin rounds as a GPU does, bits are compared. Norms sum in another order than PyTorch on a
CPU, and the CPU's exponential and square root are not a GPU's: those are near.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from looptrt.plugins import launch, reference
from looptrt.runtime.request import SamplerParams
from looptrt.runtime.sampler import draw, uniform
from tests.emulator.conftest import Library
from tests.emulator.emulated import ORDERS, Emulated, Order, name_of
from tests.plugins.pools import Pool, assert_bitwise, int32

# A kernel that never ends cannot be interrupted: the limit ends the process.
pytestmark = [pytest.mark.full, pytest.mark.timeout(method="thread")]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6

by_order = pytest.mark.parametrize("order", [ORDERS[0], ORDERS[3]], ids=name_of)
by_dtype = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)


@pytest.fixture
def rest(library: Library) -> Emulated:
    return library("compact", "fenced", "plane_copy", "position", "sampling", "update")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    """A few roundings of the dtype, of the largest element."""
    allowed = 4 * torch.finfo(want.dtype).eps * want.double().abs().amax()
    assert bool(((got.double() - want.double()).abs() <= allowed).all())


# Every layout of fenced_rms_norm: narrow, single, short, few, chains, long, and split; of few,
# every number of threads, and the narrowest and widest rows of its kernels.
@by_order
@by_dtype
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *((3, 8), (17, 96), (5, 128), (1, 640), (2, 2048), (3, 5280), (40, 1024), (16, 5280)),
        *((1, 8192), (15, 256), (8, 2048), (9, 2056), (8, 4096), (15, 4104), (8, 5280), (9, 6144)),
        *((4, 4104), (1, 2056)),
    ],
)
def test_norms_are_near_their_twins(
    rest: Emulated, rows: int, width: int, dtype: torch.dtype, order: Order
) -> None:
    x, residual = (random(rows, width, dtype=dtype, seed=i) for i in (0, 1))
    weight, next_weight = (random(width, dtype=dtype, seed=i) for i in (2, 3))
    calls = {
        "fenced_rms_norm": (x, weight),
        "fenced_add_rms_norm": (x, residual, weight),
        "fenced_rms_norm_add_rms_norm": (x, residual, weight, next_weight),
        "fenced_add_rms_norm_rms_norm": (x, residual, weight, next_weight),
    }
    for name, operands in calls.items():
        want = getattr(reference, name)(*operands, eps=EPS)
        with rest.in_use(order):
            got = getattr(launch, name)(*operands, eps=EPS)
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for one, other in pairs:
            assert_near(one, other)


@by_order
@by_dtype
@pytest.mark.parametrize("sizes", [(16, 16, 128), (4, 2, 16), (4, 1, 32)])
def test_qk_norm_is_near_its_twin(
    rest: Emulated, sizes: tuple[int, int, int], dtype: torch.dtype, order: Order
) -> None:
    heads = dict(zip(("num_heads", "num_kv_heads", "head_dim"), sizes, strict=True))
    q, k = sizes[0] * sizes[2], sizes[1] * sizes[2]
    for rows in (1, 7, 9, 20):
        qkv = random(rows, q + 2 * k, dtype=dtype)
        weights = random(q, dtype=dtype, seed=1), random(k, dtype=dtype, seed=2)
        with rest.in_use(order):
            got = launch.fenced_qk_norm(qkv, *weights, **heads, eps=EPS)
        assert_near(got, reference.fenced_qk_norm(qkv, *weights, **heads, eps=EPS))
        assert_bitwise(got[:, q + k :], qkv[:, q + k :])


@by_order
@by_dtype
@pytest.mark.parametrize("table_dtype", [None, F32], ids=str)
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("sizes", [(16, 16, 128), (5, 5, 96), (4, 2, 12)])
def test_ropes_have_their_twins_bits(
    rest: Emulated,
    sizes: tuple[int, int, int],
    interleaved: int,
    table_dtype: torch.dtype | None,
    dtype: torch.dtype,
    order: Order,
) -> None:
    heads = dict(zip(("num_heads", "num_kv_heads", "head_dim"), sizes, strict=True))
    cos, sin = (random(50, sizes[2] // 2, dtype=table_dtype or dtype, seed=i) for i in (1, 2))
    qk = (sizes[0] + sizes[1]) * sizes[2]
    bias = random(qk, dtype=dtype, seed=3)
    for rows in (1, 9):
        qkv = random(rows, qk + sizes[1] * sizes[2], dtype=dtype)
        operands = torch.arange(rows, dtype=torch.int32).flip(0).contiguous(), cos, sin
        attributes = {**heads, "interleaved": interleaved}
        with rest.in_use(order):
            got = launch.fenced_rope(qkv, *operands, **attributes)
            biased = launch.fenced_bias_rope(qkv, bias, *operands, **attributes)
        assert_bitwise(got, reference.fenced_rope(qkv, *operands, **attributes))
        assert_bitwise(biased, reference.fenced_bias_rope(qkv, bias, *operands, **attributes))


@by_order
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_a_chain_of_norms_and_a_rope_reads_what_the_kernels_before_wrote(
    rest: Emulated, rows: int, dtype: torch.dtype, order: Order
) -> None:
    """They start before their predecessors have ended; positions too are made in the chain."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    x = random(rows, 512, dtype=dtype)
    weight, next_weight = (random(512, dtype=dtype, seed=i) for i in (1, 2))
    bias = random(384, dtype=dtype, seed=3)
    turn = random(50, 32, dtype=F32, seed=4), random(50, 32, dtype=F32, seed=5)
    numbers = torch.arange(49, 49 - rows, -1, dtype=torch.int32)[:, None].view(F32)
    order_of_rows = torch.arange(rows, dtype=torch.int32).flip(0).contiguous()

    def chain() -> list[Tensor]:
        y = launch.fenced_rms_norm(x, weight, eps=EPS)
        h, y = launch.fenced_rms_norm_add_rms_norm(y, x, weight, next_weight, eps=EPS)
        h, y = launch.fenced_add_rms_norm_rms_norm(y, h, weight, next_weight, eps=EPS)
        y = launch.fenced_add_rms_norm(y, h, weight, eps=EPS)
        y = launch.fenced_rms_norm(y, weight, eps=EPS)
        # Just before the rope, which also needs what came before that.
        positions = launch.compact_gather(numbers, order_of_rows).view(torch.int32).flatten()
        turned = launch.fenced_bias_rope(y, bias, positions, *turn, **heads, interleaved=1)
        return [h, y, turned]

    with rest.in_use(order):
        want = chain()
        with rest.overlapping():
            got = chain()
    for one, other in zip(got, want, strict=True):
        assert_bitwise(one, other)


@by_order
@by_dtype
@pytest.mark.parametrize("width", [33, 352])
def test_silu_mul_is_near_its_twin(
    rest: Emulated, width: int, dtype: torch.dtype, order: Order
) -> None:
    for rows in (1, 9):
        gate_up = random(rows, 2 * width, dtype=dtype)
        with rest.in_use(order):
            assert_near(launch.fenced_silu_mul(gate_up), reference.fenced_silu_mul(gate_up))


@by_order
@by_dtype
@pytest.mark.parametrize("width", [8, 33])
@pytest.mark.parametrize("count", [0, 1, 41, 512, 513])
def test_rows_are_gathered_and_scattered(
    rest: Emulated, count: int, width: int, dtype: torch.dtype, order: Order
) -> None:
    generator = torch.Generator().manual_seed(count)
    x, rows = random(530, width, dtype=dtype), torch.randperm(530, generator=generator)
    index = rows[:count].int()
    update = random(count, width, dtype=dtype, seed=1)
    with rest.in_use(order):
        gathered = launch.compact_gather(x, index)
        scattered = launch.compact_scatter(x, update, index)
    assert_bitwise(gathered, x[rows[:count]])
    assert_bitwise(scattered, x.index_copy(0, rows[:count], update))


@by_order
@by_dtype
def test_noise_has_the_bits_of_its_twin(rest: Emulated, dtype: torch.dtype, order: Order) -> None:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (16,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (16,), generator=generator).int()
    like = torch.zeros(16, 300, dtype=dtype)
    scales = {"std": math.sqrt(2 / (5 * 300)), "scale": math.sqrt(300)}
    with rest.in_use(order):
        got = launch.position_keyed_noise(like, positions, seeds, **scales)
    assert_bitwise(got, reference.position_keyed_noise(like, positions, seeds, **scales))


@by_order
@pytest.mark.parametrize(("dtype", "shape"), [(BF16, (3, 2, 4, 2, 8)), (F32, (1, 2, 4, 1, 3))])
def test_plane_copies_read_before_they_write(
    rest: Emulated, dtype: torch.dtype, shape: tuple[int, ...], order: Order
) -> None:
    """Chains, and copies whose units do not exist."""
    pool = Pool.of(6, shape, dtype)
    pool.units.copy_(random(6, *shape, dtype=dtype))
    want = pool.units.clone()
    want[2, :, :, 1:3] = pool.units[1, :, :, 1:3]
    want[3] = pool.units[2]
    want[4] = pool.units[3]
    lists = (
        [1, 2, 3, 4, 0, 1, 5],
        [2, 3, 4, 1, 1, 6, 5],
        [1, 0, 0, 2, 0, 0, 0],
        [3, 4, 4, 2, 4, 4, 0],
    )
    with rest.in_use(order):
        launch.plane_copy(pool.kv_pool, *map(int32, lists), shape, dtype)
    assert_bitwise(pool.units, want)
    pool.assert_guards_intact()


@by_order
def test_tables_are_updated_in_whole_columns(rest: Emulated, order: Order) -> None:
    table = torch.zeros(3, 2, 4, dtype=torch.int32)
    columns = [2, 0, 3, 1], [1, 3, 0, 4], [[7, 8], [9, 10], [1, 1], [1, 1]]
    with rest.in_use(order):
        launch.update_tables(table, *map(int32, columns))
    assert table[2, :, 1].tolist() == [7, 8]
    assert table[0, :, 3].tolist() == [9, 10]
    assert int(table.count_nonzero()) == 4


FILTERS = (
    SamplerParams(temperature=1.0),
    SamplerParams(temperature=0.7, top_k=50),
    SamplerParams(temperature=1.3, top_p=0.9),
    SamplerParams(temperature=0.8, min_p=0.05),
    SamplerParams(temperature=1.0, top_k=7, top_p=0.6, min_p=0.01),
    SamplerParams(temperature=2.0, top_p=1e-9),
)


@by_order
@by_dtype
@pytest.mark.parametrize("vocab", [1, 33, 3000])
def test_draws_are_those_of_the_runtime(
    rest: Emulated, vocab: int, dtype: torch.dtype, order: Order
) -> None:
    rows = 2 * len(FILTERS)
    logits = random(rows, vocab, dtype=dtype) * 3
    logits[1::2] = (logits[1::2] * 2).round() / 2  # many equal ones
    params = [replace(FILTERS[i % len(FILTERS)], seed=i * 7919) for i in range(rows)]
    positions = [i * 31 for i in range(rows)]
    seeds = np.array([p.seed for p in params], np.uint64)
    want = draw(logits.double(), params, uniform(seeds, np.array(positions, np.int32)))
    broken = logits.clone()
    broken[:, vocab // 2] = math.nan
    columns = (
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        int32([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float64),
        torch.tensor(seeds.astype(np.int64)),
        int32(positions),
    )
    with rest.in_use(order):
        tokens, failed = launch.sample(logits, *columns)
        greedy, _ = launch.sample(logits, columns[0] * 0, *columns[1:])
        nothing, all_failed = launch.sample(broken, *columns)
    assert tokens.tolist() == want.tolist()
    assert greedy.tolist() == [int((row == row.max()).nonzero()[0, 0]) for row in logits]
    assert not failed.any()
    assert not nothing.any()
    assert all_failed.all()
