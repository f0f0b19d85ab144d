"""Every way to ask the real server gives the Python API's answer and ends exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from looptrt.runtime.llm import LLM
from looptrt.runtime.outputs import CompletionOutput
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.triton.tensors import ENSEMBLE
from running_server import RunningServer
from tests.support.scripted import wait_until
from tests.triton.clients import (
    Reply,
    ask_grpc,
    figure,
    generate,
    generate_stream,
    grpc_stream,
    infer,
    opened_stream,
    wait_until_idle,
)
from tests.triton.clients import arrays as arrays_of

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
PROMPT = "Hällo, wörld"
SAMPLED = {"temperature": 1.0, "seed": 7}


def expected(llm: LLM, prompt: str | list[int] = PROMPT, **params: Any) -> CompletionOutput:
    (output,) = llm.generate([prompt], SamplingParams(**params))
    return output.outputs[0]


def ids_of(reply: Reply) -> list[int]:
    return [int(one) for response in reply.responses for one in response["output_ids"].ravel()]


def num_aborted(server: RunningServer) -> float:
    return figure(server, "looptrt_requests_total", 'finish_reason="abort"')


Ask = Callable[..., Reply]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_rows_of_a_batch_may_want_different_numbers_of_answers(
    server: RunningServer, model: str
) -> None:
    one = arrays_of(model, text_input=PROMPT, max_tokens=3, num_return_sequences=1)
    rows = {name: np.repeat(array, 2, axis=0) for name, array in one.items()}
    rows["num_return_sequences"][1] = 3
    with grpc_stream(server) as stream:
        stream.ask(model, rows)
        reply = stream.reply()
        stream.close()
        assert (reply.error, reply.num_final + stream.num_left()) == (None, 1)
    places = [
        (response["batch_index"].item(), response.get("sequence_index", np.zeros(1)).item())
        for response in reply.responses
    ]
    assert sorted(places) == [(0, 0), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize(
    ("ask", "stream"),
    [(ask_grpc, True), (ask_grpc, False), (generate, False), (generate_stream, True)],
    ids=["grpc stream", "grpc whole", "generate", "generate_stream"],
)
def test_text_equals_the_python_apis_however_it_comes(
    server: RunningServer, llm: LLM, model: str, ask: Ask, stream: bool
) -> None:
    answer = expected(llm, max_tokens=100, temperature=1.0, seed=7)
    reply = ask(server, model, text_input=PROMPT, max_tokens=100, stream=stream, **SAMPLED)
    assert reply.error is None
    assert reply.text() == answer.text
    assert reply.num_final == 1
    assert (len(reply.responses) > 1) == stream
    assert reply.last("finish_reason") == answer.finish_reason


@pytest.mark.parametrize("streaming", [True, False])
def test_ids_equal_the_python_apis(server: RunningServer, llm: LLM, streaming: bool) -> None:
    answer = expected(llm, [5, 6, 7], max_tokens=20, temperature=1.0, seed=7, logprobs=0)
    reply = ask_grpc(
        server,
        "tensorrt_llm",
        input_ids=[5, 6, 7],
        input_lengths=3,
        request_output_len=20,
        streaming=streaming,
        return_log_probs=True,
        return_num_output_tokens=True,
        **SAMPLED,
    )
    assert ids_of(reply) == answer.token_ids
    assert reply.num_final == 1
    assert answer.logprobs is not None
    scores = [one for response in reply.responses for one in response["output_log_probs"].ravel()]
    assert scores == pytest.approx([at.logprobs[0] for at in answer.logprobs], rel=1e-6)
    assert reply.last("cum_log_probs") == pytest.approx(answer.cumulative_logprob, rel=1e-5)
    loops = [one for response in reply.responses for one in response["loops_used"].ravel()]
    assert loops == answer.depths
    assert reply.last("num_output_tokens") == 20


@pytest.mark.parametrize("opts_in", [True, False])
@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm"])
def test_one_response_is_final_with_and_without_the_empty_final_opt_in(
    server: RunningServer, model: str, opts_in: bool
) -> None:
    text = {"text_input": PROMPT, "max_tokens": 5, "stream": True}
    ids = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 5, "streaming": True}
    values = ids if model == "tensorrt_llm" else text
    options = {"enable_empty_final_response": opts_in, "request_id": "one"}
    reply = ask_grpc(server, model, options=options, **values)
    assert reply.num_final == 1
    assert reply.last("finish_reason") == "length"


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 2}, "beam_width: not supported"),
        ({"loops": 9}, "loops: expected from 1 to 4, got 9"),
        ({"max_tokens": 0}, "request_output_len (max_tokens): expected"),
        ({"text_input": "x" * 200}, "max_input_len"),
        ({"guided_decoding_guide_type": "json"}, "guided_decoding_guide_type: not supported"),
        ({"decoder_text_input": "x"}, "not supported; looped models are decoders"),
    ],
)
def test_error_before_the_first_token_is_the_only_message(
    server: RunningServer, model: str, values: dict[str, Any], message: str
) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 5, **values}
    for ask, stream in ((ask_grpc, True), (ask_grpc, False), (generate, False)):
        reply = ask(server, model, **asked, stream=stream)
        assert reply.responses == []
        assert reply.num_final == 1
        assert reply.error is not None
        assert message in reply.error
    assert generate(server, model, **asked).status == 400
    assert generate_stream(server, model, **asked, stream=True).error is not None


@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm"])
@pytest.mark.parametrize("over", ["grpc", "http"])
def test_plain_infer_of_a_decoupled_model_is_refused_clearly(
    server: RunningServer, model: str, over: str
) -> None:
    text = {"text_input": PROMPT, "max_tokens": 5}
    ids = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 5}
    reply = infer(server, model, over=over, **(ids if model == "tensorrt_llm" else text))
    assert reply.error is not None
    assert "decoupled" in reply.error


def test_several_answers_are_no_single_generate_but_come_over_grpc(
    server: RunningServer, llm: LLM
) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 6, "num_return_sequences": 3, **SAMPLED}
    (whole,) = llm.generate([PROMPT], SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=7))
    for model in TEXT_MODELS:
        reply = ask_grpc(server, model, **asked)
        assert reply.num_final == 1
        by_index = {
            int(one["sequence_index"].item()): one["text_output"].item().decode()
            for one in reply.responses
        }
        assert by_index == {one.index: one.text for one in whole.outputs}
    assert generate(server, "ensemble", **asked).error is not None


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize(
    "outputs",
    [["text_output"], ["finish_reason"], ["loops_used", "text_output"], ["cum_log_probs"]],
)
def test_subset_of_outputs_comes_alone_and_ends(
    server: RunningServer, model: str, outputs: list[str]
) -> None:
    for stream in (True, False):
        reply = ask_grpc(
            server,
            model,
            outputs,
            text_input=PROMPT,
            max_tokens=4,
            stream=stream,
            return_log_probs=True,
        )
        assert reply.error is None
        assert reply.num_final == 1
        assert {name for one in reply.responses for name in one} == {*outputs}


def test_every_output_that_is_asked_for_comes(server: RunningServer) -> None:
    never = {"context_logits", "generation_logits", "batch_index", "sequence_index"}
    for model in TEXT_MODELS:
        reply = ask_grpc(
            server,
            model,
            text_input=PROMPT,
            max_tokens=4,
            return_log_probs=True,
            return_perf_metrics=True,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
        )
        names = {tensor.name for tensor in ENSEMBLE.outputs}
        assert set(reply.responses[-1]) == names - never
        assert reply.last("num_input_tokens") == len(PROMPT.encode())
        assert reply.last("num_output_tokens") == 4
        assert reply.last("arrival_time_ns") < reply.last("last_token_time_ns")


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_stop_words_end_the_text_before_them_in_stream_and_whole(
    server: RunningServer, llm: LLM, model: str
) -> None:
    text = expected(llm, max_tokens=40, temperature=1.0, seed=7).text
    stop = text[3:5]
    before = text[:3]
    assert text.index(stop) == 3
    for stream in (True, False):
        asked = {"text_input": PROMPT, "max_tokens": 40, "stream": stream, **SAMPLED}
        reply = ask_grpc(server, model, stop_words=["", stop], **asked)
        assert reply.text() == before
        assert (reply.last("finish_reason"), reply.last("stop_reason")) == ("stop", stop)
    wait_until_idle(server)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_prompt_comes_in_front_where_a_whole_answer_asks_for_it(
    server: RunningServer, llm: LLM, model: str
) -> None:
    asked = {"text_input": PROMPT, "max_tokens": 5, "exclude_input_in_output": False}
    assert generate(server, model, **asked).text() == PROMPT + expected(llm, max_tokens=5).text
    streamed = ask_grpc(server, model, stream=True, **asked)
    assert streamed.text() == expected(llm, max_tokens=5).text


def test_our_fields_reach_the_engine(server: RunningServer, llm: LLM) -> None:
    asked = {"loops": 3, "prefill_loops": 2, "cache_salt": "a", "priority": 1, "noise_seed": 0}
    answer = expected(llm, max_tokens=8, **asked)
    for model in TEXT_MODELS:
        reply = generate(server, model, text_input=PROMPT, max_tokens=8, **asked)
        assert reply.text() == answer.text
        assert reply.last("loops_used") == [3] * 8


def test_words_of_a_bias_move_the_answer_as_in_the_python_api(
    server: RunningServer, llm: LLM
) -> None:
    assert llm.tokenizer is not None
    (token_id,) = llm.tokenizer.encode("z")
    bias = [0.0] * 256
    bias[token_id] = 100.0
    assert expected(llm, max_tokens=4, embedding_bias=bias).text == "zzzz"
    for model in TEXT_MODELS:
        reply = ask_grpc(
            server,
            model,
            text_input=PROMPT,
            max_tokens=4,
            embedding_bias_words=["z"],
            embedding_bias_weights=[100.0],
        )
        assert reply.text() == "zzzz"


def test_second_request_finds_the_pages_of_the_first(server: RunningServer) -> None:
    asked = {"text_input": "the same beginning of a prompt", "max_tokens": 2, "cache_salt": "s"}
    found = [generate(server, "ensemble", **asked).last("num_cached_tokens") for _ in range(2)]
    assert found[0] == 0
    assert found[1] > 0


def test_preprocessing_and_postprocessing_answer_plain_requests(
    server: RunningServer, llm: LLM
) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPT)
    for over in ("grpc", "http"):
        reply = infer(
            server,
            "preprocessing",
            over=over,
            QUERY=PROMPT,
            REQUEST_OUTPUT_LEN=5,
            STOP_WORDS_DICT=["ab", "", "c"],
        )
        tensors = reply.responses[0]
        assert tensors["INPUT_ID"].ravel().tolist() == ids
        assert tensors["REQUEST_INPUT_LEN"].item() == len(ids)
        words = llm.tokenizer.encode("abc")
        assert tensors["STOP_WORDS_IDS"].tolist() == [[words, [2, 3, -1]]]
        text = infer(
            server,
            "postprocessing",
            over=over,
            TOKENS_BATCH=[[*ids, 9, 9]],
            SEQUENCE_LENGTH=len(ids),
        )
        assert text.responses[0]["OUTPUT"].item().decode() == PROMPT


@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm"])
def test_stream_that_is_cancelled_frees_the_engine_long_before_its_end(
    server: RunningServer, model: str
) -> None:
    text = {"text_input": PROMPT, "max_tokens": 110, "end_id": -1, "stream": True}
    ids = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 110, "streaming": True}
    values = ids | {"end_id": -1} if model == "tensorrt_llm" else text
    wait_until_idle(server)
    before = num_aborted(server)
    with grpc_stream(server) as stream:
        stream.ask(model, arrays_of(model, **values))
        stream.next()
    wait_until(lambda: num_aborted(server) == before + 1, "the request's end in the engine")
    wait_until_idle(server)


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
def test_client_that_leaves_generate_stream_frees_the_engine(
    server: RunningServer, model: str
) -> None:
    wait_until_idle(server)
    before = num_aborted(server)
    body = {"text_input": PROMPT, "max_tokens": 110, "end_id": -1, "stream": True}
    with opened_stream(server, model, **body) as response:
        assert response.readline().startswith(b"data:")
    wait_until(lambda: num_aborted(server) == before + 1, "the request's end in the engine")
    wait_until_idle(server)


def test_timeout_of_a_request_ends_it_as_an_error(server: RunningServer) -> None:
    values = {"text_input": PROMPT, "max_tokens": 110, "end_id": -1}
    for model in TEXT_MODELS:
        reply = ask_grpc(server, model, options={"timeout": 1000}, **values)
        assert reply.num_final == 1
        assert reply.error is not None
        assert "timeout" in reply.error
    wait_until_idle(server)


def test_metrics_port_has_the_names_that_dashboards_know(server: RunningServer) -> None:
    generate(server, "ensemble", text_input=PROMPT, max_tokens=3)
    wait_until_idle(server)
    names = {name.partition("{")[0] for name in server.figures()}
    assert {
        "nv_trt_llm_request_metrics",
        "nv_trt_llm_kv_cache_block_metrics",
        "nv_trt_llm_inflight_batcher_metrics",
        "nv_trt_llm_general_metrics",
        "nv_llm_input_token_len_bucket",
        "nv_llm_output_token_len_bucket",
        "looptrt_time_to_first_token_seconds_bucket",
        "looptrt_time_per_output_token_seconds_bucket",
        "looptrt_prefix_hit_tokens_total",
        "looptrt_loop_depth_bucket",
        "looptrt_kv_units",
    } <= names
    ended = sum(value for name, value in server.figures().items() if "requests_total" in name)
    assert figure(server, "nv_llm_output_token_len_count") <= ended
