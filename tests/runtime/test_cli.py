"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from looptrt import __version__, doctor
from looptrt.builder.build import BuildConfig, build
from looptrt.cli import main, trtllm_build

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = ("d=0;i=d;a=i;l=a;h=9;w=5;?whd>", "v=n;p=l;l=0;d=n;j=4;w=g;n=p;m=n;g=1;s=9;?lwp>")
ANSWERS = ("w5h9d0", "l0w1p0")
PROGRAM = [sys.executable, "-P", "-c", "import sys; from looptrt.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "huginn"
    config = BuildConfig(
        checkpoint_dir=EXAMPLES / "tiny-huginn", output_dir=directory, max_batch_size=4
    )
    build(config)
    return directory


def generate(engine_dir: Path, *arguments: str) -> int:
    return main(["generate", str(engine_dir), "--in-process", *arguments])


def prompt_flags(*prompts: str) -> list[str]:
    return [word for prompt in prompts for word in ("--prompt", prompt)]


# ---- generate


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_answers_go_to_stdout_and_figures_to_stderr(
    engine_dir: Path, capsys: pytest.CaptureFixture[str], stream: str
) -> None:
    assert generate(engine_dir, *prompt_flags(*PROMPTS), stream) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == list(ANSWERS)
    first, second = err.splitlines()
    assert first.startswith("[1/2] depth 8 | 7 tokens in ")
    assert first.endswith("| stop")
    assert "of 46 prompt tokens cached | KV " in second


def test_depth_flags_show_how_far_the_look_up_got(
    engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = "n=5;a=0;y=s;m=7;f=2;s=m;p=y;t=y;?mft>"
    texts = []
    for loops in ("1", "4"):
        generate(engine_dir, "--prompt", chain, "--loops", loops, "--max-tokens", "6")
        texts.append(capsys.readouterr().out.strip())
    assert texts == ["m7f2ty", "m7f2t7"]


def test_json_is_one_object_for_each_answer(
    engine_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPTS[0]}\r\n\n{PROMPTS[1]}\n")
    flags = ["--json", "--prompts-file", str(file), "--loops", "8", "--prefill-loops", "4"]
    assert generate(engine_dir, *flags) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == list(PROMPTS)
    assert [answer["text"] for answer in answers] == list(ANSWERS)
    assert answers[0]["depths"] == [8] * 7
    assert (answers[0]["finish_reason"], answers[0]["stop_reason"]) == ("stop", 2)


def test_prompts_come_from_the_standard_input(
    engine_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(PROMPTS).encode())))
    assert generate(engine_dir, "--chat", "--stop", "h") == 0
    assert capsys.readouterr().out.splitlines() == ["w5", ANSWERS[1]]


