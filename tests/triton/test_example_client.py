"""The example client against the real server: every way gives the Python API's answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from looptrt.builder.build import BuildConfig, build
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.triton.tensors import MODELS
from running_server import RunningServer, running_server
from triton_client import FIELDS, REPEATABLE, WAYS, Question, main

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "n=5;a=0;y=s;m=7;f=2;s=m;p=y;t=y;?mft>"
LONG = ("--max_tokens=400", "--min_tokens=400")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("client") / "engine"
    build(BuildConfig(checkpoint_dir=EXAMPLES / "tiny-huginn", output_dir=directory))
    return directory


@pytest.fixture(scope="module")
def server(server_env: None, engine_dir: Path) -> Iterator[RunningServer]:
    with running_server(engine_dir, engine_dir.with_name("server.log")) as made:
        yield made


@pytest.fixture(scope="module")
def answers(engine_dir: Path) -> dict[int, str]:
    """The Python API's answers by loops; they differ."""
    with LLM(engine_dir, EngineConfig(num_threads=1), in_process=True) as llm:
        params = [SamplingParams(max_tokens=8, loops=loops, prefill_loops=1) for loops in (2, 4)]
        texts = [output.outputs[0].text for output in llm.generate([PROMPT] * 2, params)]
    assert texts[0] != texts[1]
    return dict(zip((2, 4), texts, strict=True))


def asked(server: RunningServer, *arguments: str) -> list[str]:
    """Arguments of the client for a server."""
    return [f"--url={server.grpc}", f"--http_url={server.http}", *arguments]


def figure(server: RunningServer, name: str, label: str) -> float:
    figures = server.figures()
    return next(
        value for key, value in figures.items() if key.startswith(f"{name}{{") and label in key
    )


def test_every_field_is_a_tensor_of_both_text_models_with_its_type() -> None:
    for model in ("ensemble", "tensorrt_llm_bls"):
        for name, (dtype, _) in FIELDS.items():
            tensor = MODELS[model].input(name)
            assert (tensor.dtype, tensor.refusal) == (dtype, None)
            assert tensor.dims == ((-1,) if name in REPEATABLE else (1,))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("stream", [True, False])
def test_both_protocols_give_the_answer_of_the_python_api(
    server: RunningServer, answers: dict[int, str], model: str, protocol: str, stream: bool
) -> None:
    url = server.grpc if protocol == "grpc" else server.http
    for loops, want in answers.items():
        fields = {"max_tokens": 8, "loops": loops, "prefill_loops": 1}
        question = Question(PROMPT, fields)
        pieces = list(WAYS[protocol](url, model, question, stream=stream, timeout_s=DEADLINE_S))
        assert "".join(piece.text for piece in pieces) == want
        assert [piece.finish_reason is not None for piece in pieces].count(True) == 1
        assert pieces[-1].finish_reason is not None
        assert {depth for piece in pieces for depth in piece.loops} == {loops}
        assert stream or len(pieces) == 1


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_long_answer_is_streamed_in_pieces(
    server: RunningServer, model: str, protocol: str
) -> None:
    url = server.grpc if protocol == "grpc" else server.http
    question = Question(PROMPT, {"max_tokens": 400, "min_tokens": 400})
    way = WAYS[protocol]
    pieces = list(way(url, model, question, stream=True, timeout_s=DEADLINE_S))
    assert len(pieces) > 1
    assert sum(len(piece.loops) for piece in pieces) == 400


def test_the_command_prints_the_answer_and_its_figures(
    server: RunningServer, answers: dict[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max_tokens=8", "--loops=4", "--prefill_loops=1", "--stream")
    code = main(asked(server, f"--prompt={PROMPT}", *options))
    out, err = capsys.readouterr()
    assert (code, out) == (0, f"{answers[4]}\n")
    assert err.startswith("[7 tokens, 28 loops, stop, first after ")


def test_stop_words_and_sampling_reach_the_engine(
    server: RunningServer, answers: dict[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    stop = answers[4][3]
    options = ["--max_tokens=8", "--loops=4", "--prefill_loops=1", f"--stop_words={stop}"]
    for protocol in ("grpc", "http"):
        code = main(
            asked(
                server,
                f"--protocol={protocol}",
                f"--prompt={PROMPT}",
                *options,
                *("--temperature=0.01", "--seed=3", "--top_k=5"),
            )
        )
        assert (code, capsys.readouterr().out) == (0, answers[4].partition(stop)[0] + "\n")


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_stream_that_is_cancelled_ends_its_request_in_the_engine(
    server: RunningServer, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = figure(server, "looptrt_requests_total", 'finish_reason="abort"')
    options = (*LONG, "--stream", "--cancel_after=2", f"--protocol={protocol}")
    code = main(asked(server, f"--prompt={PROMPT}", *options))
    _, err = capsys.readouterr()
    assert code == 0
    assert ", cancelled, " in err
    end_s = time.monotonic() + DEADLINE_S
    while figure(server, "looptrt_requests_total", 'finish_reason="abort"') == before:
        assert time.monotonic() < end_s, "the engine's request goes on"
    assert figure(server, "looptrt_requests_total", 'finish_reason="abort"') == before + 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max_tokens=0",), "max_tokens): expected"),
        (("--max_tokens=0", "--protocol=http"), "max_tokens): expected"),
        (("--max_tokens=0", "--protocol=http", "--stream"), "max_tokens): expected"),
        (("--loops=99",), "loops: expected"),
        (("--protocol=grpc-infer",), "decoupled"),
        (("--protocol=http-infer",), "decoupled"),
        (("--url=127.0.0.1:9",), "UNAVAILABLE"),
        (("--http_url=127.0.0.1:9", "--protocol=http"), "refused"),
        ((*LONG, "--model=tensorrt_llm_bls", "--timeout_s=0.05"), "DEADLINE_EXCEEDED"),
    ],
)
def test_what_goes_wrong_is_one_line_and_exit_code_1(
    server: RunningServer,
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(asked(server, f"--prompt={PROMPT}", *arguments)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--stream", "--protocol=http-infer"),
        ("--cancel_after=2",),
        ("--stream", "--cancel_after=0"),
        ("--timeout_s=0",),
        ("--model=other",),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--prompt=x", *arguments])
    assert ended.value.code == 2


@pytest.mark.full
def test_plain_infer_answers_on_a_server_without_decoupled_mode(
    server_env: None, engine_dir: Path, answers: dict[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    log = engine_dir.with_name("coupled.log")
    with running_server(engine_dir, log, "--no-decoupled_mode") as server:
        for protocol in ("grpc-infer", "http-infer", "http"):
            for model in ("ensemble", "tensorrt_llm_bls"):
                options = ("--max_tokens=8", "--loops=2", "--prefill_loops=1", f"--model={model}")
                code = main(asked(server, f"--prompt={PROMPT}", *options, f"--protocol={protocol}"))
                assert (code, capsys.readouterr().out) == (0, f"{answers[2]}\n")
