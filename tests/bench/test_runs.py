"""What becomes of requests: every one has a record, whole, failed, refused or too late."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from looptrt.bench import results
from looptrt.bench.runs import Ask, Record, Run, run
from looptrt.errors import EngineError
from looptrt.runtime.request import Request
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.scripted import ScriptedCore, forever, llm_of

PARAMS = SamplingParams(max_tokens=4)


def ask(token: int, at_s: float = 0.0, **fields: object) -> Ask:
    return Ask([token, 1], SamplingParams(max_tokens=4, **fields), at_s)  # type: ignore[arg-type]


def first_token(request: Request) -> list[int]:
    return [int(request.prompt[0])] * request.max_new_tokens


def test_every_request_gets_its_own_answer(tmp_path: Path) -> None:
    with llm_of(ScriptedCore(first_token), tmp_path) as llm:
        outcome = run(llm, [ask(5), ask(6), ask(7)], deadline_s=20)
    assert [record.token_ids for record in outcome.records] == [(t,) * 4 for t in (5, 6, 7)]
    assert [record.index for record in outcome.records] == [0, 1, 2]
    assert outcome.failed == []


def test_a_failing_request_is_reported_beside_the_answered(tmp_path: Path) -> None:
    core = ScriptedCore(first_token, error_token=6)
    with llm_of(core, tmp_path) as llm:
        asks = [ask(5), ask(6), ask(7, cache_salt="never fits"), ask(8), ask(2_000)]
        outcome = run(llm, asks, deadline_s=20)
    errors = {record.index: record.error for record in outcome.failed}
    assert errors.keys() == {1, 2, 4}
    assert errors[1] == "the model's logits are not finite"
    assert errors[2] == "RequestError: prompt: more pages than the pool"
    assert errors[4] is not None
    assert errors[4].startswith("RequestError: prompt: ")
    summed = results.summary(outcome)
    assert (summed["requests"], summed["answered"], summed["output_tokens"]) == (5, 2, 8)
    assert [entry["index"] for entry in summed["failed"]] == [1, 2, 4]
    assert len(results.failed_requests({"arms": {"x": {"cells": [summed]}}})) == 3


def test_what_is_not_answered_at_the_deadline_is_aborted_and_recorded(tmp_path: Path) -> None:
    turns = threading.Semaphore(2)  # two steps, then the engine waits
    core = ScriptedCore(forever, turns=turns)
    with llm_of(core, tmp_path) as llm:
        release = threading.Timer(0.6, lambda: turns.release(1000))
        release.start()
        outcome = run(llm, [ask(5), ask(5), ask(5, at_s=60.0)], deadline_s=0.3)
        release.join()
    assert [record.error for record in outcome.records] == [
        "not finished within the run's deadline of 0.3 s",
        "not finished within the run's deadline of 0.3 s",
        "not submitted: the run's deadline of 0.3 s came before its time",
    ]
    assert len(core.aborted) >= 2


def test_an_engine_that_ends_ends_the_run(tmp_path: Path) -> None:
    with (
        llm_of(ScriptedCore(forever, fail_at_step=2), tmp_path) as llm,
        pytest.raises(EngineError, match="ZeroDivisionError"),
    ):
        run(llm, [ask(5), ask(6)], deadline_s=20)


def test_on_end_is_told_of_every_request(tmp_path: Path) -> None:
    ended: list[None] = []
    with llm_of(ScriptedCore(first_token), tmp_path) as llm:
        run(llm, [ask(5), ask(2_000)], deadline_s=20, on_end=lambda: ended.append(None))
    assert len(ended) == 2


def record(index: int, **fields: object) -> Record:
    made = {"num_prompt": 10, "token_ids": (1, 2, 3), "due_s": 100.0, **fields}
    return Record(index=index, **made)  # type: ignore[arg-type]


def test_summary_of_hand_made_records() -> None:
    records = (
        record(0, first_token_s=100.5, last_token_s=100.9, finished_s=101.0, num_cached=5),
        record(1, first_token_s=102.0, last_token_s=102.2, finished_s=103.0, token_ids=(1, 2)),
        record(2, error="broken", token_ids=(), num_prompt=0),
    )
    summed = results.summary(Run(records, wall_s=3.0))
    assert summed["output_tokens_per_s"] == pytest.approx(5 / 3)
    assert summed["ttft_ms"]["mean"] == pytest.approx(1250.0)
    assert summed["ttft_ms"]["n"] == 2
    assert summed["tpot_ms"]["p50"] == pytest.approx(200.0)
    assert summed["latency_per_token_ms"]["mean"] == pytest.approx((1000 / 3 + 1500) / 2)
    assert summed["share_ttft_up_to_1_s"] == 0.5
    assert summed["cached_share"] == 0.25
    assert summed["failed"] == [{"index": 2, "error": "broken"}]


def test_a_run_in_which_all_failed_has_no_spreads_and_no_zero_speed() -> None:
    summed = results.summary(Run((record(0, error="broken"),), wall_s=1.0))
    assert summed["ttft_ms"] is None
    assert summed["share_ttft_up_to_1_s"] is None
    assert summed["cached_share"] is None


def test_identical_counts_pairs_that_both_have_whole() -> None:
    ours = [record(0), record(1), record(2, token_ids=(9,)), record(3)]
    theirs = [record(0), record(1, error="broken"), record(2), record(3)]
    assert results.identical(ours, theirs) == {"identical": 2, "total": 3}


@pytest.mark.parametrize(
    ("device", "named"), [("auto", "GPU 0"), ("cuda", "GPU 0"), ("cuda:1", "GPU 1"), ("cpu", None)]
)
def test_a_result_names_the_gpu_that_the_engine_ran_on(
    monkeypatch: pytest.MonkeyPatch, device: str, named: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: f"GPU {index}")
    assert results.machine("abc", device)["gpu"] == named
