"""An output directory changes in one step or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from looptrt.builder import engine_dir
from looptrt.builder.engine_dir import atomic_directory, check_target
from looptrt.errors import BuildError

OURS = '{"looptrt": {"format": 1}}'


def write_engine(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(OURS)
    (directory / "rank0.safetensors").write_text(text)


def write_until_interrupted(target: Path) -> None:
    with atomic_directory(target) as draft:
        write_engine(draft, "new")
        raise KeyboardInterrupt


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_new_directory_with_its_parents(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    with atomic_directory(target) as draft:
        write_engine(draft, "new")
        assert not target.exists()
    assert (target / "rank0.safetensors").read_text() == "new"
    assert names(tmp_path / "a") == ["b"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_until_interrupted(tmp_path / "a" / "b")
    assert names(tmp_path) == []


@pytest.mark.parametrize("can_exchange", [True, False])
def test_engine_directory_is_replaced(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(engine_dir, "_exchange", lambda draft, target: False)
    target = tmp_path / "engine"
    for text in ("old", "new"):
        with atomic_directory(target) as draft:
            write_engine(draft, text)
            if text == "new":
                assert (target / "rank0.safetensors").read_text() == "old"
                (target / "leftover").touch()
    assert (target / "rank0.safetensors").read_text() == "new"
    assert names(target) == ["config.json", "rank0.safetensors"]
    assert names(tmp_path) == ["engine"]


def test_failed_replacement_keeps_the_old_engine(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    with atomic_directory(target) as draft:
        write_engine(draft, "old")
    with pytest.raises(OSError, match="full"), atomic_directory(target):
        raise OSError(errno.ENOSPC, "disk full")
    assert (target / "rank0.safetensors").read_text() == "old"
    assert names(tmp_path) == ["engine"]


def test_link_to_an_engine_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_directory(tmp_path / "link") as draft:
        write_engine(draft, "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "rank0.safetensors").read_text() == "new"


def test_empty_directory_may_be_filled(tmp_path: Path) -> None:
    check_target(tmp_path)


@pytest.mark.parametrize("config", [None, "{}", "[]", "not json", '{"looptrt": 1}'])
def test_directory_of_others_is_refused(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "precious").touch()
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with (
        pytest.raises(BuildError, match=r"--output_dir .*not an engine directory"),
        atomic_directory(tmp_path),
    ):
        pytest.fail("the block must not run")
    assert (tmp_path / "precious").exists()


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="expected a directory"):
        check_target(tmp_path / "file")
    with pytest.raises(BuildError, match="not a writable directory"):
        check_target(tmp_path / "file" / "engine")
