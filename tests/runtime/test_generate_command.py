"""`looptrt generate` over a scripted engine: settings in, failed answers out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from looptrt.cli import generate as generate_command
from looptrt.cli import main
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from tests.support.scripted import ScriptedCore, llm_of, write_tokenizer


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Settings of the engines that the command starts; token 2 of an answer fails."""
    taken: list[EngineConfig] = []
    write_tokenizer(tmp_path, ["<a>", "b", "c", "d"])

    def start(engine_dir: Path, config: EngineConfig, *, in_process: bool) -> LLM:
        assert in_process
        taken.append(config)
        return llm_of(ScriptedCore(lambda _: [1, 3, 2], error_token=2), engine_dir)

    monkeypatch.setattr(generate_command, "LLM", start)
    return taken


def generate(engine_dir: Path, *arguments: str) -> int:
    prompt = ("generate", str(engine_dir), "--in-process", "--prompt", "b")
    return main([*prompt, *arguments])


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_answer_that_failed_is_printed_and_the_exit_code_is_1(
    tmp_path: Path, configs: list[EngineConfig], capsys: pytest.CaptureFixture[str], stream: str
) -> None:
    assert generate(tmp_path, stream) == 1
    out, err = capsys.readouterr()
    assert out == "bd\n"
    assert err.endswith("| error: the model's logits are not finite\n")
    assert generate(tmp_path, "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"]) == ("bd", "error")
    assert answer["stop_reason"] == "the model's logits are not finite"
    assert generate(tmp_path, "--max-tokens", "2") == 0


def test_kv_memory_is_a_size(
    tmp_path: Path, configs: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (["--kv-cache-bytes", "1.5MiB"], []):
        generate(tmp_path, *flags)
    assert [config.kv_cache_bytes for config in configs] == [3 * 2**19, None]
    for size, message in (("lots", "expected a size"), ("0", "kv_cache_bytes: expected")):
        capsys.readouterr()
        assert generate_fails(tmp_path, size) == 2
        assert message in capsys.readouterr().err


def generate_fails(engine_dir: Path, size: str) -> int | str | None:
    try:
        return generate(engine_dir, "--kv-cache-bytes", size)
    except SystemExit as error:
        return error.code
