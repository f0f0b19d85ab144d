"""Each fenced operator has the bits of the eager chain that the references run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looptrt.errors import PluginError
from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators
from tests.plugins.pools import assert_bitwise, int32

OPS = torch.ops.looptrt
EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
QK, QKV = 6 * 16, 8 * 16

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


class EagerRMSNorm(nn.Module):
    """RMSNorm as the Ouro and Huginn references write it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


@by_dtype
@pytest.mark.parametrize("magnitude", [300.0, 1.0, 1e-3, 0.0])
def test_norm_has_the_eager_bits(dtype: torch.dtype, magnitude: float) -> None:
    x = random(7, 96, dtype=dtype) * magnitude
    weight = random(96, dtype=dtype, seed=1)
    got = OPS.fenced_rms_norm(x, weight, eps=EPS)
    assert_bitwise(got, EagerRMSNorm(weight)(x))
    assert got.isfinite().all()


def test_norm_rounds_before_the_weight() -> None:
    x, weight = (random(64, 96, dtype=torch.bfloat16, seed=i) for i in (0, 1))
    weight = weight[0]
    wide = x.float()
    once = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).to(
        torch.bfloat16
    )
    assert not torch.equal(OPS.fenced_rms_norm(x, weight, eps=EPS), once)


@by_dtype
def test_joins_have_the_eager_bits(dtype: torch.dtype) -> None:
    x, residual = (random(7, 96, dtype=dtype, seed=i) for i in (0, 1))
    weight, next_weight = (random(96, dtype=dtype, seed=i) for i in (2, 3))
    norm, next_norm = EagerRMSNorm(weight), EagerRMSNorm(next_weight)

    assert_bitwise(OPS.fenced_add_rms_norm(x, residual, weight, eps=EPS), norm(x + residual))

    h, y = OPS.fenced_rms_norm_add_rms_norm(x, residual, weight, next_weight, eps=EPS)
    assert_bitwise(h, residual + norm(x))
    assert_bitwise(y, next_norm(residual + norm(x)))

    h, y = OPS.fenced_add_rms_norm_rms_norm(x, residual, weight, next_weight, eps=EPS)
    assert_bitwise(h, norm(x + residual))
    assert_bitwise(y, next_norm(norm(x + residual)))


@by_dtype
@pytest.mark.parametrize("magnitude", [300.0, 1.0, 1e-3, 0.0])
def test_qk_norm_has_the_eager_bits(dtype: torch.dtype, magnitude: float) -> None:
    """Recurrent OLMo-2: one norm over all heads of q, one over all of k, before the split."""
    qkv = random(7, QKV, dtype=dtype) * magnitude
    q_weight, k_weight = random(64, dtype=dtype, seed=1), random(32, dtype=dtype, seed=2)
    got = OPS.fenced_qk_norm(qkv, q_weight, k_weight, **HEADS, eps=EPS)
    query, key, value = qkv.split([64, 32, 32], dim=1)
    assert_bitwise(got[:, :64], EagerRMSNorm(q_weight)(query))
    assert_bitwise(got[:, 64:96], EagerRMSNorm(k_weight)(key))
    assert_bitwise(got[:, 96:], value)
    assert got.isfinite().all()


@by_dtype
def test_half_split_rope_in_float32_is_recurrent_olmo_s(dtype: torch.dtype) -> None:
    qkv, positions = random(6, QKV, dtype=dtype), int32([0, 1, 7, 49, 20, 3])
    cos, sin = (torch.cat((t, t), dim=-1) for t in (angles().cos(), angles().sin()))
    cos, sin = (table[positions.long()][:, None] for table in (cos, sin))
    rotating = qkv[:, :QK].view(6, 6, 16)
    want = (rotating * cos + rotate_half(rotating) * sin).to(dtype)
    got = OPS.fenced_rope(qkv, positions, angles().cos(), angles().sin(), **HEADS, interleaved=0)
    assert_bitwise(got[:, :QK], want.flatten(1))


