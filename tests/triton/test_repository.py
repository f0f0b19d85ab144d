"""Repositories written from the templates, and the settings that come back out of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from looptrt import cli
from looptrt.errors import EngineError, LooptrtError, ManifestError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.triton.repository import RepositoryOptions, write_repository
from looptrt.runtime.triton.settings import Settings
from looptrt.runtime.triton.tensors import MODELS


def settings_of(repository: Path, model: str) -> Settings:
    """Settings as the server would hand them over."""
    text = (repository / model / "config.pbtxt").read_text("utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    values = {name: {"string_value": one.string_value} for name, one in config.parameters.items()}
    policy = {"decoupled": config.model_transaction_policy.decoupled}
    as_json = {"parameters": values, "model_transaction_policy": policy}
    return Settings.of_model({"model_config": json.dumps(as_json)})


def test_every_model_is_written_whole_and_nothing_stays_open(
    engine_dir: Path, tmp_path: Path
) -> None:
    options = RepositoryOptions(engine_dir=engine_dir, engine_config=EngineConfig())
    assert write_repository(tmp_path / "r", options, links_package=False) == [*MODELS]
    for name in MODELS:
        config = (tmp_path / "r" / name / "config.pbtxt").read_text("utf-8")
        assert "${" not in config
        assert text_format.Parse(config, model_config_pb2.ModelConfig()).max_batch_size == 8
        assert (tmp_path / "r" / name / "1" / "model.py").exists() == (name != "ensemble")
        assert not (tmp_path / "r" / name / "1" / "looptrt").exists()


def test_engine_settings_come_back_as_they_went_in(engine_dir: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        kv_cache_bytes=123456,
        max_batch_size=4,
        enable_prefix_cache=False,
        prefix_depth="at_least",
        device="cpu",
        cache_dir='/a "quoted" \\ path',
        start_timeout_s=1.5,
    )
    options = RepositoryOptions(
        engine_dir=engine_dir, engine_config=config, decoupled_mode=False, engine_python="/py"
    )
    write_repository(tmp_path / "r", options, links_package=True)
    settings = settings_of(tmp_path / "r", "tensorrt_llm")
    assert settings.engine_config() == config
    assert settings.engine_dir("engine_dir") == engine_dir
    assert settings.text("engine_python") == "/py"
    assert (settings.decoupled, settings.flag("lazy_load", default=True)) == (False, False)
    assert (tmp_path / "r" / "tensorrt_llm" / "1" / "looptrt" / "errors.py").is_file()


def test_directory_that_is_not_empty_is_left_alone(engine_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    options = RepositoryOptions(engine_dir=engine_dir, engine_config=EngineConfig())
    with pytest.raises(LooptrtError, match="expected an empty directory"):
        write_repository(tmp_path, options, links_package=False)
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


def test_bad_engine_directory_and_bad_limits_write_nothing(
    engine_dir: Path, tmp_path: Path
) -> None:
    target = tmp_path / "r"
    absent = RepositoryOptions(engine_dir=tmp_path / "absent", engine_config=EngineConfig())
    with pytest.raises(ManifestError, match="not an engine directory"):
        write_repository(target, absent, links_package=False)
    raised = EngineConfig(max_batch_size=9)
    options = RepositoryOptions(engine_dir=engine_dir, engine_config=raised)
    with pytest.raises(EngineError, match="max_batch_size: expected at most 8"):
        write_repository(target, options, links_package=False)
    assert not target.exists() or not any(target.iterdir())


def test_parameters_that_are_open_or_empty_are_not_given() -> None:
    settings = Settings({"a": "${a}", "b": "", "c": " x "}, decoupled=True)
    assert [settings.text(name) for name in "abcd"] == [None, None, "x", None]
    assert settings.flag("a", default=True)
    assert settings.count("b", default=3) == 3
    with pytest.raises(EngineError, match="parameter a: expected the path"):
        settings.engine_dir("a")


@pytest.mark.parametrize("value", ["yes", "2", "none"])
def test_flag_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(EngineError, match="parameter a: expected true or false"):
        Settings({"a": value}, decoupled=True).flag("a", default=True)


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_count_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(EngineError, match="parameter a: expected a number above 0"):
        Settings({"a": value}, decoupled=True).count("a", default=1)


def test_engine_setting_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(EngineError, match="max_waiting"):
        Settings({"max_waiting": "many"}, decoupled=True).engine_config()


def test_command_writes_a_repository_and_starts_nothing(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models"
    arguments = ["triton", f"--engine_dir={engine_dir}", f"--model_repo={target}"]
    assert cli.main([*arguments, "--max_waiting=7", "--no-decoupled_mode"]) == 0
    assert re.search(r"wrote preprocessing, tensorrt_llm, .* to ", capsys.readouterr().out)
    settings = settings_of(target, "tensorrt_llm")
    assert settings.engine_config().max_waiting == 7
    assert not settings.decoupled
    assert settings.text("engine_python") is None  # the container's own
    assert settings.text("drain_file") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["triton"], "--engine_dir: expected an engine directory"),
        (["triton", "--engine_dir=x", "--bls_max_requests=0", "--model_repo=y"], "above 0, got 0"),
        (["triton", "--engine_dir=x", "--log_level=loud"], "log_level"),
    ],
)
def test_bad_command_line_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
