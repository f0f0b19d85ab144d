"""Operators and runtime launchers on CUDA tensors: calls into `liblooptrt_plugins.so`.

Owns finding and opening the library, its C signatures and where results are allocated; leaves
registration and operand checks of operators to `ops` and arithmetic to the kernels. Invariant:
everything is enqueued on torch's current stream, nothing waits for the device.
"""

from __future__ import annotations

import ctypes
import math
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.plugins.schema import operand_error

LIBRARY_NAME = "liblooptrt_plugins.so"
ABI_VERSION = 4  # LOOPTRT_PLUGINS_ABI of plugins/include/looptrt/plugins.h
BUILD_COMMAND = "cmake -S . -B build/cuda -DLOOPTRT_CUDA=ON && cmake --build build/cuda --parallel"

# Arguments of every C function without its stream: pointer, int64 (q), int32 (i), float.
_TYPES = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
SIGNATURES = {
    "fenced_rms_norm": "pppqifi",
    "fenced_add_rms_norm": "ppppqifi",
    "fenced_rms_norm_add_rms_norm": "ppppppqifi",
    "fenced_add_rms_norm_rms_norm": "ppppppqifi",
    "fenced_qk_norm": "ppppqiifi",
    "fenced_rope": "ppppppqqiiiiii",
    "fenced_silu_mul": "ppqii",
    "packed_plane_attention": "pppppppppqiiiiiiiiiiifi",
    "compact_gather": "pppqqii",
    "compact_scatter": "ppppqqii",
    "position_keyed_noise": "pppqiffi",
    "skinny_linear": "pppqiii",
    "sample": "pppppppppqii",
    "plane_copy": "ppppppqiii",
    "update_tables": "ppppqiii",
}
MAX_SKINNY_ROWS = 16  # kMaxSkinnyRows of plugins/kernels/skinny_linear.cuh
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Library:
    """The opened plugin library."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        try:
            self._library = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise PluginError(f"{self.path}: cannot be opened: {error}") from error
        version = self._library.looptrt_abi_version()
        if version != ABI_VERSION:
            raise PluginError(
                f"{self.path}: expected version {ABI_VERSION} of the C API, got {version};"
                f" build it again: {BUILD_COMMAND}"
            )
        self._library.looptrt_last_error_text.restype = ctypes.c_char_p
        self._library.looptrt_plane_copy_workspace_bytes.restype = ctypes.c_int64
        self._library.looptrt_packed_plane_attention_workspace_bytes.restype = ctypes.c_int64
        for name, signature in SIGNATURES.items():
            getattr(self._library, f"looptrt_{name}").argtypes = [
                *(_TYPES[letter] for letter in signature),
                ctypes.c_void_p,
            ]

    def call(self, name: str, stream: int, *arguments: float | None) -> None:
        """Enqueue one launcher.

        Args:
            name: of `SIGNATURES`.
            stream: a cudaStream_t.
            arguments: pointers as integers, None for a null pointer.

        Raises:
            PluginError: the launcher refused or the launch failed; has CUDA's error name.
        """
        if getattr(self._library, f"looptrt_{name}")(*arguments, stream):
            raise PluginError(f"{name}: {self._library.looptrt_last_error_text().decode()}")

    def let_kernels_overlap(self, most_rows: int) -> None:
        """Small kernels of so many rows start before their predecessors have ended, from now on."""
        self._library.looptrt_let_kernels_overlap(ctypes.c_int32(most_rows))

    def plane_copy_workspace_bytes(self, *sizes: int) -> int:
        """Bytes that `plane_copy` needs for (copies, unit_slots, page_size, token_bytes)."""
        num_copies, *rest = sizes
        function = self._library.looptrt_plane_copy_workspace_bytes
        return int(function(ctypes.c_int64(num_copies), *map(ctypes.c_int32, rest)))

    def packed_plane_attention_workspace_bytes(self, *sizes: int) -> int:
        """Bytes of scratch memory that `packed_plane_attention` needs.

        Args:
            sizes: rows, sequences, pages of a sequence, heads, kv heads, head_dim, page size
                and number of the dtype. More never need less.
        """
        num_rows, *rest = sizes
        function = self._library.looptrt_packed_plane_attention_workspace_bytes
        return int(function(ctypes.c_int64(num_rows), *map(ctypes.c_int32, rest)))


class _Process:
    """The one library of this process, and the blocks of `overlapping_kernels` in it."""

    library: ClassVar[Library | None] = None
    lock: ClassVar[threading.Lock] = threading.Lock()
    overlapping: ClassVar[list[int]] = []  # rows of each block


def places() -> list[Path]:
    """Where the library is looked for: beside this file, in the install, in the source tree."""
    here = Path(__file__).resolve().parent
    installed = Path(sysconfig.get_path("platlib")) / "looptrt" / "plugins"
    folders = (here / "lib", installed / "lib", here.parent / "build" / "cuda")
    return [folder / LIBRARY_NAME for folder in folders]


def load(path: Path | None = None) -> Library:
    """Open the plugin library, once in a process.

    Args:
        path: the library; without one, the first of `places()` that exists.

    Raises:
        PluginError: there is none, it cannot be opened, or another one is open already.
    """
    if _Process.library is None:
        _Process.library = Library(path or find_library())
    elif path is not None and path.resolve() != _Process.library.path:
        raise PluginError(f"{path}: {_Process.library.path} is open in this process already")
    return _Process.library


def find_library() -> Path:
    """The first of `places()` that exists.

    Raises:
        PluginError: none does; says how to build it.
    """
    for place in places():
        if place.is_file():
            return place
    tried = ", ".join(map(str, places()))
    raise PluginError(f"no {LIBRARY_NAME} (tried {tried}); build it: {BUILD_COMMAND}")


def _enqueue(name: str, *arguments: Tensor | float | None) -> None:
    """Call a launcher on the current stream of the device of its first argument, a tensor."""
    library = load()
    first = arguments[0]
    assert isinstance(first, Tensor)
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    index = first.get_device()
    if torch.cuda.current_device() == index:  # entering a device costs as much as the launch
        library.call(name, torch.cuda.current_stream(index).cuda_stream, *values)
        return
    with torch.cuda.device(index):
        library.call(name, torch.cuda.current_stream(index).cuda_stream, *values)


def fenced_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `reference.fenced_rms_norm`."""
    y = torch.empty_like(x)
    _enqueue("fenced_rms_norm", y, x, weight, *x.shape, eps, _DTYPES[x.dtype])
    return y