@by_dtype
def test_silu_mul_rounds_silu_before_the_product(dtype: torch.dtype) -> None:
    gate_up = random(5, 2 * 88, dtype=dtype)
    gate, up = gate_up[:, :88], gate_up[:, 88:]
    assert_bitwise(OPS.fenced_silu_mul(gate_up), F.silu(gate.float()).to(dtype) * up)


def angles() -> Tensor:
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, 16, 2).float() / 16))
    return torch.outer(torch.arange(50).float(), frequencies)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 8:], x[..., :8]), dim=-1)


@by_dtype
def test_half_split_rope_in_the_model_dtype_is_ouro_s(dtype: torch.dtype) -> None:
    qkv, positions = random(6, QKV, dtype=dtype), int32([0, 1, 7, 49, 20, 3])
    cos, sin = angles().cos().to(dtype), angles().sin().to(dtype)
    wide_cos, wide_sin = (torch.cat((t, t), dim=-1)[positions.long()][:, None] for t in (cos, sin))
    rotating = qkv[:, :QK].view(6, 6, 16)
    want = rotating * wide_cos + rotate_half(rotating) * wide_sin
    got = OPS.fenced_rope(qkv, positions, cos, sin, **HEADS, interleaved=0)
    assert_bitwise(got[:, :QK], want.flatten(1))
    assert_bitwise(got[:, QK:], qkv[:, QK:])


@by_dtype
def test_interleaved_rope_in_float32_is_huginn_s(dtype: torch.dtype) -> None:
    qkv, positions = random(6, QKV, dtype=dtype), int32([0, 1, 7, 49, 20, 3])
    bias = random(QK, dtype=dtype, seed=1)
    cos, sin = angles().cos(), angles().sin()
    pairs = (qkv[:, :QK] + bias).view(6, 6, 8, 2).float()
    c, s = (table[positions.long()][:, None] for table in (cos, sin))
    want = torch.stack(
        (pairs[..., 0] * c - pairs[..., 1] * s, pairs[..., 1] * c + pairs[..., 0] * s), dim=-1
    )
    got = OPS.fenced_bias_rope(qkv, bias, positions, cos, sin, **HEADS, interleaved=1)
    assert_bitwise(got[:, :QK], want.to(dtype).flatten(1))
    assert_bitwise(got[:, QK:], qkv[:, QK:])


@pytest.mark.parametrize("position", [-1, 50])
def test_a_position_without_table_row_is_refused(position: int) -> None:
    operands = random(1, QKV, dtype=torch.float32), int32([position]), angles(), angles()
    with pytest.raises(PluginError, match=rf"fenced_rope: positions: .* got {position}"):
        OPS.fenced_rope(*operands, **HEADS, interleaved=0)


@by_dtype
def test_scatter_after_gather_changes_the_chosen_rows_only(dtype: torch.dtype) -> None:
    x, rows = random(6, 8, dtype=dtype), int32([4, 0, 3])
    gathered = OPS.compact_gather(x, rows)
    assert_bitwise(gathered, torch.stack((x[4], x[0], x[3])))
    scattered = OPS.compact_scatter(x, gathered + 1, rows)
    assert_bitwise(scattered[[4, 0, 3]], gathered + 1)
    assert_bitwise(scattered[[1, 2, 5]], x[[1, 2, 5]])
    assert_bitwise(x, random(6, 8, dtype=dtype))


def test_no_rows_gather_and_scatter_nothing() -> None:
    x, rows = random(3, 4, dtype=torch.float32), int32([])
    gathered = OPS.compact_gather(x, rows)
    assert gathered.shape == (0, 4)
    assert_bitwise(OPS.compact_scatter(x, gathered, rows), x)


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_outside_the_batch_is_refused(row: int) -> None:
    x, rows = random(3, 4, dtype=torch.float32), int32([row])
    with pytest.raises(PluginError, match=f"compact_gather: rows: expected 0..2, got {row}"):
        OPS.compact_gather(x, rows)
    with pytest.raises(PluginError, match=f"compact_scatter: rows: expected 0..2, got {row}"):
        OPS.compact_scatter(x, x[:1], rows)
