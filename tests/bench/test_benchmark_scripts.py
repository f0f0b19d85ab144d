"""Scripts under benchmarks/: what they count in a trace, and the table made of results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import data_movement
import graph_rows
import plain_looped
import pytest
import report
import serving
import serving_children
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import LooptrtError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.step_plan import StepPlan, StepResult
from tests.support.checkpoints import tiny_ouro
from tests.support.graphs_on_cpu import use_graphs_on_cpu


def copy(name: str, num_bytes: int) -> dict:
    return {"cat": "gpu_memcpy", "name": name, "args": {"bytes": num_bytes}}


def call(name: str, at_us: float, kind: str = "cuda_runtime") -> dict:
    return {"cat": kind, "name": name, "ts": at_us, "dur": 0.5}


def test_a_trace_is_counted_by_kind() -> None:
    events = [
        copy("Memcpy HtoD (Pageable -> Device)", 12),
        copy("Memcpy HtoD (Pinned -> Device)", 30),
        copy("Memcpy DtoH (Device -> Pinned)", 8),
        {"cat": "kernel", "name": "void at::native::direct_copy_kernel_cuda(float)"},
        {"cat": "kernel", "name": "void at::native::indexSelectSmallIndex<long>(long)"},
        {"cat": "kernel", "name": "nvjet_tst_64x8"},
        {"cat": "user_annotation", "name": data_movement.WINDOW, "ts": 10.0, "dur": 5.0},
        call("cudaStreamSynchronize", 11),
        call("cudaMemcpyAsync", 12),
        call("cudaLaunchKernelExC", 12.5),
        call("cuLaunchKernel", 13, "cuda_driver"),
        call("cudaGraphLaunch", 14),
        call("cudaEventRecordWithFlags", 15),
        call("cudaGraphLaunch", 9.9),
        call("cudaDeviceSynchronize", 15.1),
        {"cat": "cpu_op", "name": "aten::copy_"},
    ]
    assert data_movement.counted(events) == {
        "HtoD": 2,
        "HtoD_bytes": 42,
        "DtoH": 1,
        "DtoH_bytes": 8,
        "pageable": 1,
        "kernels": 3,
        "copy_kernels": 2,
        "waits": 1,
        "launches": 3,
        "records": 1,
    }


def launch_of(correlation: int, at_us: float, name: str = "cudaGraphLaunch") -> dict:
    return {**call(name, at_us), "args": {"correlation": correlation}}


def work_of(correlation: int, begin_us: float, end_us: float, kind: str = "kernel") -> dict:
    args = {"correlation": correlation, "bytes": 4}
    return {"cat": kind, "name": "k", "ts": begin_us, "dur": end_us - begin_us, "args": args}


def timeline() -> list[dict]:
    """Three steps of a window, the GPU behind the host; one graph from before the window."""
    return [
        {"cat": "user_annotation", "name": data_movement.WINDOW, "ts": 10.0, "dur": 90.0},
        *(launch_of(7, 5), work_of(7, 8, 18), work_of(7, 18, 20)),
        *(launch_of(2, 30), launch_of(1, 12), launch_of(3, 80)),
        *(work_of(1, 20.5, 50), work_of(1, 22, 30), work_of(1, 31, 32, "gpu_memcpy")),
        *(launch_of(9, 31, "cudaLaunchKernel"), work_of(9, 51, 52)),
        *(work_of(2, 60, 62, "gpu_memset"), work_of(2, 54, 58), work_of(2, 61, 70)),
        *(work_of(3, 150, 160), work_of(3, 110, 120), work_of(3, 130, 140)),
    ]


def test_the_gpu_is_idle_from_a_graphs_last_work_to_the_next_ones_first() -> None:
    assert serving_children.idle_between(timeline(), 3) == [4.0, 40.0]


def test_a_trace_without_one_whole_graph_for_each_step_gives_no_gaps() -> None:
    events = timeline()
    with pytest.raises(LooptrtError, match=r"trace of 4 steps.* got 3 graphs"):
        serving_children.idle_between(events, 4)
    with pytest.raises(LooptrtError, match=r"got 3 graphs of \[2, 3\] kernels"):
        serving_children.idle_between(events[:-1], 3)
    without_work = [event for event in events if event["cat"] not in ("kernel", "gpu_memcpy")]
    with pytest.raises(LooptrtError, match=r"graphs of \[0, 1\] kernels"):
        serving_children.idle_between(without_work, 3)
    no_kernel_seen = [event for event in without_work if event["cat"] != "gpu_memset"]
    with pytest.raises(LooptrtError, match=r"graphs of \[0\] kernels"):
        serving_children.idle_between(no_kernel_seen, 3)
    two = [event for event in events if event.get("args", {}).get("correlation") != 3]
    overlapping = [work_of(2, 49, 55) if event["ts"] == 54 else event for event in two]
    with pytest.raises(LooptrtError, match="overlap"):
        serving_children.idle_between(overlapping, 2)


def test_host_time_is_the_median_gap_and_what_serving_adds() -> None:
    idle = {"idle_us": [5.0, 200.0, 7.0], "events_us": [2.0] * 4, "num_early": 3}
    alone = {"step_ms": 9.5, **idle}
    values = {
        served_ms: [figure.value for figure in serving.host_figures(alone, served_ms)]
        for served_ms in (9.6, 9.4)
    }
    assert values[9.6] == pytest.approx([7.0, 200.0, 107.0, 0.75])
    assert values[9.4] == [7.0, 200.0, 7.0, 0.75], "serving never makes the gap shorter"
    targets = [figure.target for figure in serving.host_figures(alone, 9.6)]
    assert targets == [150.0, None, 150.0, None]
    with pytest.raises(LooptrtError, match="not the same work"):
        serving.host_figures(alone, 9.0)


class TimedEvent:
    """Of a GPU on which a record takes 1 ms, and that is done with nothing yet."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        TimedEvent.now_ms += 1
        self.at_ms = TimedEvent.now_ms

    def elapsed_time(self, end: TimedEvent) -> float:
        return end.at_ms - self.at_ms

    def query(self) -> bool:
        return False


