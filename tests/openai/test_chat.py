"""`/v1/chat/completions` through the public client, held against the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.endpoint import MODEL, Endpoint, serving
from tests.support.scripted import ScriptedCore, llm_of, manifest, write_tokenizer

CONTENT = "a=b;b=3;c=a;d=4;e=5;f=6;?abc>"
MESSAGES: Any = [{"role": "user", "content": CONTENT}]


def test_answer_is_that_of_the_python_api(endpoint: Endpoint, ouro: LLM) -> None:
    (expected,) = ouro.chat([MESSAGES], SamplingParams(max_tokens=16))
    made = endpoint.client().chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=16
    )
    (choice,) = made.choices
    assert choice.message.content == expected.outputs[0].text
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_stream_begins_with_the_role_and_joins_to_the_whole(endpoint: Endpoint) -> None:
    asked: Any = {"n": 3, "seed": 3, "temperature": 1.5, "max_tokens": 9}
    client = endpoint.client()
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked
    )
    texts, roles, ends, usage = [""] * 3, [], [], None
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            if not texts[choice.index] and choice.index not in [at for at, _ in roles]:
                roles.append((choice.index, choice.delta.role))
            else:
                assert choice.delta.role is None
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(roles) == [(index, "assistant") for index in range(3)]
    assert sorted(ends) == sorted(choice.finish_reason for choice in whole.choices)
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_are_those_of_the_python_api(endpoint: Endpoint, ouro: LLM) -> None:
    (expected,) = ouro.chat([MESSAGES], SamplingParams(max_tokens=4, logprobs=3))
    scored = expected.outputs[0].logprobs
    assert scored is not None
    fields: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 4}
    client = endpoint.client().chat.completions
    made = client.create(logprobs=True, top_logprobs=3, **fields)
    assert made.choices[0].logprobs is not None
    content = made.choices[0].logprobs.content
    assert content is not None
    assert [entry.logprob for entry in content] == [at.logprobs[0] for at in scored]
    assert "".join(entry.token for entry in content) == made.choices[0].message.content
    for entry, at in zip(content, scored, strict=True):
        assert entry.bytes == list(entry.token.encode())
        best = sorted(zip(at.ranks, at.logprobs, strict=True))[:3]
        assert [top.logprob for top in entry.top_logprobs] == [value for _, value in best]
    bare = client.create(logprobs=True, **fields)
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.content is not None
    assert all(entry.top_logprobs == [] for entry in bare.choices[0].logprobs.content)
    assert client.create(**fields).choices[0].logprobs is None


def test_parts_of_text_are_joined(endpoint: Endpoint, ouro: LLM) -> None:
    parts = [{"type": "text", "text": text} for text in (CONTENT[:12], CONTENT[12:])]
    body = {"messages": [{"role": "user", "content": parts}], "return_token_ids": True}
    (choice,) = endpoint.post("chat/completions", **body).json()["choices"]
    joined = [{"role": "user", "content": f"{CONTENT[:12]}\n{CONTENT[12:]}"}]
    assert choice["prompt_token_ids"] == ouro.chat_prompt(joined)


def test_thinking_is_the_templates_to_know(endpoint: Endpoint, tmp_path: Path) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    refused = endpoint.post("chat/completions", **body)
    assert refused.status_code == 400
    assert "does not use it" in refused.json()["error"]["message"]
    write_tokenizer(tmp_path, ["<a>", *"abcdefghijklmnopqrstuvwxyz<>/|_\n "])
    core = ScriptedCore(lambda _: [2])
    core.manifest = manifest(max_seq_len=512)
    with llm_of(core, tmp_path) as llm, serving(llm) as made:
        plain = made.post("chat/completions", messages=MESSAGES)
        body["chat_template_kwargs"] = {"enable_thinking": True}
        told = made.post("chat/completions", **body)
        assert (plain.status_code, told.status_code) == (200, 200)
    lengths = [request.num_prompt for request in core.seen]
    assert lengths[0] != lengths[1], "the template was not told"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: expected a list of at least 1 message"),
        ({"messages": [{"role": "user"}]}, "messages[0]: expected a string 'content'"),
        ({"messages": "hi"}, "messages: Input should be a valid list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0]: expected parts of type text",
        ),
        (
            {"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]},
            "messages[0]: 'tool_call_id': not supported",
        ),
        ({"tools": [{"type": "function"}]}, "tools: not supported; tools are not called"),
        ({"top_logprobs": 2}, "top_logprobs: only with logprobs true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens: expected the same"),
        ({"max_completion_tokens": 0}, "max_tokens: expected an integer from 1"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs: only enable_thinking"),
        ({"response_format": {"type": "json_object"}}, "response_format: not supported"),
        ({"echo": True}, "echo: not supported"),
        ({"logprobs": 2}, "logprobs: Input should be a valid boolean"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    endpoint: Endpoint, fields: dict[str, Any], message: str
) -> None:
    made = endpoint.post("chat/completions", **{"messages": MESSAGES, **fields})
    assert made.status_code == 400
    assert made.json()["error"]["message"].startswith(message)


def test_neutral_values_of_what_is_not_supported_are_fine(endpoint: Endpoint) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "logit_bias": None,
        "audio": None,
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
    }
    assert endpoint.post("chat/completions", messages=MESSAGES, **neutral).status_code == 200