def fenced_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `reference.fenced_add_rms_norm`."""
    y = torch.empty_like(x)
    _enqueue("fenced_add_rms_norm", y, x, residual, weight, *x.shape, eps, _DTYPES[x.dtype])
    return y


def fenced_rms_norm_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """See `reference.fenced_rms_norm_add_rms_norm`."""
    return _two_norms("fenced_rms_norm_add_rms_norm", x, residual, weight, next_weight, eps)


def fenced_add_rms_norm_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """See `reference.fenced_add_rms_norm_rms_norm`."""
    return _two_norms("fenced_add_rms_norm_rms_norm", x, residual, weight, next_weight, eps)


def _two_norms(
    name: str, x: Tensor, residual: Tensor, weight: Tensor, next_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    h, y = torch.empty_like(x), torch.empty_like(x)
    _enqueue(name, h, y, x, residual, weight, next_weight, *x.shape, eps, _DTYPES[x.dtype])
    return h, y


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
    """See `reference.fenced_qk_norm`."""
    normed = torch.empty_like(qkv)
    widths = num_heads * head_dim, num_kv_heads * head_dim
    dtype = _DTYPES[qkv.dtype]
    _enqueue("fenced_qk_norm", normed, qkv, q_weight, k_weight, len(qkv), *widths, eps, dtype)
    return normed


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
    """See `reference.fenced_rope`; a position without table row gives NaN instead of an error."""
    sizes = num_heads, num_kv_heads, head_dim, interleaved
    return _rope(qkv, None, positions, cos, sin, sizes)


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
    """See `reference.fenced_bias_rope`; positions as in `fenced_rope`."""
    sizes = num_heads, num_kv_heads, head_dim, interleaved
    return _rope(qkv, bias, positions, cos, sin, sizes)


def _rope(
    qkv: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, int, int, int],
) -> Tensor:
    rotated = torch.empty_like(qkv)
    dtypes = _DTYPES[qkv.dtype], _DTYPES[cos.dtype]
    tensors = rotated, qkv, bias, positions, cos, sin
    _enqueue("fenced_rope", *tensors, len(qkv), len(cos), *sizes, *dtypes)
    return rotated


def fenced_silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.fenced_silu_mul`."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(num_tokens, width)
    _enqueue("fenced_silu_mul", y, gate_up, num_tokens, width, _DTYPES[gate_up.dtype])
    return y


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
    """See `reference.packed_plane_attention`, but for what a kernel cannot raise.

    A row whose position, slot or table row is out of range gives NaN; a token whose unit is
    null or outside the pool is not stored and reads as zeros.
    """
    attended = qkv.new_empty(len(qkv), num_heads * head_dim)
    heads, dtype = (num_heads, num_kv_heads, head_dim), _DTYPES[qkv.dtype]
    sizes = len(qkv), len(seq_slots), block_table.shape[2]
    num_bytes = attention_workspace_bytes(*sizes, heads, page_size, qkv.dtype)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=qkv.device)
    tensors = (attended, qkv, positions, cu_seqlens, seq_slots, block_table, kv_pool, plane)
    shapes = len(qkv), len(seq_slots), *block_table.shape
    place = page_size, unit_slots, row, slot
    name = "packed_plane_attention"
    _enqueue(name, *tensors, workspace, *shapes, *heads, *place, scale, dtype)
    return attended


def compact_gather(x: Tensor, rows: Tensor) -> Tensor:
    """See `reference.compact_gather`; a row outside x reads as NaN instead of an error."""
    gathered = x.new_empty(len(rows), x.shape[1])
    sizes = len(x), len(rows), x.shape[1]
    _enqueue("compact_gather", gathered, x, rows, *sizes, _DTYPES[x.dtype])
    return gathered


def compact_scatter(x: Tensor, update: Tensor, rows: Tensor) -> Tensor:
    """See `reference.compact_scatter`; a row outside x is left out instead of an error."""
    scattered = torch.empty_like(x)
    sizes = len(x), len(rows), x.shape[1]
    _enqueue("compact_scatter", scattered, x, update, rows, *sizes, _DTYPES[x.dtype])
    return scattered


def position_keyed_noise(
    like: Tensor, positions: Tensor, seeds: Tensor, *, std: float, scale: float
) -> Tensor:
    """See `reference.position_keyed_noise`."""
    drawn = torch.empty_like(like)
    dtype = _DTYPES[like.dtype]
    _enqueue("position_keyed_noise", drawn, positions, seeds, *like.shape, std, scale, dtype)
    return drawn


def attention_workspace_bytes(
    num_rows: int,
    num_sequences: int,
    max_pages: int,
    heads: tuple[int, int, int],
    page_size: int,
    dtype: torch.dtype,
) -> int:
    """Scratch memory that `packed_plane_attention` takes; heads as its three attributes."""
    sizes = num_sequences, max_pages, *heads, page_size, _DTYPES[dtype]
    return load().packed_plane_attention_workspace_bytes(num_rows, *sizes)


OPERATORS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        fenced_rms_norm,
        fenced_add_rms_norm,
        fenced_rms_norm_add_rms_norm,
        fenced_add_rms_norm_rms_norm,
        fenced_qk_norm,
        fenced_rope,
        fenced_bias_rope,
        fenced_silu_mul,
        packed_plane_attention,
        compact_gather,
        compact_scatter,
        position_keyed_noise,
    )
}


def skinny_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer on a few rows, at the speed at which its weight can be read.

    Sums are float32, ordered by K alone and rounded once: an element's bits depend on its rows of
    x and weight, not on their neighbours (level batch_invariant). They are not cuBLAS's.
    The kernel reads weight before its predecessors on the stream have ended, however many of this
    library's: between one that writes it and this one there must be one that starts after its
    predecessor has ended, as every kernel of another library does. x may be the result of the
    kernel just before.

    Args:
        x: [R, K], R at most `MAX_SKINNY_ROWS`.
        weight: [N, K], of x's dtype; both contiguous.

    Returns:
        [R, N].

    Raises:
        PluginError: operands of another shape, dtype or placement, or too many rows.
    """
    if x.dtype not in _DTYPES:
        raise operand_error("skinny_linear", "x", " or ".join(map(str, _DTYPES)), x.dtype)
    rows, inputs = x.shape
    outputs = len(weight)
    _check("skinny_linear", "x", x, x.dtype, (rows, inputs))
    _check("skinny_linear", "weight", weight, x.dtype, (outputs, inputs))
    check_placement("skinny_linear", "weight", weight, x.device)
    y = x.new_empty(rows, outputs)
    _enqueue("skinny_linear", y, x, weight, rows, outputs, inputs, _DTYPES[x.dtype])
    return y


