"""`looptrt bench` end to end on a trained tiny engine: flags in, results out."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lookup_task import held_out
from looptrt.bench import changes
from looptrt.bench.ladder import broken_promises
from looptrt.bench.offline import OfflineEngine
from looptrt.builder.build import BuildConfig, build
from looptrt.cli import main
from looptrt.loop_spec import NoiseMode
from looptrt.plugins import launch
from looptrt.plugins.products import Products
from looptrt.runtime import engine_core
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.step_plan import StepPlan
from tests.support.checkpoints import tiny_huginn
from tests.support.gpu_on_cpu import gpu_on_cpu

EXAMPLES = Path(__file__).parents[2] / "examples"
MACHINE = {"gpu", "driver", "cuda", "torch", "looptrt", "commit", "python", "processor", "cores"}

Bench = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "engine"
    build(
        BuildConfig(
            EXAMPLES / "tiny-ouro",
            directory,
            tokens_per_block=8,
            max_batch_size=4,
            max_num_tokens=64,
            max_seq_len=128,
        )
    )
    return directory


@pytest.fixture
def bench(engine_dir: Path, tmp_path: Path) -> Bench:
    def run(
        kind: str, *arguments: str, code: int = 0, engine_dir: Path = engine_dir
    ) -> dict[str, Any]:
        """Run a kind with one repeat in this process; returns the result."""
        out = tmp_path / "out.json"
        fixed = ("--device", "cpu", "--in-process", "--repeats", "1", "--out", str(out))
        assert main(["bench", kind, str(engine_dir), *fixed, *arguments]) == code
        return json.loads(out.read_text()) if code < 2 else {}

    return run


def check_frame(result: dict[str, Any], kind: str) -> None:
    """What every result says of itself."""
    assert (result["format"], result["kind"]) == (1, kind)
    assert result["machine"].keys() == MACHINE
    assert result["engine"]["architecture"] == "OuroForCausalLM"
    assert len(result["engine"]["fingerprint"]) == 64
    assert result["config"]["device"] == "cpu"
    assert result["workload"]["repeats"] == 1


def test_burst_measures_every_cell_in_every_arm(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--concurrency", "1,3", "--prompt-tokens", "20", "--output-tokens", "6")
    arms = ("--arm", "same=enable_prefix_cache:false", "--arm", "half=loops:2")
    result = bench("burst", *lengths, *arms)
    check_frame(result, "burst")
    assert [*result["arms"]] == ["default", "same", "half"]
    assert result["arms"]["same"]["engine_config"]["enable_prefix_cache"] is False
    assert result["arms"]["default"]["engine_config"]["enable_prefix_cache"] is True
    for arm in result["arms"].values():
        assert [cell["concurrency"] for cell in arm["cells"]] == [1, 3]
        for cell in arm["cells"]:
            count = cell["concurrency"]
            median = cell["median"]
            assert (len(cell["dropped"]), len(cell["repeats"])) == (1, 1)
            assert (median["requests"], median["answered"]) == (count, count)
            assert (median["prompt_tokens"], median["output_tokens"]) == (20 * count, 6 * count)
            assert median["cached_prompt_tokens"] == 0, "a repeat found another's pages"
            assert median["ttft_ms"]["p50"] > 0
            assert median["tpot_ms"]["p99"] >= median["tpot_ms"]["p50"] > 0
            assert median["counters"]["num_prompt_tokens"] == 20 * count
            assert cell["repeats"][0]["failed"] == []
    same, half = (result["arms"][name]["cells"][1]["against_default"] for name in ("same", "half"))
    assert (same["identical"], same["total"]) == (6, 6)
    assert half["identical"] < half["total"] == 6, "the arm's loops did not reach its requests"
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if " %" in line] == [
        *("default",) * 2,
        *("same",) * 2,
        *("half",) * 2,
    ]


HOT = ("--arm", "hot=temperature:0.7")  # on the default arm's engine


def cached(arm: dict[str, Any]) -> list[int]:
    """Prompt tokens that each run of an arm found in the cache."""
    runs = [run for cell in arm["cells"] for run in (*cell["dropped"], *cell["repeats"])]
    return [run["cached_prompt_tokens"] for run in runs]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("burst", ("--concurrency", "2")),
        ("poisson", ("--rates", "50", "--lengths", "32:6", "--requests", "2")),
    ],
)
def test_arms_that_share_an_engine_find_none_of_each_other_s_pages(
    bench: Bench, kind: str, arguments: tuple[str, ...]
) -> None:
    lengths = ("--prompt-tokens", "32", "--output-tokens", "6") if kind == "burst" else ()
    result = bench(kind, *arguments, *lengths, *HOT)
    assert [cached(arm) for arm in result["arms"].values()] == [[0, 0], [0, 0]]


def test_saturated_arms_that_share_an_engine_find_none_of_each_other_s_pages(bench: Bench) -> None:
    lengths = ("--batches", "1", "--prompt-tokens", "32", "--output-tokens", "12")
    result = bench("latency", *lengths, *HOT)
    assert [arm["saturation"]["cached_prompt_tokens"] for arm in result["arms"].values()] == [0, 0]


def test_conversations_of_arms_that_share_an_engine_begin_alike(bench: Bench) -> None:
    sizes = ("--count", "1", "--turns", "2", "--system-tokens", "16", "--turn-tokens", "8")
    result = bench("sessions", *sizes, "--output-tokens", "8", "--no-cold", *HOT)
    default, hot = (cached(arm) for arm in result["arms"].values())
    assert default == hot
    assert min(default) > 0, "no turn found the one before"


def test_the_search_of_a_rate_finds_no_pages_of_the_cells(bench: Bench) -> None:
    lengths = ("--rates", "50", "--lengths", "32:6", "--requests", "2")
    search = ("--threshold-ms", "1e-6", "--search-seconds", "0.02", "--search-steps", "0")
    result = bench("poisson", *lengths, *search, "--deadline-s", "30")
    tried = result["arms"]["default"]["search"]["tried"]
    assert [entry["cached_prompt_tokens"] for entry in tried] == [0] * len(tried)
    assert tried[0]["rate"] == 50


def test_an_arm_of_all_layers_in_each_plane_holds_fewer_tokens_in_the_same_bytes(
    bench: Bench, tmp_path: Path
) -> None:
    checkpoint = tiny_huginn(tmp_path / "checkpoint")  # (2, 4, 2) layers, 4 loops
    build(BuildConfig(checkpoint, tmp_path / "engine", tokens_per_block=8, max_batch_size=4))
    lengths = ("--concurrency", "2", "--prompt-tokens", "8", "--output-tokens", "2")
    arms = ("--arm", "all=kv_layout:all_layers", "--kv-cache-bytes", "4MiB")
    result = bench("burst", *lengths, *arms, engine_dir=tmp_path / "engine")
    default, other = (
        result["arms"][name]["cells"][0]["median"]["kv"]["units"] for name in ("default", "all")
    )
    assert other == int(default * 5 / 8)  # 5 units a page, or 4 planes of 8 layers


def test_requests_that_fail_are_counted_shown_and_the_exit_code(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("a=1;?a>\n" + "a=1;" * 60 + "?a>\n")
    arguments = ("--concurrency", "2", "--output-tokens", "4", "--prompts-file", str(prompts))
    result = bench("burst", *arguments, code=1)
    (cell,) = result["arms"]["default"]["cells"]
    assert (cell["median"]["requests"], cell["median"]["answered"]) == (2, 1)
    for repeat in (*cell["dropped"], *cell["repeats"]):
        (failure,) = repeat["failed"]
        assert failure["index"] == 1
        assert "max_input_len" in failure["error"]
    assert capsys.readouterr().out.count("FAILED: ") == 2


def test_an_answer_that_the_engine_cut_short_is_no_answer(bench: Bench, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("a=1;?a>\n" + "a=1;" * 28 + "?a>\n")  # of 128 positions
    arguments = ("--concurrency", "2", "--output-tokens", "32", "--prompts-file", str(prompts))
    result = bench("burst", *arguments, code=1)
    for repeat in result["arms"]["default"]["cells"][0]["repeats"]:
        (failure,) = repeat["failed"]
        assert failure["index"] == 1
        assert re.fullmatch(r"cut to \d+ of 32 tokens: the engine has no room", failure["error"])


def test_latency_times_whole_batches_and_records_the_steps_of_a_full_engine(bench: Bench) -> None:
    lengths = ("--batches", "1,3", "--prompt-tokens", "10", "--output-tokens", "12")
    result = bench("latency", *lengths, "--arm", "half=loops:2")
    check_frame(result, "latency")
    for arm in result["arms"].values():
        for cell in arm["cells"]:
            # 12 tokens make 11 intervals; those that settle are left out.
            assert 4 <= cell["median"]["step_ms"]["n"] <= 7
            assert cell["median"]["ms_per_token"] == cell["median"]["step_ms"]["p50"] > 0
        saturated = arm["saturation"]
        mix = saturated["step_mix"]
        assert (saturated["answered"], saturated["failed"]) == (8, [])
        assert mix["mean_prompt_rows"] * mix["steps"] == pytest.approx(8 * 10)
        assert mix["mean_decode_rows"] * mix["steps"] == pytest.approx(8 * 11)
    assert result["arms"]["half"]["cells"][0]["against_default"]["time_ratio"] > 0


@pytest.mark.parametrize("grid", [None, pytest.param(16, marks=pytest.mark.full)])
def test_sessions_reuse_prompts_and_hits_equal_cold_runs(bench: Bench, grid: int | None) -> None:
    sizes = ("--count", "3", "--turns", "3", "--system-tokens", "24", "--turn-tokens", "8")
    more = () if grid is None else ("--grid", str(grid))
    result = bench("sessions", *sizes, "--output-tokens", "8", "--at-once", "2", *more)
    check_frame(result, "sessions")
    assert [*result["arms"]] == ["default", "grid"][: 1 + bool(grid)]
    if grid is not None:
        assert result["arms"]["grid"]["engine_config"]["prefix_grid"] == grid
    for arm in result["arms"].values():
        (cell,) = arm["cells"]
        # Turns of 32, 48 and 64 prompt tokens; the second and third find the one before.
        assert cell["median"]["prompt_tokens"] == 3 * (32 + 48 + 64)
        assert cell["median"]["cached_prompt_tokens"] >= 3 * (32 + 48)
        cold = arm["against_cold"]
        assert cold["failed"] == []
        assert cold["all"] == {"identical": 9, "total": 9}
        assert cold["hits"]["identical"] == cold["hits"]["total"] >= 6


def test_poisson_measures_rates_and_finds_the_highest_that_holds(bench: Bench) -> None:
    arguments = ("--rates", "50", "--lengths", "8:4,16:6", "--requests", "4")
    search = ("--threshold-ms", "100000", "--search-steps", "0", "--deadline-s", "60")
    result = bench("poisson", *arguments, *search, "--search-seconds", "0.001")
    check_frame(result, "poisson")
    (cell,) = result["arms"]["default"]["cells"]
    assert cell["median"]["answered"] == 4
    assert cell["median"]["latency_per_token_ms"]["p50"] > 0
    found = result["arms"]["default"]["search"]
    rates = [entry["rate"] for entry in found["tried"]]
    assert rates[:3] == [50, 100, 200]
    assert found["highest_rate_held"] == rates[-1]  # nothing exceeds that threshold
    # For that long they come at every rate: few that come at once would never form a queue.
    wanted = [max(4, math.ceil(rate * 0.001)) for rate in rates]
    assert [entry["requests"] for entry in found["tried"]] == wanted
    assert wanted[-1] > 50


def test_ladder_compares_tokens_speed_and_quality(bench: Bench, tmp_path: Path) -> None:
    questions, table = tmp_path / "questions.jsonl", tmp_path / "ladder.md"
    samples = [{"prompt": s.prompt, "answer": s.answer} for s in islice(held_out(), 12)]
    questions.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    lengths = ("--concurrency", "3", "--prompt-tokens", "24", "--output-tokens", "4")
    quality = ("--questions", str(questions), "--answer-tokens", "7", "--loops", "2")
    changes = ("--change", "prefix cache", "--change", "plane units", "--change", "shallow prompt")
    not_here = ("--change", "CUDA graphs")
    result = bench("ladder", *lengths, *quality, *changes, *not_here, "--markdown", str(table))
    check_frame(result, "ladder")
    assert result["left_out"] == {"CUDA graphs": "for want of a GPU"}
    units, cache, shallow = (
        result["arms"][name] for name in ("plane units", "prefix cache", "shallow prompt")
    )
    assert (units["rung"], units["holds"], units["is_default"]) == ("R0", True, True)
    for row in (units, cache):
        assert [(c["identical"], c["total"], c["requests"]) for c in row["cells"]] == [
            (6, 6, 6),
        ]
        assert (row["quality"]["points"], row["quality"]["verdict"]) == (0.0, "pass")
        assert row["quality"]["right_with"] >= 10  # two loops answer nearly all
    assert cache["cells"][0]["with"]["repeats"][0]["cached_prompt_tokens"] == 3 * 8
    assert cache["cells"][0]["without"]["repeats"][0]["cached_prompt_tokens"] == 0
    assert shallow["is_default"] is False
    lines = table.read_text().splitlines()
    assert lines[2].startswith("| rung | change |")
    assert [line.split(" | ")[1] for line in lines[4:7]] == [
        *("plane units", "prefix cache", "shallow prompt"),
    ]
    assert lines[7:] == ["", "Not compared, for want of a GPU: CUDA graphs."]


def test_ladder_compares_noise_with_what_it_replaces(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2: other numbers, so other answers now and then; quality is asked over many draws."""
    huginn, questions = tmp_path / "huginn", tmp_path / "questions.jsonl"
    limits = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 128}
    build(BuildConfig(EXAMPLES / "tiny-huginn", huginn, tokens_per_block=8, **limits))
    samples = [{"prompt": s.prompt, "answer": s.answer} for s in islice(held_out(), 6)]
    questions.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    asked: dict[str, list[int | None]] = {}
    answer = OfflineEngine.answer

    def watched(self: OfflineEngine, prompts: Any, params: Any, deadline_s: float) -> Any:
        seeds = [one.noise_seed for one in params]
        asked.setdefault(self.manifest.noise_mode, []).extend(seeds)
        return answer(self, prompts, params, deadline_s)

    monkeypatch.setattr(OfflineEngine, "answer", watched)
    lengths = ("--concurrency", "2", "--prompt-tokens", "24", "--output-tokens", "8")
    quality = ("--questions", str(questions), "--answer-tokens", "7")
    changes = ("--change", "position-keyed noise", "--speculative-loops", "2")
    result = bench("ladder", *lengths, *quality, *changes, engine_dir=huginn)
    row = result["arms"]["position-keyed noise"]
    assert (row["rung"], row["is_default"], row["with"]["config"]) == ("R2", True, {})
    assert row["without"]["config"]["noise"] == "sequential"
    assert (result["config"]["speculative_loops"], result["left_out"]) == (2, {})
    (cell,) = row["cells"]
    assert cell["total"] == cell["requests"] == 4
    assert row["quality"]["num_samples"] == 6
    # Two runs of two requests, then a seed for each sample, the same with and without.
    assert asked == dict.fromkeys(NoiseMode, [None] * 4 + [*range(6)])


