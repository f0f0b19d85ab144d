"""The build as a command: signals, logs, progress, and one line for every error."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from looptrt.builder import progress as progress_module
from looptrt.builder.build import BuildConfig, build
from looptrt.builder.progress import progress
from looptrt.builder.verify import open_phases
from looptrt.cli import main, trtllm_build
from looptrt.errors import BuildError
from looptrt.manifest import Manifest
from tests.support.checkpoints import tiny_ouro

# A build that says when its draft is there, and waits.
STUCK = """
import signal, sys, time
# A test run in the background ignores both, and what is ignored stays so.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from looptrt.builder import build
from looptrt.cli import main

def export_phases(*arguments):
    print("draft", flush=True)
    time.sleep(600)

build.export_phases = export_phases
sys.exit(main(["build", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_signals_end_a_build_and_leave_nothing(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    argv = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "a" / "e")]
    command = [sys.executable, "-c", STUCK, *argv, "--log_level", "error"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "draft\n"
        assert len(list((tmp_path / "a").iterdir())) == 1
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_handlers_are_restored_and_ignored_signals_stay_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def plan(_config: object) -> None:
        seen.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)))
        raise BuildError("seen")

    monkeypatch.setattr("looptrt.builder.build.plan_build", plan)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        assert trtllm_build(["--checkpoint_dir", "c", "--dry_run"]) == 2
        thread = threading.Thread(target=trtllm_build, args=(["--checkpoint_dir=c", "--dry_run"],))
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGHUP, hangup)
    (during, ignored), in_thread = seen
    assert during is not terminate
    assert ignored == signal.SIG_IGN
    assert in_thread == (terminate, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is terminate


# Logs.


def test_log_levels_of_the_process_are_as_before(tmp_path: Path) -> None:
    ours, root = logging.getLogger("looptrt"), logging.getLogger()
    before = (ours.level, root.level, root.handlers[:])
    argv = ["--checkpoint_dir", str(tiny_ouro(tmp_path / "c"))]
    assert trtllm_build([*argv, "--dry_run", "--log_level", "trace"]) == 0
    assert main(["convert", *argv, "--output_dir", str(tmp_path / "there")]) == 0
    assert (ours.level, root.level, root.handlers) == before


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress that is shown at once, and then not soon again."""
    monkeypatch.setattr(progress_module, "_QUIET_S", 0.0)


def progress_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [item.getMessage() for item in caplog.records]


@pytest.mark.usefixtures("impatient")
def test_progress_ends_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "looptrt"), progress("export", 3) as advance:
        for _ in range(3):
            advance(1)
    assert progress_lines(caplog) == ["export: 1/3", "export: 3/3"]


@pytest.mark.usefixtures("impatient")
def test_progress_of_a_failed_stage_does_not_claim_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        with progress("export", 3) as advance:
            advance(1)
            raise BuildError("no")

    with caplog.at_level(logging.INFO, "looptrt"), pytest.raises(BuildError):
        fail()
    assert progress_lines(caplog) == ["export: 1/3"]


@pytest.mark.parametrize("is_terminal", ["1", ""])
def test_progress_is_silent_where_the_log_is(tmp_path: Path, is_terminal: str) -> None:
    program = (
        "import sys; from looptrt.builder import progress; progress._QUIET_S = 0.0;"
        "from looptrt.cli import trtllm_build; sys.exit(trtllm_build())"
    )
    argv = ["--checkpoint_dir", str(tiny_ouro(tmp_path / "c")), "--output_dir", str(tmp_path / "e")]
    environment = {"FORCE_COLOR": "1"} if is_terminal else {}  # rich's word for a terminal
    result = subprocess.run(
        [sys.executable, "-c", program, *argv, "--log_level", "error"],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# Errors.


def test_arguments_that_are_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = os.fsdecode(b"\xff")
    for arguments in (
        ["build", "--checkpoint_dir", bad],
        ["build", "--checkpoint_dir", "c", f"--output_dir={bad}"],
        ["generate", bad, "--prompt", "a"],
        ["inspect", bad],
    ):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert r"\xff" in err
        assert "expected UTF-8" in err


@pytest.mark.parametrize("output", [".", "/", "c"])
def test_outputs_that_cannot_be_replaced(
    tmp_path: Path,
    output: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny_ouro(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    for flags in ([], ["--dry_run"]):
        assert trtllm_build(["--checkpoint_dir", "c", "--output_dir", output, *flags]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"trtllm-build: error: --output_dir {output}: ")


def test_rebuild_keeps_a_strangers_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--checkpoint_dir", str(tiny_ouro(tmp_path / "c")), "--output_dir", str(tmp_path / "e")]
    assert trtllm_build(argv) == 0
    (tmp_path / "e" / "thesis.tex").write_text("years of work")
    assert trtllm_build(argv) == 2
    assert "'thesis.tex' is not of the engine" in capsys.readouterr().err
    assert (tmp_path / "e" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "e" / "thesis.tex").unlink()
    assert trtllm_build(argv) == 0


def test_checkpoint_whose_weights_are_links_into_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, engine = tiny_ouro(tmp_path / "c"), tmp_path / "e"
    argv = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(engine)]
    assert trtllm_build(argv) == 0
    weights = (checkpoint / "model.safetensors").read_bytes()
    (engine / "rank0.safetensors").write_bytes(weights)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to(engine / "rank0.safetensors")
    assert trtllm_build(argv) == 2
    assert "model.safetensors is in it" in capsys.readouterr().err
    assert (engine / "rank0.safetensors").read_bytes() == weights


# The check of an export.


@pytest.mark.parametrize(
    "flags", [{"dtype": "bfloat16"}, {"logits_dtype": "bfloat16"}, {"dtype": "float32"}]
)
def test_phases_in_bfloat16_cannot_be_evaluated(tmp_path: Path, flags: dict[str, str]) -> None:
    target = tmp_path / "e"
    build(BuildConfig(tiny_ouro(tmp_path / "c"), target, **flags))  # type: ignore[arg-type]
    manifest = Manifest.load(target)
    if "bfloat16" not in flags.values():
        assert set(open_phases(target, manifest)) == set(manifest.phases)
        return
    with pytest.raises(BuildError, match=r"\.onnx: bfloat16: .*--dtype float32"):
        open_phases(target, manifest)
