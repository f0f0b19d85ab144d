"""The table of what looptrt must show on one GPU, row by row, with limits and comparators.

Builds engine directories of the released models' shapes with random bfloat16 weights, runs
`looptrt.bench` on them, and puts beside each figure its target, the device's copy bandwidth,
the time of the model's matrix products alone, and the same model as plain compiled PyTorch.
The JSON is written after every row and rows of an earlier run are kept, so that a run can be
cut or continued; benchmarks/report.py makes the tables.

Run: python benchmarks/serving.py --out serving.json [--only ouro-latency,limits] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import build_full_size
import serving_children
from serving_children import in_child

from looptrt.bench import burst, latency, poisson, results, sessions
from looptrt.bench.arms import Arm, KvLayout, predefined, tokens_held
from looptrt.bench.setup import Setup
from looptrt.bench.workload import Lengths
from looptrt.builder.build import BuildConfig, build
from looptrt.errors import LooptrtError
from looptrt.manifest import Manifest
from looptrt.runtime.config import EngineConfig

PROMPT_TOKENS = 512
_OURO = build_full_size.CONFIG
_HUGINN = {
    "architectures": ["RavenForCausalLM"],
    "model_type": "huginn_raven",
    "n_embd": 5280,
    "n_heads": 55,
    "num_attention_heads": 55,
    "num_key_value_heads": 55,
    "n_layers": 8,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4,
    "n_layers_in_coda": 2,
    "mean_recurrence": 32,
    "block_size": 4096,
    "vocab_size": 65536,
    "padded_vocab_size": 65536,
    "intermediate_size": 17920,
    "bias": False,
    "qk_bias": True,
    "tie_embeddings": True,
    "norm_eps": 1e-6,
    "rope_base": 50000.0,
    "block_class_name": "SandwichBlock",
    "state_init": "like-init",
    "injection_type": "linear",
    "init_values": {"std": (2 / (5 * 5280)) ** 0.5, "embed_scale": 5280**0.5},
    "test_time_noise": 0,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "Ouro-1.4B": _OURO,
    "Ouro-2.6B": _OURO | {"num_hidden_layers": 48},
    "Huginn-0125": _HUGINN,
}
MAX_SEQ_LEN = 2560
_HOST_TARGET_US = 150.0
_LEAST_SERVED = 0.95  # of the engine's own step


def at_most(value: float, target: float) -> bool:
    """Whether a time meets its target."""
    return value <= target


def at_least(value: float, target: float) -> bool:
    """Whether a speed or a share meets its target."""
    return value >= target


@dataclass(frozen=True)
class Figure:
    """One number of the table.

    Attributes:
        target: None where none was set.
        meets: compares value and target.
        beside: (model, requests) of the limit and the comparator to show beside it.
    """

    name: str
    value: float | None
    unit: str
    target: float | None = None
    meets: Callable[[float, float], bool] = at_most
    beside: tuple[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the verdict; a figure that could not be had misses its target."""
        met = None
        if self.target is not None:
            met = self.value is not None and self.meets(self.value, self.target)
        bound = None if self.target is None else ("≤" if self.meets is at_most else "≥")
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "bound": bound,
            "target": self.target,
            "met": met,
            "beside": self.beside,
        }


@dataclass
class Bench:
    """What rows share: settings and the engine directories, built when first needed."""

    workdir: Path
    quick: bool
    repeats: int
    commit: str | None
    build_s: dict[str, float] = field(default_factory=dict)

    def engine_dir(self, model: str) -> Path:
        """The engine directory of a model."""
        directory = self.workdir / model
        if not directory.is_dir():
            begin_s = time.monotonic()
            config = self.workdir / f"{model}.json"
            config.write_text(json.dumps(MODELS[model]), encoding="utf-8")
            build(
                BuildConfig(
                    None,
                    directory,
                    model_config=config,
                    max_batch_size=128,
                    max_input_len=MAX_SEQ_LEN,
                    max_seq_len=MAX_SEQ_LEN,
                    max_num_tokens=8192,
                    workers=len(os.sched_getaffinity(0)),
                )
            )
            self.build_s[model] = time.monotonic() - begin_s
            print(f"  built {model} in {self.build_s[model]:.1f} s", flush=True)
        return directory

    def setup(self, model: str, *arms: Arm, **config: Any) -> Setup:  # noqa: ANN401
        """Settings of a benchmark on a model."""
        return Setup(
            self.engine_dir(model),
            EngineConfig(device="cuda", **config),
            others=arms,
            repeats=self.repeats,
            deadline_s=300.0,
            commit=self.commit,
        )


