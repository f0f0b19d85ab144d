"""CUDA kernels against PyTorch's eager chains on the same GPU, or their CPU twins, bit for bit.

benchmarks/kernels.py compares many more elements; these are quick, and each says which one-line
change of a kernel makes it fail.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.plugins import launch, reference
from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators
from tests.plugins.pools import assert_bitwise, int32

pytestmark = pytest.mark.gpu

OPS = torch.ops.looptrt
EPS = 1e-6
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NORMS = (
    "fenced_rms_norm",
    "fenced_add_rms_norm",
    "fenced_rms_norm_add_rms_norm",
    "fenced_add_rms_norm_rms_norm",
)

by_dtype = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> None:
    """Leave NaN where the next result of this shape will lie."""
    del [torch.full(shape, math.nan, dtype=dtype, device="cuda") for _ in range(2)][:]


def heads_of(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


@by_dtype
@pytest.mark.parametrize("width", [8, 64, 96, 128, 2048, 2056, 5280, 8192])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 15, 16, 17, 300])
def test_norms_have_the_eager_bits(rows: int, width: int, dtype: torch.dtype) -> None:
    """Fails with row_sum.cuh's sumLanes going up (offset = 1, 2, 4, ...), as PyTorch once did."""
    x, residual = (random(rows, width, dtype=dtype, seed=i) for i in (0, 1))
    weight, next_weight = (random(width, dtype=dtype, seed=i) for i in (2, 3))
    for name in NORMS:
        operands = {
            1: (x, weight),
            2: (x, residual, weight),
            3: (x, residual, weight, next_weight),
        }[1 if name == NORMS[0] else 2 if name == NORMS[1] else 3]
        want = getattr(reference, name)(*operands, eps=EPS)
        poisoned(rows, width, dtype=dtype)
        got = getattr(OPS, name)(*operands, eps=EPS)
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for one, other in pairs:
            assert_bitwise(one, other)