@contextmanager
def overlapping_kernels(most_rows: int) -> Iterator[None]:
    """Let small kernels start before their predecessors have ended, within the block.

    Faster between kernels of the library, slower after cuBLAS's. Changes no bits. It holds for
    the whole process, with the most rows of all blocks that are open; a captured graph keeps what
    held at its capture. Norms and ropes that start early read their weights and bias at once; who
    may write those is said at `skinny_linear`.

    Args:
        most_rows: of a call that may; those of more are beside cuBLAS's products.
    """
    library = load()
    with _Process.lock:
        _Process.overlapping.append(most_rows)
        library.let_kernels_overlap(max(_Process.overlapping))
    try:
        yield
    finally:
        with _Process.lock:
            _Process.overlapping.remove(most_rows)
            library.let_kernels_overlap(max(_Process.overlapping, default=0))


def plane_copy(
    kv_pool: Tensor,
    src_units: Tensor,
    dst_units: Tensor,
    token_begin: Tensor,
    token_end: Tensor,
    unit_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """See `reference.plane_copy`; copies outside the pool are left out instead of an error.

    Raises:
        PluginError: operands of different lengths or not int32, or a token of K that is not a
            multiple of 4 bytes.
    """
    lists = {
        "src_units": src_units,
        "dst_units": dst_units,
        "token_begin": token_begin,
        "token_end": token_end,
    }
    _check("plane_copy", "kv_pool", kv_pool, torch.int64, (2,))
    for name, operand in lists.items():
        _check("plane_copy", name, operand, torch.int32, src_units.shape)
    unit_slots, _, page_size, *token_shape = unit_shape
    token_bytes = math.prod(token_shape) * dtype.itemsize
    sizes = len(src_units), unit_slots, page_size, token_bytes
    num_bytes = load().plane_copy_workspace_bytes(*sizes)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=kv_pool.device)
    _enqueue("plane_copy", kv_pool, *lists.values(), workspace, *sizes)


