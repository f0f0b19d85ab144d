"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from looptrt import __version__, doctor
from looptrt.builder.build import BuildConfig, build
from looptrt.cli import generate as generate_command
from looptrt.cli import main, trtllm_build
from looptrt.manifest import _checksum
from looptrt.runtime.sampling_params import SamplingParams

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


def test_every_sampling_flag_is_a_field_and_reaches_the_engine(
    engine_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = {
        "n": 2,
        "max-tokens": 5,
        "min-tokens": 4,
        "temperature": 0.7,
        "repetition-penalty": 1.2,
        "presence-penalty": -0.1,
        "frequency-penalty": 0.3,
        "seed": 4,
        "logprobs": 2,
        "prompt-logprobs": 1,
        "logprobs-mode": "processed",
        "truncate-prompt-tokens": 20,
        "loops": 4,
        "prefill-loops": 2,
        "exit-at-step": 1,
        "exit-kv": "run_all",
        "cache-salt": "salt",
        "priority": -1,
        "stop": "zz",
        "stop-token-ids": 3,
        "bad-words": "a",
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    flags += ["--include-stop", "--no-exclude-input", "--no-skip-special-tokens", "--json"]
    flags += ["--embedding-bias", str(tmp_path / "bias.npy")]
    vocab = json.loads((engine_dir / "config.json").read_text())["pretrained_config"]["vocab_size"]
    np.save(tmp_path / "bias.npy", np.zeros(vocab))
    assert generate(engine_dir, "--prompt", PROMPTS[0], *flags) == 0
    out, err = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["index"] for answer in answers] == [0, 1]
    assert len(err.splitlines()) == 2
    for answer in answers:
        assert len(answer["prompt_token_ids"]) == 20
        assert answer["token_ids"][:20] == answer["prompt_token_ids"]
        assert set(answer["depths"]) == {2}
        assert len(answer["depths"]) == len(answer["logprobs"]) >= 4
        assert answer["logprobs"][0]["token_ids"][0] == answer["token_ids"][20]
        assert answer["prompt_logprobs"][0] is None
        assert len(answer["prompt_logprobs"]) == 20


def test_flags_of_generate_are_the_fields_of_sampling_params() -> None:
    flags = {
        flag for flag, *_ in (*generate_command._SAMPLING_FLAGS, *generate_command._SAMPLING_LISTS)
    }
    flags |= {flag for flag, _ in generate_command._SAMPLING_SWITCHES} | {"--embedding-bias"}
    fields = {f"--{name.replace('_', '-')}" for name in SamplingParams.__dataclass_fields__}
    assert flags == fields


def test_several_answers_are_printed_one_a_line(
    engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(engine_dir, *prompt_flags(*PROMPTS), "--n", "2") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [ANSWERS[0]] * 2 + [ANSWERS[1]] * 2
    assert len(err.splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--exit-threshold", "nan"], "exit_threshold: expected a finite number"),
        (["--prompt", "a", "--exit-threshold", "0.5"], "has no exit gate; name an exit_criterion"),
        (["--prompt", "a", "--logprobs-mode", "x"], "logprobs_mode: expected raw or processed"),
        (["--prompt", "a", "--embedding-bias", __file__], "not a .npy file of numbers"),
        (["--prompt", "a", "--best-of", "3"], "unrecognized arguments: --best-of"),
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
    names = (
        "torch",
        "CUDA (torch)",
        "plugin library",
        "CUDA kernels",
        "tensorrt",
        "tensorrt_rtx",
    )
    findings = [doctor.Finding(name, None, "not installed") for name in names]
    cpu, cuda, tensorrt, _ = doctor.backends(findings)
    assert (cpu.found, cpu.reason) == (None, "not installed")
    assert (cuda.found, cuda.reason) == (None, "torch: not installed")
    assert tensorrt.reason == "tensorrt: not installed"


def test_doctor_prints_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "torch",
        "CUDA (torch)",
        "plugin library",
        "CUDA kernels",
        "tensorrt",
        "tensorrt_rtx",
    )
    findings = [doctor.Finding(name, None, "[not] installed") for name in names]
    monkeypatch.setattr(doctor, "installed", lambda: findings)
    assert main(["doctor"]) == 0
    assert "no: [not] installed" in capsys.readouterr().out


# ---- what a shell can do to a command


def run_in_shell(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `looptrt` with streams that a shell closed or moved."""
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", *PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("redirections", ["<&-", "<&- 2>&-", "2>&-"])
def test_closed_input_or_error_stream_is_no_error(engine_dir: Path, redirections: str) -> None:
    result = run_in_shell(redirections, "inspect", str(engine_dir))
    assert (result.returncode, result.stderr) == (0, "")
    assert "RavenForCausalLM" in result.stdout


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_closed_output_is_one_line(engine_dir: Path, flags: list[str]) -> None:
    result = run_in_shell(">&-", "inspect", str(engine_dir), *flags)
    assert result.returncode == 2
    assert result.stderr == "looptrt: error: the standard output is closed\n"


@pytest.mark.parametrize("redirections", ["<&- >&- 2>&-", ">&- 2>&-"])
def test_nobody_to_tell(engine_dir: Path, redirections: str) -> None:
    result = run_in_shell(redirections, "inspect", str(engine_dir))
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")


def test_error_does_not_go_to_stdout_when_stderr_is_closed() -> None:
    result = run_in_shell("2>&-", "inspect", "/nonexistent")
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")


def test_generate_without_an_input_is_one_line(engine_dir: Path) -> None:
    result = run_in_shell("<&-", "generate", str(engine_dir))
    assert result.returncode == 2
    assert result.stderr.startswith("looptrt: error: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--help"]])
def test_help_for_a_reader_that_left(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        command = [*PROGRAM, *arguments]
        result = subprocess.run(
            command,
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
            env={},  # without PYTHONUNBUFFERED, under which argparse passes over the error
        )
    assert (result.returncode, result.stderr) == (141, b"")


def test_full_disk_is_one_line(engine_dir: Path) -> None:
    result = run_in_shell(">/dev/full", "inspect", str(engine_dir))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "No space left" in result.stderr


INTERRUPTED_IMPORT = """
import signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv[1:] = [sys.argv[1], *sys.argv[2:]]
from looptrt.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("argparse", ["doctor"]),
        ("numpy", ["doctor"]),
        ("looptrt.runtime.llm", ["inspect", "x"]),
        ("looptrt.builder.flags", ["build", "--help"]),
        ("onnx", ["build", "--help"]),
        ("torch", ["convert", "--checkpoint_dir", "c", "--output_dir", "d"]),
    ],
)
def test_interrupt_while_modules_load(module: str, arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", INTERRUPTED_IMPORT, module, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (130, "")


# ---- inspect and what is not an engine directory


@pytest.mark.parametrize("memory", ["9" * 400, "9" * 5000, "9" * 400 + "GiB", "2EiB", "2000000TiB"])
def test_memory_beyond_any_machine(capsys: pytest.CaptureFixture[str], memory: str) -> None:
    assert main(["inspect", "engine", "--memory", memory]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "--memory: expected" in err
    assert len(err) < 200


Edit = Callable[[dict[str, Any]], object]


def sections(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    ours, build = data["looptrt"], data["build_config"]
    return {
        "": data,
        "build_config": build,
        "pretrained_config": data["pretrained_config"],
        "looptrt": ours,
        "plane_layout": ours["plane_layout"],
        "tokens": ours["tokens"],
        "phases": ours["phases"],
        "core": ours["phases"]["core"],
        "files": ours["files"],
        "rank0": ours["files"]["rank0.safetensors"],
        "loop_spec": data["pretrained_config"]["loop_spec"],
        "rope": data["pretrained_config"]["loop_spec"]["rope"],
    }


READ = {
    "": ("version", "pretrained_config", "build_config", "looptrt"),
    "build_config": (
        *("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "flags"),
    ),
    "pretrained_config": ("dtype", "logits_dtype", "loop_spec"),
    "looptrt": (
        *("backend", "plane_layout", "noise_mode", "tokens", "phases", "fingerprint"),
        *("files", "tools", "format"),
    ),
    "plane_layout": ("unit_slots", "max_loops", "page_size", "head_dim", "dtype", "strategy"),
    "tokens": ("eos", "source"),
    "phases": ("prelude", "core"),
    "core": ("onnx", "inputs", "outputs"),
    "files": ("rank0.safetensors",),
    "rank0": ("sha256", "bytes"),
    "loop_spec": (
        *("architecture", "num_loops", "core_layers", "norm_eps", "rope", "block", "exit_gate"),
        *("embedding_scale", "state_std", "initial_state"),
    ),
    "rope": ("style", "base", "in_float32", "scaling"),
}
NULLABLE = {("rope", "scaling")}


def forge(engine_dir: Path, target: Path, edit: Edit) -> Path:
    """An engine directory with an edited manifest whose checksum is right."""
    shutil.copytree(engine_dir, target)
    path = target / "config.json"
    data = json.loads(path.read_text())
    edit(data)
    if isinstance(data.get("looptrt"), dict):
        data["looptrt"]["checksum"] = _checksum(data)
    path.write_text(json.dumps(data))
    return target


VALUES: list[object] = [None, "x", -1, 10**300, 1.5, [], {}, [None], {"a": None}, True]


@pytest.mark.parametrize("section", READ)
def test_forged_manifest_is_one_line(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    target = forge(engine_dir, tmp_path / "e", lambda _: None)
    text = (target / "config.json").read_text()
    for key in READ[section]:
        for value in VALUES:
            data = json.loads(text)
            sections(data)[section][key] = value
            if isinstance(data["looptrt"], dict):
                data["looptrt"]["checksum"] = _checksum(data)
            (target / "config.json").write_text(json.dumps(data))
            code = main(["inspect", str(target)])
            err = capsys.readouterr().err
            assert code in (0, 2), (key, value)
            assert len(err.splitlines()) == (code == 2), (key, value)
            if value is None:
                assert code == (0 if (section, key) in NULLABLE else 2), key


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: sections(d)["files"].update({"../x": {"sha256": "", "bytes": 0}}), "plain name"),
        (lambda d: sections(d)["phases"].update(extra=sections(d)["core"]), "phases: expected"),
        (lambda d: sections(d)["plane_layout"].update(strategy="compress-s" + "9" * 5000), ""),
        (lambda d: sections(d)["plane_layout"].update(unit_slots=0, strategy="compress-s2"), ""),
        (lambda d: sections(d)["build_config"].update(max_seq_len=2**31), "max_seq_len"),
    ],
)
def test_forged_manifest_says_what_is_wrong(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Edit, words: str
) -> None:
    assert main(["inspect", str(forge(engine_dir, tmp_path / "e", edit))]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "config.json: malformed manifest" in err
    assert words in err
    assert len(err) < 500


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"null",
        b"[" * 100_000,
        b'{"looptrt": ' * 100_000,
        b'{"looptrt": {"format": 1, "a": ' + b"[" * 900 + b"]" * 900 + b"}}",
        b'{"looptrt": {"format": 1, "a": ' + b"9" * 5000 + b"}}",
        b'{"looptrt": {"format": 1, "a": NaN}}',
        b'{"looptrt": {"format": 1, "checksum": ' + b"[" * 400 + b"]" * 400 + b"}}",
        b'{"looptrt": {"format": ' + b"9" * 4000 + b"}}",
        b'{"looptrt": {"format": "\\ud800"}}',
    ],
)
def test_config_that_is_no_manifest_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert main(["inspect", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert len(err) < 500


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda p: p.symlink_to("/dev/zero")])
def test_config_that_is_no_file_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object]
) -> None:
    make(tmp_path / "config.json")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "config.json: expected a regular file" in capsys.readouterr().err
