"""`/v1/completions` through the public client, held against the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.endpoint import MODEL, Endpoint, serving
from tests.support.scripted import ScriptedCore, llm_of, write_tokenizer

FACTS = "a=b;b=3;c=a;d=4;e=5;f=6;"
PROMPTS = [f"{FACTS}?{query}>" for query in ("abc", "cab", "def")]


def texts_of(chunks: Any) -> dict[int, str]:
    """Text of each choice of a stream, joined."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize("as_ids", [False, True])
def test_answers_are_those_of_the_python_api(endpoint: Endpoint, ouro: LLM, as_ids: bool) -> None:
    expected = ouro.generate(PROMPTS, SamplingParams(max_tokens=16))
    prompts: Any = [ouro.encode(text).token_ids for text in PROMPTS] if as_ids else PROMPTS
    client = endpoint.client()
    many = client.completions.create(model=MODEL, prompt=prompts, temperature=0)
    one = client.completions.create(model=MODEL, prompt=prompts[0], temperature=0)
    texts = [output.outputs[0].text for output in expected]
    assert [choice.text for choice in many.choices] == texts
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in many.choices} == {"stop"}
    assert (one.choices[0].text, one.object) == (texts[0], "text_completion")
    assert many.usage is not None
    num_tokens = sum(output.outputs[0].num_tokens for output in expected)
    assert many.usage.completion_tokens == num_tokens
    assert many.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in expected)
    assert many.usage.total_tokens == many.usage.prompt_tokens + num_tokens
    assert many.usage.loops_used == 4 * num_tokens  # type: ignore[attr-defined]


def test_stream_of_many_prompts_and_answers_joins_to_the_whole(
    endpoint: Endpoint, ouro: LLM
) -> None:
    asked = {"n": 2, "temperature": 1.5, "seed": 7, "max_tokens": 12}
    expected = ouro.generate(PROMPTS, SamplingParams(**asked))  # type: ignore[arg-type]
    texts = [one.text for output in expected for one in output.outputs]
    client = endpoint.client()
    whole = client.completions.create(model=MODEL, prompt=PROMPTS, **asked)  # type: ignore[call-overload]
    assert [choice.text for choice in whole.choices] == texts
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPTS,
            stream=True,
            stream_options={"include_usage": True},
            **asked,  # type: ignore[arg-type]
        )
    )
    assert texts_of(chunks) == dict(enumerate(texts))
    *before, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert all(chunk.usage is None for chunk in before)
    ends = [c.index for chunk in before for c in chunk.choices if c.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2, 3, 4, 5]
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_without_usage_has_none(endpoint: Endpoint) -> None:
    stream = endpoint.client().completions.create(model=MODEL, prompt=PROMPTS[0], stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_defaults_are_openais(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<a>", "b", "c"])
    core = ScriptedCore(lambda request: [1] * request.max_new_tokens)
    with llm_of(core, tmp_path) as llm, serving(llm) as made:
        client = made.client()
        client.completions.create(model=MODEL, prompt="b")
        client.completions.create(model=MODEL, prompt="b", seed=-1, max_tokens=5)
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "b"}])
    completion, seeded, chat = core.seen
    assert (completion.max_new_tokens, completion.sampler.temperature) == (16, 1.0)
    assert (seeded.max_new_tokens, seeded.sampler.seed) == (5, 2**63 - 1)
    assert chat.max_new_tokens == core.manifest.limits.max_seq_len - chat.num_prompt


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_logprobs_are_those_of_the_python_api(
    endpoint: Endpoint, ouro: LLM, stream: bool
) -> None:
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2)
    (expected,) = ouro.generate(PROMPTS[0], params)
    made = endpoint.client().completions.create(
        model=MODEL,
        prompt=PROMPTS[0],
        temperature=0,
        max_tokens=3,
        logprobs=2,
        echo=True,
        stream=stream,
    )
    text, tokens, values, tops, offsets = "", [], [], [], []  # type: ignore[var-annotated]
    for part in made if stream else [made]:
        (choice,) = part.choices  # type: ignore[union-attr]
        text += choice.text
        logprobs = choice.logprobs
        tokens += logprobs.tokens
        values += logprobs.token_logprobs
        tops += logprobs.top_logprobs
        offsets += logprobs.text_offset
    answer = expected.outputs[0]
    assert text == PROMPTS[0] + answer.text
    assert expected.prompt_logprobs is not None
    assert answer.logprobs is not None
    scored = [*expected.prompt_logprobs, *answer.logprobs]
    assert (values[0], tops[0]) == (None, None)
    assert values[1:] == [at.logprobs[0] for at in scored[1:] if at is not None]
    assert [max(top.values()) for top in tops[1:]] == [max(at.logprobs) for at in scored[1:] if at]
    for top, token, value in zip(tops[1:], tokens[1:], values[1:], strict=True):
        assert top[token] == value
    assert tokens[0] == "<bos>"
    assert offsets[0] == offsets[1] == 0
    ends = [*offsets[2:], len(text)]
    assert [text[a:b] for a, b in zip(offsets[1:], ends, strict=True)] == tokens[1:]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_with_echo_scores_the_prompt(endpoint: Endpoint, ouro: LLM, stream: bool) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    expected = ouro.generate(PROMPTS[:2], params)
    made: Any = endpoint.client().completions.create(
        model=MODEL, prompt=PROMPTS[:2], max_tokens=0, logprobs=0, echo=True, stream=stream
    )
    parts = list(made) if stream else [made]
    values: dict[int, list[float | None]] = {0: [], 1: []}
    for part in parts:
        for choice in part.choices:
            values[choice.index] += choice.logprobs.token_logprobs
    for index, output in enumerate(expected):
        assert output.prompt_logprobs is not None
        wanted = [at and at.logprobs[0] for at in output.prompt_logprobs]
        assert values[index] == wanted
    if not stream:
        assert [choice.text for choice in made.choices] == PROMPTS[:2]
        assert {choice.finish_reason for choice in made.choices} == {"length"}
        assert made.usage.completion_tokens == 0
    silent = endpoint.post("completions", prompt=PROMPTS[0], max_tokens=0).json()
    assert silent["choices"][0]["text"] == ""


