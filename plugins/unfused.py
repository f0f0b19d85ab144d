"""Every operator as a chain of plain torch operators, on any device.

Owns what stands in for a kernel that fails its check, and what exactness is measured against;
leaves the arithmetic of most operators to `reference`, whose functions are such chains.
Invariant: on CUDA no form but the noise's and a pool's first use waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from looptrt.plugins import reference
from looptrt.plugins.schema import OPS, Exactness

# Elements of gathered keys (or values) held at once.
_MAX_ELEMENTS = 1 << 27
# Pools by their address tensor, whose values no graph capture may read.
_pools: Any = WeakIdKeyDictionary()


class _Memory:
    """A range of device memory, as torch.as_tensor reads it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def pool_view(kv_pool: Tensor, unit_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`reference.kv_view` on any device: [num_units, *unit_shape] over the pool's memory.

    On CUDA the address is read once for each `kv_pool` tensor, which must not change.
    """
    if not kv_pool.is_cuda:
        return reference.kv_view(kv_pool, unit_shape, dtype)
    if kv_pool not in _pools:
        address, num_units = kv_pool.tolist()
        num_bytes = num_units * math.prod(unit_shape) * dtype.itemsize
        memory = torch.as_tensor(_Memory(address, num_bytes), device=kv_pool.device)
        _pools[kv_pool] = memory.view(dtype).view(num_units, *unit_shape)
    pool: Tensor = _pools[kv_pool]
    return pool


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
    """`reference.packed_plane_attention`, row by row over gathered pages.

    Sums are in the order of torch's attention, so bits may differ from the other forms.
    """
    num_rows = len(qkv)
    heads = qkv.view(num_rows, num_heads + 2 * num_kv_heads, head_dim)
    query, new_kv = heads[:, :num_heads], heads[:, num_heads:]
    shape = (unit_slots, 2, page_size, num_kv_heads, head_dim)
    pool = pool_view(kv_pool, shape, qkv.dtype)[:, slot]
    ids = torch.arange(num_rows, dtype=cu_seqlens.dtype, device=qkv.device)
    seqs = torch.searchsorted(cu_seqlens[1:], ids, right=True)
    table = block_table.index_select(1, plane + row)[seq_slots[seqs].long(), 0]
    places = positions.long()
    pages, tokens = places // page_size, places % page_size
    units = table.gather(1, pages[:, None])[:, 0].long()
    pool[units, :, tokens] = new_kv.view(num_rows, 2, num_kv_heads, head_dim)
    num_pages = _num_pages(table, pages)
    num_keys = num_pages * page_size
    unseen = torch.arange(num_keys, device=qkv.device) > places[:, None]
    block = max(1, _MAX_ELEMENTS // (num_keys * num_kv_heads * head_dim))
    attended = torch.empty_like(query)
    for begin in range(0, num_rows, block):
        rows = slice(begin, begin + block)
        gathered = pool[table[rows, :num_pages].long()]
        key, value = (
            gathered[:, :, half]
            .flatten(1, 2)
            .masked_fill(unseen[rows, :, None, None], 0.0)
            .transpose(1, 2)
            for half in (0, 1)
        )
        result = F.scaled_dot_product_attention(
            query[rows, :, None],
            key,
            value,
            attn_mask=~unseen[rows, None, None],
            scale=scale,
            enable_gqa=num_kv_heads != num_heads,
        )
        attended[rows] = result[:, :, 0]
    return attended.flatten(1)


def _num_pages(table: Tensor, pages: Tensor) -> int:
    """Pages to gather: those in use, or all of the table's while a graph is captured."""
    if not len(pages):
        return 1
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return table.shape[1]
    return int(pages.max()) + 1


def position_keyed_noise(
    like: Tensor, positions: Tensor, seeds: Tensor, *, std: float, scale: float
) -> Tensor:
    """`reference.position_keyed_noise`, drawn on the CPU and moved to like's device."""
    drawn = reference.position_keyed_noise(
        torch.empty(like.shape, dtype=like.dtype),
        positions.cpu(),
        seeds.cpu(),
        std=std,
        scale=scale,
    )
    return drawn.to(like.device)


_OWN: dict[str, Callable[..., Any]] = {
    "packed_plane_attention": packed_plane_attention,
    "position_keyed_noise": position_keyed_noise,
}
FORMS: dict[str, Callable[..., Any]] = {
    op.name: _OWN.get(op.name, getattr(reference, op.name)) for op in OPS
}
# Those whose bits are PyTorch's: with them run op by op, an engine's results do not change.
EXACT = frozenset(op.name for op in OPS if op.level is Exactness.EQUALS_TORCH)