def update_tables(block_table: Tensor, slots: Tensor, pages: Tensor, units: Tensor) -> None:
    """See `reference.update_tables`; updates outside the table are left out, not an error.

    Raises:
        PluginError: operands of the wrong shape or not int32.
    """
    max_slots, num_rows, max_pages = block_table.shape
    _check("update_tables", "block_table", block_table, torch.int32, block_table.shape)
    _check("update_tables", "slots", slots, torch.int32, (len(slots),))
    _check("update_tables", "pages", pages, torch.int32, (len(slots),))
    _check("update_tables", "units", units, torch.int32, (len(slots), num_rows))
    operands = block_table, slots, pages, units
    _enqueue("update_tables", *operands, len(slots), max_slots, num_rows, max_pages)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Choose a token for every row, as `runtime/sampler.py` does for rows without edits.

    Args:
        logits: [n, vocab] float32, bfloat16 or float16.
        temperatures: [n] float64; 0 takes the most likely token, the smallest id of equal ones.
        top_ks: [n] int32, 0 for all tokens.
        top_ps: [n] float64.
        min_ps: [n] float64.
        seeds: [n] int64, the bits of the unsigned seeds.
        positions: [n] int32 of the rows' own tokens.

    Returns:
        [2, n] int32: token ids, then 1 where logits are not all finite; the token is 0 there.

    Raises:
        PluginError: operands of the wrong shape or dtype, or a vocabulary above 2**19.
    """
    _check("sample", "logits", logits, logits.dtype, (len(logits), logits.shape[-1]))
    if logits.dtype not in _DTYPES:
        raise operand_error("sample", "logits", " or ".join(map(str, _DTYPES)), logits.dtype)
    kinds = {
        "temperatures": (temperatures, torch.float64),
        "top_ks": (top_ks, torch.int32),
        "top_ps": (top_ps, torch.float64),
        "min_ps": (min_ps, torch.float64),
        "seeds": (seeds, torch.int64),
        "positions": (positions, torch.int32),
    }
    for name, (operand, dtype) in kinds.items():
        _check("sample", name, operand, dtype, (len(logits),))
    chosen = torch.empty(2, len(logits), dtype=torch.int32, device=logits.device)
    rows = [operand for operand, _ in kinds.values()]
    _enqueue("sample", *chosen, logits, *rows, *logits.shape, _DTYPES[logits.dtype])
    return chosen


def _check(op: str, name: str, operand: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Require a contiguous CUDA tensor of this dtype and shape."""
    if operand.dtype != dtype or operand.shape != shape:
        got = f"{operand.dtype} {list(operand.shape)}"
        raise operand_error(op, name, f"{dtype} {list(shape)}", got)
    check_placement(op, name, operand, operand.device)


def check_placement(op: str, name: str, operand: Tensor, device: torch.device) -> None:
    """Require a contiguous tensor on one CUDA device.

    Raises:
        PluginError: it is elsewhere, or strided.
    """
    if operand.device.type != "cuda":
        raise operand_error(op, name, "a CUDA tensor", operand.device)
    if operand.device != device:
        raise operand_error(op, name, f"a tensor on {device}", operand.device)
    if not operand.is_contiguous():
        raise operand_error(op, name, "a contiguous tensor", f"strides {operand.stride()}")
