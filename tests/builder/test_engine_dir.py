"""An output directory changes in one step or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from looptrt.builder import engine_dir
from looptrt.builder.engine_dir import atomic_directory, check_beside_checkpoint, check_target
from looptrt.errors import BuildError

OURS = '{"looptrt": {"format": 1, "files": {"rank0.safetensors": {}}}}'


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


# What is not ours is never removed.


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "rank1.safetensors"])
@pytest.mark.parametrize("is_directory", [True, False])
def test_foreign_content_of_an_engine_directory_is_kept(
    tmp_path: Path, name: str, is_directory: bool
) -> None:
    write_engine(tmp_path, "old")
    (tmp_path / name).mkdir() if is_directory else (tmp_path / name).touch()
    with pytest.raises(BuildError, match=f"'{name}' is not of the engine"):
        check_target(tmp_path)


def test_directory_in_place_of_a_listed_file_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(OURS)
    (tmp_path / "rank0.safetensors").mkdir()
    with pytest.raises(BuildError, match=r"rank0\.safetensors' is not of the engine"):
        check_target(tmp_path)


@pytest.mark.parametrize("files", ["null", "[]", "3"])
def test_engine_that_lists_no_files_owns_its_config_alone(tmp_path: Path, files: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"looptrt": {{"files": {files}}}}}')
    check_target(tmp_path)
    (tmp_path / "rank0.safetensors").touch()
    with pytest.raises(BuildError, match="not of the engine"):
        check_target(tmp_path)


def test_content_that_comes_during_the_build_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    with atomic_directory(target) as draft:
        write_engine(draft, "old")
    with pytest.raises(BuildError, match="'precious'"), atomic_directory(target):
        (target / "precious").touch()
    assert names(target) == ["config.json", "precious", "rank0.safetensors"]
    assert names(tmp_path) == ["engine"]


def test_inputs_in_the_target_are_kept_even_through_links(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    target.mkdir()
    write_engine(target, "weights that the checkpoint links to")
    (tmp_path / "model.safetensors").symlink_to(target / "rank0.safetensors")
    check_target(target, inputs=[tmp_path / "other"])
    with pytest.raises(BuildError, match=r"model\.safetensors is in it"):
        check_target(target, inputs=[tmp_path / "model.safetensors"])


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_target_named_like_a_file_of_the_checkpoint_around_it(tmp_path: Path, name: str) -> None:
    check_beside_checkpoint(tmp_path / "engine", tmp_path)
    check_beside_checkpoint(tmp_path / "engine" / name, tmp_path)
    with pytest.raises(BuildError, match="would look like a file of the checkpoint"):
        check_beside_checkpoint(tmp_path / name, tmp_path)


# Places where no rename can put a directory.


@pytest.mark.parametrize("target", [".", "..", "../..", "/", "../here"])
def test_the_working_directory_is_refused(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(BuildError, match=r"--output_dir .*: the working directory .*\./engine"):
        check_target(Path(target))


def test_mount_points_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "link").symlink_to("volume")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "volume")
    for name in ("volume", "link"):
        with pytest.raises(BuildError, match=f"mount point .* such as .*{name}/engine"):
            check_target(tmp_path / name)
    check_target(tmp_path / "volume" / "engine")


def test_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BuildError, match="expected a directory"):
        check_target(tmp_path / "loop")


@pytest.mark.parametrize("target", [b"\xff", b"\xff/engine"])
def test_path_that_is_not_utf8_is_refused(tmp_path: Path, target: bytes) -> None:
    with pytest.raises(BuildError, match="expected a path in UTF-8"):
        check_target(tmp_path / os.fsdecode(target))


def test_relative_path_in_a_directory_that_is_not_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / os.fsdecode(b"\xfe")
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(BuildError, match="expected a path in UTF-8"):
        check_target(Path("engine"))


# Drafts of builders that were killed.

HOLD = """
import sys, time
from pathlib import Path
from looptrt.builder.engine_dir import atomic_directory
with atomic_directory(Path(sys.argv[1])) as draft:
    (draft / "rank0.safetensors").write_text("half")
    print(draft.name, flush=True)
    time.sleep(600)
"""


def start_builder(target: Path) -> tuple[subprocess.Popen[str], str]:
    """A process in the middle of a build, and its draft's name."""
    command = [sys.executable, "-c", HOLD, str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_draft_of_a_killed_builder_is_swept_and_that_of_a_living_one_kept(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    living, kept = start_builder(target)
    dead, left = start_builder(target)
    other, of_another_target = start_builder(tmp_path / "engine2")
    try:
        for process in (dead, other):
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert names(tmp_path) == sorted([kept, left, of_another_target])
        with atomic_directory(target) as draft:
            write_engine(draft, "new")
            assert names(tmp_path) == sorted([kept, of_another_target, draft.name])
    finally:
        for process in (living, dead, other):
            process.kill()
            process.communicate()
    assert names(tmp_path) == sorted([kept, of_another_target, "engine"])
    with atomic_directory(target) as draft:
        write_engine(draft, "newer")
    assert names(tmp_path) == sorted([of_another_target, "engine"])


def test_names_that_only_resemble_drafts_are_kept(tmp_path: Path) -> None:
    kept = [".engine.0123abc.tmp", ".engine.0123abcd.tmp.old", ".engine.0123abcd.old", "engine.tmp"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".engine.00000000.tmp").touch()
    (tmp_path / ".engine.11111111.tmp").symlink_to(tmp_path / kept[0])
    with atomic_directory(tmp_path / "engine") as draft:
        write_engine(draft, "new")
    left = [*kept, ".engine.00000000.tmp", ".engine.11111111.tmp", "engine"]
    assert names(tmp_path) == sorted(left)


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(engine_dir.fcntl, "flock", flock)
    (tmp_path / ".engine.0123abcd.tmp").mkdir()  # whose builder may live
    with atomic_directory(tmp_path / "engine") as draft:
        write_engine(draft, "new")
    assert names(tmp_path) == [".engine.0123abcd.tmp", "engine"]
