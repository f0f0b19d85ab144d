"""What the border refuses, and how it says so."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from looptrt import cli
from looptrt.errors import EngineError, RequestError
from looptrt.runtime.llm import LLM
from looptrt.runtime.openai.bodies import ChatBody, CompletionBody
from looptrt.runtime.openai.server import ServerConfig
from tests.support.endpoint import MODEL, Endpoint, serving
from tests.support.scripted import DEADLINE_S, ScriptedCore, llm_of, write_tokenizer


def post_raw(endpoint: Endpoint, content: bytes, path: str = "completions") -> httpx.Response:
    return httpx.post(f"{endpoint.url}/v1/{path}", content=content, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"prompt": []}, "prompt: expected a text, a list", "prompt"),
        ({"prompt": ["a", [1]]}, "prompt: expected a text, a list", "prompt"),
        ({"prompt": {"a": 1}}, "prompt: expected a text, a list", "prompt"),
        ({"prompt": [1, True]}, "prompt: expected integer token ids", "prompt"),
        ({"prompt": [1, 48]}, "prompt: expected token ids from 0 to 47", "prompt"),
        ({"prompt": "\ud800"}, "prompt: not valid Unicode", "prompt"),
        ({"prompt": "a" * 600}, "prompt: expected at most max_input_len 512", "prompt"),
        ({"prompt": None}, "prompt: expected a text, a list", "prompt"),
        ({"temprature": 1}, "temprature: not supported", "temprature"),
        ({"temperature": -1}, "temperature: expected a finite number", "temperature"),
        ({"temperature": "hot"}, "temperature: expected a finite number", "temperature"),
        ({"seed": True}, "seed: expected an integer", "seed"),
        ({"max_tokens": -1}, "max_tokens: expected an integer", "max_tokens"),
        ({"max_tokens": False}, "max_tokens: expected an integer", "max_tokens"),
        ({"suffix": "x"}, "suffix: not supported", "suffix"),
        ({"best_of": 2}, "best_of: answers are not ranked", "best_of"),
        ({"logprobs": 10**6}, "logprobs: expected at most max_logprobs", "logprobs"),
        ({"logprobs": "5"}, "logprobs: Input should be a valid integer", "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: not supported; use echo", "prompt_logprobs"),
        ({"exclude_input": False}, "exclude_input: not supported; use echo", "exclude_input"),
        ({"stream_options": {"include_usage": True}}, "stream_options: only", "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage: expected true or false",
            "stream_options",
        ),
        (
            {"stream": True, "stream_options": {"includ_usage": True}},
            "stream_options: 'includ_usage': not supported",
            "stream_options",
        ),
        ({"cls": 1}, "cls: not supported", "cls"),
        ({"self": 1}, "self: not supported", "self"),
        ({"max_tokens": 0.0}, "max_tokens: expected an integer", "max_tokens"),
        ({"logit_bias": {"1": "a"}}, "logit_bias: expected numbers", "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias: expected numbers", "logit_bias"),
        ({"bad_words": ["a"] * 1025}, "bad_words: expected at most 1024 entries", "bad_words"),
        ({"bad_words": ["a" * 1025]}, "bad_words: expected at most 1024 char", "bad_words"),
        ({"prompt": "a" * 50_000}, "prompt: expected at most 40960 characters", "prompt"),
        ({"stream": "yes"}, "stream: Input should be a valid boolean", "stream"),
        ({"n": 10**4}, "prompt: 1 prompts with n 10000", "prompt"),
        ({"n": 0}, "n: expected an integer", "n"),
        ({"loops": 5}, "loops: expected from 1 to 4", "loops"),
        ({"logit_bias": {"48": 1}}, "logit_bias: expected token ids from 0 to 47", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias: expected token ids from 0 to 47", "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias: expected token ids from 0 to 47", "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias: expected numbers from -100", "logit_bias"),
        ({"use_beam_search": True}, "use_beam_search: not supported; there is no", None),
        ({"stop": [""]}, "stop: an empty entry", "stop"),
        ({"model": 5}, "model: Input should be a valid string", "model"),
    ],
)
def test_bad_field_is_named(
    endpoint: Endpoint, fields: dict[str, Any], message: str, param: str | None
) -> None:
    content = json.dumps({"model": MODEL, "prompt": "a", **fields}).encode()
    made = post_raw(endpoint, content)
    error = made.json()["error"]
    assert made.status_code == 400, error
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == (param or next(iter(fields)))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}", b"[1]", b"null"],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_body_that_is_no_json_object_is_a_bad_request(
    endpoint: Endpoint, content: bytes, path: str
) -> None:
    made = post_raw(endpoint, content, path)
    assert made.status_code == 400
    assert made.json()["error"]["message"].startswith("body: ")


@pytest.mark.parametrize(
    "fields",
    [
        {"x" * 10**6: 1},
        {"logit_bias": {"x" * 10**6: "a"}},
        {"stream": True, "stream_options": {"x" * 10**6: 1}},
        {"chat_template_kwargs": {"x" * 10**6: 1}},
    ],
)
def test_refusal_of_something_long_is_short(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    for path, prompt in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        made = endpoint.post(path, **prompt, **fields)
        assert made.status_code == 400
        assert len(made.content) < 1000


def test_body_full_of_errors_costs_no_more_than_its_first() -> None:
    wrong = {
        "model": MODEL,
        "messages": [1] * 200_000,
        "logit_bias": {str(i): "" for i in range(9)},
    }
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"messages\[0\]: expected a JSON object, got 1"):
            ChatBody.of(wrong).conversation()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 2**20  # an error for each entry takes ten times as much


def test_others_are_served_while_a_long_body_is_read(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, may_go_on = threading.Event(), threading.Event()

    def slow(values: object) -> CompletionBody:
        reading.set()
        assert may_go_on.wait(DEADLINE_S)
        return CompletionBody.model_validate(values)

    monkeypatch.setattr(CompletionBody, "of", slow)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(endpoint.post, "completions", prompt="a", max_tokens=1)
        assert reading.wait(DEADLINE_S)
        try:
            assert httpx.get(f"{endpoint.url}/health", timeout=DEADLINE_S).status_code == 200
        finally:
            may_go_on.set()
        assert asked.result(DEADLINE_S).status_code == 200


def test_not_a_number_is_refused(endpoint: Endpoint) -> None:
    content = b'{"model": "tiny", "prompt": "a", "temperature": NaN}'
    assert "temperature: expected a finite" in post_raw(endpoint, content).text


def test_missing_field_is_named(endpoint: Endpoint) -> None:
    made = httpx.post(f"{endpoint.url}/v1/completions", json={"prompt": "a"})
    assert (made.status_code, made.json()["error"]["message"]) == (400, "model: Field required")


def test_body_beyond_the_limit_is_refused(ouro: LLM) -> None:
    with serving(ouro, max_body_bytes=1000) as made:
        assert made.post("completions", prompt="a" * 100).status_code == 200
        refused = made.post("completions", prompt="a" * 1000)
        assert (refused.status_code, "1000 bytes" in refused.text) == (413, True)


def test_body_that_does_not_come_is_given_up(ouro: LLM) -> None:
    with serving(ouro, io_timeout_s=0.2) as made:
        host, port = made.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert sock.recv(4096).startswith(b"HTTP/1.1 408")


def test_other_models_are_not_found(endpoint: Endpoint) -> None:
    client = endpoint.client()
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, client.models.retrieve(MODEL).id) == (MODEL, "looptrt", MODEL)


def test_unknown_paths_and_methods_are_errors_of_the_same_shape(endpoint: Endpoint) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405)):
        made = httpx.request(method, f"{endpoint.url}{path}")
        assert made.status_code == status
        assert set(made.json()["error"]) == {"message", "type", "param", "code"}


def test_key_is_needed_for_the_api_and_nothing_else(ouro: LLM) -> None:
    with serving(ouro, api_key="secret") as made:
        for key in ("wrong", "secre", "secret2"):
            with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
                made.client(api_key=key).models.list()
        assert made.post("completions", prompt="a").status_code == 401
        assert made.client(api_key="secret").models.list().data[0].id == MODEL
        for path in ("health", "version", "metrics"):
            assert httpx.get(f"{made.url}/{path}").status_code == 200
        assert made.figure("looptrt_http_responses_total", path="/v1/models", status="401") == 3


def test_fault_of_ours_is_a_server_error_without_details(
    ouro: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_labels: object) -> list[Any]:
        raise ZeroDivisionError("a secret of the server")

    with serving(ouro) as made:
        monkeypatch.setattr(ouro, "metrics", broken)
        failed = httpx.get(f"{made.url}/metrics")
    assert failed.status_code == 500
    assert failed.json()["error"]["type"] == "server_error"
    assert "secret" not in failed.text


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"model": "a\nb"},
        {"api_key": " "},
        {"api_key": "é"},
        {"api_key": ""},
        {"api_key": "secret\n"},
        {"max_body_bytes": 0},
        {"io_timeout_s": 0.0},
        {"drain_timeout_s": -1.0},
        {"drain_timeout_s": float("nan")},
    ],
)
def test_setting_out_of_range_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="expected"):
        ServerConfig(**{"model": MODEL, **fields})


def test_command_refuses_a_port_that_is_taken_before_it_loads_anything(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = endpoint.url.rpartition(":")[2]
    assert cli.main(["serve", str(tmp_path / "nothing"), "--port", port]) == 2
    assert f"host 127.0.0.1, port {port}: " in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path / "nothing"), "--port", "99999"]) == 2
    assert cli.main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 2
    assert "nothing" in capsys.readouterr().err


def test_nothing_is_queued_unless_every_prompt_can_be(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<a>", "b"])
    core = ScriptedCore(lambda _: [1])
    with llm_of(core, tmp_path) as llm, serving(llm) as made:
        assert made.post("completions", prompt=[[1], [10**6]]).status_code == 400
        assert made.post("completions", prompt=[[1], [1]], max_tokens=1).status_code == 200
    assert len(core.seen) == 2


def test_command_without_the_http_packages_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from looptrt.cli import main\n"
        "sys.exit(main(['serve', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, "install looptrt[serve]" in done.stderr) == (2, True)


def test_bodies_are_described_without_dangling_references(endpoint: Endpoint) -> None:
    described = httpx.get(f"{endpoint.url}/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert "model" in body["schema"]["required"]
        assert "$ref" not in json.dumps(body)
