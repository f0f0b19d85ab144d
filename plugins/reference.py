"""Slow, exact CPU twin of every operator and runtime launcher, in torch.

Owns what each operator computes, down to the roundings; leaves registration and operand checks
to `ops` and speed to the CUDA kernels. Invariant: operators change none of their operands; KV
memory is reached through its address alone.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from looptrt.plugins import noise
from looptrt.plugins.schema import operand_error

# Floats of padded scores, or of gathered keys and values, held at once: 256 MiB.
_MAX_FLOATS = 1 << 26


def fenced_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm as PyTorch's eager chain computes it.

    Scaled in float32, rounded to x's dtype, then multiplied by weight in that dtype.

    Args:
        x: [T, H].
        weight: [H].
        eps: added to the mean square.

    Returns:
        [T, H].
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def fenced_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """norm(x + residual), [T, H]; the sum is rounded to the model dtype first."""
    return fenced_rms_norm(x + residual, weight, eps=eps)


def fenced_rms_norm_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Close a sandwich sublayer and open the next one.

    Returns:
        h = residual + norm(x; weight) and y = norm(h; next_weight), both [T, H].
    """
    h = residual + fenced_rms_norm(x, weight, eps=eps)
    return h, fenced_rms_norm(h, next_weight, eps=eps)