@dataclass
class Row:
    """What a row gives: figures for the table, and everything behind them."""

    figures: list[Figure]
    detail: dict[str, Any]


# ---- limits and comparators


def limits(bench: Bench) -> Row:
    """Copy bandwidth, and matrix products of a decode step by themselves."""
    batches = {"Ouro-1.4B": (1, 8, 32, 64, 128), "Huginn-0125": (1, 8, 32)}
    if not bench.quick:
        batches["Ouro-2.6B"] = (1, 32)
    found = in_child(serving_children.limits, batches)
    figures = [Figure("copy bandwidth, read and written", found["copy_gb_per_s"], "GB/s")]
    for model, times in found["gemm_ms"].items():
        figures += [Figure(f"{model} GEMMs alone, {n}", ms, "ms") for n, ms in times.items()]
    return Row(figures, found)


def ouro_plain(bench: Bench) -> Row:
    """Ouro-1.4B as plain compiled PyTorch."""
    return _plain("Ouro-1.4B", "OURO_1_4B", (1, 32) if bench.quick else (1, 8, 32), 128)


def huginn_plain(bench: Bench) -> Row:
    """Huginn-0125 as plain compiled PyTorch."""
    return _plain("Huginn-0125", "HUGINN", (1,) if bench.quick else (1, 8, 32), 64)


def _plain(model: str, shape: str, batches: tuple[int, ...], output_tokens: int) -> Row:
    figures, detail = [], {}
    for batch in batches:
        found = in_child(serving_children.plain, shape, batch, PROMPT_TOKENS, output_tokens)
        detail[str(batch)] = found
        named = f"{model} plain torch.compile, {batch}"
        figures += [
            Figure(f"{named}: time per token", found["ms_per_token"], "ms"),
            Figure(f"{named}: burst", found["output_tokens_per_s"], "tokens/s"),
        ]
    return Row(figures, detail)


# ---- the engine


def _latency(
    bench: Bench, model: str, targets: dict[int, float | None], output_tokens: int = 64
) -> Row:
    work = latency.Latency(tuple(targets), PROMPT_TOKENS, output_tokens, saturation=not bench.quick)
    found = latency.measure(bench.setup(model), work)
    cells = found["arms"]["default"]["cells"]
    figures = [
        Figure(
            f"{model} time per output token, {batch}",
            latency.median_ms(cells, batch),
            "ms",
            target,
            beside=(model, batch),
        )
        for batch, target in targets.items()
    ]
    return Row(figures, found)


def ouro_latency(bench: Bench) -> Row:
    """Ouro-1.4B, steady batches."""
    return _latency(bench, "Ouro-1.4B", {1: 5.0, 8: 6.4, 32: 9.7, 64: 13.9, 128: 22.0})


def ouro26_latency(bench: Bench) -> Row:
    """Ouro-2.6B, reported without a target."""
    return _latency(bench, "Ouro-2.6B", {1: None, 32: None})


def huginn_latency(bench: Bench) -> Row:
    """Huginn-0125, steady batches."""
    return _latency(bench, "Huginn-0125", {1: 32.0, 8: 36.0, 32: 50.0}, output_tokens=32)


def _burst(
    bench: Bench,
    model: str,
    targets: dict[int, float],
    ttft_targets: dict[int, float],
    output_tokens: int,
) -> Row:
    work = burst.Burst(tuple(targets), PROMPT_TOKENS, output_tokens)
    found = burst.measure(bench.setup(model), work)
    figures = []
    for cell in found["arms"]["default"]["cells"]:
        count, median = cell["concurrency"], cell["median"]
        figures.append(
            Figure(
                f"{model} burst with prompts, {count}",
                median["output_tokens_per_s"],
                "tokens/s",
                targets[count],
                at_least,
                (model, count),
            )
        )
        ttft = median["ttft_ms"]["mean"]
        named = f"{model} mean time to first token, {count}"
        figures.append(Figure(named, ttft, "ms", ttft_targets.get(count)))
    return Row(figures, found)


