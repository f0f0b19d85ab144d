"""Check, then time packed_plane_attention and the sampling kernel on the GPU at hand.

Builds the library for this GPU, holds a sample of every timed shape's rows against float64, then
times decode and prefill in CUDA graphs over more KV than the L2 cache holds, beside the measured
copy bandwidth and matrix peak. Figures go to a JSON file. Exits 1 on a wrong result.

Run: PYTHONPATH=. python benchmarks/attention.py [--out attention.json] [--skip sanitize,time]
     [--only '1 x 2048, decode']
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import build, copy_bandwidth, graph_of, microseconds, sanitize, steady
from looptrt.bench.results import machine
from looptrt.plugins import launch
from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators

OPS = torch.ops.looptrt
BF16 = torch.bfloat16
PAGE_SIZE = 32
COLD_BYTES = 4e8  # several times the L2 cache


@dataclass(frozen=True)
class Shape:
    """One timed call: every sequence has `new` rows that end at position length - 1."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    sequences: int
    length: int
    new: int

    @property
    def name(self) -> str:
        kind = "decode" if self.new == 1 else f"{self.new} rows"
        return f"{self.model} {self.sequences} x {self.length}, {kind}"

    @property
    def kv_bytes(self) -> int:
        return self.sequences * self.length * self.kv_heads * self.head_dim * 4

    @property
    def flops(self) -> float:
        """Of the two products, hidden keys not counted."""
        first = self.length - self.new
        keys = sum(range(first + 1, self.length + 1))
        return 4.0 * self.sequences * self.heads * self.head_dim * keys


OURO, HUGINN = ("Ouro-1.4B", 16, 16, 128), ("Huginn-0125", 55, 55, 96)
GROUPED = ("grouped 32:8", 32, 8, 128)
DECODE = [
    Shape(*model, sequences, length, 1)
    for model in (OURO, HUGINN)
    for length in (576, 2048)
    for sequences in (1, 8, 32, 128)
] + [
    Shape(*GROUPED, 32, 2048, 1),
    Shape(*OURO, 1, 32768, 1),
    Shape(*OURO, 1, 65536, 1),
]
PREFILL = [
    Shape(*OURO, 8, 2048, 2048),
    Shape(*HUGINN, 8, 2048, 2048),
    Shape(*GROUPED, 8, 2048, 2048),
    Shape("Ouro-1.4B", 16, 16, 64, 8, 2048, 2048),
    Shape(*OURO, 1, 512, 512),
    Shape(*OURO, 1, 16384, 2048),
    Shape(*OURO, 32, 2048, 4),
]