def test_our_own_fields_are_body_keys(endpoint: Endpoint, ouro: LLM) -> None:
    params = SamplingParams(max_tokens=7, loops=2, prefill_loops=1)
    (expected,) = ouro.generate(PROMPTS[0], params)
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 7, "return_token_ids": True}
    made = endpoint.post("completions", loops=2, prefill_loops=1, **body).json()
    (choice,) = made["choices"]
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert choice["loops_used"] == expected.outputs[0].depths == [2] * len(choice["token_ids"])
    assert choice["prompt_token_ids"] == expected.prompt_token_ids
    assert made["usage"]["loops_used"] == sum(choice["loops_used"])
    shallow = endpoint.post("completions", exit_at_step=0, **body).json()["choices"][0]
    assert set(shallow["loops_used"]) == {1}


def test_stop_string_cuts_the_text_and_is_named(endpoint: Endpoint) -> None:
    made = endpoint.post("completions", prompt=PROMPTS[0], temperature=0, stop=["b", "z"]).json()
    (choice,) = made["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a3", "stop", "b")


def test_usage_tells_cached_prompt_tokens(endpoint: Endpoint) -> None:
    prompt = f"{FACTS}g=h;h=1;i=2;?ghi>"
    fields = {"prompt": prompt, "temperature": 0, "cache_salt": "only here"}
    cold, warm = (endpoint.post("completions", **fields).json()["usage"] for _ in range(2))
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["prompt_tokens_details"]["cached_tokens"] == 32


def test_logit_bias_moves_the_answer(endpoint: Endpoint, ouro: LLM) -> None:
    token = ouro.encode("z").token_ids[-1]
    fields = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 1}
    forced = endpoint.post("completions", logit_bias={str(token): 100}, **fields).json()
    assert forced["choices"][0]["text"] == "z"
    plain = endpoint.post("completions", logit_bias={}, **fields).json()
    assert plain["choices"][0]["text"] == "a"


def test_engine_without_a_tokenizer_answers_token_ids(tmp_path: Path) -> None:
    core = ScriptedCore(lambda request: [5, 6, 7])
    with llm_of(core, tmp_path) as llm, serving(llm) as made:
        fields = {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}
        (choice,) = made.post("completions", **fields).json()["choices"]
        assert (choice["token_ids"], choice["text"]) == ([5, 6, 7], "")
        refused = made.post("completions", prompt="text")
        assert refused.status_code == 400
        assert "no tokenizer.json" in refused.json()["error"]["message"]
