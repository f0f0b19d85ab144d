"""What is counted: by the scheduler, for each request, and over all of them."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from looptrt.runtime.metrics import Distribution, Family, Kind, loop_depth, observations
from looptrt.runtime.outputs import FinishedRequest, RequestOutput
from looptrt.runtime.request import FinishReason
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.scripted import (
    ScriptedCore,
    client_of,
    llm_of,
    manifest,
    step_until,
    write_tokenizer,
)
from tests.support.table import TableCore
from tests.support.tiny import engine, layout, request

PIECES = ["<end>", *"abcdefghij"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, PIECES)
    return tmp_path


def table_llm(directory: Path, **config: object) -> LLM:
    """Token i is followed by i + 1; token 10 is last."""
    table = torch.eye(len(PIECES)).roll(1, 1) * 50
    core = TableCore(table)
    return llm_of(core, directory, **config)  # type: ignore[arg-type]


def value(families: list[Family], name: str, **labels: str) -> float | Distribution:
    (family,) = (family for family in families if family.name == name)
    wanted = labels.items()
    (sample,) = (sample for sample in family.samples if wanted <= sample.labels.items())
    return sample.value


def count(families: list[Family], name: str) -> int:
    found = value(families, name)
    assert isinstance(found, Distribution)
    return found.counts[-1]


def test_every_end_is_counted_once_under_the_reason_that_its_caller_sees(directory: Path) -> None:
    with table_llm(directory) as llm:
        outputs = llm.generate(
            ["a", "ab", "a"],
            [
                SamplingParams(max_tokens=3, n=2),
                SamplingParams(max_tokens=1, loops=2),
                SamplingParams(max_tokens=9, stop_token_ids=(4,)),
            ],
        )
        families = llm.metrics()
    reasons = Counter(one.finish_reason for output in outputs for one in output.outputs)
    assert reasons == {FinishReason.LENGTH: 3, FinishReason.STOP: 1}
    for reason in (FinishReason.LENGTH, FinishReason.STOP):
        told = value(families, "looptrt_requests_total", finish_reason=reason.value)
        assert told == reasons[reason]
    assert count(families, "nv_llm_input_token_len") == 4
    assert count(families, "looptrt_time_to_first_token_seconds") == 4
    assert count(families, "looptrt_request_queue_seconds") == 4


def test_tokens_depths_and_lengths_add_up_to_what_was_answered(directory: Path) -> None:
    with table_llm(directory) as llm:
        params = [SamplingParams(max_tokens=n, loops=loops) for n, loops in [(1, 4), (5, 2)] * 3]
        outputs = llm.generate(["abc"] * 6, params)
        families = llm.metrics()
    answers = [output.outputs[0] for output in outputs]
    num_tokens = sum(answer.num_tokens for answer in answers)
    assert value(families, "looptrt_generated_tokens_total") == num_tokens == 18
    lengths = value(families, "nv_llm_output_token_len")
    assert lengths == Distribution((6,) * 6, 18.0)
    depths = value(families, "looptrt_loop_depth")
    assert depths == Distribution((0, 15, 15, 18, 18), 15 * 2 + 3 * 4)
    assert count(families, "looptrt_time_per_output_token_seconds") == 3  # of those with two
    assert value(families, "looptrt_prompt_tokens_total") == 18


def test_figures_of_an_engine_that_has_ended_are_those_that_need_no_engine(
    directory: Path,
) -> None:
    llm = table_llm(directory)
    llm.generate("a", SamplingParams(max_tokens=2))
    alive = llm.metrics({"model": "m"})
    llm.shutdown()
    dead = llm.metrics({"model": "m"})
    assert value(alive, "looptrt_engine_up") == 1
    assert value(dead, "looptrt_engine_up") == 0
    assert value(dead, "looptrt_generated_tokens_total") == 2
    missing = {family.name for family in alive} - {family.name for family in dead}
    assert {name for name in missing if name.startswith("nv_trt_llm_")} == {
        f"nv_trt_llm_{name}_metrics"
        for name in ("request", "runtime_memory", "kv_cache_block", "inflight_batcher", "general")
    }
    assert all(sample.labels["model"] == "m" for family in dead for sample in family.samples)


def test_families_are_well_formed(directory: Path) -> None:
    with table_llm(directory) as llm:
        llm.generate("abc", SamplingParams(max_tokens=3))
        families = llm.metrics({"model": "m"})
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert (family.kind is Kind.COUNTER) == family.name.endswith("_total")
        assert (family.kind is Kind.HISTOGRAM) == bool(family.buckets)
        assert list(family.buckets) == sorted(set(family.buckets))
        assert len({frozenset(s.labels.items()) for s in family.samples}) == len(family.samples)
        for sample in family.samples:
            assert isinstance(sample.value, Distribution) == (family.kind is Kind.HISTOGRAM)
            if isinstance(sample.value, Distribution):
                assert len(sample.value.counts) == len(family.buckets) + 1
                assert list(sample.value.counts) == sorted(sample.value.counts)


def test_blocks_are_pages_at_full_depth_and_units_are_exact(directory: Path) -> None:
    with table_llm(directory) as llm:
        llm.generate("abcdefghi", SamplingParams(max_tokens=2))  # two full pages stay published
        families = llm.metrics()
        layout = llm.manifest.layout
    page_units = layout.units_of_page(layout.max_loops)
    units = {
        state: value(families, "looptrt_kv_units", state=state)
        for state in ("total", "free", "cached", "used")
    }
    assert units == {
        "total": 999,
        "free": 999 - 2 * page_units,
        "cached": 2 * page_units,
        "used": 0,
    }
    blocks = {
        kind: value(families, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        for kind in ("max", "free", "used", "tokens_per", "fraction")
    }
    most = 999 // page_units
    assert blocks == {"max": most, "free": most, "used": 0, "tokens_per": 4, "fraction": 0}


def test_stop_found_by_the_front_end_is_a_stop_in_the_engine(directory: Path) -> None:
    core = ScriptedCore(lambda request: [1, 3] * request.max_new_tokens)
    core.manifest, core.turns = manifest(max_seq_len=10_000), threading.Semaphore(0)
    with llm_of(core, directory) as llm, ThreadPoolExecutor() as pool:
        ended: list[FinishedRequest] = []
        llm.observe(lambda output: ended.extend(output.finished))
        streams = [
            llm.stream("a", SamplingParams(max_tokens=9000, stop=stop)) for stop in ("c", "z")
        ]
        answers = [pool.submit(list, stream) for stream in streams]
        llm.stream("a", SamplingParams(max_tokens=9000)).close()  # nobody listens to its end
        step_until(core, answers[0].done)
        llm.abort(streams[1].request_id)
        step_until(core, lambda: answers[1].done() and len(ended) == 3)
        counted = llm._metrics.families(None)
        reasons = [answer.result()[-1].outputs[0].finish_reason for answer in answers]
    assert reasons == [FinishReason.STOP, FinishReason.ABORT]
    assert {end.request_id: end.reason for end in ended} == {
        **dict(enumerate(reasons)),
        2: FinishReason.ABORT,
    }
    assert value(counted, "looptrt_requests_total", finish_reason="abort") == 2
    assert value(counted, "looptrt_requests_total", finish_reason="stop") == 1


def test_observer_hears_of_an_end_before_the_caller(directory: Path) -> None:
    core = ScriptedCore(lambda request: [1] * request.max_new_tokens)
    order: list[str] = []
    client = client_of(core, directory)
    with LLM.over(client, directory, EngineConfig()) as llm:
        client.observe(lambda output: order.extend("observer" for _ in output.finished))
        llm.generate("a", SamplingParams(max_tokens=1))
        order.append("caller")
    assert order == ["observer", "caller"]


# ---- the scheduler's figures


def test_latest_step_is_told_while_requests_live_and_nothing_after() -> None:
    one = engine(max_num_tokens=8)
    one.add(request(0, [1] * 12, 3))
    one.add(request(1, [2] * 2, 3))

    def latest() -> tuple[int, ...]:
        stats = one.scheduler.stats()
        return stats.num_scheduled, stats.num_context, stats.num_context_tokens

    seen = []
    while one.step():
        seen.append(latest())
    assert seen[:3] == [(1, 1, 8), (2, 2, 6), (2, 0, 0)]
    assert latest() == (0, 0, 0)
    assert one.scheduler.stats().num_steps == len(seen)


def test_preempted_requests_that_wait_are_paused() -> None:
    tight = engine(num_units=45, enable_prefix_cache=False)
    for request_id in range(3):
        tight.add(request(request_id, [request_id] * 12, 20))
    most = 0
    while tight.step():
        stats = tight.scheduler.stats()
        most = max(most, stats.num_paused)
        assert stats.num_paused <= stats.num_waiting
    assert most > 0
    assert tight.scheduler.stats().num_paused == 0


def test_pages_are_told_apart_by_where_they_came_from() -> None:
    one = engine()
    for request_id in range(2):
        one.add(request(request_id, [1] * 9, 4))
        one.drain()
    cold, warm = one.finished[0], one.finished[1]
    # 12 tokens with KV (the last one has none yet) are 3 pages, 2 of them full of prompt.
    assert (cold.num_reused_pages, cold.num_missed_pages, cold.num_allocated_pages) == (0, 3, 3)
    assert (warm.num_reused_pages, warm.num_missed_pages, warm.num_allocated_pages) == (2, 1, 1)
    assert (warm.num_cached_tokens, warm.num_prompt_tokens) == (8, 9)


def test_pages_taken_again_after_a_preemption_are_counted_again() -> None:
    tight = engine(num_units=45, enable_prefix_cache=False)
    for request_id in range(3):
        tight.add(request(request_id, [request_id] * 12, 20))
    tight.drain()
    for end in tight.finished.values():
        assert (end.num_allocated_pages > 8) == (end.num_preemptions > 0)
        assert end.num_missed_pages == 3


@pytest.mark.parametrize("abort", ["never", "in flight", "between steps"])
def test_generated_tokens_are_those_that_were_given_out(abort: str) -> None:
    one = engine()
    one.add(request(0, [1] * 6, 5))
    one.step()
    one.step(abort_in_flight=(0,) if abort == "in flight" else ())
    if abort == "between steps":
        one.scheduler.abort(0)
    one.drain()
    assert one.finished[0].num_generated_tokens == len(one.tokens[0])
    assert len(one.tokens[0]) == {"never": 5, "in flight": 1, "between steps": 2}[abort]


def test_times_are_in_order_and_survive_a_preemption() -> None:
    ticks = itertools.count()
    tight = engine(num_units=45, enable_prefix_cache=False, clock=lambda: float(next(ticks)))
    for request_id in range(3):
        tight.add(request(request_id, [request_id] * 12, 20))
    tight.drain()
    assert any(end.num_preemptions for end in tight.finished.values())
    for end in tight.finished.values():
        assert end.first_scheduled_s is not None
        assert end.first_token_s is not None
        assert end.last_token_s is not None
        assert end.arrival_s < end.first_scheduled_s < end.first_token_s < end.last_token_s
        assert end.last_token_s < end.finished_s


def test_request_that_never_ran_is_in_no_histogram() -> None:
    one = engine(max_batch_size=1)
    one.add(request(0, [1] * 4, 4))
    one.add(request(1, [1] * 4, 4))
    one.step()
    one.scheduler.abort(1)
    one.drain()
    assert list(observations(one.finished[1])) == []
    names = {spec.name for spec, _ in observations(one.finished[0])}
    assert len(names) == 6
    no_token = dataclasses.replace(one.finished[0], first_token_s=None, num_generated_tokens=0)
    assert len(list(observations(no_token))) == 4


def test_times_per_token_leave_the_first_one_out() -> None:
    end = FinishedRequest(
        1, FinishReason.LENGTH, None, 0, 0, 0, 1.0, 2.0, 4.0, 9.0, 8.0, 3, num_generated_tokens=5
    )
    told = {spec.name: value for spec, value in observations(end)}
    assert told["looptrt_request_queue_seconds"] == 1.0
    assert told["looptrt_time_to_first_token_seconds"] == 3.0
    assert told["looptrt_time_per_output_token_seconds"] == 1.0
    assert told["looptrt_request_seconds"] == 8.0


def test_metrics_of_a_request_reach_its_caller(directory: Path) -> None:
    with table_llm(directory) as llm:
        (output,) = llm.generate("abcdefghi", SamplingParams(max_tokens=4, n=2))
        assert isinstance(output, RequestOutput)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_token_s is not None
    assert metrics.last_token_s is not None
    assert metrics.arrival_s <= metrics.first_token_s <= metrics.last_token_s <= metrics.finished_s
    # Nine prompt tokens: 3 pages; the second answer shares the two full ones.
    assert (metrics.num_missed_pages, metrics.num_reused_pages) == (3 + 1, 2)


def test_module_needs_neither_torch_nor_prometheus() -> None:
    code = (
        "import sys, looptrt.runtime.metrics\n"
        "found = {'torch', 'prometheus_client', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_depths_of_a_model_with_many_loops_share_buckets() -> None:
    deep = loop_depth(dataclasses.replace(layout(), max_loops=20))
    assert deep.buckets == (1, 2, 3, 4, 6, 8, 12, 16, 20)