class Call:
    """Operands of a shape, with as many layer slots as keep the L2 cache cold."""

    def __init__(self, shape: Shape, cold_bytes: float = COLD_BYTES) -> None:
        self.shape = shape
        self.slots = max(2, math.ceil(cold_bytes / shape.kv_bytes))
        pages = math.ceil(shape.length / PAGE_SIZE)
        units = shape.sequences * pages
        unit = (self.slots, 2, PAGE_SIZE, shape.kv_heads, shape.head_dim)
        self.pool = torch.empty(units + 1, *unit, dtype=BF16, device="cuda").normal_()
        order = torch.randperm(units, device="cuda").add(1).int()
        rows = shape.sequences * shape.new
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = torch.randn(rows, width, device="cuda").to(BF16)
        starts = torch.arange(shape.sequences + 1, device="cuda") * shape.new
        positions = torch.arange(shape.length - shape.new, shape.length, device="cuda")
        self.operands = (
            positions.repeat(shape.sequences).int(),
            starts.int(),
            torch.arange(shape.sequences, device="cuda").int(),
            order.view(shape.sequences, 1, pages),
            torch.tensor([self.pool.data_ptr(), units + 1], device="cuda"),
            torch.zeros(1, dtype=torch.int32, device="cuda"),
        )

    def run(self, slot: int) -> Tensor:
        """Attention of one layer: [rows, heads * head_dim]."""
        shape = self.shape
        result: Tensor = OPS.packed_plane_attention(
            self.qkv,
            *self.operands,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_size=PAGE_SIZE,
            unit_slots=self.slots,
            row=0,
            slot=slot,
            scale=shape.head_dim**-0.5,
        )
        return result

    def worst(self, slot: int) -> float:
        """Largest error of some rows in units of what rounding explains: below 1 is right."""
        shape = self.shape
        got = self.run(slot)
        table = self.operands[3]
        worst = 0.0
        for sequence in {0, shape.sequences // 2, shape.sequences - 1}:
            units = table[sequence, 0].long()
            key, value = (
                self.pool[units, slot, half].flatten(0, 1)[: shape.length].transpose(0, 1)
                for half in (0, 1)
            )
            for new in {0, shape.new // 3, shape.new - 1}:
                row = sequence * shape.new + new
                seen = shape.length - shape.new + new + 1
                query = self.qkv[row, : shape.heads * shape.head_dim].view(shape.heads, -1)
                group = shape.heads // shape.kv_heads
                k, v = (x[:, :seen].double().repeat_interleave(group, dim=0) for x in (key, value))
                scores = (k @ query.double()[:, :, None])[..., 0] * shape.head_dim**-0.5
                weights = scores.softmax(dim=-1)[:, None]
                want = (weights @ v)[:, 0]
                error = (got[row].double().view(shape.heads, -1) - want).abs()
                bound = 2**-8 * 1.1 * ((weights @ v.abs())[:, 0] + want.abs()) + 1e-7
                worst = max(worst, float((error / bound).nan_to_num(nan=math.inf).max()))
        return worst

    def microseconds(self) -> float:
        """Median time of one call among calls for all slots in a graph that replays follow."""
        kept: list[Tensor] = []

        def work() -> None:
            kept.clear()
            kept.extend(self.run(slot) for slot in range(self.slots))

        return statistics.median(steady(graph_of(work).replay)) / self.slots


def kernel_times(call: Call) -> dict[str, float]:
    """Mean µs of every kernel of a call, run one by one; they overlap in a graph."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - slow to load

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for slot in range(min(call.slots, 8)):
            call.run(slot)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in trace.events():
        name = re.search(r"(\w+Kernel)", event.name)
        if name and event.device_time:
            times[name[1]].append(event.device_time)
    return {name: round(sum(values) / len(values), 2) for name, values in times.items()}


def matrix_peak() -> float:
    """TFLOP/s of a large bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(BF16) for _ in range(2))
    return 2 * 8192**3 / microseconds(lambda: a @ b, 9) / 1e6


def torch_attention(shape: Shape) -> float | None:
    """µs of PyTorch's own causal attention on the same rows, unpaged; None where it differs."""
    if shape.new != shape.length:
        return None
    sizes = (shape.sequences, shape.length)
    q = torch.randn(*sizes, shape.heads, shape.head_dim, device="cuda").to(BF16).transpose(1, 2)
    k = torch.randn(*sizes, shape.kv_heads, shape.head_dim, device="cuda").to(BF16)
    k = k.transpose(1, 2)
    grouped = shape.heads != shape.kv_heads
    return microseconds(
        lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=grouped), 7
    )


def drive_small_shapes() -> None:
    """Every kernel on small shapes; inputs come from the host, so that all are known."""
    for heads, kv_heads, head_dim, dtype in (
        (2, 2, 64, BF16),
        (2, 1, 128, torch.float16),
        (2, 2, 96, BF16),
        (18, 1, 64, BF16),
        (2, 1, 16, torch.float32),
        (2, 1, 80, BF16),
        # So many heads that prompts fill a GPU: on an H200 by two and by three warpgroups.
        (96, 96, 128, torch.float16),
        (264, 8, 96, BF16),
    ):
        unit = (2, 2, 16, kv_heads, head_dim)
        pool = torch.randn(61, *unit).to(dtype).cuda()
        kv_pool = torch.tensor([pool.data_ptr(), 61]).cuda()
        table = torch.arange(1, 61, dtype=torch.int32).view(3, 1, 20).cuda()
        table[2, 0] = 0
        plane = torch.zeros(1, dtype=torch.int32).cuda()
        for rows in (
            [(0, [300]), (1, [5]), (2, [7])],
            [(0, [*range(270, 290)]), (1, [40])],
            [(0, [*range(150)]), (1, [*range(3, 9)]), (2, [2])],
        ):
            counts = torch.tensor([0] + [len(positions) for _, positions in rows])
            positions = torch.tensor([p for _, some in rows for p in some])
            qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * head_dim).to(dtype)
            OPS.packed_plane_attention(
                qkv.cuda(),
                positions.int().cuda(),
                counts.cumsum(0).int().cuda(),
                torch.tensor([slot for slot, _ in rows]).int().cuda(),
                table,
                kv_pool,
                plane,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                page_size=16,
                unit_slots=2,
                row=0,
                slot=1,
                scale=0.1,
            )
    logits = torch.randn(3, 3000).cuda()
    column = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64).cuda()
    whole = torch.tensor([0, 40, 7], dtype=torch.int32).cuda()
    shares = torch.tensor([0.9, 0.9, 0.1], dtype=torch.float64).cuda()
    seeds = torch.tensor([0, 40, 7]).cuda()
    launch.sample(logits, column, whole, shares, shares, seeds, whole)
    torch.cuda.synchronize()


