"""What a request asks of its answers, up to the border of the engine: n, stops, text, limits."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from looptrt.errors import EngineError, QueueFullError, RequestError
from looptrt.runtime.llm import LLM
from looptrt.runtime.outputs import CompletionOutput
from looptrt.runtime.request import (
    ExitKv,
    ExitParams,
    ExitRule,
    FinishReason,
    LogprobsMode,
    SamplerParams,
)
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.scripted import (
    VOCAB,
    ScriptedCore,
    forever,
    llm_of,
    manifest,
    step_until,
    write_tokenizer,
)

PIECES = ["<end>", "<turn>", "<|im_end|>", "a", " be", "ta ga", "mma d", "Qui", "ck", "END", "é"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, PIECES)
    return tmp_path


def says(*tokens: int) -> ScriptedCore:
    """An engine that says these tokens, then `é` for ever."""
    return ScriptedCore(lambda request: [*tokens, *[10] * request.max_new_tokens])


def one(llm: LLM, **fields: Any) -> CompletionOutput:
    """The answer, which a stream must give as well."""
    params = SamplingParams(**{"max_tokens": 20, **fields})
    (answer,) = llm.generate("a", params)[0].outputs
    *_, last = streamed = list(llm.stream("a", params))
    assert "".join(output.outputs[0].delta for output in streamed) == answer.text
    assert last.outputs[0].token_ids == answer.token_ids
    assert last.outputs[0].stop_reason == answer.stop_reason
    return answer


# ---- n answers


def test_answers_of_one_request_come_together_and_in_order(directory: Path) -> None:
    core = ScriptedCore(lambda r: [3 + r.request_id % 4] * (1 + r.request_id % 4) + [2])
    with llm_of(core, directory) as llm:
        params = [SamplingParams(n=n, temperature=1.0) for n in (3, 1, 4)]
        outputs = llm.generate([[1]] * 3, params)
        assert [output.request_id for output in outputs] == [0, 3, 4]
        assert [len(output.outputs) for output in outputs] == [3, 1, 4]
        for output in outputs:
            assert [answer.index for answer in output.outputs] == list(range(len(output.outputs)))
            for answer in output.outputs:
                request_id = output.request_id + answer.index
                assert answer.token_ids == [3 + request_id % 4] * (1 + request_id % 4) + [2]
            assert output.kv_bytes == 4096 * len(output.outputs)
            assert output.metrics is not None
    assert [request.fork_of for request in core.seen] == [None, 0, 0, None, None, 4, 4, 4]


def test_further_answers_get_the_seeds_that_follow_or_fresh_ones(directory: Path) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory) as llm:
        fields = {"max_tokens": 1, "temperature": 1.0, "n": 3, "prompt_logprobs": 1}
        llm.generate([1], SamplingParams(seed=2**63 - 2, **fields))
        llm.generate([1], SamplingParams(**fields))
    seeds = [request.sampler.seed for request in core.seen]
    assert seeds[:3] == [2**63 - 2, 2**63 - 1, 0]
    assert len(set(seeds[3:])) == 3
    assert [r.sampler.prompt_logprobs for r in core.seen[:3]] == [1, None, None]


def test_stream_of_several_answers_gives_each_ones_pieces(directory: Path) -> None:
    core = ScriptedCore(lambda r: [[3, 4, 5, 2], [7, 8, 2], [9, 2]][r.request_id % 3])
    with llm_of(core, directory) as llm:
        params = SamplingParams(n=3, temperature=1.0)
        outputs = list(llm.stream("a", params))

        async def collect() -> list[str]:
            texts = ["", "", ""]
            async for output in llm.generate_async("a", params):
                texts = [t + o.delta for t, o in zip(texts, output.outputs, strict=True)]
            return texts

        assert asyncio.run(collect()) == ["a beta ga", "Quick", "END"]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index, text in enumerate(("a beta ga", "Quick", "END")):
        assert "".join(output.outputs[index].delta for output in outputs) == text
        assert outputs[-1].outputs[index].text == text
        reasons = [output.outputs[index].finish_reason for output in outputs]
        assert reasons == sorted(reasons, key=lambda reason: reason is not None)


def test_abort_ends_all_answers_and_a_stop_string_only_its_own(directory: Path) -> None:
    core = ScriptedCore(
        lambda r: [9 if r.request_id == 1 else 5] * 60, turns=threading.Semaphore(0)
    )
    with llm_of(core, directory) as llm, ThreadPoolExecutor() as pool:
        stream = llm.stream("a", SamplingParams(n=3, max_tokens=60, stop=("END",)))
        outputs = pool.submit(list, stream)
        step_until(core, lambda: core.aborted == [1])
        assert not outputs.done()
        for _ in range(2):
            llm.abort(stream.request_id)
        step_until(core, outputs.done)
        *_, last = outputs.result()
        assert set(core.aborted) == {0, 1, 2}
        assert not core.has_work()
    reasons = [answer.finish_reason for answer in last.outputs]
    assert reasons == [FinishReason.ABORT, FinishReason.STOP, FinishReason.ABORT]
    assert [answer.stop_reason for answer in last.outputs] == [None, "END", None]


def test_one_answer_refused_refuses_all(directory: Path) -> None:
    core = ScriptedCore(forever, max_waiting=2, turns=threading.Semaphore(0))
    with llm_of(core, directory, max_waiting=8) as llm, ThreadPoolExecutor() as pool:
        outputs = pool.submit(list, llm.stream("a", SamplingParams(n=8, max_tokens=60)))
        step_until(core, lambda: outputs.done() and not core.has_work())
        with pytest.raises(QueueFullError):
            outputs.result()
        with pytest.raises(RequestError, match="n: expected at most max_waiting 8, got 9"):
            llm.generate("a", SamplingParams(n=9))


def test_batch_waits_for_room_for_each_answer(directory: Path) -> None:
    core = ScriptedCore(forever, max_waiting=3)
    with llm_of(core, directory, max_waiting=3) as llm:
        outputs = llm.generate([[1]] * 5, SamplingParams(n=3, max_tokens=2, temperature=1.0))
    assert all(len(output.outputs) == 3 and output.finished for output in outputs)
    assert core.num_refused == 0


def test_closed_stream_of_several_answers_frees_them_all(directory: Path) -> None:
    core = ScriptedCore(forever, turns=threading.Semaphore(0))
    with llm_of(core, directory) as llm:
        llm.stream("a", SamplingParams(n=5, max_tokens=60)).close()
        step_until(core, lambda: set(core.aborted) == set(range(5)) and not core.has_work())


def test_error_of_the_engine_ends_a_stream_of_several_answers(directory: Path) -> None:
    turns = threading.Semaphore(0)
    with llm_of(ScriptedCore(forever, fail_at_step=2, turns=turns), directory) as llm:
        stream = llm.stream("a", SamplingParams(n=3))
        turns.release(9)
        with pytest.raises(EngineError, match="scripted"):
            list(stream)
        assert list(stream) == []


# ---- where an answer ends (case C5)


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "kept", "reason"),
    [
        ((3, 4, 5, 6), "beta gamma", "a ", "a beta gamma", "beta gamma"),
        ((3, 9), "END", "a", "aEND", "END"),
        ((3, 4, 2), "x", "a be", "a be", 2),
        ((3, 4, 5, 6), (4, 5), "a", "a beta ga", (4, 5)),
        ((3, 3, 3, 4), (3, 4), "aa", "aaa be", (3, 4)),
        ((3, 4, 3, 4, 5), (4, 3, 4, 5), "a", "a bea beta ga", (4, 3, 4, 5)),
        ((3, 4, 3, 2), (4, 3, 4, 5), "a bea", "a bea", 2),
        ((9,), (9,), "", "END", (9,)),
    ],
)
def test_stop_is_cut_off_or_kept(
    directory: Path,
    tokens: tuple[int, ...],
    stop: str | tuple[int, ...],
    text: str,
    kept: str,
    reason: str | int | tuple[int, ...],
) -> None:
    with llm_of(says(*tokens), directory) as llm:
        for include_stop, expected in ((False, text), (True, kept)):
            answer = one(llm, stop=(stop,), include_stop=include_stop)
            assert (answer.text, answer.stop_reason) == (expected, reason)
            assert answer.finish_reason is FinishReason.STOP
            assert len(answer.token_ids) == len(answer.depths) <= len(tokens)


def test_stop_token_is_shown_where_it_is_asked_for(directory: Path) -> None:
    with llm_of(says(3, 4, 2), directory) as llm:
        assert one(llm, include_stop=True, skip_special_tokens=False).text == "a be<|im_end|>"
        assert one(llm, include_stop=True).text == "a be"
        assert one(llm, stop_token_ids=(4,), include_stop=True).text == "a be"
        assert one(llm, stop_token_ids=(4,)).text == "a"


def test_special_tokens_are_shown_where_they_are_asked_for(directory: Path) -> None:
    with llm_of(says(3, 1, 4, 999, 2), directory) as llm:
        assert one(llm, skip_special_tokens=False).text == "a<turn> be"
        assert one(llm).text == "a be"
        assert one(llm, stop=("<turn>",), skip_special_tokens=False).text == "a"


@pytest.mark.parametrize("stop", ["a", "a be", (3,), (3, 4)])
def test_stop_counts_only_when_it_ends_after_min_tokens(directory: Path, stop: Any) -> None:
    with llm_of(says(3, 4, 3, 4, 3, 4, 3, 4), directory) as llm:
        length = 1 if stop in ("a", (3,)) else 2
        for min_tokens in range(6):
            answer = one(llm, stop=(stop,), min_tokens=min_tokens)
            ends = range(length, 9, 2)
            assert len(answer.token_ids) == next(end for end in ends if end > min_tokens)
            assert answer.stop_reason == stop


def test_stop_string_that_was_complete_too_early_does_not_end_the_answer_later(
    directory: Path,
) -> None:
    with llm_of(says(9, 3, 4, 9, 2), directory) as llm:
        answer = one(llm, stop=("END", "ENDx"), min_tokens=1)
        assert (answer.text, len(answer.token_ids)) == ("ENDa be", 4)


def test_end_ids_are_masked_in_the_engine_until_min_tokens(directory: Path) -> None:
    core = ScriptedCore(forever, manifest(eos=(2, 0, VOCAB + 5)))
    with llm_of(core, directory) as llm:
        llm.generate([1], SamplingParams(min_tokens=3, stop_token_ids=(7,)))
        llm.generate([1], SamplingParams(min_tokens=3, stop_token_ids=(7,), ignore_eos=True))
        llm.generate([1], SamplingParams(stop_token_ids=(7,)))
    masked = [(request.sampler.min_tokens, request.sampler.end_ids) for request in core.seen]
    assert masked == [(3, (2, 0, 7)), (3, ()), (0, ())]


@pytest.mark.parametrize(("num_prompt", "min_tokens"), [(63, 2), (10, 55), (1, 500)])
def test_min_tokens_beyond_the_room_is_refused(
    directory: Path, num_prompt: int, min_tokens: int
) -> None:
    with llm_of(ScriptedCore(forever), directory) as llm:
        room = 64 - num_prompt
        message = f"min_tokens: expected at most {room}, .* max_seq_len 64, got {min_tokens}"
        for max_tokens in (None, 500):
            params = SamplingParams(min_tokens=min_tokens, max_tokens=max_tokens)
            with pytest.raises(RequestError, match=message):
                llm.generate([1] * num_prompt, params)
        answer = llm.generate([1] * num_prompt, SamplingParams(min_tokens=room, max_tokens=500))
        assert len(answer[0].outputs[0].token_ids) == room


# ---- what is shown


def test_prompt_stands_in_front_where_it_is_asked_for(directory: Path) -> None:
    with llm_of(says(3, 4, 2), directory) as llm:
        answer = one(llm, exclude_input=False)
        assert (answer.text, answer.token_ids) == ("aa be", [3, 3, 4, 2])
        assert len(answer.depths) == 3
        for prompt, fields, text in (
            ([3, 1, 4], {}, "a bea be"),
            ([3, 1, 4], {"skip_special_tokens": False}, "a<turn> bea be"),
            ("aé", {"truncate_prompt_tokens": 1}, "éa be"),
        ):
            params = SamplingParams(exclude_input=False, **fields)
            (output,) = llm.generate([prompt], params)
            assert output.outputs[0].text == text


def test_prompt_is_cut_to_its_last_tokens(directory: Path) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory) as llm:
        prompt = list(range(3, 73))
        for kept in (1, 5, 63):
            params = SamplingParams(max_tokens=1, truncate_prompt_tokens=kept)
            (output,) = llm.generate([prompt], params)
            assert output.prompt_token_ids == prompt[-kept:]
            assert core.seen[-1].prompt.tolist() == prompt[-kept:]
        whole = SamplingParams(max_tokens=1, truncate_prompt_tokens=99)
        assert llm.generate([[3, 4]], whole)[0].prompt_token_ids == [3, 4]
        with pytest.raises(RequestError, match="prompt: expected at most max_input_len 64"):
            llm.generate([prompt], whole)


# ---- what the engine gets


def test_sampling_set_reaches_the_engine(directory: Path) -> None:
    core = ScriptedCore(forever)
    bias = np.linspace(-1, 1, VOCAB)
    with llm_of(core, directory) as llm:
        params = SamplingParams(
            max_tokens=4,
            min_tokens=1,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=-0.25,
            bad_words=[[7, 8], "a", "é", [3]],  # type: ignore[arg-type]
            embedding_bias=bias,  # type: ignore[arg-type]
            logprobs=5,
            prompt_logprobs=0,
            logprobs_mode="processed",
            seed=9,
        )
        llm.generate([1], params)
    assert core.seen[0].sampler == SamplerParams(
        seed=9,
        prompt_logprobs=0,
        logprobs=5,
        logprobs_mode=LogprobsMode.PROCESSED,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        min_tokens=1,
        end_ids=(2,),
        bad_words=((7, 8), (3,), (0, 3), (10,), (0, 10)),  # 0 is the unknown token: the space
        embedding_bias=bias.astype(np.float32).tobytes(),
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embedding_bias": [0.0] * 999}, "embedding_bias: expected 1000 numbers, .* got 999"),
        ({"bad_words": [[5, 1000]]}, "bad_words: expected token ids from 0 to 999, got 1000"),
        ({"stop": [[1000]]}, "stop: expected token ids from 0 to 999, got 1000"),
        ({"stop_token_ids": [1000]}, "stop_token_ids: expected token ids from 0 to 999"),
        ({"bad_words": ["\ud800"]}, "bad_words: not valid Unicode"),
        ({"stop": ["\ud800"]}, "stop: not valid Unicode"),
        ({"logprobs": 1025}, "logprobs: expected at most max_logprobs 1024, got 1025"),
        ({"prompt_logprobs": 1025}, "prompt_logprobs: expected at most max_logprobs 1024"),
    ],
)
def test_request_that_does_not_fit_the_engine_is_named_and_the_next_one_works(
    directory: Path, fields: dict[str, Any], message: str
) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(RequestError, match=message):
                call("a", SamplingParams(**fields))
        assert llm.generate("a")[0].finished
    assert len(core.seen) == 1


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    with llm_of(says(5, 6, 7, 2), tmp_path) as llm:
        for name in ("stop", "bad_words"):
            with pytest.raises(RequestError, match=rf"{name}: .*no tokenizer\.json"):
                llm.generate([1], SamplingParams(**{name: ("x",)}))
        (answer,) = llm.generate([1], SamplingParams(stop=((6, 7),), bad_words=((9,),)))[0].outputs
        assert (answer.token_ids, answer.text, answer.stop_reason) == ([5, 6, 7], "", (6, 7))


def test_parameters_of_another_kind_are_refused(directory: Path) -> None:
    with (
        llm_of(ScriptedCore(forever), directory) as llm,
        pytest.raises(RequestError, match="sampling_params: expected SamplingParams"),
    ):
        llm.generate([[1]], [{"max_tokens": 3}])  # type: ignore[list-item]


def with_gate(has_gate: bool) -> ScriptedCore:
    base = manifest()
    spec = dataclasses.replace(base.spec, exit_gate=has_gate)
    return ScriptedCore(forever, dataclasses.replace(base, spec=spec))


@pytest.mark.parametrize(
    ("has_gate", "fields", "expected"),
    [
        (True, {}, ExitParams()),
        (True, {"exit_threshold": 1.0}, ExitParams()),
        (True, {"exit_threshold": 7}, ExitParams()),
        (True, {"exit_threshold": 0.95}, ExitParams(ExitRule.GATE, 0.95)),
        (True, {"exit_threshold": 0}, ExitParams(ExitRule.GATE, 0)),
        (True, {"exit_mode": "reference"}, ExitParams(ExitRule.GATE_REFERENCE, 1.0)),
        (
            True,
            {"exit_mode": "reference", "exit_threshold": 1.5, "exit_kv": "run_all"},
            ExitParams(ExitRule.GATE_REFERENCE, 1.5, ExitKv.RUN_ALL),
        ),
        (True, {"exit_at_step": 0, "exit_threshold": 0.2}, ExitParams(ExitRule.STEP, 1)),
        (False, {"exit_at_step": 3}, ExitParams(ExitRule.STEP, 4)),
        (False, {"exit_criterion": "entropy-diff"}, ExitParams(ExitRule.ENTROPY_DIFF, 1e-3)),
        (False, {"exit_criterion": "latent-diff"}, ExitParams(ExitRule.LATENT_DIFF, 0.03)),
        (False, {"exit_criterion": "kl", "exit_threshold": 0.5}, ExitParams(ExitRule.KL, 0.5)),
        (False, {"exit_criterion": "argmax-stability"}, ExitParams(ExitRule.ARGMAX_STABILITY, 5)),
    ],
)
def test_exit_reaches_the_engine(
    directory: Path, has_gate: bool, fields: dict[str, Any], expected: ExitParams
) -> None:
    core = with_gate(has_gate)
    with llm_of(core, directory) as llm:
        llm.generate([1], SamplingParams(max_tokens=1, **fields))
    assert core.seen[0].exit == expected