def ouro_burst(bench: Bench) -> Row:
    """Ouro-1.4B, requests at once."""
    return _burst(bench, "Ouro-1.4B", {1: 190, 8: 1100, 32: 2400}, {1: 25, 32: 450}, 128)


def huginn_burst(bench: Bench) -> Row:
    """Huginn-0125, requests at once."""
    return _burst(bench, "Huginn-0125", {1: 28, 8: 160, 32: 310, 64: 380}, {1: 120}, 64)


def prefill(bench: Bench) -> Row:
    """Prompts alone: 8 of 2048 tokens, to the first token of the last."""
    found = burst.measure(bench.setup("Ouro-1.4B"), burst.Burst((8,), 2048, 1))
    (cell,) = found["arms"]["default"]["cells"]
    median = cell["median"]
    speed = median["prompt_tokens"] / median["wall_s"]
    name = "Ouro-1.4B packed prefill, 8 x 2048 tokens"
    return Row([Figure(name, speed, "prompt tokens/s", 45_000, at_least)], found)


def units(bench: Bench) -> Row:
    """Huginn tokens in a pool, against all layers in the plane of each depth."""
    manifest = Manifest.load(bench.engine_dir("Huginn-0125"))
    layout = manifest.layout
    pool = 64 * 2**30 // layout.unit_bytes
    held = {kind.value: tokens_held(layout, pool, layout.max_loops, kind) for kind in KvLayout}
    ratio = held[KvLayout.UNITS] / held[KvLayout.ALL_LAYERS]
    name = "Huginn-0125 tokens in a pool of 64 GiB, units over all layers"
    return Row([Figure(name, ratio, "×", 1.93, at_least)], {"pool_units": pool, "tokens": held})


def _against_base(bench: Bench, model: str, count: int, output_tokens: int, **more: Any) -> Row:  # noqa: ANN401
    target = more.pop("target")
    setup = bench.setup(model, predefined("base"), **more)
    found = burst.measure(setup, burst.Burst((count,), PROMPT_TOKENS, output_tokens))
    (cell,) = found["arms"]["base"]["cells"]
    ratio = cell["against_default"]["throughput_ratio"]
    value = 1 / ratio if ratio else None
    name = f"{model} burst at {count}, defaults over the base arm"
    return Row([Figure(name, value, "×", target, at_least)], found)


def ouro_base(bench: Bench) -> Row:
    """The base arm against the defaults, Ouro-1.4B."""
    return _against_base(bench, "Ouro-1.4B", 32, 128, target=2.5)


