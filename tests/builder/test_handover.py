"""Architectures that are not looped go to TensorRT-LLM's own build, if it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from looptrt import doctor
from looptrt.builder import handover
from tests.support.checkpoints import tiny_ouro

BUILD = "import sys; from looptrt.cli import trtllm_build; sys.exit(trtllm_build())"
LOOPTRT = "import sys; from looptrt.cli import main; sys.exit(main(['build', *sys.argv[1:]]))"
FAKE = """
import json, sys
print(json.dumps(sys.argv[1:]))
sys.exit(7)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A directory with a package named tensorrt_llm that must never be imported as such."""
    commands = tmp_path / "site" / "tensorrt_llm" / "commands"
    commands.mkdir(parents=True)
    (commands.parent / "__init__.py").touch()
    (commands / "__init__.py").touch()
    (commands / "build.py").write_text(FAKE)
    return tmp_path / "site"


def llama(tmp_path: Path) -> Path:
    directory = tmp_path / "llama"
    directory.mkdir()
    (directory / "config.json").write_text('{"architecture": "LlamaForCausalLM"}')
    return directory


def run(program: str, site: Path | None, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *argv],
        capture_output=True,
        text=True,
        check=False,
        env={} if site is None else {"PYTHONPATH": str(site)},
        cwd="/",
    )


def test_foreign_architecture_is_handed_over_with_its_command_line(
    tmp_path: Path, fake: Path
) -> None:
    argv = [f"--checkpoint_dir={llama(tmp_path)}", "--gemm_plugin", "auto", "--strip_plan"]
    result = run(BUILD, fake, *argv)
    assert result.returncode == 7
    assert json.loads(result.stdout) == argv
    assert "handed to tensorrt_llm" in result.stderr


def test_without_tensorrt_llm_the_known_architectures_are_listed(tmp_path: Path) -> None:
    result = run(BUILD, None, "--checkpoint_dir", str(llama(tmp_path)))
    assert result.returncode == 2
    assert result.stderr.startswith("trtllm-build: error: ")
    assert result.stderr.count("\n") == 1
    assert "'LlamaForCausalLM' is unknown, expected one of OuroForCausalLM" in result.stderr


def test_looptrt_build_hands_nothing_over(tmp_path: Path, fake: Path) -> None:
    result = run(LOOPTRT, fake, "--checkpoint_dir", str(llama(tmp_path)))
    assert result.returncode == 2
    assert result.stdout == ""


@pytest.mark.parametrize("config", ["looped", "unreadable", "absent", "none", "a class file"])
def test_what_is_ours_stays_here(
    tmp_path: Path, fake: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(fake)
    directory = tiny_ouro(tmp_path / "c")
    argv = ["--checkpoint_dir", str(directory)]
    if config == "unreadable":
        (directory / "config.json").write_text("{")
    elif config == "absent":
        argv = ["--model_config", str(tmp_path / "absent.json")]
    elif config == "none":
        argv = ["--help"]
    elif config == "a class file":
        argv = ["--checkpoint_dir", str(llama(tmp_path)), "--model_cls_file", "x.py"]
    assert handover.foreign_architecture(argv) is None


@pytest.mark.parametrize("key", ["--checkpoint_dir", "--model_config"])
def test_foreign_architectures_of_both_layouts(
    tmp_path: Path, fake: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(fake)
    for content in ({"architecture": "LlamaForCausalLM"}, {"architectures": ["LlamaForCausalLM"]}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        place = tmp_path if key == "--checkpoint_dir" else tmp_path / "config.json"
        assert handover.foreign_architecture([key, str(place)]) == "LlamaForCausalLM"
        assert "tensorrt_llm" not in sys.modules


@pytest.mark.parametrize(
    ("script", "is_installed", "words"),
    [
        (
            "from looptrt.cli import trtllm_build",
            False,
            "of looptrt; tensorrt_llm is not installed",
        ),
        ("from looptrt.cli import trtllm_build", True, "of looptrt, which hands architectures"),
        (
            "from tensorrt_llm.commands.build import main",
            True,
            "of tensorrt_llm, which knows no looped architectures; use `looptrt build`",
        ),
        ("exec true", False, "of an unknown package"),
    ],
)
def test_doctor_says_whose_script_it_is(
    tmp_path: Path,
    fake: Path,
    script: str,
    is_installed: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "bin" / "trtllm-build"
    path.parent.mkdir()
    path.write_text(f"#!/usr/bin/python\nimport sys\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    if is_installed:
        monkeypatch.syspath_prepend(fake)
    finding = doctor._owner_of_script()
    assert finding.found is not None
    assert words in finding.found
