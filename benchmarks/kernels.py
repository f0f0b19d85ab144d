"""Check, then time the CUDA kernels of the plugin library on the GPU at hand.

Builds the library for this GPU, compares every exact kernel with PyTorch's eager chain on the
same GPU bit for bit (and the noise with its CPU twin), runs compute-sanitizer over small shapes,
then times. Prints a table last; figures go to a JSON file. Exits 1 on a mismatch.

Run: python benchmarks/kernels.py [--out kernels.json] [--skip check,sanitize,time]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from looptrt.bench.results import machine
from looptrt.plugins import launch, reference
from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators
from looptrt.plugins.products import MAX_SKINNY_BYTES, Products

ROOT = Path(__file__).resolve().parent.parent
OPS = torch.ops.looptrt
EPS = 1e-6
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
_BITS = {F32: torch.int32, BF16: torch.int16, F16: torch.int16}

# (hidden, intermediate, heads, key heads, head_dim, rope) of the models the kernels serve.
MODELS = {
    "Ouro-1.4B": (2048, 5632, 16, 16, 128, "half"),
    "Huginn-0125": (5280, 17920, 55, 55, 96, "pairs"),
    "OLMo-2-1B": (2048, 8192, 16, 16, 128, "half32"),
}
TINY_WIDTHS = (64, 96, 128)
MORE_WIDTHS = (8192,)  # PyTorch splits a row across warps from here on
ROWS = (*range(1, 257), 512, 1024, 2048, 4096, 8192)
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


# --- check ---------------------------------------------------------------------------------


class Tally:
    """Elements compared and found different, by operator."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self.first: dict[str, str] = {}

    def compare(self, name: str, case: str, got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
        """Count differing bits of results."""
        entry = self.rows.setdefault(name, [0, 0])
        for one, other in zip(got, want, strict=True):
            same = one.dtype == other.dtype and one.shape == other.shape
            kind = _BITS[one.dtype]
            wrong = (
                int((one.contiguous().view(kind) != other.contiguous().view(kind)).sum())
                if same
                else one.numel()
            )
            entry[0] += one.numel()
            entry[1] += wrong
            if wrong:
                self.first.setdefault(name, f"{case}: {wrong} of {one.numel()}")

    def mismatches(self) -> int:
        return sum(wrong for _, wrong in self.rows.values())


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def poison(*shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the next results of these shapes will get."""
    del [torch.full(shape, math.nan, dtype=dtype, device="cuda") for shape in shapes][:]


def tables(head_dim: int, dtype: torch.dtype, positions: int = 4096) -> tuple[Tensor, Tensor]:
    channels = torch.arange(0, head_dim, 2, device="cuda").float()
    angles = torch.outer(
        torch.arange(positions, device="cuda").float(), 1 / 1e4 ** (channels / head_dim)
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)


def eager_rope(
    qkv: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: dict[str, int],
    interleaved: int,
) -> Tensor:
    """The models' rotation as a chain of eager operators."""
    num_heads, num_kv_heads, head_dim = heads.values()
    split = (num_heads + num_kv_heads) * head_dim
    rotating, value = qkv[:, :split], qkv[:, split:]
    if bias is not None:
        rotating = rotating + bias
    x = rotating.reshape(len(qkv), -1, head_dim).to(cos.dtype)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = a * c - b * s, b * c + a * s
    both = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((both.to(qkv.dtype).flatten(1), value), dim=1)


def check_norms(tally: Tally, width: int, rows: Iterable[int], dtype: torch.dtype) -> None:
    w1, w2 = random(width, dtype=dtype), random(width, dtype=dtype)
    for count in rows:
        case = f"{dtype} [{count}, {width}]"
        x = random(count, width, dtype=dtype, scale=10 ** (count % 3 - 1))
        r = random(count, width, dtype=dtype)
        shapes = (x.shape, x.shape)
        want = reference.fenced_rms_norm(x, w1, eps=EPS)
        poison(*shapes, dtype=dtype)
        tally.compare("fenced_rms_norm", case, [OPS.fenced_rms_norm(x, w1, eps=EPS)], [want])
        want = reference.fenced_add_rms_norm(x, r, w1, eps=EPS)
        poison(*shapes, dtype=dtype)
        got = OPS.fenced_add_rms_norm(x, r, w1, eps=EPS)
        tally.compare("fenced_add_rms_norm", case, [got], [want])
        for name in ("fenced_rms_norm_add_rms_norm", "fenced_add_rms_norm_rms_norm"):
            both = getattr(reference, name)(x, r, w1, w2, eps=EPS)
            poison(*shapes, dtype=dtype)
            tally.compare(name, case, getattr(OPS, name)(x, r, w1, w2, eps=EPS), both)


def check_qk_norms(
    tally: Tally, heads: tuple[int, int, int], rows: Iterable[int], dtype: torch.dtype
) -> None:
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    q, k = heads[0] * heads[2], heads[1] * heads[2]
    w1, w2 = random(q, dtype=dtype), random(k, dtype=dtype)
    for count in rows:
        qkv = random(count, q + 2 * k, dtype=dtype)
        want = reference.fenced_qk_norm(qkv, w1, w2, **sizes, eps=EPS)
        poison(qkv.shape, dtype=dtype)
        got = OPS.fenced_qk_norm(qkv, w1, w2, **sizes, eps=EPS)
        tally.compare("fenced_qk_norm", f"{dtype} [{count}] {heads}", [got], [want])


def check_ropes(
    tally: Tally, heads: tuple[int, int, int], rows: Iterable[int], dtype: torch.dtype
) -> None:
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    width = (heads[0] + 2 * heads[1]) * heads[2]
    bias = random((heads[0] + heads[1]) * heads[2], dtype=dtype)
    kinds = [(table, pairs) for table in {dtype, F32} for pairs in (0, 1)]
    turns = {kind: tables(heads[2], kind[0]) for kind in kinds}
    for count in rows:
        qkv = random(count, width, dtype=dtype)
        positions = torch.randint(0, 4096, (count,), dtype=torch.int32, device="cuda")
        # Large counts take one kind each, so that the check stays short.
        for kind in kinds if count <= 16 else [kinds[count % len(kinds)]]:
            cos, sin = turns[kind]
            case = f"{dtype} [{count}] {heads} {kind}"
            want = eager_rope(qkv, None, positions, cos, sin, sizes, kind[1])
            poison(qkv.shape, dtype=dtype)
            got = OPS.fenced_rope(qkv, positions, cos, sin, **sizes, interleaved=kind[1])
            tally.compare("fenced_rope", case, [got], [want])
            want = eager_rope(qkv, bias, positions, cos, sin, sizes, kind[1])
            poison(qkv.shape, dtype=dtype)
            got = OPS.fenced_bias_rope(qkv, bias, positions, cos, sin, **sizes, interleaved=kind[1])
            tally.compare("fenced_bias_rope", case, [got], [want])


def check_silu(tally: Tally, width: int, rows: Iterable[int], dtype: torch.dtype) -> None:
    for count in rows:
        gate_up = random(count, 2 * width, dtype=dtype, scale=4.0)
        want = F.silu(gate_up[:, :width]) * gate_up[:, width:]
        poison((count, width), dtype=dtype)
        got = OPS.fenced_silu_mul(gate_up)
        tally.compare("fenced_silu_mul", f"{dtype} [{count}, {width}]", [got], [want])


def check_silu_of_every_value(tally: Tally) -> None:
    """All 65,536 gates of the 16-bit types, and 2**24 random float32 ones."""
    for dtype in (BF16, F16):
        gates = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
        ups = torch.ones_like(gates)
        got = OPS.fenced_silu_mul(torch.cat((gates, ups))[None])
        tally.compare("fenced_silu_mul", f"every {dtype}", [got], [(F.silu(gates) * ups)[None]])
    wide = random(16, 2**21, dtype=F32, scale=20.0)
    want = F.silu(wide[:, : 2**20]) * wide[:, 2**20 :]
    tally.compare("fenced_silu_mul", "random float32", [OPS.fenced_silu_mul(wide)], [want])


def check_rows(tally: Tally) -> None:
    for dtype in (BF16, F16, F32):
        for width in (96, 2048, 5280, 33):
            x = random(300, width, dtype=dtype)
            order = torch.randperm(300, device="cuda").int()
            for count in (0, 1, 7, 128, 300):
                rows = order[:count]
                case = f"{dtype} [{count}, {width}]"
                want = x[rows.long()]
                poison((count, width), dtype=dtype)
                tally.compare("compact_gather", case, [OPS.compact_gather(x, rows)], [want])
                update = random(count, width, dtype=dtype)
                want = x.index_copy(0, rows.long(), update)
                poison(x.shape, dtype=dtype)
                got = OPS.compact_scatter(x, update, rows)
                tally.compare("compact_scatter", case, [got], [want])


def check_noise(tally: Tally, tokens: int) -> None:
    """Against the CPU twin: seeds and positions from all of their ranges."""
    generator = torch.Generator().manual_seed(tokens)
    seeds = torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (tokens,), generator=generator, dtype=torch.int32)
    seeds[: tokens // 2], positions[: tokens // 2] = 0, torch.arange(tokens // 2).int()
    scales = {"std": math.sqrt(2 / (5 * 5280)), "scale": math.sqrt(5280)}
    for dtype in (F32, BF16, F16):
        share = tokens if dtype is F32 else tokens // 16
        like = torch.empty(share, 5280, dtype=dtype)
        parts = [
            torch.ops.looptrt.position_keyed_noise(like[a:b], positions[a:b], seeds[a:b], **scales)
            for a, b in ((i, min(i + 256, share)) for i in range(0, share, 256))
        ]
        poison(like.shape, dtype=dtype)
        got = OPS.position_keyed_noise(
            torch.empty_like(like, device="cuda"),
            positions[:share].cuda(),
            seeds[:share].cuda(),
            **scales,
        )
        tally.compare("position_keyed_noise", f"{dtype}", [got], [torch.cat(parts).cuda()])


def check(noise_tokens: int) -> Tally:
    torch.manual_seed(0)
    tally = Tally()
    widths = {model[0] for model in MODELS.values()}
    for width in (*widths, *TINY_WIDTHS, *MORE_WIDTHS, 256, 4096):
        check_norms(tally, width, ROWS, BF16)
        few = ROWS if width in widths else (1, 2, 3, 5, 9, 16, 33, 256, 1024)
        check_norms(tally, width, few, F16)
        check_norms(tally, width, (1, 2, 3, 5, 9, 16, 33, 256, 1024), F32)
    for width in (8, 16, 24, 40, 120, 136, 1032, 3072, 6144, 7168, 8184, 11264):
        check_norms(tally, width, (1, 2, 3, 4, 7, 8, 15, 16, 17, 100, 600), BF16)
    check_qk_norms(tally, (16, 16, 128), ROWS, BF16)
    check_qk_norms(tally, (16, 4, 128), (1, 2, 5, 9, 16, 100, 2048), F16)
    for heads in {model[2:5] for model in MODELS.values()}:
        check_ropes(tally, heads, ROWS, BF16)
        check_ropes(tally, heads, (1, 3, 16, 100, 513), F16)
    for heads in ((4, 4, 32), (4, 2, 16), (3, 3, 32), (4, 2, 12), (2, 1, 64)):
        for dtype in (BF16, F16, F32):
            check_ropes(tally, heads, (1, 2, 5, 100), dtype)
    for width in (*{model[1] for model in MODELS.values()}, 192, 352, 384, 100, 33):
        check_silu(tally, width, ROWS if width > 1000 else (1, 2, 5, 100), BF16)
        check_silu(tally, width, (1, 2, 5, 100, 2048), F16)
    check_silu_of_every_value(tally)
    check_rows(tally)
    check_noise(tally, noise_tokens)
    torch.cuda.synchronize()
    return tally


# --- sanitize ------------------------------------------------------------------------------


def drive_small_shapes() -> None:
    """Every kernel once on small shapes; inputs come from the host, so that all are known."""

    def host(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape).to(dtype).cuda()

    for dtype in (BF16, F32):
        for count in (1, 2, 5, 9, 17):
            for width in (8, 96, 128, 264, 2048, 8192):
                x, r = host(count, width, dtype=dtype), host(count, width, dtype=dtype)
                w1, w2 = host(width, dtype=dtype), host(width, dtype=dtype)
                OPS.fenced_rms_norm(x, w1, eps=EPS)
                OPS.fenced_add_rms_norm(x, r, w1, eps=EPS)
                OPS.fenced_rms_norm_add_rms_norm(x, r, w1, w2, eps=EPS)
                OPS.fenced_add_rms_norm_rms_norm(x, r, w1, w2, eps=EPS)
            for head_dim in (12, 32):
                sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim}
                qkv = host(count, 4 * head_dim, dtype=dtype)
                bias = host(3 * head_dim, dtype=dtype)
                positions = torch.arange(count, dtype=torch.int32).cuda()
                turn = [host(32, head_dim // 2, dtype=F32) for _ in range(2)]
                for pairs in (0, 1):
                    OPS.fenced_rope(qkv, positions, *turn, **sizes, interleaved=pairs)
                    OPS.fenced_bias_rope(qkv, bias, positions, *turn, **sizes, interleaved=pairs)
            sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
            weights = host(64, dtype=dtype), host(32, dtype=dtype)
            OPS.fenced_qk_norm(host(count, 128, dtype=dtype), *weights, **sizes, eps=EPS)
            for width in (33, 352):
                OPS.fenced_silu_mul(host(count, 2 * width, dtype=dtype))
                x = host(count, width, dtype=dtype)
                rows = torch.arange(count - 1, -1, -1, dtype=torch.int32).cuda()
                seeds = torch.arange(count).cuda()
                OPS.compact_scatter(x, OPS.compact_gather(x, rows), rows)
                OPS.compact_scatter(x, x[: count - 1].clone(), rows[: count - 1])
                OPS.position_keyed_noise(x, rows, seeds, std=0.1, scale=3.0)
    drive_skinny_linear()
    shape = (3, 2, 4, 2, 8)
    units = torch.randn(6, *shape).cuda()
    pool = torch.tensor([units.data_ptr(), 6]).cuda()
    ranges = [torch.tensor(v, dtype=torch.int32).cuda() for v in ([1, 2], [2, 3], [0, 1], [4, 3])]
    launch.plane_copy(pool, *ranges, shape, F32)
    table = torch.zeros(3, 2, 4, dtype=torch.int32).cuda()
    columns = [torch.tensor(v, dtype=torch.int32).cuda() for v in ([2], [1], [[5, 6]])]
    launch.update_tables(table, *columns)
    torch.cuda.synchronize()


def drive_skinny_linear() -> None:
    """Every form of the kernel: deep and shallow, x in shared memory or not, tall, unaligned."""
    for dtype in (BF16, F32):
        for count in (1, 3, 16):
            for inputs, outputs in ((2048, 40), (5632, 1100), (17920, 24), (72, 9), (33, 5)):
                operands = [torch.randn(n, inputs).to(dtype).cuda() for n in (count, outputs)]
                torch.cuda.synchronize()
                launch.skinny_linear(*operands)


def sanitize(script: str = __file__) -> dict[str, str]:
    """Last line of every compute-sanitizer tool over `script --drive`; they run side by side."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return dict.fromkeys(SANITIZERS, "not run: no compute-sanitizer")
    command = [sys.executable, script, "--drive"]
    # Only our kernels: torch's own are not what is checked here.
    only_ours = ["--kernel-name", "kernel_substring=looptrt"]
    environment = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
    running = {
        tool: subprocess.Popen(
            [*environment, program, "--tool", tool, *only_ours, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for tool in SANITIZERS
    }
    results = {}
    for tool, process in running.items():
        try:
            output, _ = process.communicate(timeout=150)
            lines = [line for line in output.splitlines() if "SUMMARY" in line]
            tail = " | ".join(output.splitlines()[-6:])
            results[tool] = lines[-1].strip("= ") if lines else f"no summary: {tail}"
        except subprocess.TimeoutExpired:
            process.kill()
            results[tool] = "no result in 150 s"
    return results


# --- time ----------------------------------------------------------------------------------


def graph_of(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def once(work: Callable[[], Any]) -> float:
    """Time of one run, in µs."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def microseconds(work: Callable[[], Any], repeats: int = 15) -> float:
    """Median time of one run."""
    return statistics.median([once(work) for _ in range(repeats + 3)][3:])


def steady(replay: Callable[[], Any], repeats: int = 9, in_a_row: int = 3) -> list[float]:
    """Times of a graph's replays behind one another, as an engine runs them, in µs.

    A replay by itself adds the time in which the host launches a graph of a thousand kernels,
    up to 1 ms; an engine does that while the step before runs. The first of the times is dropped.
    """
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replay()
        begin.record()
        for _ in range(in_a_row):
            replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / in_a_row)
    return times[1:]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device copy, in GB/s."""
    source, target = (torch.empty(2**31, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_(0, 255)
    # Not in a graph, whose copy nodes run on a copy engine: slower.
    return 2 * 2**31 / microseconds(lambda: target.copy_(source), 7) / 1e3


Step = Callable[[Tensor], Tensor]


def own_products(model: str) -> Products:
    """Products of an engine of the model by default, unless it requires exact ones.

    Those of few rows are `launch.skinny_linear`, where at least one matrix is small enough, as in
    `runtime.product_checks.skinny_rows` (of one row up to however many makes no difference here).
    """
    hidden, width, heads, kv_heads, head_dim, _ = MODELS[model]
    others = ((heads + 2 * kv_heads) * head_dim, heads * head_dim, 2 * width, width)
    is_any_small = any(2 * hidden * other <= MAX_SKINNY_BYTES for other in others)
    return Products(launch.MAX_SKINNY_ROWS if is_any_small else 0)


def added_at(rows: int, products: Products, weights: list[list[Tensor]], step: Step) -> float:
    """What an operator adds to a chain of products of few rows, in µs.

    Args:
        rows: how many.
        products: how they are computed; kernels start early beside our own, as in an engine.
        weights: [out, in] of the product before the operator and of any behind it, for every link
            of the chain; more of them than the L2 cache holds. A product takes the first channels
            of what is there.
        step: the operator on [rows, out].
    """
    start = random(rows, weights[0][0].shape[1], dtype=BF16)

    def chain(after: Step) -> Callable[[], None]:
        def run() -> None:
            x = start
            for before, *behind in weights:
                x = after(products.linear(x[:, : before.shape[1]], before))
                for weight in behind:
                    x = products.linear(x[:, : weight.shape[1]], weight)

        return run

    with launch.overlapping_kernels(products.max_skinny_rows):
        bare, full = (graph_of(chain(after)) for after in (lambda y: y, step))
    # One after the other, so that both see the same clocks.
    pairs = [[*steady(full.replay, 1), *steady(bare.replay, 1)] for _ in range(25)][3:]
    return statistics.median(a - b for a, b in pairs) / len(weights)


def few_rows_cases(model: str, rows: int) -> Iterator[tuple[str, int, tuple[int, int], Step]]:
    """(operator, width of the product before it, [out, in] of the next in a layer, its call)."""
    hidden, width, heads, kv_heads, head_dim, kind = MODELS[model]
    w1, w2 = (random(hidden, dtype=BF16) for _ in range(2))
    r = random(rows, hidden, dtype=BF16)
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    cos, sin = tables(head_dim, BF16 if kind == "half" else F32)
    positions = torch.full((rows,), 77, dtype=torch.int32, device="cuda")
    pairs = int(kind == "pairs")
    bias = random((heads + kv_heads) * head_dim, dtype=BF16)
    gate_up, attended = (2 * width, hidden), (hidden, heads * head_dim)
    # No operator of ours: what any small kernel costs in this place.
    yield "torch.neg", hidden, gate_up, torch.neg
    yield "fenced_rms_norm", hidden, gate_up, lambda y: OPS.fenced_rms_norm(y, w1, eps=EPS)
    yield (
        "fenced_add_rms_norm",
        hidden,
        gate_up,
        lambda y: OPS.fenced_add_rms_norm(y, r, w1, eps=EPS),
    )
    for name in ("fenced_rms_norm_add_rms_norm", "fenced_add_rms_norm_rms_norm"):
        op = getattr(OPS, name)
        yield name, hidden, gate_up, lambda y, op=op: op(y, r, w1, w2, eps=EPS)[1]
    qkv = (heads + 2 * kv_heads) * head_dim
    turn = (positions, cos, sin)
    if pairs:
        yield (
            "fenced_bias_rope",
            qkv,
            attended,
            lambda y: OPS.fenced_bias_rope(y, bias, *turn, **sizes, interleaved=1),
        )
    else:
        yield (
            "fenced_rope",
            qkv,
            attended,
            lambda y: OPS.fenced_rope(y, *turn, **sizes, interleaved=0),
        )
    if kind == "half32":
        yield (
            "fenced_qk_norm",
            qkv,
            attended,
            lambda y: OPS.fenced_qk_norm(y, w1, w2, **sizes, eps=EPS),
        )
    yield "fenced_silu_mul", 2 * width, (hidden, width), OPS.fenced_silu_mul


def time_few_rows(model: str) -> dict[str, dict[str, float]]:
    """What every operator adds, in µs: at one row beside each kind of products, and at eight.

    Beside cuBLAS's, in a chain of the product before it alone: where a link takes 100 µs, as in a
    layer of Huginn, what one operator adds is lost in what such products vary by. Beside those of
    an engine of the model by default, where they are others, with the next product of a layer as
    well: what it gains by an early start belongs to the operator, and some of these products may
    be cuBLAS's.
    """
    hidden = MODELS[model][0]
    arms = {"one_row_added_us": (1, Products()), "eight_rows_added_us": (8, Products())}
    if (own := own_products(model)).max_skinny_rows:
        arms["one_row_added_beside_own_us"] = 1, own
    results: dict[str, dict[str, float]] = {}
    for key, (rows, products) in arms.items():
        results[key] = {}
        for name, out, behind, step in few_rows_cases(model, rows):
            shapes = [(out, hidden), *([behind] if products.max_skinny_rows else [])]
            links = max(24, math.ceil(1e8 / sum(map(math.prod, shapes))))
            weights = [
                [random(*shape, dtype=BF16, scale=shape[1] ** -0.5) for shape in shapes]
                for _ in range(links)
            ]
            results[key][name] = added_at(rows, products, weights, step)
    return results


def time_many_rows(model: str, rows: int) -> dict[str, tuple[float, float]]:
    """(µs, GB/s) of every operator, its bytes each read or written once."""
    hidden, width, heads, kv_heads, head_dim, kind = MODELS[model]
    w1, w2 = random(hidden, dtype=BF16), random(hidden, dtype=BF16)
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    qkv = (heads + 2 * kv_heads) * head_dim
    cos, sin = tables(head_dim, BF16 if kind == "half" else F32, rows)
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    bias = random((heads + kv_heads) * head_dim, dtype=BF16)
    row = 2 * rows * hidden
    table_bytes = 2 * cos.numel() * cos.element_size()
    turn = (positions, cos, sin)
    cases: dict[str, tuple[int, int, Callable[..., Any]]] = {
        "fenced_rms_norm": (hidden, 2 * row, lambda x, _: OPS.fenced_rms_norm(x, w1, eps=EPS)),
        "fenced_add_rms_norm": (
            hidden,
            3 * row,
            lambda x, r: OPS.fenced_add_rms_norm(x, r, w1, eps=EPS),
        ),
        "fenced_rms_norm_add_rms_norm": (
            hidden,
            4 * row,
            lambda x, r: OPS.fenced_rms_norm_add_rms_norm(x, r, w1, w2, eps=EPS),
        ),
        "fenced_add_rms_norm_rms_norm": (
            hidden,
            4 * row,
            lambda x, r: OPS.fenced_add_rms_norm_rms_norm(x, r, w1, w2, eps=EPS),
        ),
        "fenced_silu_mul": (2 * width, 6 * rows * width, lambda x, _: OPS.fenced_silu_mul(x)),
    }
    if kind == "pairs":
        cases["fenced_bias_rope"] = (
            qkv,
            4 * rows * qkv + table_bytes,
            lambda x, _: OPS.fenced_bias_rope(x, bias, *turn, **sizes, interleaved=1),
        )
    else:
        cases["fenced_rope"] = (
            qkv,
            4 * rows * qkv + table_bytes,
            lambda x, _: OPS.fenced_rope(x, *turn, **sizes, interleaved=0),
        )
    if kind == "half32":
        cases["fenced_qk_norm"] = (
            qkv,
            4 * rows * qkv,
            lambda x, _: OPS.fenced_qk_norm(x, w1, w2, **sizes, eps=EPS),
        )
    return {name: time_rotating(rows, *case) for name, case in cases.items()}


def time_rotating(
    rows: int, width: int, num_bytes: int, call: Callable[..., Any]
) -> tuple[float, float]:
    """Over more input sets than the L2 cache holds; results stay apart until the graph ends."""
    sets = max(4, math.ceil(4e8 / num_bytes))
    inputs = [random(rows, width, dtype=BF16) for _ in range(sets)]
    others = [random(rows, width, dtype=BF16) for _ in range(sets)]
    kept: list[Any] = []

    def work() -> None:
        kept.clear()
        kept.extend(call(x, r) for x, r in zip(inputs, others, strict=True))

    duration = statistics.median(steady(graph_of(work).replay)) / sets
    return duration, num_bytes / duration / 1e3


# --- the program ---------------------------------------------------------------------------


def build() -> Path:
    """Compile for this GPU alone; nothing to do when it is done."""
    major, minor = torch.cuda.get_device_capability()
    folder = ROOT / "build" / "cuda"
    options = ["-DLOOPTRT_CUDA=ON", f"-DLOOPTRT_CUDA_ARCHITECTURES={major}{minor}"]
    for command in (
        ["cmake", "-S", ROOT, "-B", folder, *options],
        ["cmake", "--build", folder, "--parallel"],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stdout}{result.stderr}")
    return folder / launch.LIBRARY_NAME


def report(results: dict[str, Any]) -> None:
    for name, entry in results.get("check", {}).items():
        print(f"{name:32}{entry['elements']:>14,} elements {entry['mismatches']:>10,} differ")
        if "first" in entry:
            print(f"    first: {entry['first']}")
    for tool, line in results.get("sanitize", {}).items():
        print(f"{tool:12}{line}")
    timed = results.get("time")
    if timed is None:
        return
    copied = timed["copy_gb_per_s"]
    print(f"copy bandwidth {copied:.0f} GB/s")
    print(
        f"{'':46}{'1 row, added':>13}{'beside ours':>13}{'8 rows, added':>14}"
        f"{'8192 rows':>12}{'of copy':>9}"
    )
    for model, entry in timed["models"].items():
        own = entry.get("one_row_added_beside_own_us", {})
        for name, added in entry["one_row_added_us"].items():
            line = f"{model:14}{name:32}{added:>10.2f} us"
            line += f"{own[name]:>10.2f} us" if own else " " * 13
            line += f"{entry['eight_rows_added_us'][name]:>11.2f} us"
            if name in entry["many_rows"]:  # not torch.neg
                duration, rate = entry["many_rows"][name]
                line += f"{duration:>9.1f} us{rate / copied:>9.0%}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--skip", default="", help="comma-separated: check, sanitize, time")
    parser.add_argument("--library", type=Path, help="use this library, build none")
    parser.add_argument("--commit", help="recorded where git cannot tell it")
    parser.add_argument("--noise-tokens", type=int, default=20000, help="of 5280 draws each")
    parser.add_argument("--drive", action="store_true", help="run small shapes only")
    options = parser.parse_args()
    if options.drive:
        drive_small_shapes()
        return
    begin = time.monotonic()
    launch.load(options.library or build())
    print(f"built: {time.monotonic() - begin:.0f} s")
    skipped = set(re.split(r",\s*", options.skip))
    results: dict[str, Any] = {"machine": machine(options.commit)}
    if "check" not in skipped:
        tally = check(options.noise_tokens)
        results["check"] = {
            name: {"elements": elements, "mismatches": wrong}
            | ({"first": tally.first[name]} if wrong else {})
            for name, (elements, wrong) in tally.rows.items()
        }
        print(f"checked: {time.monotonic() - begin:.0f} s")
    if "sanitize" not in skipped:
        results["sanitize"] = sanitize()
        print(f"sanitized: {time.monotonic() - begin:.0f} s")
    if "time" not in skipped:
        results["time"] = {
            "copy_gb_per_s": copy_bandwidth(),
            "models": {
                model: {**time_few_rows(model), "many_rows": time_many_rows(model, 8192)}
                for model in MODELS
            },
        }
        print(f"timed: {time.monotonic() - begin:.0f} s")
    report(results)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if any(entry["mismatches"] for entry in results.get("check", {}).values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