NO_NOISE = "for want of position-keyed noise that can be switched off"
NOT_AGAIN = "as kv_planes latest with noise sequential cannot be computed again"


@pytest.fixture(scope="module")
def huginn_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[NoiseMode], Path]:
    root = tmp_path_factory.mktemp("huginn")
    tiny_huginn(root / "c")

    def get(noise: NoiseMode) -> Path:
        if not (root / noise).exists():
            limits = {"max_batch_size": 8, "max_num_tokens": 256, "tokens_per_block": 8}
            build(BuildConfig(root / "c", root / noise, noise=noise, **limits))
        return root / noise

    return get


@pytest.mark.parametrize("how", ["no random state", "built sequential", "run sequential"])
def test_a_ladder_leaves_out_what_needs_the_noise_that_an_engine_lacks(
    bench: Bench,
    huginn_of: Callable[[NoiseMode], Path],
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    """Speculation was refused after other changes had run; a cache compared two without one."""
    noise = ("--change", "position-keyed noise")
    asked = (*noise, "--change", "prefix cache", "--change", "speculation")
    more: dict[str, Any] = {}
    left_out = {"position-keyed noise": NO_NOISE}
    lengths = ("--concurrency", "1", "--prompt-tokens", "8", "--output-tokens", "2")
    if how != "no random state":
        built = NoiseMode.SEQUENTIAL if how == "built sequential" else NoiseMode.POSITION
        more = {"engine_dir": huginn_of(built)}
        left_out |= {"prefix cache": NOT_AGAIN, "speculation": NOT_AGAIN}
    if how == "run sequential":
        lengths += ("--noise", "sequential")
    bench("ladder", *lengths, *noise, code=2, **more)
    error = capsys.readouterr().err
    assert f"nothing to compare. Not compared, {NO_NOISE}: position-keyed noise." in error
    result = bench("ladder", *lengths, *asked, "--change", "packed prefill", **more)
    assert {*result["arms"]} == {"packed prefill", *asked[1::2]} - left_out.keys()
    assert result["left_out"] == left_out
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Not compared, {NO_NOISE}: position-keyed noise." in shown
    assert ("cannot be computed again: prefix cache, speculation." in shown) is (len(left_out) > 1)


def test_a_ladder_leaves_out_what_its_own_settings_decide(bench: Bench) -> None:
    """Both sides would be the same engine, or one that the engine's own checks refuse."""
    lengths = ("--concurrency", "1", "--prompt-tokens", "8", "--output-tokens", "2")
    names = ("packed prefill", "prefix cache", "speculation", "shallow prompt", "prefill share")
    changes = [word for name in names for word in ("--change", name)]
    settings = ("--no-packed-prefill", "--no-enable-prefix-cache", "--speculative-loops", "2")
    result = bench("ladder", *lengths, *changes, *settings)
    assert [*result["arms"]] == ["shallow prompt", "prefill share"]
    assert result["left_out"] == dict.fromkeys(names[:3], "as the default arm's settings decide it")
    result = bench("ladder", *lengths, *changes, "--loops", "1")
    assert [*result["arms"]] == ["packed prefill", "prefix cache", "prefill share"]
    assert result["left_out"] == dict.fromkeys(names[2:4], "as half of one loop is none")


def test_a_change_whose_settings_are_refused_is_left_out_before_anything_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal by its engine came after others had run, and lost what they had found."""
    refused = (
        changes.Change("grid", changes.Rung.R1, "nothing", on={"prefix_grid": 12}),
        changes.Change("size", changes.Rung.R1, "nothing", on={"max_batch_size": 5}),
        changes.Change("temperature", changes.Rung.R3, "nothing", on_request={"temperature": -1}),
    )
    asked = (*changes.changes_named(("packed prefill",)), *refused)
    monkeypatch.setattr(changes, "changes_named", lambda _names: asked)
    result = bench("ladder", "--concurrency", "1", "--prompt-tokens", "8", "--output-tokens", "2")
    assert [*result["arms"]] == ["packed prefill"]
    said = [result["left_out"][change.name] for change in refused]
    assert said[0] == (
        "as its settings are refused (prefix_grid: expected a multiple of 8 tokens per block, "
        "got 12)"
    )
    assert "(max_batch_size: expected at most 4" in said[1]
    assert "(temperature: " in said[2]


@pytest.mark.parametrize("graphs", ["auto", "step"])
def test_noise_is_compared_on_a_gpu_whatever_graphs_are_asked_for(
    bench: Bench,
    huginn_of: Callable[[NoiseMode], Path],
    monkeypatch: pytest.MonkeyPatch,
    graphs: str,
) -> None:
    """The arm without it has no graphs, and refuses those that are asked for by name."""
    lengths = ("--concurrency", "2", "--prompt-tokens", "8", "--output-tokens", "3")
    change = ("--change", "position-keyed noise", "--cuda-graphs", graphs)
    cache = ("--max-graph-rows", "16", "--kv-cache-bytes", "4MiB")
    with gpu_on_cpu(monkeypatch):
        engine_dir = huginn_of(NoiseMode.POSITION)
        result = bench(
            "ladder", *lengths, *change, *cache, "--device", "cuda", engine_dir=engine_dir
        )
    (cell,) = result["arms"]["position-keyed noise"]["cells"]
    assert cell["total"] == cell["requests"] == 4
    assert cell["with"]["repeats"][0]["counters"]["graph_hits"] > 0
    assert "graph_hits" not in cell["without"]["repeats"][0]["counters"]


@pytest.mark.parametrize(
    ("settings", "graphs"),
    [(("--noise", "sequential"), "off"), (("--cuda-graphs", "loop"), "loop")],
)
def test_graphs_and_what_rests_on_them_are_compared_where_there_are_any(
    bench: Bench,
    huginn_of: Callable[[NoiseMode], Path],
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    graphs: str,
) -> None:
    """Without them both sides were the same; so they are without joined products, as in Huginn."""
    lengths = ("--concurrency", "1", "--prompt-tokens", "8", "--output-tokens", "2")
    names = ("scheduling ahead", "CUDA graphs", "fused kernels", "joined projections")
    asked = [word for name in names for word in ("--change", name)]
    gpu = ("--device", "cuda", "--max-graph-rows", "16", "--kv-cache-bytes", "4MiB")
    with gpu_on_cpu(monkeypatch):
        engine_dir = huginn_of(NoiseMode.POSITION)
        result = bench("ladder", *lengths, *asked, *gpu, *settings, engine_dir=engine_dir)
    left_out = dict.fromkeys(
        names[: 2 if graphs == "off" else 1], f"as cuda_graphs are {graphs} here"
    ) | {"joined projections": "as the engine joins none of the checkpoint's products"}
    assert result["left_out"] == left_out
    assert {*result["arms"]} == {*names} - {*left_out}


def test_speculation_is_compared_with_as_many_requests_as_guess(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more at once nobody guesses, and both sides were the same."""
    directory, questions = tmp_path / "e", tmp_path / "questions.jsonl"
    limits = {"max_batch_size": 16, "max_num_tokens": 128, "max_seq_len": 64}
    build(BuildConfig(EXAMPLES / "tiny-ouro", directory, tokens_per_block=8, **limits))
    samples = [{"prompt": s.prompt, "answer": s.answer} for s in islice(held_out(), 9)]
    questions.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    at_once: list[int] = []
    answer = OfflineEngine.answer

    def watched(self: OfflineEngine, prompts: Any, params: Any, deadline_s: float) -> Any:
        at_once.append(len(prompts))
        return answer(self, prompts, params, deadline_s)

    monkeypatch.setattr(OfflineEngine, "answer", watched)
    lengths = ("--concurrency", "8", "--prompt-tokens", "8", "--output-tokens", "8")
    quality = ("--questions", str(questions), "--answer-tokens", "6")
    result = bench("ladder", *lengths, *quality, "--change", "speculation", engine_dir=directory)
    row = result["arms"]["speculation"]
    assert row["most_at_once"] == max(at_once) == 4
    (cell,) = row["cells"]
    assert cell["identical"] == cell["total"] == cell["requests"]
    assert cell["with"]["median"]["counters"]["num_draft_tokens"] > 0
    assert row["quality"]["num_samples"] == 9


@pytest.mark.parametrize("rows", [0, 3])
def test_products_of_few_rows_are_compared_where_few_rows_run(
    bench: Bench,
    engine_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
) -> None:
    """With more at once both sides ran PyTorch's products, and passed without a comparison."""
    questions, table = tmp_path / "questions.jsonl", tmp_path / "ladder.md"
    samples = [{"prompt": s.prompt, "answer": s.answer} for s in islice(held_out(), 8)]
    questions.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    ours = Products(max_skinny_rows=rows)
    decoded: list[int] = []
    submit = EngineCore._submit

    def watched(core: EngineCore, plan: StepPlan | None) -> None:
        if plan is not None:
            decoded.append(len(plan.seq_slots))
        submit(core, plan)

    lengths = ("--concurrency", "1,4", "--prompt-tokens", "8", "--output-tokens", "3")
    quality = ("--questions", str(questions), "--answer-tokens", "4", "--markdown", str(table))
    changes = ("--change", "products of few rows", "--change", "packed prefill")
    gpu = ("--device", "cuda", "--kv-cache-bytes", "4MiB", "--cuda-graphs", "off")
    with gpu_on_cpu(monkeypatch):
        monkeypatch.setattr(engine_core, "settle_products", lambda *_: ours)
        monkeypatch.setattr(launch, "overlapping_kernels", lambda _: nullcontext())  # no library
        result = bench("ladder", *lengths, *changes, *gpu)
        assert ("products of few rows" in result["left_out"]) is (rows == 0)
        if rows == 0:
            assert result["left_out"] == {
                "products of few rows": "as all products are PyTorch's here"
            }
            return
        monkeypatch.setattr(EngineCore, "_submit", watched)
        result = bench("ladder", *lengths, *quality, *changes[:2], *gpu)
    assert max(decoded) == 3
    row = result["arms"]["products of few rows"]
    assert row["most_at_once"] == 3
    assert [(c["concurrency"], c["identical"], c["total"]) for c in row["cells"]] == [
        (1, 2, 2),
        (4, 8, 8),
    ]
    repeat = row["cells"][1]["with"]["repeats"][0]
    assert (repeat["answered"], repeat["output_tokens"]) == (4, 12)
    assert repeat["counters"]["num_prompt_tokens"] == 4 * 8
    assert row["quality"]["num_samples"] == 8
    assert "products of few rows: at most 3 requests at once" in table.read_text()


def test_an_r0_change_with_other_answers_is_named_and_the_exit_code(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = changes.Change("false claim", changes.Rung.R0, "nothing", off_request={"loops": 1})
    monkeypatch.setattr(changes, "changes_named", lambda _names: (wrong,))
    lengths = ("--concurrency", "1", "--prompt-tokens", "16", "--output-tokens", "8")
    result = bench("ladder", *lengths, code=1)
    assert result["arms"]["false claim"]["holds"] is False
    assert "NOT R0: false claim" in capsys.readouterr().out


@pytest.mark.full
def test_shallow_prompts_change_answers_and_few_samples_leave_that_unresolved(
    bench: Bench, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    samples = [{"prompt": s.prompt, "answer": s.answer} for s in islice(held_out(), 30)]
    questions.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    result = bench(
        *("ladder", "--change", "shallow prompt", "--questions", str(questions)),
        *("--concurrency", "1", "--prompt-tokens", "8", "--output-tokens", "2", "--loops", "2"),
        *("--answer-tokens", "7"),
    )
    quality = result["arms"]["shallow prompt"]["quality"]
    # Of 30 samples at (2, 2) and (2, 1): the cards say 0.969 and 0.691.
    assert quality["right_without"] > quality["right_with"]
    assert quality["verdict"] == "unresolved"
    assert quality["standard_error"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("burst", "--arm", "x=nothing:1"), "arm x: unknown field 'nothing'"),
        (("burst", "--concurrency", "1,x"), "--concurrency: expected numbers"),
        (("burst", "--concurrency", "0"), "concurrency: expected counts from 1"),
        (("burst", "--prompt-tokens", "500"), "the engine takes prompts up to 128"),
        (("burst", "--repeats", "0"), "repeats: expected at least 1"),
        (("latency", "--batches", "5"), "batch 5: this engine runs at most 4"),
        (("latency", "--output-tokens", "3"), "output_tokens: expected at least 8"),
        (("sessions", "--turns", "0"), "turns: expected at least 1"),
        (("poisson", "--rates", "0"), "rates: expected numbers from 1e-06 on"),
        (("poisson", "--lengths", "5"), "expected PROMPT:ANSWER"),
        (
            ("poisson", "--threshold-ms", "9", "--deadline-s", "30"),
            "search_s: expected less than the deadline of 30 s, got 30",
        ),
        (("ladder", "--change", "magic"), "change 'magic': expected one of"),
        (("ladder", "--arm", "base"), "unrecognized arguments"),
        (
            ("ladder", "--change", "CUDA graphs", "--output-tokens", "8"),
            "there is nothing to compare. Not compared, for want of a GPU: CUDA graphs.",
        ),
        (("burst", "--out", "/nowhere/x.json"), "there is no folder /nowhere"),
        (("burst", "--out", "/"), "/: expected the name of a file, it is a folder"),
        (("burst", "--plot", "x.xyz"), "--plot x.xyz: expected a name that ends in one of "),
        (("ladder", "--markdown", "/nowhere/x.md"), "there is no folder /nowhere"),
        (("burst", "--arm", "x=max_batch_size:9"), "arm x: max_batch_size: expected at most 4"),
        (("burst", "--arm", "x=kv_cache_bytes:9"), "arm x: kv_cache_bytes: the pools of all arms"),
        *(
            ((kind, "--concurrency", "2,1,2"), "concurrency: expected different values")
            for kind in ("burst", "ladder")
        ),
        (("latency", "--batches", "2,2"), "batches: expected different values"),
        (("poisson", "--rates", "2,2"), "rates: expected different values"),
        (
            ("burst", "--output-tokens", "32", "--arm", "x=max_seq_len:20"),
            "arm x: 8 prompt and 32 output tokens: the engine takes",
        ),
        (("latency", "--batches", "4", "--arm", "x=max_batch_size:2"), "arm x: batch 4: "),
        (
            ("latency", "--batches", "1", "--arm", "x=speculative_loops:2"),
            "arm x: speculative_loops: expected none, got 2: a step may give",
        ),
        (("sessions", "--grid", "16", "--arm", "grid=loops:2"), "arms: grid: given twice"),
        (("poisson", "--rates", "1e-320"), "rates: expected numbers from 1e-06 on"),
        (("poisson", "--lengths", "1" * 5000 + ":4"), "expected PROMPT:ANSWER"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_nothing_is_measured(
    bench: Bench, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    kind, *rest = arguments
    if kind in ("burst", "latency", "ladder"):
        rest = ["--prompt-tokens", "8", *rest]
    bench(kind, *rest, code=2)
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("looptrt: error: ")
    assert err.count("\n") == 1
    assert not out.strip()


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    bench("burst", "--plot", str(tmp_path / "x.png"), code=2)
    assert "pip install 'looptrt[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["burst", "latency", "sessions", "poisson", "ladder"])
def test_every_kind_has_a_picture(bench: Bench, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    few = {
        "burst": ("--concurrency", "1", "--prompt-tokens", "8", "--output-tokens", "2"),
        "latency": ("--batches", "1", "--prompt-tokens", "8", "--output-tokens", "8"),
        "sessions": ("--count", "1", "--turns", "1", "--system-tokens", "8", "--turn-tokens", "2"),
        "poisson": (
            *("--rates", "9", "--lengths", "4:2", "--requests", "2"),
            *("--threshold-ms", "1e6", "--search-seconds", "0.001"),
        ),
        "ladder": ("--change", "prefix cache", "--prompt-tokens", "8", "--output-tokens", "2"),
    }
    picture = tmp_path / "picture.png"
    bench(kind, *few[kind], "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_engines_in_processes_of_their_own_give_the_same_answers(
    engine_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    arguments = ("--device", "cpu", "--repeats", "1", "--out", str(out))
    lengths = ("--concurrency", "3", "--prompt-tokens", "16", "--output-tokens", "6")
    command = ("bench", "burst", str(engine_dir), *arguments, *lengths)
    assert main([*command, "--arm", "plain=enable_prefix_cache:false"]) == 0
    against = json.loads(out.read_text())["arms"]["plain"]["cells"][0]["against_default"]
    assert (against["identical"], against["total"]) == (6, 6)
    command = ("bench", "ladder", str(engine_dir), *arguments, *lengths)
    assert main([*command, "--change", "prefix cache"]) == 0
    (cell,) = json.loads(out.read_text())["arms"]["prefix cache"]["cells"]
    assert (cell["identical"], cell["requests"]) == (6, 6)


def test_answers_that_could_not_be_compared_are_not_said_to_differ() -> None:
    cells = [{"identical": 0, "total": 0, "requests": 4}]
    told = broken_promises({"arms": {"x": {"holds": False, "cells": cells}, "y": {"holds": True}}})
    assert told == {"x": "not all answers could be compared, some requests failed"}