@pytest.fixture
def decoding_engine(tmp_path: Path) -> Path:
    limits = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 64}
    build(BuildConfig(tiny_ouro(tmp_path / "c"), tmp_path / "e", tokens_per_block=8, **limits))
    return tmp_path / "e"


def test_steps_are_timed_and_marked_around_their_graphs(
    decoding_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for a GPU, so no time means anything."""
    use_graphs_on_cpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    core = EngineCore(decoding_engine, EngineConfig(device="cpu"))
    assert serving_children.step_ms(core, 3, 16, 12, 1) > 0
    data_movement.fill(core, 3, 16, 8)
    submit = core.executor.submit

    def submit_for_5_ms(plan: StepPlan) -> Callable[[], StepResult]:
        TimedEvent.now_ms += 5
        return submit(plan)

    monkeypatch.setattr(core.executor, "submit", submit_for_5_ms)
    assert serving_children.event_gaps(core, 8) == ([1000.0] * 7, 7)
    assert core.executor.submit is submit_for_5_ms
    core.close()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_steps_that_are_no_graphs_have_no_gaps_between_graphs(
    decoding_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_graphs_on_cpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    core = EngineCore(decoding_engine, EngineConfig(device="cpu", cuda_graphs="off"))
    data_movement.fill(core, 3, 16, 8)
    with pytest.raises(LooptrtError, match="expected one graph each, got 4 plans and 0 graphs"):
        serving_children.event_gaps(core, 4)
    trace, tokens = data_movement.traced(core, 4)
    assert tokens == 12
    with pytest.raises(LooptrtError, match=r"trace of 4 steps.* got 0 graphs"):
        serving_children.idle_between(trace, 4)
    core.close()


@pytest.mark.gpu
def test_gaps_between_graphs_are_seen_on_a_gpu(decoding_engine: Path, tmp_path: Path) -> None:
    config = EngineConfig(device="cuda", kv_cache_bytes=2**26, cache_dir=str(tmp_path / "cache"))
    core = EngineCore(decoding_engine, config)
    data_movement.fill(core, 3, 16, 16)
    marked, num_early = serving_children.event_gaps(core, 8)
    trace, _ = data_movement.traced(core, 8)
    core.close()
    idle = serving_children.idle_between(trace, 8)
    assert len(marked) == len(idle) == 7
    assert min(marked) > 0
    assert min(idle) > 0
    assert 0 <= num_early <= 7


def cell(rows: int, graph_ms: float, launched_ms: float) -> dict:
    return {"rows": rows, "graph_ms": graph_ms, "launched_ms": launched_ms, "host_ms": 50.0}


def test_graphs_are_worth_it_below_the_size_from_which_no_launched_step_is_slower() -> None:
    slower, near, equal = cell(512, 14, 55), cell(1024, 30.0, 30.7), cell(2048, 60.0, 61.1)
    assert graph_rows.threshold([slower, near, equal]) == 2048
    assert graph_rows.threshold([equal, cell(4096, 120.0, 90.0), near]) == 2048
    assert graph_rows.threshold([cell(256, 9, 9), slower, equal]) == 2048, "one that was equal"
    assert graph_rows.threshold([equal, cell(4096, 100, 103)]) is None
    assert graph_rows.threshold([equal]) == 2048
    result = {"cells": [near, equal], "threshold_rows": 2048}
    lines = graph_rows.table(result).splitlines()
    assert lines[2:4] == [
        "| 1,024 | 30.00 | 30.70 | 50.00 | 1.023 |",
        "| 2,048 | 60.00 | 61.10 | 50.00 | 1.018 |",
    ]
    assert lines[-1] == "Graphs gained at most 2 % from 2,048 rows on."
    assert "faster at the largest" in graph_rows.table({**result, "threshold_rows": None})


def test_steps_of_prompts_are_timed_as_graphs_and_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for a GPU: the requests, the arms and the figures, no times."""
    use_graphs_on_cpu(monkeypatch)
    monkeypatch.setattr(graph_rows, "PROMPT_TOKENS", 50)
    limits = {"max_batch_size": 4, "max_num_tokens": 192, "max_seq_len": 64}
    build(BuildConfig(tiny_ouro(tmp_path / "c"), tmp_path / "e", tokens_per_block=8, **limits))
    result = graph_rows.measure(tmp_path / "e", (64, 128, 256), "abc", 0.0, device="cpu")
    assert [cell["rows"] for cell in result["cells"]] == [64, 128]  # 256 are beyond the limit
    for cell in result["cells"]:
        assert [len(times) for times in cell["repeats"].values()] == [2, 2]
        assert 0 < cell["host_ms"] < cell["launched_ms"]
    assert result["machine"]["commit"] == "abc"
    with pytest.raises(LooptrtError, match="at most 192 rows"):
        graph_rows.measure(tmp_path / "e", (256,), "abc", 0.0, device="cpu")
    with pytest.raises(LooptrtError, match="a step of 64 rows: expected one graph, ran launched"):
        graph_rows.measure(tmp_path / "e", (64,), "abc", 0.0, device="cpu", cuda_graphs="loop")


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_comparator_decodes_what_it_prefills(
    interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_looped, "DTYPE", torch.float32)
    boundary = int(interleaved)
    shape = plain_looped.Shape(32, 48, 4, 50, boundary, 2, boundary, 3, False, interleaved)
    torch.manual_seed(0)
    model = plain_looped.make(shape, 2, 12, "cpu")
    model.compiled = plain_looped.Layer.forward
    ids = torch.randint(0, 50, (2, 8))
    with torch.no_grad():
        whole = model(ids, torch.arange(8), is_prompt=True)
        filled = model.cache.clone()
        model.cache.zero_()
        model(ids[:, :7], torch.arange(7), is_prompt=True)
        last = model(ids[:, 7:], torch.tensor([7]), is_prompt=False)
    assert torch.equal(last, whole)
    torch.testing.assert_close(model.cache, filled)
    assert model.cache[:, :, :, :, :8].abs().sum(-1).gt(0).all()


def test_the_comparator_runs_in_bfloat16() -> None:
    shape = plain_looped.Shape(32, 48, 4, 50, 0, 1, 0, 2, False, False)
    model = plain_looped.make(shape, 1, 4, "cpu")
    model.compiled = plain_looped.Layer.forward
    with torch.no_grad():
        token = model(torch.tensor([[1, 2]]), torch.arange(2), is_prompt=True)
    assert (token.shape, model.cache.dtype) == ((1, 1), torch.bfloat16)


def rows() -> dict:
    figures = [
        serving.Figure("time", 13.904, "ms", 13.9, beside=("Ouro-1.4B", 64)),
        serving.Figure("speed", 2400.0, "tokens/s", 2400, serving.at_least, ("Ouro-1.4B", 32)),
        serving.Figure("no target", 1.5, "ms"),
        serving.Figure("gone", None, "ms", 5.0),
    ]
    facts = {"gpu": "a GPU", "driver": "1", "torch": "2", "commit": "abc"}
    limits = {"gemm_ms": {"Ouro-1.4B": {"64": 4.5}}, "weights_over_bandwidth_ms": {}}
    return {
        "limits": {"figures": [], "detail": limits, "machine": facts},
        "first": {"figures": [f.to_json() for f in figures], "detail": {}, "machine": facts},
        "broken": {"figures": [], "error": "EngineError: a | b", "machine": facts},
    }


def test_a_target_is_judged_by_the_whole_value_and_a_miss_says_by_how_much() -> None:
    result = json.loads(json.dumps({"rows": rows()}))
    lines = report.table(result).splitlines()
    assert "a GPU, driver 1, torch 2; commits abc." in lines[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert cells == [
        ["time", "13.90 ms", "≤ 13.9", "missed by 0.0%", "GEMMs alone 4.50 ms, 3.09 ×"],
        ["speed", "2,400 tokens/s", "≥ 2,400", "met", ""],
        ["no target", "1.50 ms", "", "", ""],
        ["gone", "not measured ms", "≤ 5", "not measured", ""],
        ["broken", "failed: EngineError: a / b", "", "", ""],
    ]


def test_the_readmes_part_between_the_markers_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, readme = tmp_path / "serving.json", tmp_path / "README.md"
    results.write_text(json.dumps({"rows": rows()}))
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    arguments = ["report", "--results", str(results), "--readme", str(readme)]
    monkeypatch.setattr("sys.argv", [*arguments, "--check"])
    assert report.main() == 1
    monkeypatch.setattr("sys.argv", arguments)
    assert report.main() == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n\nRandom weights")
    assert text.endswith(f"\n{report.END}\nafter\n")
    assert "old" not in text
    monkeypatch.setattr("sys.argv", [*arguments, "--check"])
    assert report.main() == 0
    readme.write_text("no markers")
    with pytest.raises(SystemExit, match="expected one line"):
        report.main()


def test_every_row_has_a_title_and_released_shapes_are_known() -> None:
    assert all(row.__doc__ for row in serving.ROWS.values())
    for name, (hidden, layers) in {"Ouro-1.4B": (2048, 24), "Ouro-2.6B": (2048, 48)}.items():
        config = serving.MODELS[name]
        assert (config["hidden_size"], config["num_hidden_layers"]) == (hidden, layers)
    assert serving.MODELS["Huginn-0125"]["n_embd"] == plain_looped.HUGINN.hidden