def fenced_add_rms_norm_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Close a sublayer whose norm is on the sum and open the next one.

    Returns:
        h = norm(x + residual; weight) and y = norm(h; next_weight), both [T, H].
    """
    h = fenced_add_rms_norm(x, residual, weight, eps=eps)
    return h, fenced_rms_norm(h, next_weight, eps=eps)


def fenced_qk_norm(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> Tensor:
    """RMSNorm of the whole q and of the whole k, all heads together; v passes through.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim].
        q_weight: [num_heads * head_dim].
        k_weight: [num_kv_heads * head_dim].
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: channels of a head.
        eps: added to the mean squares.

    Returns:
        qkv's shape and dtype.
    """
    sizes = [num_heads * head_dim, *[num_kv_heads * head_dim] * 2]
    query, key, value = torch.split(qkv, sizes, dim=1)
    normed = (
        fenced_rms_norm(query, q_weight, eps=eps),
        fenced_rms_norm(key, k_weight, eps=eps),
    )
    return torch.cat((*normed, value), dim=1)


def fenced_rope(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    interleaved: int,
) -> Tensor:
    """Rotate q and k by their positions; v passes through.

    The rotation runs in the tables' dtype: with model-dtype tables every product and sum is
    rounded to it; with float32 tables q and k are upcast and the result is rounded once.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim].
        positions: [T] int32, rows of the tables.
        cos: [max_positions, head_dim / 2].
        sin: [max_positions, head_dim / 2].
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: channels of a head.
        interleaved: nonzero rotates channels (2i, 2i + 1), zero (i, i + head_dim / 2).

    Returns:
        qkv's shape and dtype.

    Raises:
        PluginError: a position has no row in the tables.
    """
    _check_index("fenced_rope", "positions", positions, len(cos))
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    rotating, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in (cos, sin))
    rotated = _rotate(rotating.to(cos.dtype), cos, sin, interleaved).to(qkv.dtype)
    return torch.cat((rotated, value), dim=1).flatten(1)


def fenced_bias_rope(
    qkv: Tensor,
    bias: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    interleaved: int,
) -> Tensor:
    """`fenced_rope` of q and k plus their bias, the sum rounded to the model dtype.

    Args:
        qkv: as in `fenced_rope`.
        bias: [(num_heads + num_kv_heads) * head_dim].
        positions: as in `fenced_rope`, like the rest.
        cos: float table.
        sin: float table.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: channels of a head.
        interleaved: which channels pair up.

    Returns:
        qkv's shape and dtype.

    Raises:
        PluginError: a position has no row in the tables.
    """
    biased = torch.cat((qkv[:, : len(bias)] + bias, qkv[:, len(bias) :]), dim=1)
    return fenced_rope(
        biased,
        positions,
        cos,
        sin,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        interleaved=interleaved,
    )


def fenced_silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: silu in float32, rounded to the dtype, then the product rounded.

    Args:
        gate_up: [T, 2 * I], gate first.

    Returns:
        [T, I].
    """
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def kv_view(kv_pool: Tensor, unit_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The KV pool's memory as a tensor that shares it.

    Args:
        kv_pool: [2] int64, the address of unit 0 and the number of units.
        unit_shape: [unit_slots, 2, page_size, num_kv_heads, head_dim].
        dtype: element type of the pool.

    Returns:
        [num_units, *unit_shape].

    Raises:
        PluginError: no address, or no unit.
    """
    address, num_units = kv_pool.tolist()
    if address == 0 or num_units < 1:
        raise operand_error(
            "kv_view", "kv_pool", "an address and at least 1 unit", kv_pool.tolist()
        )
    num_bytes = num_units * math.prod(unit_shape) * dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(num_units, *unit_shape)


def packed_plane_attention(
    qkv: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    seq_slots: Tensor,
    block_table: Tensor,
    kv_pool: Tensor,
    plane: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    unit_slots: int,
    row: int,
    slot: int,
    scale: float,
) -> Tensor:
    """Store K and V of new tokens, then attend to every token up to each one's own.

    The unit of position p of sequence i is block_table[seq_slots[i], row + plane[0],
    p // page_size]; its K and V lie at [slot, :, p % page_size] of the unit. Scores, softmax
    and the weighted sum are float32, rounded once at the end. Memory of later positions may
    hold anything, NaN included.

    Args:
        qkv: [R, (num_heads + 2 * num_kv_heads) * head_dim], rotated.
        positions: [R] int32, increasing within a sequence, gaps allowed.
        cu_seqlens: [N + 1] int32; rows cu_seqlens[i]:cu_seqlens[i + 1] are sequence i's and
            may be none; every row has a sequence.
        seq_slots: [N] int32, sequences' slots in the table.
        block_table: [max_slots, num_rows, max_pages] int32 unit ids.
        kv_pool: [2] int64, address of unit 0 and number of units of
            [unit_slots, 2, page_size, num_kv_heads, head_dim] in qkv's dtype.
        plane: [1] int32, added to row.
        num_heads: query heads; head h reads key head h // (num_heads // num_kv_heads).
        num_kv_heads: key and value heads.
        head_dim: channels of a head.
        page_size: tokens of a page.
        unit_slots: layer slots of a unit.
        row: table row of plane 0, or of a boundary unit.
        slot: layer slot in the unit.
        scale: factor on the scores.

    Returns:
        [R, num_heads * head_dim].

    Raises:
        PluginError: rows without a sequence, a position, slot or row outside the table, or a
            unit that is null or outside the pool.
    """
    op = "packed_plane_attention"
    if num_heads % num_kv_heads:
        raise operand_error(op, "num_heads", f"a multiple of {num_kv_heads}", num_heads)
    counts = _row_counts(op, cu_seqlens.numpy(), len(qkv))
    _check_range(op, "seq_slots", seq_slots.numpy(), 0, len(block_table))
    table_row = row + int(plane)
    for name, index, size in (
        ("row + plane", table_row, block_table.shape[1]),
        ("slot", slot, unit_slots),
    ):
        if not 0 <= index < size:
            raise operand_error(op, name, f"0..{size - 1}", index)
    table = block_table[:, table_row].numpy()
    _check_range(op, "positions", positions.numpy(), 0, table.shape[1] * page_size)
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    query, new_kv = heads[:, :num_heads], heads[:, num_heads:]
    pool = kv_view(kv_pool, (unit_slots, 2, page_size, num_kv_heads, head_dim), qkv.dtype)
    call = _Attention(
        query=query,
        positions=positions.numpy().astype(np.int64),
        slots=np.repeat(seq_slots.numpy(), counts),
        table=table,
        pool=pool[:, slot],
        scale=scale,
    )
    call.write(new_kv.reshape(len(qkv), 2, num_kv_heads, head_dim))
    attended = torch.empty_like(query)
    for rows in _groups(cu_seqlens.numpy()[:-1], counts):
        call.attend(rows, attended)
    return attended.flatten(1)


def compact_gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]: [T, H] and [R] int32 to [R, H].

    Raises:
        PluginError: a row is outside x.
    """
    _check_index("compact_gather", "rows", rows, len(x))
    return x.index_select(0, rows)


def compact_scatter(x: Tensor, update: Tensor, rows: Tensor) -> Tensor:
    """Copy of x [T, H] in which rows [R] int32, all different, are those of update [R, H].

    Raises:
        PluginError: a row is outside x.
    """
    _check_index("compact_scatter", "rows", rows, len(x))
    return x.index_copy(0, rows.long(), update)


def position_keyed_noise(
    like: Tensor, positions: Tensor, seeds: Tensor, *, std: float, scale: float
) -> Tensor:
    """Initial state of every token, from its seed and position alone.

    z * std goes from float64 to float32 to the model dtype; that times scale is a float32
    product, rounded to the model dtype. A std of 0 gives +0.

    Args:
        like: [T, H], gives shape and dtype.
        positions: [T] int32.
        seeds: [T] int64.
        std: standard deviation of the normal before its cut at 3 std, rounded to float32 as
            every operator attribute of a graph is.
        scale: factor, rounded to float32.

    Returns:
        [T, H].
    """
    if std == 0.0:
        return torch.zeros_like(like)
    std = float(np.float32(std))
    z = noise.truncated_normal(seeds.numpy(), positions.numpy(), like.shape[1])
    drawn = torch.from_numpy(z * std).float().to(like.dtype)
    return (drawn.float() * torch.tensor(scale, dtype=torch.float32)).to(like.dtype)


def plane_copy(
    kv_pool: Tensor,
    src_units: Tensor,
    dst_units: Tensor,
    token_begin: Tensor,
    token_end: Tensor,
    unit_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Copy token ranges between units, K and V of all layer slots.

    All sources are read before any destination is written.

    Args:
        kv_pool: [2] int64, address of unit 0 and number of units.
        src_units: [n] int32.
        dst_units: [n] int32.
        token_begin: [n] int32, first token index within the page.
        token_end: [n] int32, one past the last.
        unit_shape: [unit_slots, 2, page_size, num_kv_heads, head_dim].
        dtype: element type of the pool.

    Raises:
        PluginError: a unit is null or outside the pool, or a range leaves the page.
    """
    pool = kv_view(kv_pool, unit_shape, dtype)
    for name, units in (("src_units", src_units), ("dst_units", dst_units)):
        _check_range("plane_copy", name, units.numpy(), 1, len(pool))
    begin, end = token_begin.numpy().astype(np.int64), token_end.numpy().astype(np.int64)
    _check_range("plane_copy", "token_begin", begin, 0, unit_shape[2] + 1)
    _check_range("plane_copy", "token_end", end, 0, unit_shape[2] + 1)
    lengths = end - begin
    _check_range("plane_copy", "token_end - token_begin", lengths, 0, unit_shape[2] + 1)
    first = np.cumsum(lengths) - lengths
    tokens = torch.from_numpy(np.arange(lengths.sum()) + np.repeat(begin - first, lengths))
    repeats = torch.from_numpy(lengths)
    src, dst = (units.long().repeat_interleave(repeats) for units in (src_units, dst_units))
    pool[dst, :, :, tokens] = pool[src, :, :, tokens]


def update_tables(block_table: Tensor, slots: Tensor, pages: Tensor, units: Tensor) -> None:
    """Write columns of the block table, in place.

    Args:
        block_table: [max_slots, num_rows, max_pages] int32.
        slots: [n] int32.
        pages: [n] int32.
        units: [n, num_rows] int32.

    Raises:
        PluginError: a slot or page is outside the table.
    """
    _check_range("update_tables", "slots", slots.numpy(), 0, block_table.shape[0])
    _check_range("update_tables", "pages", pages.numpy(), 0, block_table.shape[2])
    block_table[slots.long(), :, pages.long()] = units


@dataclass(frozen=True)
class _Attention:
    """One attention call, its operands checked.

    Attributes:
        query: [R, num_heads, head_dim].
        positions: [R] int64.
        slots: [R] int32, each row's slot in the table.
        table: [max_slots, max_pages] int32, the plane's row of the block table.
        pool: [num_units, 2, page_size, num_kv_heads, head_dim], one layer slot of the pool.
    """

    query: Tensor
    positions: NDArray[np.int64]
    slots: NDArray[np.int32]
    table: NDArray[np.int32]
    pool: Tensor
    scale: float

    def write(self, new_kv: Tensor) -> None:
        """Store new tokens' K and V, [R, 2, num_kv_heads, head_dim]."""
        pages, tokens = np.divmod(self.positions, self.pool.shape[2])
        units = self.table[self.slots, pages]
        self._check_units(units)
        index = (torch.from_numpy(units.astype(np.int64)), slice(None), torch.from_numpy(tokens))
        self.pool[index] = new_kv

    def attend(self, rows: NDArray[np.int64], attended: Tensor) -> None:
        """Fill attended[rows] for sequences that all have the same number of rows.

        Args:
            rows: [n, c], the c rows of each of n sequences.
            attended: [R, num_heads, head_dim].
        """
        for block in self._blocks(rows):
            result = self._attend_block(block)
            if block.shape[1] > 1 and not bool(result.isfinite().all()):
                # 0 * NaN of a later token of the same sequence must not reach earlier rows.
                self.attend(block.reshape(-1, 1), attended)
            else:
                attended[torch.from_numpy(block)] = result

    def _blocks(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Split [n, c] rows so that neither scores nor gathered KV outgrow `_MAX_FLOATS`."""
        num_keys = int(self.positions[rows].max()) + 1
        num_heads = self.query.shape[1]
        kv_width = 2 * self.pool.shape[3] * self.pool.shape[4]
        width = min(rows.shape[1], max(1, _MAX_FLOATS // (num_heads * num_keys)))
        height = max(1, _MAX_FLOATS // (max(num_heads * width, kv_width) * num_keys))
        for top in range(0, rows.shape[0], height):
            for left in range(0, rows.shape[1], width):
                yield rows[top : top + height, left : left + width]

    def _attend_block(self, rows: NDArray[np.int64]) -> Tensor:
        """Attention of [n, c] rows: [n, c, num_heads, head_dim] in the query's dtype."""
        n, c = rows.shape
        positions = self.positions[rows]
        last = positions.max(axis=1)
        key, value = self._gather(self.slots[rows[:, 0]], last)
        num_kv_heads, num_keys, head_dim = key.shape[1:]
        group = self.query.shape[1] // num_kv_heads
        query = self.query[torch.from_numpy(rows)].float()
        query = query.view(n, c, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        scores = query.reshape(n, num_kv_heads, group * c, head_dim) @ key.transpose(2, 3)
        scores = scores.mul_(self.scale).view(n, num_kv_heads, group, c, num_keys)
        hidden = torch.from_numpy(np.arange(num_keys) > positions[:, :, None])
        weights = scores.masked_fill_(hidden[:, None, None], -math.inf).softmax(dim=-1)
        result = weights.view(n, num_kv_heads, group * c, num_keys) @ value
        result = result.view(n, num_kv_heads, group, c, head_dim).permute(0, 3, 1, 2, 4)
        return result.flatten(2, 3).to(self.query.dtype)

    def _gather(self, slots: NDArray[np.int32], last: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """K and V of positions 0..last of n sequences, float32, padded to the longest.

        Returns:
            Keys and values, [n, num_kv_heads, num_keys, head_dim]; values beyond a
            sequence's last position are 0.
        """
        page_size = self.pool.shape[2]
        num_keys = int(last.max()) + 1
        pages = np.arange(-(-num_keys // page_size))
        is_used = pages <= last[:, None] // page_size
        units = self.table[slots[:, None], pages]
        self._check_units(units[is_used])
        index = torch.from_numpy(np.where(is_used, units, 0).astype(np.int64))
        key, value = (
            self.pool[:, half][index].flatten(1, 2)[:, :num_keys].float() for half in (0, 1)
        )
        unseen = torch.from_numpy(np.arange(num_keys) > last[:, None])
        value.masked_fill_(unseen[:, :, None, None], 0.0)
        return key.transpose(1, 2), value.transpose(1, 2)

    def _check_units(self, units: NDArray[np.int32]) -> None:
        _check_range("packed_plane_attention", "block_table unit", units, 1, len(self.pool))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: int) -> Tensor:
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def _row_counts(op: str, cu_seqlens: NDArray[np.int32], num_rows: int) -> NDArray[np.int32]:
    """Rows of every sequence; the sequences must share out all rows in order."""
    counts = np.diff(cu_seqlens)
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != num_rows or (counts < 0).any():
        raise operand_error(op, "cu_seqlens", f"rising from 0 to {num_rows}", cu_seqlens.tolist())
    return counts


def _groups(starts: NDArray[np.int32], counts: NDArray[np.int32]) -> Iterator[NDArray[np.int64]]:
    """[n, c] rows of the n sequences that have c rows, for every c above 0."""
    for count in np.unique(counts[counts > 0]):
        yield starts[counts == count][:, None] + np.arange(count)


def _check_index(op: str, operand: str, indices: Tensor, end: int) -> None:
    """Require indices below `end`; on CUDA nothing waits for them, and torch's kernels assert."""
    if not indices.is_cuda:
        _check_range(op, operand, indices.numpy(), 0, end)


def _check_range(
    op: str, operand: str, values: NDArray[np.int32] | NDArray[np.int64], low: int, end: int
) -> None:
    """Require low <= values < end."""
    if values.size and not (low <= values.min() and values.max() < end):
        wrong = values[(values < low) | (values >= end)].flat[0]
        raise operand_error(op, operand, f"{low}..{end - 1}", wrong)