def test_sampling_flags_reach_the_engine(
    engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"temperature": 3, "top-k": 40, "top-p": 0.9, "min-p": 0.001, "seed": 5}
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    texts = []
    for _ in range(2):
        assert generate(engine_dir, "--prompt", PROMPTS[0], *flags) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ANSWERS[0] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--loops", "9"], "loops: expected from 1 to 8, got 9"),
        (["--prompt", "a", "--temperature", "nan"], "temperature: expected a finite number"),
        (["--prompt", "a", "--top-k", "-1"], "top_k: expected an integer"),
        (["--prompt", "a", "--max-tokens", "x"], "argument --max-tokens: invalid int value"),
        (["--prompt", "a" * 600], "prompt: expected at most max_input_len 512 tokens, got 601"),
        (["--prompt", "a", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["--prompts-file", "/nonexistent"], "No such file or directory: '/nonexistent'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    engine_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert generate(engine_dir, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("looptrt: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_input_that_is_not_text_is_named(
    engine_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b"\xff\n")
    assert generate(engine_dir, "--prompts-file", str(file)) == 2
    assert f"{file}: not UTF-8 text" in capsys.readouterr().err
    file.write_bytes(b"\n \n")
    assert generate(engine_dir, "--prompts-file", str(file)) == 2
    assert "there is no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["generate"], ["inspect"], ["inspect", "/nonexistent"]]
)
def test_bad_command_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, text in (("--version", f"looptrt {__version__}\n"), ("--help", "engine directory")):
        with pytest.raises(SystemExit) as end:
            main([flag])
        assert end.value.code == 0
        assert text in capsys.readouterr().out


def test_build_goes_to_the_builder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for run, prog in (
        (lambda a: main(["build", *a]), "looptrt build"),
        (trtllm_build, "trtllm-build"),
    ):
        assert run(["--checkpoint_dir", str(tmp_path), "--output_dir", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.startswith(f"{prog}: error: ")


# ---- as a process


def test_interrupt_ends_with_130_and_no_traceback(engine_dir: Path) -> None:
    flags = ["--prompt", PROMPTS[0], "--max-tokens", "400", "--temperature", "50", "--top-k", "20"]
    command = [*PROGRAM, "generate", str(engine_dir), *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_reader_that_leaves_ends_with_141_and_no_traceback(engine_dir: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*PROGRAM, "generate", str(engine_dir), "--prompt", PROMPTS[0]]
    with os.fdopen(writer, "wb") as stdout:
        result = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (result.returncode, result.stderr) == (141, "")


# ---- inspect and doctor


def test_inspect_counts_units_and_bytes(
    engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--memory", "1 MiB", "--loops", "8", "--prefill-loops", "2", "--json"]
    assert main(["inspect", str(engine_dir), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["phases"]) == ["prelude", "core", "coda"]
    slot = 2 * 3 * 32 * 4  # K and V, 3 heads of 32, float32
    kv, memory = report["kv"], report["memory"]
    assert kv["unit_shape"] == [2, 2, 32, 3, 32]
    assert kv["unit_bytes"] == 2 * 32 * slot
    assert (kv["boundary_rows"], kv["plane_rows"]) == (1, 8)
    units = 2**20 // kv["unit_bytes"] - 1
    assert memory["units"] == units
    assert memory["prompt"] == {
        "loops": 2,
        "bytes_per_token": 3 * 2 * slot,
        "bytes_per_token_all_layers": 4 * 2 * slot,
        "capacity_tokens": units // 3 * 32,
    }
    assert memory["generated"]["bytes_per_token"] == 9 * 2 * slot
    assert memory["generated"]["capacity_tokens"] == units // 9 * 32


def test_inspect_prints_tables(engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(engine_dir)]) == 0
    out = capsys.readouterr().out
    for text in ("RavenForCausalLM", "prelude", "noise_seeds", "1 boundary, 8 planes", "[2]"):
        assert text in out
    assert "8.00 GiB of KV memory" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory", "8Q"], "expected a size such as 8GiB"),
        (["--memory", "-1"], "expected a size such as 8GiB"),
        (["--loops", "9"], "expected 1 <= --prefill-loops <= --loops <= 8, got 9 and 9"),
        (["--loops", "2", "--prefill-loops", "3"], "got 3 and 2"),
    ],
)
def test_inspect_refuses_what_cannot_be(
    engine_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["inspect", str(engine_dir), *flags]) == 2
    assert message in capsys.readouterr().err


def test_doctor_says_what_is_there_and_what_can_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    installed = {finding["name"]: finding for finding in report["installed"]}
    assert installed["python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert installed["torch"]["found"]
    for finding in report["installed"] + report["backends"]:
        assert bool(finding["found"]) != bool(finding["reason"]), finding
    backends = {finding["name"]: finding for finding in report["backends"]}
    assert backends["pytorch on cpu"]["found"] == "works"
    assert set(backends) == {"pytorch on cpu", "pytorch on cuda", "tensorrt", "tensorrt_rtx"}


def test_doctor_names_the_first_thing_that_a_backend_lacks() -> None:
    names = ("torch", "CUDA (torch)", "tensorrt", "tensorrt_rtx")
    findings = [doctor.Finding(name, None, "not installed") for name in names]
    cpu, cuda, tensorrt, _ = doctor.backends(findings)
    assert (cpu.found, cpu.reason) == (None, "not installed")
    assert (cuda.found, cuda.reason) == (None, "torch: not installed")
    assert tensorrt.reason == "tensorrt: not installed"


def test_doctor_prints_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("torch", "CUDA (torch)", "tensorrt", "tensorrt_rtx")
    findings = [doctor.Finding(name, None, "[not] installed") for name in names]
    monkeypatch.setattr(doctor, "installed", lambda: findings)
    assert main(["doctor"]) == 0
    assert "no: [not] installed" in capsys.readouterr().out