def time_sampling() -> dict[str, float]:
    """µs of one call over float32 logits, by what it does, rows and vocabulary."""
    results = {}
    kinds = {"greedy": (0.0, 0, 1.0), "draw": (1.0, 0, 1.0), "top-k 50, top-p 0.9": (1.0, 50, 0.9)}
    for name, (temperature, top_k, top_p) in kinds.items():
        for rows in (1, 32, 128):
            for vocab in (49_152, 152_064):
                logits = torch.randn(rows, vocab, device="cuda") * 3
                column = torch.full((rows,), temperature, dtype=torch.float64, device="cuda")
                zeros = torch.zeros(rows, dtype=torch.int32, device="cuda")
                operands = (
                    column,
                    zeros + top_k,
                    torch.full_like(column, top_p),
                    torch.zeros_like(column),
                    zeros.long(),
                    zeros,
                )

                def work(logits: Tensor = logits, operands: tuple[Tensor, ...] = operands) -> None:
                    launch.sample(logits, *operands)

                case = f"{name}, {rows} x {vocab}"
                results[case] = microseconds(graph_of(work).replay)
                print(f"sample {case:38}{results[case]:10.2f} us", flush=True)
    return results


def timed(shape: Shape, copied: float, peak: float) -> dict[str, Any]:
    """Check a shape, time it, print its line."""
    call = Call(shape)
    worst = call.worst(1)
    duration = call.microseconds()
    entry: dict[str, Any] = {
        "shape": vars(shape),
        "worst_error_in_bounds": worst,
        "us": duration,
        "kernels_us": kernel_times(call),
    }
    if shape.flops / shape.kv_bytes > 50:
        entry["tflop_per_s"] = shape.flops / duration / 1e6
        entry["of_matrix_peak"] = entry["tflop_per_s"] / peak
        entry["torch_us"] = torch_attention(shape)
        rate = f"{entry['tflop_per_s']:7.0f} TFLOP/s {entry['of_matrix_peak']:5.0%} of peak"
    else:
        entry["kv_gb_per_s"] = shape.kv_bytes / duration / 1e3
        entry["of_copy_bandwidth"] = entry["kv_gb_per_s"] / copied
        rate = f"{entry['kv_gb_per_s']:7.0f} GB/s    {entry['of_copy_bandwidth']:5.0%} of copy"
    wrong = "" if worst <= 1 else f"  WRONG: {worst:.3g} bounds"
    print(f"{shape.name:38}{duration:10.2f} us {rate}  {entry['kernels_us']}{wrong}", flush=True)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--skip", default="", help="comma-separated: sanitize, time")
    parser.add_argument("--only", default="", help="regex: time the shapes whose name has it")
    parser.add_argument("--library", type=Path, help="use this library, build none")
    parser.add_argument("--commit", help="recorded where git cannot tell it")
    parser.add_argument("--drive", action="store_true", help="run small shapes only")
    options = parser.parse_args()
    if options.drive:
        drive_small_shapes()
        return
    begin = time.monotonic()
    launch.load(options.library or build())
    print(f"built: {time.monotonic() - begin:.0f} s", flush=True)
    skipped = set(re.split(r",\s*", options.skip))
    results: dict[str, Any] = {"machine": machine(options.commit)}
    if "time" not in skipped:
        copied, peak = copy_bandwidth(), matrix_peak()
        print(f"copy bandwidth {copied:.0f} GB/s, bf16 matrix peak {peak:.0f} TFLOP/s", flush=True)
        results["copy_gb_per_s"], results["matrix_tflop_per_s"] = copied, peak
        results["attention"] = {
            shape.name + (f", head_dim {shape.head_dim}"): timed(shape, copied, peak)
            for shape in (*DECODE, *PREFILL)
            if re.search(options.only, shape.name)
        }
        if not options.only:
            results["sampling_us"] = time_sampling()
        print(f"timed: {time.monotonic() - begin:.0f} s", flush=True)
    if "sanitize" not in skipped:
        results["sanitize"] = sanitize(__file__)
        for tool, line in results["sanitize"].items():
            print(f"{tool:12}{line}")
        print(f"sanitized: {time.monotonic() - begin:.0f} s", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if any(e["worst_error_in_bounds"] > 1 for e in results.get("attention", {}).values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