def huginn_base(bench: Bench) -> Row:
    """The same for Huginn in a pool that holds 12,000 tokens of the base layout."""
    layout = Manifest.load(bench.engine_dir("Huginn-0125")).layout
    pages = -(-12_000 // layout.page_size)
    pool_units = pages * layout.max_loops * 2 + 1  # 8 layers in each plane: two units of 4
    return _against_base(
        bench, "Huginn-0125", 64, 64, target=2.0, kv_cache_bytes=pool_units * layout.unit_bytes
    )


def exact(bench: Bench) -> Row:
    """Answers with every bit-exact kernel against PyTorch's own operators, in equal batches."""
    total = 64 if bench.quick else 1024
    engine_dir = bench.engine_dir("Ouro-1.4B")
    fused = in_child(serving_children.exact_answers, engine_dir, total, True)
    plain = in_child(serving_children.exact_answers, engine_dir, total, False)
    same = sum(a == b for a, b in zip(fused, plain, strict=True))
    name = "Ouro-1.4B answers equal with exact kernels on and off"
    # Every one of at least 1,000: fewer requests show less, however many of them are equal.
    figure = Figure(name, same, f"of {total}", max(total, 1000), at_least)
    return Row([figure], {"requests": total, "identical": same, "batch": 32})


def host(bench: Bench) -> Row:
    """Host time on the critical path between the graphs of two decode steps of 32 requests."""
    count, output_tokens = 32, 64
    engine_dir = bench.engine_dir("Ouro-1.4B")
    lengths = PROMPT_TOKENS, output_tokens
    alone = in_child(serving_children.between_graphs, engine_dir, count, *lengths, bench.repeats)
    work = latency.Latency((count,), *lengths, saturation=False)
    served = latency.measure(bench.setup("Ouro-1.4B"), work)
    served_ms = latency.median_ms(served["arms"]["default"]["cells"], count)
    detail = {**alone, "served_ms": served_ms, "served": served}
    return Row(host_figures(alone, served_ms), detail)


def host_figures(alone: dict[str, Any], served_ms: float) -> list[Figure]:
    """The GPU's idle time between two graphs, and what serving adds to a step.

    Serving cannot make a step shorter: a difference below zero is noise, and no gain.

    Args:
        alone: of `serving_children.between_graphs`, the engine in one process with its caller.
        served_ms: time of a step as the client of an engine process sees it.

    Raises:
        LooptrtError: served steps are shorter by more than a twentieth, so the two times are
            not of the same steps.
    """
    idle_us = statistics.median(alone["idle_us"])
    early = alone["num_early"] / len(alone["events_us"])
    added_us = 1e3 * (served_ms - alone["step_ms"])
    if served_ms < _LEAST_SERVED * alone["step_ms"]:
        raise LooptrtError(
            f"a served step takes {served_ms:.3f} ms, the engine's own {alone['step_ms']:.3f} ms: "
            "the two are not the same work"
        )
    named, served_us = "GPU idle between two graphs of 32", idle_us + max(added_us, 0.0)
    return [
        Figure(f"Ouro-1.4B {named}, engine alone, median", idle_us, "µs", _HOST_TARGET_US),
        Figure(f"{named}, engine alone, longest", max(alone["idle_us"]), "µs"),
        Figure(f"{named}, and what serving adds to a step", served_us, "µs", _HOST_TARGET_US),
        Figure("share of such graphs launched before the last one ended", early, "share"),
    ]


def prefix(bench: Bench) -> Row:
    """Sessions over a shared system prompt: reuse, and hits against cold runs."""
    setup = replace(bench.setup("Ouro-1.4B"), repeats=1)
    served = sessions.measure(setup, sessions.Sessions(output_tokens=32))
    count = 4 if bench.quick else 16
    alone = sessions.measure(
        setup, sessions.Sessions(count=count, output_tokens=32, at_once=1, grid=256)
    )
    return Row(prefix_figures(served, alone), {"served": served, "alone": alone})


def prefix_figures(served: dict[str, Any], alone: dict[str, Any]) -> list[Figure]:
    """Figures of sessions held 16 at once, and one at a time. Cold runs are always alone."""
    arms = served["arms"]["default"], alone["arms"]["default"], alone["arms"]["grid"]
    names = "16 at once", "one at a time", "one at a time, prefix_grid 256"
    reused = sessions.reused_share(arms[0])
    return [
        Figure("prompt tokens reused, 16 sessions", reused, "share", 0.75, at_least),
        *(
            Figure(f"hits equal to cold runs, {name}", _share(arm), "share", target, at_least)
            for name, arm, target in zip(names, arms, (0.8, 0.8, 1.0), strict=True)
        ),
    ]


def _share(arm: dict[str, Any]) -> float | None:
    hits = arm["against_cold"]["hits"]
    return hits["identical"] / hits["total"] if hits["total"] else None


def _share_of_prompts(
    bench: Bench, model: str, lengths: Lengths, rates: tuple[float, ...], max_num_tokens: int
) -> Row:
    """Arrivals at rising rates with a step's rows so few that prompts and answers compete."""
    setup = bench.setup(
        model, Arm("no share", {"prefill_share": False}), max_num_tokens=max_num_tokens
    )
    found = poisson.measure(setup, poisson.Poisson(rates, (lengths,), num_requests=16))
    figures = []
    for with_cell, without in zip(
        found["arms"]["default"]["cells"], found["arms"]["no share"]["cells"], strict=True
    ):
        for key, name in (("ttft_ms", "time to first token"), ("tpot_ms", "time per token")):
            ratio = with_cell["median"][key]["mean"] / without["median"][key]["mean"]
            named = f"{model} {with_cell['rate']:g} requests/s, {name}, prefill share / none"
            figures.append(Figure(named, ratio, "×"))
    return Row(figures, found)


def ouro_share(bench: Bench) -> Row:
    """The prefill share, Ouro-1.4B: prompts of 2,048 tokens, steps of as many rows."""
    return _share_of_prompts(bench, "Ouro-1.4B", Lengths(2048, 64), (4.0, 6.0, 8.0, 10.0), 2048)


def huginn_share(bench: Bench) -> Row:
    """The same for Huginn: prompts of 512 tokens, steps of as many rows."""
    return _share_of_prompts(bench, "Huginn-0125", Lengths(512, 16), (1.5, 3.0, 4.5, 6.0), 512)


ROWS: dict[str, Callable[[Bench], Row]] = {
    "limits": limits,
    "ouro-latency": ouro_latency,
    "ouro-burst": ouro_burst,
    "prefill": prefill,
    "prefix": prefix,
    "ouro-base": ouro_base,
    "exact": exact,
    "host": host,
    "huginn-latency": huginn_latency,
    "huginn-burst": huginn_burst,
    "units": units,
    "huginn-base": huginn_base,
    "ouro-share": ouro_share,
    "huginn-share": huginn_share,
    "ouro26-latency": ouro26_latency,
    "ouro-plain": ouro_plain,
    "huginn-plain": huginn_plain,
}


def run_row(name: str, bench: Bench) -> dict[str, Any]:
    """A row's JSON; one that fails says why and does not take the others with it."""
    begin_s = time.monotonic()
    print(f"{name}: {ROWS[name].__doc__}", flush=True)
    entry: dict[str, Any] = {
        "title": ROWS[name].__doc__,
        "quick": bench.quick,
        "repeats": bench.repeats,
    }
    try:
        row = ROWS[name](bench)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other rows go on
        traceback.print_exc()
        entry |= {"error": f"{type(error).__name__}: {error}", "figures": []}
    else:
        entry |= {"figures": [f.to_json() for f in row.figures], "detail": row.detail}
        failed = results.failed_requests(row.detail)
        if failed:
            entry["failed_requests"] = failed
            print(f"  FAILED REQUESTS: {len(failed)}, the first: {failed[0]}")
    for figure in entry["figures"]:
        print(f"  {shown(figure)}", flush=True)
    entry["seconds"] = round(time.monotonic() - begin_s, 1)
    entry["machine"] = results.machine(bench.commit)
    print(f"  {entry['seconds']} s", flush=True)
    return entry


def shown(figure: dict[str, Any]) -> str:
    """A figure with its target as one line."""
    value = "none" if figure["value"] is None else f"{figure['value']:,.3f}"
    text = f"{figure['name']:62} {value:>12} {figure['unit']}"
    if figure["target"] is None:
        return text
    verdict = "met" if figure["met"] else "MISSED"
    return f"{text}  target {figure['bound']} {figure['target']:,g}: {verdict}"


def main() -> int:
    """Run the rows; 0 when all ran and no target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON, written after every row")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, comma-separated")
    parser.add_argument("--quick", action="store_true", help="one repeat, fewer cells")
    parser.add_argument("--repeats", type=int, help="that count (default: 3, with --quick 1)")
    parser.add_argument("--workdir", type=Path, help="keep engine directories here")
    parser.add_argument("--commit", help="recorded where git cannot tell it")
    options = parser.parse_args()
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {options.repeats}")
    names = options.only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--only: {', '.join(unknown)}: expected some of {', '.join(ROWS)}")
    rows: dict[str, Any] = {}
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
    with tempfile.TemporaryDirectory(prefix="looptrt-serving-") as folder:
        workdir = options.workdir or Path(folder)
        workdir.mkdir(parents=True, exist_ok=True)
        repeats = options.repeats or (1 if options.quick else 3)
        bench = Bench(workdir, options.quick, repeats, options.commit)
        for name in names:
            rows[name] = run_row(name, bench)
            rows[name]["build_s"] = dict(bench.build_s)
            results.write_json({"format": 1, "kind": "serving", "rows": rows}, options.out)
    ran = [rows[name] for name in names]
    bad = [row for row in ran if "error" in row or "failed_requests" in row]
    missed = [f["name"] for row in ran for f in row["figures"] if f["met"] is False]
    print(f"{len(ran)} rows, {len(bad)} with errors, targets missed: {missed or 'none'}")
    return 1 if bad or missed else 0


if __name__ == "__main__":
    sys.exit(main())
