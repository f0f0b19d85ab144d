"""`LLM` as callers see it: batches, streams, asyncio, stops, limits, aborts.

Answers whose tokens matter come from a scripted engine; limits, aborts and depth from the
trained tiny Ouro.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import pickle
import random
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from looptrt.builder.build import BuildConfig, build
from looptrt.errors import EngineError, ManifestError, RequestError
from looptrt.runtime.answer import Answer
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_client import Update
from looptrt.runtime.llm import LLM, AnswerStream, AsyncAnswerStream
from looptrt.runtime.outputs import RequestOutput, TokenLogprobs
from looptrt.runtime.request import FinishReason, Request
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.scripted import (
    DEADLINE_S,
    ScriptedCore,
    client_of,
    forever,
    llm_of,
    manifest,
    open_descriptors,
    step_until,
    wait_until,
    write_tokenizer,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
PIECES = ["<end>", "<turn>", "<|im_end|>", "a", " be", "ta ga", "mma d", "Qui", "ck", "END", "é"]


def says(*tokens: int) -> ScriptedCore:
    """An engine that says these tokens, then `é` for ever."""
    return ScriptedCore(lambda request: [*tokens, *[10] * request.max_new_tokens])


def one(llm: LLM, params: SamplingParams | None = None) -> RequestOutput:
    (output,) = llm.generate("a", params)
    return output


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, PIECES)
    return tmp_path


# ---- stops (C5, A1) and text (C6)


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "reason"),
    [
        ((3, 4, 5, 6), ("beta gamma",), "a ", "beta gamma"),
        ((7, 8, 2), ("Question:",), "Quick", 2),
        ((3, 9), ("END",), "a", "END"),
        ((3, 9), ("EN", "END"), "a", "EN"),
        ((3, 9), ("ND", "END"), "a", "END"),
        ((3, 4, 5, 2), ("gamma",), "a beta ga", 2),
    ],
)
def test_stop_string_cuts_stream_and_text_alike(
    directory: Path, tokens: tuple[int, ...], stops: tuple[str, ...], text: str, reason: str | int
) -> None:
    core = says(*tokens)
    with llm_of(core, directory) as llm:
        params = SamplingParams(stop=stops, max_tokens=20)
        (answer,) = one(llm, params).outputs
        streamed = list(llm.stream("a", params))
        assert not core.has_work()
    assert answer.text == "".join(output.outputs[0].delta for output in streamed) == text
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, reason)
    assert answer.token_ids == list(tokens)
    assert streamed[-1].outputs[0].token_ids == answer.token_ids
    assert len(answer.depths) == len(answer.token_ids)
    assert [output.finished for output in streamed] == [False] * (len(streamed) - 1) + [True]


def test_stop_string_ends_the_request_in_the_engine(directory: Path) -> None:
    core = says(3, 9)
    core.manifest, core.turns = manifest(max_seq_len=10_000), threading.Semaphore(0)
    with llm_of(core, directory) as llm, ThreadPoolExecutor() as pool:
        answer = pool.submit(one, llm, SamplingParams(stop=("END",), max_tokens=None))
        step_until(core, answer.done)
    output = answer.result()
    assert core.aborted == [output.request_id]
    assert output.outputs[0].token_ids == [3, 9]
    assert output.kv_bytes == 4096
    assert output.metrics is not None


def test_text_held_back_for_a_stop_string_comes_at_the_end(directory: Path) -> None:
    with llm_of(says(3, 4), directory) as llm:
        params = SamplingParams(stop=(" beta",), max_tokens=2)
        (answer,) = one(llm, params).outputs
        assert (answer.text, answer.finish_reason) == ("a be", FinishReason.LENGTH)
        assert "".join(o.outputs[0].delta for o in llm.stream("a", params)) == "a be"


def test_chat_turn_ends_at_every_end_token_and_never_says_it(directory: Path) -> None:
    core = says(5, 6, 2, 7, 7)
    core.manifest = manifest(eos=(2, 0))
    with llm_of(core, directory) as llm:
        (output,) = llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=9))
        (answer,) = output.outputs
        assert (answer.token_ids, answer.text) == ([5, 6, 2], "ta gamma d")
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, 2)
        added = one(llm, SamplingParams(stop_token_ids=(6,))).outputs[0]
        assert (added.token_ids, added.text, added.stop_reason) == ([5, 6], "ta ga", 6)
        both = SamplingParams(stop_token_ids=(6,), ignore_eos=True, max_tokens=5)
        ignored = one(llm, both).outputs[0]
        assert ignored.token_ids == [5, 6, 2, 7, 7]
        assert ignored.finish_reason is FinishReason.LENGTH
    assert [set(request.stop_token_ids) for request in core.seen] == [{2, 0}, {2, 0, 6}, set()]


def test_end_tokens_and_their_source_are_logged(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    llm_of(says(2), directory).shutdown()
    assert "answers end at token ids [2] (the test)" in caplog.text


def test_chat_renders_the_family_template(directory: Path) -> None:
    core = says(2)
    core.manifest = manifest(max_seq_len=256)
    with llm_of(core, directory) as llm:
        message = {"role": "user", "content": "a"}
        one_turn, other = llm.chat([[message], [message, message]], enable_thinking=True)
        assert one_turn.prompt is not None
        assert one_turn.prompt.endswith("<|im_start|>assistant\n<think>\n")
        assert llm.chat_prompt([message], enable_thinking=True) == one_turn.prompt_token_ids
        assert len(other.prompt_token_ids) > len(one_turn.prompt_token_ids)


def test_answer_cut_inside_a_character_shows_it_as_one_shot_decoding_does(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokens = raw.encode("é").ids + raw.encode("😀").ids
    core = ScriptedCore(lambda request: tokens + tokens)
    with llm_of(core, tmp_path) as llm:
        cut = SamplingParams(max_tokens=len(tokens) - 1)
        streamed = list(llm.stream("a", cut))
        text = one(llm, cut).outputs[0].text
        whole = one(llm, SamplingParams(max_tokens=len(tokens))).outputs[0].text
    assert text == "".join(o.outputs[0].delta for o in streamed) == raw.decode(tokens[:-1])
    assert (text.count("\ufffd"), whole) == (1, "é😀")


def test_engine_without_a_tokenizer_takes_and_gives_token_ids(tmp_path: Path) -> None:
    with llm_of(says(5, 6, 2), tmp_path) as llm:
        (output,) = llm.generate([1, 2])
        assert output.outputs[0].token_ids == [5, 6, 2]
        assert (output.prompt, output.outputs[0].text) == (None, "")
        for call, field in (
            (lambda: llm.generate("a"), "prompt"),
            (lambda: llm.generate([1], SamplingParams(stop=("x",))), "stop"),
            (lambda: llm.chat([{"role": "user", "content": "a"}]), "messages"),
        ):
            with pytest.raises(RequestError, match=rf"{field}: .*no tokenizer\.json"):
                call()


# ---- batches


def test_answers_come_in_the_order_of_the_prompts(directory: Path) -> None:
    core = ScriptedCore(lambda r: [int(r.prompt[0])] * int(r.prompt[0] % 7 + 1) + [2])
    prompts = [[token] for token in range(3, 103)]
    with llm_of(core, directory, max_waiting=3) as llm:
        outputs = llm.generate(prompts)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].token_ids[0] for output in outputs] == list(range(3, 103))


def test_batch_larger_than_the_waiting_queue_never_overruns_it(directory: Path) -> None:
    core = ScriptedCore(forever, max_waiting=3)
    with llm_of(core, directory, max_waiting=3) as llm:
        outputs = llm.generate([[1]] * 50, SamplingParams(max_tokens=2))
    assert all(output.finished for output in outputs)
    assert core.num_refused == 0


def test_batches_of_several_threads_share_a_full_queue(directory: Path) -> None:
    core = ScriptedCore(forever, max_waiting=2)
    with llm_of(core, directory, max_waiting=2) as llm, ThreadPoolExecutor(4) as pool:
        params = SamplingParams(max_tokens=3)
        batches = [pool.submit(llm.generate, [[1]] * 10, params) for _ in range(4)]
        for batch in batches:
            outputs = batch.result(DEADLINE_S)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [3] * 10


def test_parameters_for_each_prompt(directory: Path) -> None:
    with llm_of(ScriptedCore(forever), directory) as llm:
        outputs = llm.generate([[1], "a"], [SamplingParams(max_tokens=n) for n in (1, 3)])
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
        with pytest.raises(RequestError, match="sampling_params: expected one for each of 2"):
            llm.generate([[1], [1]], [SamplingParams()])


def test_nothing_is_queued_when_one_prompt_of_a_batch_is_bad(directory: Path) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory) as llm:
        with pytest.raises(RequestError, match="prompt: expected token ids from 0 to 999"):
            llm.generate([[1], [1], [1000]])
        assert core.seen == []
        assert llm.generate([1])[0].finished


def test_rest_of_a_batch_is_aborted_when_one_request_is_refused(directory: Path) -> None:
    core = ScriptedCore(forever, manifest(max_seq_len=10_000), turns=threading.Semaphore(0))
    params = [SamplingParams(max_tokens=None, cache_salt=s) for s in (None, None, "never fits")]
    with llm_of(core, directory) as llm, ThreadPoolExecutor() as pool:
        batch = pool.submit(llm.generate, [[1]] * 3, params)
        step_until(core, lambda: batch.done() and not core.has_work())
        with pytest.raises(RequestError, match="more pages than the pool"):
            batch.result()
        assert sorted(core.aborted) == sorted(request.request_id for request in core.seen)


def test_progress_bar_changes_nothing(directory: Path) -> None:
    with llm_of(ScriptedCore(forever), directory) as llm:
        assert len(llm.generate([[1]] * 3, SamplingParams(max_tokens=1), progress=True)) == 3


def test_seeds_reach_the_engine_as_given_or_fresh(directory: Path) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory, noise_seed=11) as llm:
        fixed = [SamplingParams(seed=seed, max_tokens=1) for seed in (0, 2**63 - 1)]
        llm.generate([[1]] * 2, fixed)
        llm.generate([[1]] * 20, SamplingParams(max_tokens=1))
        llm.generate([1], SamplingParams(max_tokens=1, noise_seed=5))
    seeds = [request.sampler.seed for request in core.seen]
    assert sorted(seeds[:2]) == [0, 2**63 - 1]
    assert len(set(seeds[2:22])) == 20
    assert [request.noise_seed for request in core.seen] == [11] * 22 + [5]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-30, 9e-6])
def test_tiny_temperature_is_greedy(directory: Path, temperature: float) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory) as llm:
        llm.generate([1], SamplingParams(temperature=temperature, max_tokens=1))
    assert core.seen[0].sampler.temperature == 0.0


# ---- limits (C7) and depth (A6) at the border


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: expected at least 1 token, got 0"),
        ([], "prompt: expected at least 1 token, got 0"),
        ([[]], "prompt: expected at least 1 token, got 0"),
        ([1] * 64, "prompt: expected at most 63 tokens, .*max_seq_len 64, got 64"),
        ([1] * 65, "prompt: expected at most max_input_len 64 tokens, got 65"),
        ([-1], "prompt: expected token ids from 0 to 999, got -1"),
        ([1000], "prompt: expected token ids from 0 to 999, got 1000"),
        ([2**70], "prompt: expected token ids from 0 to 999"),
        ([1.5], r"prompt: expected integer token ids, got 1\.5"),
        ([1, "a"], "prompt: expected integer token ids, got 'a'"),
        (["a", 1], "prompt: expected text or a list of token ids, got 1"),
        (None, "prompt: expected text or a list of token ids, got None"),
        (b"ab", "prompt: expected text or a list of token ids, got b'ab'"),
        (bytearray(b"ab"), "prompt: expected text or a list of token ids, got bytearray"),
        ([b"ab"], "prompt: expected text or a list of token ids, got b'ab'"),
        (np.array(3), r"prompt: expected text or a list of token ids, got array\(3\)"),
        ([10**5000], "prompt: expected token ids from 0 to 999, got a huge int"),
        ([True], "prompt: expected integer token ids, got True"),
        (5, "prompt: expected text or a list of token ids, got 5"),
        ({}, "prompt: expected text or a list of token ids, got {}"),
        ("\ud800", "prompt: not valid Unicode text"),
    ],
)
def test_bad_prompt_names_the_limit_and_the_next_request_works(
    directory: Path, prompt: object, message: str
) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory) as llm:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt)  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            llm.stream(prompt)  # type: ignore[arg-type]
        assert one(llm).finished
        assert len(core.seen) == 1


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_answer"),
    [(1, 1, 1), (63, 1, 1), (63, 10**9, 1), (10, None, 54), (10, 10**9, 54), (10, 53, 53)],
)
def test_answer_fits_max_seq_len(
    directory: Path, num_prompt: int, max_tokens: int | None, num_answer: int
) -> None:
    with llm_of(ScriptedCore(forever), directory) as llm:
        (output,) = llm.generate([1] * num_prompt, SamplingParams(max_tokens=max_tokens))
    assert len(output.outputs[0].token_ids) == num_answer
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [None], "x", 5, {}, 0, [{}], b"x"], ids=repr)
def test_parameters_of_another_type_are_refused(directory: Path, params: Any) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(RequestError, match="sampling_params: expected SamplingParams"):
                call("a", params)  # type: ignore[operator]
    assert core.seen == []


@pytest.mark.parametrize("messages", [None, 5, {}, {"role": "user"}, []], ids=repr)
def test_conversation_of_another_type_is_refused(directory: Path, messages: Any) -> None:
    with llm_of(ScriptedCore(forever), directory) as llm, pytest.raises(RequestError):
        llm.chat(messages)


def test_whole_batch_is_checked_against_the_pool_before_any_of_it_is_queued(
    directory: Path,
) -> None:
    core = ScriptedCore(forever, num_units=12)  # 3 pages of 4 tokens at 4 loops
    with llm_of(core, directory) as llm:
        with pytest.raises(RequestError, match=r"9 \+ 4 tokens at depth 4 need 16 KV units"):
            llm.generate([[1], [1] * 9], SamplingParams(max_tokens=4))
        with pytest.raises(RequestError, match=r"13 \+ 1 tokens .* the pool has 12"):
            llm.generate([[1], [1] * 13], SamplingParams(max_tokens=None))
        assert core.seen == []
        lengths = {
            (num_prompt, loops): len(one_of([1] * num_prompt, loops, llm))
            for num_prompt, loops in ((1, 4), (11, 4), (5, 4), (1, 1), (1, 2))
        }
    assert lengths == {(1, 4): 11, (11, 4): 1, (5, 4): 7, (1, 1): 47, (1, 2): 23}


def one_of(prompt: list[int], loops: int, llm: LLM) -> list[int]:
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=None, loops=loops))
    return output.outputs[0].token_ids


def test_shallow_prompt_leaves_the_pool_more_room(directory: Path) -> None:
    core = ScriptedCore(forever, num_units=12)
    with llm_of(core, directory) as llm:
        params = SamplingParams(max_tokens=None, prefill_loops=1)
        (output,) = llm.generate([1] * 17, params)  # 4 pages at 1 loop, 2 at 4
        assert len(output.outputs[0].token_ids) == 7
        with pytest.raises(RequestError, match="KV units"):
            llm.generate([1] * 17, replace(params, min_tokens=8))


def test_numpy_prompt_is_a_list_of_token_ids(directory: Path) -> None:
    with llm_of(ScriptedCore(forever), directory) as llm:
        assert llm.generate(np.array([1, 2]))[0].prompt_token_ids == [1, 2]  # type: ignore[arg-type]


def test_loops_beyond_the_engine_name_the_allowed_range(directory: Path) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory) as llm:
        with pytest.raises(RequestError, match="loops: expected from 1 to 4, got 5"):
            llm.generate([1], SamplingParams(loops=5))
        with pytest.raises(RequestError, match=r"prefill_loops: expected from 1 to .* 2, got 3"):
            llm.generate([1], SamplingParams(loops=2, prefill_loops=3))
        for params in ({}, {"loops": 2}, {"prefill_loops": 1}, {"loops": 3, "prefill_loops": 2}):
            llm.generate([1], SamplingParams(max_tokens=1, **params))
    depths = [(request.loops, request.prefill_loops) for request in core.seen]
    assert depths == [(4, 4), (2, 2), (4, 1), (3, 2)]


def test_default_loops_follow_an_engine_built_shallower() -> None:
    shallow = manifest()
    object.__setattr__(shallow.layout, "max_loops", 2)
    core = ScriptedCore(forever, manifest=shallow)
    with llm_of(core, Path("/nonexistent")) as llm:
        assert llm.generate([1], SamplingParams(max_tokens=1))[0].outputs[0].depths == [2]


# ---- streams, asyncio, aborts


def test_stream_is_cumulative_and_its_deltas_join(directory: Path) -> None:
    core = says(3, 4, 5, 2)
    core.turns = threading.Semaphore(0)
    with llm_of(core, directory) as llm:
        stream = llm.stream("a")
        texts = []
        for _ in range(3):
            core.turns.release()
            texts.append(next(stream).outputs[0].text)
        core.turns.release(10)
        last = next(stream)
        assert list(stream) == []
    assert texts == ["a", "a be", "a beta ga"]
    assert last.finished
    assert last.outputs[0].text == texts[-1]


def test_closed_or_forgotten_stream_frees_its_request(directory: Path) -> None:
    core = ScriptedCore(forever, turns=threading.Semaphore(0))
    with llm_of(core, directory) as llm:
        closed, forgotten = (llm.stream("a", SamplingParams(max_tokens=60)) for _ in range(2))
        assert core.turns is not None
        core.turns.release(2)
        assert not next(closed).finished
        closed.close()
        assert list(closed) == []
        ids = {closed.request_id, forgotten.request_id}
        del forgotten
        gc.collect()
        step_until(core, lambda: not core.has_work())
        assert set(core.aborted) == ids


def test_closing_a_stream_in_another_thread_ends_its_consumer(directory: Path) -> None:
    core = ScriptedCore(forever, turns=threading.Semaphore(0))
    with llm_of(core, directory) as llm, ThreadPoolExecutor() as pool:
        stream = llm.stream("a", SamplingParams(max_tokens=60))
        consumers = [pool.submit(list, stream) for _ in range(2)]
        threading.Event().wait(0.1)
        stream.close()
        assert [consumer.result(DEADLINE_S) for consumer in consumers] == [[], []]
        step_until(core, lambda: not core.has_work())


@pytest.mark.parametrize("from_thread", [False, True])
def test_closing_an_async_stream_elsewhere_ends_its_consumer(
    directory: Path, from_thread: bool
) -> None:
    core = ScriptedCore(forever, turns=threading.Semaphore(0))

    async def consume(stream: AsyncAnswerStream) -> int:
        return len([output async for output in stream])

    async def close_elsewhere(llm: LLM) -> int:
        stream = llm.generate_async("a", SamplingParams(max_tokens=60))
        consumer = asyncio.create_task(consume(stream))
        await asyncio.sleep(0.05)
        if from_thread:
            await asyncio.to_thread(asyncio.run, stream.aclose())
        else:
            await stream.aclose()
        return await asyncio.wait_for(consumer, DEADLINE_S)

    with llm_of(core, directory) as llm:
        assert asyncio.run(close_elsewhere(llm)) == 0
        step_until(core, lambda: not core.has_work())


def test_stream_keeps_its_llm(directory: Path) -> None:
    def start() -> AnswerStream:
        return llm_of(ScriptedCore(forever), directory).stream("a", SamplingParams(max_tokens=9))

    async def answer() -> list[int]:
        stream = llm_of(ScriptedCore(forever), directory).generate_async("a")
        gc.collect()
        return [output.outputs[0].num_tokens async for output in stream]

    threads = set(threading.enumerate())
    stream = start()
    gc.collect()
    *_, last = stream
    assert last.outputs[0].token_ids == [5] * 9
    assert asyncio.run(answer())[-1] == 32
    del stream, last
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= threads, "the engines' end")


def test_request_whose_logits_are_not_finite_ends_with_its_text(directory: Path) -> None:
    core = ScriptedCore(lambda _: [3, 4, 9, 5], error_token=5)
    reason = "the model's logits are not finite"

    async def last_of(llm: LLM) -> RequestOutput:
        *_, last = [output async for output in llm.generate_async("a")]
        return last

    with llm_of(core, directory) as llm:
        outputs = [one(llm), list(llm.stream("a"))[-1], asyncio.run(last_of(llm))]
        (stopped,) = one(llm, SamplingParams(stop="END")).outputs
    for output in outputs:
        (answer,) = output.outputs
        assert output.finished
        assert (answer.text, answer.token_ids) == ("a beEND", [3, 4, 9])
        assert (answer.finish_reason, answer.stop_reason) == ("error", reason)
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, "END")


def test_kept_outputs_of_a_long_stream_share_its_tokens(directory: Path) -> None:
    num_tokens = 3000
    core = ScriptedCore(lambda _: [3] * num_tokens, manifest(max_seq_len=4 * num_tokens))
    with llm_of(core, directory) as llm:
        encoded = llm._admission.encode("a")
        params = SamplingParams(max_tokens=num_tokens, logprobs=0)
        answer = Answer(llm._admission.admit(0, encoded, params), llm.tokenizer)
    at = TokenLogprobs([3], [-1.0], [1])
    tracemalloc.start()
    outputs = []
    for _ in range(num_tokens):
        answer.completions[0].take(Update([3], [4], [at]))
        outputs.append(answer.output())
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 2000 * num_tokens
    for length, output in ((1, outputs[0]), (700, outputs[699]), (num_tokens, outputs[-1])):
        (completion,) = output.outputs
        assert completion.token_ids == [3] * length
        assert completion.depths == [4] * length
        assert completion.text == "a" * length
        assert completion.delta == "a"
        assert completion.logprobs == [at] * length


def test_outputs_are_compared_shown_and_copied_by_what_they_hold(directory: Path) -> None:
    with llm_of(says(3, 2), directory) as llm:
        first, second = one(llm).outputs[0], one(llm).outputs[0]
    shorter = replace(first, num_tokens=1)
    assert first == second == pickle.loads(pickle.dumps(first)) != shorter
    assert "text='a', delta='a', token_ids=[3, 2]" in repr(first)
    assert first != "a"


def test_abort_gives_what_there_is(directory: Path) -> None:
    core = ScriptedCore(forever, turns=threading.Semaphore(0))
    with llm_of(core, directory) as llm:
        stream = llm.stream("a", SamplingParams(max_tokens=60))
        core.turns.release()  # type: ignore[union-attr]
        assert next(stream).outputs[0].token_ids == [5]
        for request_id in (stream.request_id, stream.request_id, 10**6):
            llm.abort(request_id)
        step_until(core, lambda: not core.has_work())
        *_, last = stream
        llm.abort(stream.request_id)
    assert last.outputs[0].finish_reason is FinishReason.ABORT
    assert 1 <= len(last.outputs[0].token_ids) < 60


def test_error_of_the_engine_ends_a_stream(directory: Path) -> None:
    with llm_of(ScriptedCore(forever, fail_at_step=2), directory) as llm:
        stream = llm.stream("a")
        with pytest.raises(EngineError, match="scripted"):
            list(stream)
        assert list(stream) == []
        with pytest.raises(EngineError, match="scripted"):
            llm.generate("a")


def test_async_streams_run_side_by_side(directory: Path) -> None:
    core = ScriptedCore(lambda r: [int(r.prompt[0])] * 20)

    async def answer(llm: LLM, token: int) -> list[int]:
        async for output in llm.generate_async([token], SamplingParams(max_tokens=10)):
            last = output
        assert last.finished
        return last.outputs[0].token_ids

    async def answers(llm: LLM) -> list[list[int]]:
        return await asyncio.gather(*(answer(llm, token) for token in range(3, 13)))

    with llm_of(core, directory) as llm:
        assert asyncio.run(answers(llm)) == [[token] * 10 for token in range(3, 13)]


def test_leaving_cancelling_or_closing_an_async_stream_aborts(directory: Path) -> None:
    core = ScriptedCore(forever, turns=threading.Semaphore(0))
    params = SamplingParams(max_tokens=60)

    async def consume(llm: LLM) -> None:
        async for _ in llm.generate_async("a", params):
            pass

    async def leave(llm: LLM) -> None:
        async for _ in llm.generate_async("a", params):
            break
        closed = llm.generate_async("a", params)
        await closed.aclose()
        assert [output async for output in closed] == []
        task = asyncio.create_task(consume(llm))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with llm_of(core, directory) as llm:
        core.turns.release()  # type: ignore[union-attr]
        asyncio.run(leave(llm))
        step_until(core, lambda: len(core.aborted) == 3 and not core.has_work())


def test_loop_that_is_gone_does_not_disturb_other_callers(directory: Path) -> None:
    core = ScriptedCore(forever, turns=threading.Semaphore(0))
    kept = []

    async def start(llm: LLM) -> None:
        kept.append(llm.generate_async("a", SamplingParams(max_tokens=5)))

    with llm_of(core, directory) as llm:
        asyncio.run(start(llm))
        core.turns.release(100)  # type: ignore[union-attr]
        assert one(llm, SamplingParams(max_tokens=9)).finished


def test_bad_async_request_fails_where_it_is_made(directory: Path) -> None:
    async def ask(llm: LLM) -> None:
        with pytest.raises(RequestError, match="prompt: expected at least 1 token"):
            llm.generate_async([])

    with llm_of(ScriptedCore(forever), directory) as llm:
        asyncio.run(ask(llm))


# ---- life


def test_shutdown_is_final_and_may_come_twice(directory: Path) -> None:
    llm = llm_of(ScriptedCore(forever), directory)
    llm.shutdown()
    llm.shutdown()
    for call in (lambda: llm.generate("a"), llm.stats, lambda: llm.stream("a")):
        with pytest.raises(EngineError, match="was shut down"):
            call()


def test_collected_llm_stops_its_engine(directory: Path) -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    core = ScriptedCore(forever)
    llm = llm_of(core, directory)
    assert one(llm).finished
    del llm
    gc.collect()
    assert core.is_closed
    assert set(threading.enumerate()) == threads
    assert open_descriptors() == descriptors


def test_failed_start_leaves_no_engine(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    core = ScriptedCore(forever)
    with pytest.raises(ManifestError, match=r"tokenizer\.json: not a usable tokenizer"):
        llm_of(core, tmp_path)
    assert core.is_closed
    core = ScriptedCore(forever)
    client = client_of(core, tmp_path)
    with pytest.raises(EngineError, match="max_seq_len: expected at most 64"):
        LLM.over(client, tmp_path, EngineConfig(max_seq_len=65))
    assert core.is_closed


# ---- with a trained model


MAX_LEN = 64


@pytest.fixture(scope="module")
def ouro_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llm") / "ouro"
    build(
        BuildConfig(
            checkpoint_dir=EXAMPLES / "tiny-ouro",
            output_dir=directory,
            max_batch_size=4,
            max_input_len=MAX_LEN,
            max_seq_len=MAX_LEN,
            max_num_tokens=16,
            tokens_per_block=16,
        )
    )
    return directory


@pytest.fixture(scope="module")
def ouro(ouro_dir: Path) -> Iterator[LLM]:
    with LLM(ouro_dir, EngineConfig(num_threads=1), in_process=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def samples() -> list[tuple[str, str]]:
    lines = (EXAMPLES / "data" / "heldout_eval.jsonl").read_text().splitlines()[:100]
    return [(entry["prompt"], entry["answer"]) for entry in map(json.loads, lines)]


def nothing_is_held(llm: LLM) -> bool:
    stats = llm.stats()
    free = stats["num_free_units"] + stats["num_cached_units"]
    return free == stats["num_units"] and not stats["num_running"] and not stats["num_waiting"]


def test_trained_model_answers(ouro: LLM, samples: list[tuple[str, str]]) -> None:
    prompts, answers = (
        [sample[0] for sample in samples[:20]],
        [sample[1] for sample in samples[:20]],
    )
    outputs = ouro.generate(prompts)
    assert [output.outputs[0].text for output in outputs] == answers
    for output in outputs:
        assert output.outputs[0].stop_reason == 2
        assert set(output.outputs[0].depths) == {4}
        assert output.kv_bytes
        metrics = output.metrics
        assert metrics is not None
        assert metrics.ttft_s is not None
        assert 0 < metrics.ttft_s <= metrics.e2e_s
    again = ouro.generate(prompts[-1])[0]
    assert again.num_cached_tokens == 16 * ((len(again.prompt_token_ids) - 1) // 16)
    assert nothing_is_held(ouro)


def test_chat_and_stream_answer_like_generate(ouro: LLM, samples: list[tuple[str, str]]) -> None:
    prompt, answer = samples[0]
    (output,) = ouro.chat([{"role": "user", "content": prompt}])
    assert output.outputs[0].text == answer
    assert output.prompt_token_ids == ouro.generate(prompt)[0].prompt_token_ids
    deltas = [step.outputs[0].delta for step in ouro.stream(prompt)]
    assert "".join(deltas) == answer


@pytest.mark.parametrize("num_prompt", [1, 16, 62, 63])
@pytest.mark.parametrize("max_tokens", [1, None, 10**9])
def test_lengths_up_to_the_limit(ouro: LLM, num_prompt: int, max_tokens: int | None) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    (output,) = ouro.generate([5] * num_prompt, params)
    room = MAX_LEN - num_prompt
    assert len(output.outputs[0].token_ids) == (1 if max_tokens == 1 else room)
    assert nothing_is_held(ouro)


def test_empty_text_is_a_prompt_where_the_tokenizer_begins_it(ouro: LLM) -> None:
    (output,) = ouro.generate("", SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == [1]


def test_prompt_larger_than_the_pool_is_refused_and_the_next_request_works(ouro_dir: Path) -> None:
    one_page = 5 * (2 * 2 * 16 * 4 * 32 * 4)  # 4 planes and the null unit
    config = EngineConfig(kv_cache_bytes=one_page, num_threads=1)
    with LLM(ouro_dir, config, in_process=True) as llm:
        with pytest.raises(RequestError, match=r"need .* KV units, the pool has"):
            llm.generate([5] * 40)
        assert llm.generate([5] * 8, SamplingParams(max_tokens=4))[0].finished
        assert nothing_is_held(llm)


def test_seeded_answer_does_not_depend_on_its_neighbours(ouro: LLM) -> None:
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=12, ignore_eos=True)
    prompt = [1, 17, 40, 4, 41]
    alone = ouro.generate(prompt, seeded)[0].outputs[0].token_ids
    unseeded = SamplingParams(temperature=5.0, max_tokens=12, ignore_eos=True)
    neighbours = [
        unseeded,
        SamplingParams(temperature=0.8, seed=7, max_tokens=12),
        SamplingParams(max_tokens=12),
    ]
    order, others = random.Random(0), set()
    for _ in range(20):
        params = [seeded, *neighbours]
        order.shuffle(params)
        outputs = ouro.generate([prompt] * 4, params)
        answers = {
            id(of): output.outputs[0].token_ids for of, output in zip(params, outputs, strict=True)
        }
        assert answers[id(seeded)] == alone
        others.add(tuple(answers[id(unseeded)]))
    assert len(others) > 1


def test_aborts_at_any_point_free_everything_and_leave_others_as_alone(
    ouro: LLM, samples: list[tuple[str, str]]
) -> None:
    chance = random.Random(1)

    async def ask(prompt: str, patience: int | None) -> str | None:
        """The answer; or None after `patience` outputs and one of three ways to leave."""
        stream = ouro.generate_async(prompt)
        if patience == 0:
            ouro.abort(stream.request_id)
        async for output in stream:
            if output.finished:
                whole = output.outputs[0].finish_reason is FinishReason.STOP
                return output.outputs[0].text if whole else None
            if patience is not None and len(output.outputs[0].token_ids) >= patience:
                if chance.random() < 0.5:
                    await stream.aclose()
                    return None
                ouro.abort(stream.request_id)
                ouro.abort(stream.request_id)
        return None

    async def ask_all() -> list[str | None]:
        patience = [chance.choice([None, 0, 1, 2, 6, 7]) for _ in samples]
        asked = zip(samples, patience, strict=True)
        return await asyncio.gather(*(ask(sample[0], limit) for sample, limit in asked))

    ouro.abort(10**9)
    answers = asyncio.run(ask_all())
    wait_until(lambda: nothing_is_held(ouro), "all units free")
    given = [(got, right) for got, (_, right) in zip(answers, samples, strict=True) if got]
    assert len(given) > 20
    assert all(got == right for got, right in given)
    assert ouro.generate(samples[0][0])[0].outputs[0].text == samples[0][1]


def test_own_process_answers_like_this_one(ouro_dir: Path, samples: list[tuple[str, str]]) -> None:
    with LLM(ouro_dir, EngineConfig(num_threads=1)) as llm:
        prompts = [sample[0] for sample in samples[:8]]
        outputs = llm.generate(prompts, SamplingParams(loops=4, prefill_loops=2))
        assert sum(o.outputs[0].text == s[1] for o, s in zip(outputs, samples, strict=False)) >= 7
        assert nothing_is_held(llm)


def test_scripted_requests_are_what_the_engine_gets(directory: Path) -> None:
    core = ScriptedCore(forever)
    with llm_of(core, directory) as llm:
        params = SamplingParams(max_tokens=2, cache_salt="ü", priority=-3, top_k=5, min_p=0.1)
        llm.generate([7, 8], params)
    (request,) = core.seen
    assert isinstance(request, Request)
    assert (request.cache_salt, request.priority) == ("ü".encode(), -3)
    assert (request.sampler.top_k, request.sampler.min_p) == (5, 0.1)
    assert request.prompt.tolist() == [7, 8]
