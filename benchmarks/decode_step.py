"""One decode step of a whole model in one CUDA graph: op by op, fused, and its GEMMs alone.

The modules are the product's own with random weights; the unfused arm runs every operator of ours
as its chain of torch operators, another replays the matrix products that the fused step makes and
nothing else. Up to 16 requests there are two more: the fused step with our own products of few
rows (`launch.skinny_linear`) in place of cuBLAS's, and those products alone. Checks every kernel
against PyTorch on the model's shapes, counts kernels, then times the arms in turn. Figures are
printed and go to a JSON file; exits 1 where a check fails.

Run: python3 benchmarks/decode_step.py --out decode_step.json [--models ...] [--batches 1,2,4,8,32]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import build as build_library
from kernels import copy_bandwidth, graph_of, steady
from looptrt.bench.results import machine
from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import LoopSpec, NoiseMode
from looptrt.models import ouro, raven
from looptrt.models.blocks import LoopedModel, build
from looptrt.models.operator_calls import calls_of
from looptrt.plugins import launch, schema
from looptrt.plugins.ops import Operators
from looptrt.plugins.probe import QUICK_ROWS, Clock, failures
from looptrt.plugins.products import Products
from looptrt.runtime.kernel_checks import probe_all

KV_LENGTH = 576
PAGE_SIZE = 32
REPEATS = 9
GOALS = {"kernels": 1100, "of_gemms": 1.27}  # for Ouro-1.4B at one request

CONFIGS: dict[str, tuple[Callable[..., LoopSpec], dict[str, Any]]] = {
    "Ouro-1.4B": (
        ouro.parse_config,
        {
            "vocab_size": 49152,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 65536,
            "num_hidden_layers": 24,
            "total_ut_steps": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
        },
    ),
    "Huginn-0125": (
        raven.parse_config,
        {
            "vocab_size": 65536,
            "n_embd": 5280,
            "n_heads": 55,
            "intermediate_size": 17920,
            "block_size": 4096,
            "n_layers_in_prelude": 2,
            "n_layers_in_recurrent_block": 4,
            "n_layers_in_coda": 2,
            "mean_recurrence": 32,
            "qk_bias": True,
        },
    ),
}
_PRODUCTS = {
    torch.ops.aten.linear.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
}
# cuBLAS adds up the parts of a split product in kernels of its own.
_REDUCTION = "splitKreduce"


def spec_of(model: str) -> LoopSpec:
    parse, config = CONFIGS[model]
    return parse(config, model)


@dataclass
class DecodeStep:
    """A model, a full KV cache and the inputs of one step for `batch` requests."""

    spec: LoopSpec
    batch: int
    device: torch.device
    kv_length: int = KV_LENGTH
    model: LoopedModel | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = PlaneLayout.of(
            self.spec,
            page_size=PAGE_SIZE,
            max_loops=self.spec.num_loops,
            dtype="bfloat16",
            kv_planes="latest",
        )
        self.model = self.model or random_model(self.spec, self.layout, self.device)
        layout, batch, pages = self.layout, self.batch, self.layout.num_pages(self.kv_length)
        num_units = 1 + batch * layout.num_rows * pages
        pool = torch.empty(num_units, *layout.unit_shape, dtype=torch.bfloat16, device=self.device)
        self.pool = pool.normal_()

        def int32(values: Tensor) -> Tensor:
            return values.to(self.device, torch.int32)

        rows = torch.arange(batch)
        table = torch.arange(1, num_units).view(batch, layout.num_rows, pages)
        self.inputs = {
            "input_ids": int32(torch.randint(0, self.spec.vocab_size, (batch,))),
            "positions": int32(torch.full((batch,), self.kv_length - 1)),
            "rows": int32(rows),
            "logit_rows": int32(rows),
            "cu_seqlens": int32(torch.arange(batch + 1)),
            "seq_slots": int32(rows),
            "block_table": int32(table),
            "kv_pool": torch.tensor([pool.data_ptr(), num_units], device=self.device),
            "noise_seeds": torch.zeros(batch, dtype=torch.int64, device=self.device),
        }
        self.planes = [int32(torch.tensor([loop])) for loop in range(self.spec.num_loops)]

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Prelude, all loops, coda."""
        carried = {**self.inputs, "plane": self.planes[0]}
        carried |= self._phase("prelude", carried)
        for plane in self.planes:
            carried["state"] = self._phase("core", {**carried, "plane": plane})["next_state"]
        return self._phase("coda", carried)["logits"]

    def token_ids(self) -> Tensor:
        return self.logits().argmax(dim=-1)

    def _phase(self, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        phase = getattr(self.model, name)
        outputs = phase(*(tensors[item] for item in phase.input_names))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return dict(zip(phase.output_names, outputs, strict=True))


def empty_model(spec: LoopSpec, layout: PlaneLayout, device: torch.device) -> LoopedModel:
    return build(
        spec,
        layout,
        max_positions=1024,
        dtype=torch.bfloat16,
        noise_mode=NoiseMode.POSITION,
        device=device,
    )


def random_model(spec: LoopSpec, layout: PlaneLayout, device: torch.device) -> LoopedModel:
    """Weights that keep activations near 1 through all loops."""
    model = empty_model(spec, layout, device)
    for tensor in model.parameters():
        if tensor.dim() == 1:
            tensor.data.normal_(1.0, 0.02)
        else:
            tensor.data.normal_(0.0, tensor.shape[-1] ** -0.5)
    return model.eval()


class _Products(TorchDispatchMode):
    """Keeps every matrix product with its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if func in _PRODUCTS:
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def products_of(step: DecodeStep) -> Callable[[], list[Tensor]]:
    """Makes the step's matrix products in its order, on the operands that it had."""
    with _Products() as mode:
        step.logits()
    calls = mode.calls

    @torch.inference_mode()
    def run() -> list[Tensor]:
        return [func(*args) for func, args in calls]

    return run


def skinny_products_of(step: DecodeStep) -> Callable[[], list[Tensor]]:
    """The same by our own kernel."""
    with _Products() as mode:
        step.logits()
    # Of F.linear(x, weight) or mm(x, weight^T).
    operands = [
        (args[0], args[1] if func is torch.ops.aten.linear.default else args[1].t())
        for func, args in mode.calls
    ]
    products = Products(max_skinny_rows=launch.MAX_SKINNY_ROWS)
    return lambda: [products.linear(x, weight) for x, weight in operands]


@contextlib.contextmanager
def arm(step: DecodeStep, name: str, missing: list[str]) -> Iterator[None]:
    """How operators of ours, and products, run while an arm is captured."""
    # The noise's unfused form draws on the CPU, which no graph can hold.
    every = [op.name for op in schema.OPS if op.name != "position_keyed_noise"]
    assert step.model is not None
    with contextlib.ExitStack() as stack:
        step.model.use_operators(Operators(every if name == "op by op" else missing))
        stack.callback(step.model.use_operators, Operators())
        if "skinny" in name:
            step.model.use_products(Products(max_skinny_rows=launch.MAX_SKINNY_ROWS))
            stack.callback(step.model.use_products, Products())
            stack.enter_context(launch.overlapping_kernels(launch.MAX_SKINNY_ROWS))
        yield


def kernel_counts(graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """Kernels of one replay by name; split-K reductions apart."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    names: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in profiler.events():
        is_kernel = not event.name.startswith(("Memcpy", "Memset"))
        if event.device_type == torch.autograd.DeviceType.CUDA and is_kernel:
            names[event.name] += 1
            times[event.name] += event.self_device_time_total
    if not names:
        sys.exit("decode_step: torch.profiler saw no kernel; CUPTI does not work here")
    reductions = sum(count for name, count in names.items() if _REDUCTION in name)
    return {
        "kernels": sum(names.values()) - reductions,
        "split_k_reductions": reductions,
        "by_name": {
            name: {"count": count, "us": round(times[name], 1)}
            for name, count in names.most_common(40)
        },
    }


def check(step: DecodeStep, missing: list[str]) -> dict[str, Any]:
    """Elements and mismatches of every kernel on the model's shapes, and what fails.

    The arms' logits say little about kernels: with random weights the last bit of one attention
    grows over the loops until logits have nothing in common.
    """
    meta = empty_model(step.spec, step.layout, torch.device("meta"))
    calls = [call for call in calls_of(meta, step.layout) if call.op not in missing]
    with torch.inference_mode():
        verdicts = probe_all(calls, QUICK_ROWS, step.device, launch.OPERATORS, Clock(120.0))
    return {
        "elements": sum(verdict.elements for verdict in verdicts),
        "fails": [f"{v.call.op} ({v.level}): {v.first}" for v in failures(verdicts)],
    }


def measure(step: DecodeStep, missing: list[str]) -> dict[str, Any]:
    """Count and time one model and batch."""
    graphs, results = {}, {}
    # Graphs read the products' operands, and a capture gives memory back that nobody holds.
    with arm(step, "fused", missing):
        products, skinny_products = products_of(step), skinny_products_of(step)
    is_skinny = step.batch <= launch.MAX_SKINNY_ROWS
    for name in ("op by op", "fused", *(["fused, skinny products"] if is_skinny else [])):
        with arm(step, name, missing):
            is_finite = bool(step.logits().isfinite().all())
            graphs[name] = graph_of(step.token_ids)
        results[name] = {"finite": is_finite}
    with arm(step, "fused", missing):
        graphs["GEMMs alone"] = graph_of(products)
        if is_skinny:
            graphs["skinny products alone"] = graph_of(skinny_products)
    for name, graph in graphs.items():
        results.setdefault(name, {}).update(kernel_counts(graph))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPEATS):
        for name, graph in graphs.items():
            times[name] += (us / 1e3 for us in steady(graph.replay, repeats=1))
    for name, all_ms in times.items():
        kept = sorted(all_ms)
        results[name] |= {"ms": statistics.median(kept), "ms_range": [kept[0], kept[-1]]}
    of_gemms = {
        name: results[name]["ms"] / results["GEMMs alone"]["ms"]
        for name in results
        if name.startswith("fused")
    }
    return {"arms": results, "of_gemms": of_gemms}


def report_check(model: str, checked: dict[str, Any]) -> None:
    print(f"{model}: {checked['elements']:,} results of kernels compared")
    for failure in checked["fails"]:
        print(f"  FAILS: {failure}")


def report_times(model: str, batch: int, entry: dict[str, Any]) -> None:
    goal = f" (goal: {GOALS['of_gemms']}, fewer than {GOALS['kernels']} kernels)"
    has_goal = model == "Ouro-1.4B" and batch == 1
    head = f"{model}, {batch} requests x {KV_LENGTH} positions"
    ratios = ", ".join(f"{name} / GEMMs {ratio:.2f}" for name, ratio in entry["of_gemms"].items())
    print(f"{head}: {ratios}{goal if has_goal else ''}")
    for name, figures in entry["arms"].items():
        counted = f"{figures['kernels']:>6} kernels + {figures['split_k_reductions']:>4}"
        low, high = figures["ms_range"]
        is_finite = figures.get("finite", True)
        print(
            f"  {name:24}{figures['ms']:8.2f} ms ({low:.2f}-{high:.2f}) {counted} reductions"
            f"{'' if is_finite else ' NOT FINITE'}",
            flush=True,
        )


def is_sound(results: dict[str, Any]) -> bool:
    """Whether every kernel held and every arm's logits were finite."""
    models = results["models"].values()
    entries = [entry for part in models for entry in part["batches"].values()]
    arms = [figures for entry in entries for figures in entry["arms"].values()]
    return not any(part["check"]["fails"] for part in models) and all(
        figures.get("finite", True) for figures in arms
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--models", default=",".join(CONFIGS), help="comma-separated")
    parser.add_argument("--batches", default="1,2,4,8,32", help="comma-separated")
    parser.add_argument("--library", type=Path, help="use this plugin library, build none")
    parser.add_argument("--commit", help="recorded where git cannot tell it")
    options = parser.parse_args()
    launch.load(options.library or build_library())
    missing = [op.name for op in schema.OPS if op.name not in launch.OPERATORS]
    if missing:
        print(f"NO KERNEL for {', '.join(missing)}: the fused arm runs them op by op")
    device = torch.device("cuda", torch.cuda.current_device())
    results: dict[str, Any] = {
        "machine": machine(options.commit),
        "kv_length": KV_LENGTH,
        "page_size": PAGE_SIZE,
        "op_by_op_in_fused_arm": missing,
        "goals": GOALS,
        "copy_gb_per_s": copy_bandwidth(),
        "models": {},
    }
    torch.manual_seed(0)
    for model in options.models.split(","):
        built = None
        figures: dict[str, Any] = {"check": None, "batches": {}}
        results["models"][model] = figures
        for batch in map(int, options.batches.split(",")):
            step = DecodeStep(spec_of(model), batch, device, model=built)
            built = step.model
            if figures["check"] is None:
                figures["check"] = check(step, missing)
                report_check(model, figures["check"])
            figures["batches"][batch] = measure(step, missing)
            report_times(model, batch, figures["batches"][batch])
            del step
            torch.cuda.empty_cache()
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        del built
    print(f"copy bandwidth {results['copy_gb_per_s']:.0f} GB/s")
    if not is_sound(results):
        sys.exit(1)


if __name__ == "__main__":
    main()