@by_dtype
@pytest.mark.parametrize("sizes", [(16, 16, 128), (4, 2, 16), (4, 1, 32)])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_qk_norm_has_the_eager_bits(
    rows: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Fails with rows.weight left that of q in block 1."""
    heads = heads_of(*sizes)
    q, k = sizes[0] * sizes[2], sizes[1] * sizes[2]
    qkv = random(rows, q + 2 * k, dtype=dtype)
    weights = random(q, dtype=dtype, seed=1), random(k, dtype=dtype, seed=2)
    want = reference.fenced_qk_norm(qkv, *weights, **heads, eps=EPS)
    poisoned(*qkv.shape, dtype=dtype)
    assert_bitwise(OPS.fenced_qk_norm(qkv, *weights, **heads, eps=EPS), want)


def eager_rope(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, heads: dict[str, Any], pairs: int
) -> Tensor:
    split = (heads["num_heads"] + heads["num_kv_heads"]) * heads["head_dim"]
    x = qkv[:, :split].reshape(len(qkv), -1, heads["head_dim"]).to(cos.dtype)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, dim=-1)
    turned = a * c - b * s, b * c + a * s
    both = torch.stack(turned, -1).flatten(-2) if pairs else torch.cat(turned, -1)
    return torch.cat((both.to(qkv.dtype).flatten(1), qkv[:, split:]), dim=1)


def tables(head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    channels = torch.arange(0, head_dim, 2, device="cuda").float()
    angles = torch.outer(torch.arange(50, device="cuda").float(), 1e4 ** (-channels / head_dim))
    return angles.cos().to(dtype), angles.sin().to(dtype)


@by_dtype
@pytest.mark.parametrize("table", ["model", "float32"])
@pytest.mark.parametrize("pairs", [0, 1])
@pytest.mark.parametrize("sizes", [(16, 16, 128), (5, 5, 96), (4, 2, 12)])
@pytest.mark.parametrize("rows", [1, 8, 9, 40])
def test_ropes_have_the_eager_bits(
    rows: int, sizes: tuple[int, int, int], pairs: int, table: str, dtype: torch.dtype
) -> None:
    """Fails with the rotation's products left in float32: mulVec of toFloatVec's in `turn`."""
    heads = heads_of(*sizes)
    cos, sin = tables(sizes[2], dtype if table == "model" else F32)
    qk = (sizes[0] + sizes[1]) * sizes[2]
    qkv = random(rows, qk + sizes[1] * sizes[2], dtype=dtype)
    positions = torch.arange(rows, dtype=torch.int32, device="cuda").flip(0).contiguous()
    want = eager_rope(qkv, positions, cos, sin, heads, pairs)
    poisoned(*qkv.shape, dtype=dtype)
    got = OPS.fenced_rope(qkv, positions, cos, sin, **heads, interleaved=pairs)
    assert_bitwise(got, want)

    bias = random(qk, dtype=dtype, seed=1)
    biased = torch.cat((qkv[:, :qk] + bias, qkv[:, qk:]), dim=1)
    want = eager_rope(biased, positions, cos, sin, heads, pairs)
    got = OPS.fenced_bias_rope(qkv, bias, positions, cos, sin, **heads, interleaved=pairs)
    assert_bitwise(got, want)


@pytest.mark.parametrize("position", [-1, 50])
def test_a_position_without_table_row_is_loud(position: int) -> None:
    """Fails with the clamped position's angles used: no `if (!is_known)`."""
    heads = heads_of(4, 2, 32)
    qkv, positions = random(2, 256, dtype=BF16), int32([3, position]).cuda()
    cos, sin = tables(32, F32)
    got = OPS.fenced_rope(qkv, positions, cos, sin, **heads, interleaved=0)
    assert got[0].isfinite().all()
    assert got[1, :192].isnan().all()
    assert_bitwise(got[1, 192:], qkv[1, 192:])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_silu_of_every_gate_has_the_eager_bits(dtype: torch.dtype) -> None:
    """Fails with __fdividef, or with __expf in place of expf."""
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    for rows in (1, 16):
        gates = gate.view(rows, -1)
        up = random(*gates.shape, dtype=dtype)
        poisoned(*gates.shape, dtype=dtype)
        got = OPS.fenced_silu_mul(torch.cat((gates, up), dim=1))
        assert_bitwise(got, F.silu(gates) * up)


@by_dtype
@pytest.mark.parametrize("width", [33, 352, 5632])
@pytest.mark.parametrize("rows", [1, 9, 64])
def test_silu_mul_has_the_eager_bits(rows: int, width: int, dtype: torch.dtype) -> None:
    """Fails with the product of unrounded silu: no roundVec<T>(activated)."""
    gate_up = random(rows, 2 * width, dtype=dtype, scale=5.0)
    want = F.silu(gate_up[:, :width]) * gate_up[:, width:]
    poisoned(rows, width, dtype=dtype)
    assert_bitwise(OPS.fenced_silu_mul(gate_up), want)


@by_dtype
@pytest.mark.parametrize("width", [8, 33, 2048])
@pytest.mark.parametrize("count", [1, 41, 512, 513])
def test_rows_are_gathered_and_scattered(count: int, width: int, dtype: torch.dtype) -> None:
    """Fails with the rows of copyAllKernel left out (many), or with found = rows[i] (few)."""
    x, rows = random(600, width, dtype=dtype), torch.randperm(600)[:count].int().cuda()
    poisoned(count, width, dtype=dtype)
    gathered = OPS.compact_gather(x, rows)
    assert_bitwise(gathered, x[rows.long()])
    update = random(count, width, dtype=dtype, seed=1)
    poisoned(600, width, dtype=dtype)
    got = OPS.compact_scatter(x, update, rows)
    assert_bitwise(got, x.index_copy(0, rows.long(), update))
    assert OPS.compact_gather(x, rows[:0]).shape == (0, width)
    assert_bitwise(OPS.compact_scatter(x, update[:0], rows[:0]), x)


def test_all_rows_in_their_own_place_and_all_but_two_are_scattered() -> None:
    """Fails with `p.rows[token] == token` taken for the last row of the list alone."""
    x, update = (random(7, 64, dtype=BF16, seed=i) for i in (0, 1))
    own = torch.arange(7, dtype=torch.int32, device="cuda")
    assert_bitwise(OPS.compact_scatter(x, update, own), update)
    swapped = int32([0, 1, 5, 3, 4, 2, 6]).cuda()
    assert_bitwise(OPS.compact_scatter(x, update, swapped), update[swapped.long()])


@pytest.mark.parametrize("row", [-1, 6])
def test_a_row_outside_the_batch_touches_nothing(row: int) -> None:
    """Fails without the check of the row in either kernel."""
    x, rows = random(6, 64, dtype=BF16), int32([2, row]).cuda()
    gathered = OPS.compact_gather(x, rows)
    assert_bitwise(gathered[0], x[2])
    assert gathered[1].isnan().all()
    update = random(2, 64, dtype=BF16, seed=1)
    want = x.clone()
    want[2] = update[0]
    assert_bitwise(OPS.compact_scatter(x, update, rows), want)


@by_dtype
def test_noise_has_the_bits_of_its_cpu_twin(dtype: torch.dtype) -> None:
    """Fails with z rounded to float32 before std multiplies it."""
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    positions = torch.arange(64, dtype=torch.int32)
    positions[32:] = torch.randint(0, 2**31 - 1, (32,), generator=generator).int()
    like = torch.empty(64, 5280, dtype=dtype)
    scales = {"std": math.sqrt(2 / (5 * 5280)), "scale": math.sqrt(5280)}
    want = OPS.position_keyed_noise(like, positions, seeds, **scales)
    poisoned(64, 5280, dtype=dtype)
    got = OPS.position_keyed_noise(like.cuda(), positions.cuda(), seeds.cuda(), **scales)
    assert_bitwise(got.cpu(), want)
    nothing = OPS.position_keyed_noise(
        like.cuda(), positions.cuda(), seeds.cuda(), **{**scales, "std": 0.0}
    )
    assert_bitwise(nothing, torch.zeros_like(nothing))


UNIT_SHAPE = (3, 2, 4, 2, 8)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_plane_copies_read_before_they_write(dtype: torch.dtype) -> None:
    """Fails with one kernel that copies from unit to unit."""
    units = random(6, *UNIT_SHAPE, dtype=dtype)
    want = units.clone()
    want[2, :, :, 1:3] = units[1, :, :, 1:3]
    want[3] = units[2]
    want[4] = units[3]
    pool = torch.tensor([units.data_ptr(), 6], device="cuda")
    lists = [1, 2, 3, 4, 0, 1, 5], [2, 3, 4, 1, 1, 6, 5], [1, 0, 0, 2, 0, 0, 0]
    ranges = [int32(values).cuda() for values in (*lists, [3, 4, 4, 2, 4, 4, 0])]
    launch.plane_copy(pool, *ranges, UNIT_SHAPE, dtype)
    assert_bitwise(units, want)


def test_tables_are_updated_in_whole_columns() -> None:
    """Fails with slot and page exchanged; an update outside the table is left out."""
    table = torch.zeros(3, 2, 4, dtype=torch.int32, device="cuda")
    columns = [[2, 0, 3, 1], [1, 3, 0, 4], [[7, 8], [9, 10], [1, 1], [1, 1]]]
    launch.update_tables(table, *(int32(values).cuda() for values in columns))
    assert table[2, :, 1].tolist() == [7, 8]
    assert table[0, :, 3].tolist() == [9, 10]
    assert int(table.count_nonzero()) == 4


def test_a_captured_call_replays_on_new_values() -> None:
    """Fails with a launch on the default stream instead of torch's current one."""
    x, weight = random(2, 2048, dtype=BF16), random(2048, dtype=BF16, seed=1)
    OPS.fenced_rms_norm(x, weight, eps=EPS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = OPS.fenced_rms_norm(x, weight, eps=EPS)
    x.copy_(random(2, 2048, dtype=BF16, seed=2))
    graph.replay()
    assert_bitwise(y, reference.fenced_rms_norm(x, weight, eps=EPS))


def test_what_a_kernel_cannot_serve_is_refused_by_name() -> None:
    x, weight = random(4, 30, dtype=BF16), random(30, dtype=BF16)
    with pytest.raises(PluginError, match="fenced_rms_norm: cudaErrorInvalidValue"):
        OPS.fenced_rms_norm(x, weight, eps=EPS)
    wide = random(4, 128, dtype=BF16)
    with pytest.raises(PluginError, match="fenced_rms_norm: x: expected a contiguous tensor"):
        OPS.fenced_rms_norm(wide[:, :64], weight.new_ones(64), eps=EPS)
    with pytest.raises(PluginError, match="weight: expected a CUDA tensor, got cpu"):
        OPS.fenced_rms_norm(wide, torch.ones(128, dtype=BF16), eps=EPS)
    shifted = random(4 * 64 + 1, dtype=BF16)[1:].view(4, 64)
    with pytest.raises(PluginError, match="fenced_rms_norm: cudaErrorMisalignedAddress"):
        OPS.fenced_rms_norm(shifted, weight.new_ones(64), eps=EPS)
