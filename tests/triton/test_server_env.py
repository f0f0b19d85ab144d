"""Which server is taken, which interpreter fits, and an environment that is whole or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from looptrt.errors import LooptrtError
from looptrt.runtime.triton import server_env
from looptrt.runtime.triton.server_env import (
    SUPPORTED,
    find_server,
    install_server,
    is_installed,
)

_BLOCKED = ("torch", "onnx", "safetensors", "transformers", "fastapi", "prometheus_client")


def program(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def stamped(directory: Path, **changes: object) -> Path:
    """What looks like an environment to those who only look for its stamp."""
    directory.mkdir(parents=True)
    stamp = {"recipe": server_env._recipe(), "version": "3.11", "python": sys.executable, **changes}
    (directory / server_env._STAMP).write_text(json.dumps(stamp))
    return directory


def test_named_server_comes_before_the_one_on_path_before_the_installed_one(
    tmp_path: Path,
) -> None:
    named, on_path = program(tmp_path / "named"), program(tmp_path / "bin" / "tritonserver")
    environment = stamped(tmp_path / "env")
    search = str(on_path.parent)
    assert find_server(named, environment, search).binary == named
    found = find_server(None, environment, search)
    assert (found.binary, found.backends, found.environment) == (on_path, None, None)
    installed = find_server(None, environment, "/nowhere")
    assert installed.binary.is_relative_to(environment)
    assert installed.backends == environment / "backends"
    assert installed.environment is not None
    assert str(environment / "lib") in installed.environment["LD_LIBRARY_PATH"]


def test_absent_server_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LooptrtError, match=r"--install_server` once, or use NVIDIA's container"):
        find_server(None, tmp_path / "env", "/nowhere")
    with pytest.raises(LooptrtError, match="expected a tritonserver program"):
        find_server(tmp_path / "absent", tmp_path / "env", "/nowhere")


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {"format": 0, "requirements": []}},
        {"recipe": None},
        {"python": "/no/such/interpreter"},
    ],
)
def test_environment_of_another_recipe_or_a_removed_interpreter_is_none(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    assert is_installed(stamped(tmp_path / "good"))
    assert not is_installed(stamped(tmp_path / "bad", **changes))
    (tmp_path / "bad" / server_env._STAMP).write_text("{")
    assert not is_installed(tmp_path / "bad")
    assert not is_installed(tmp_path / "absent")


def test_interpreter_that_does_not_run_is_passed_over_with_its_reason(tmp_path: Path) -> None:
    shim = program(tmp_path / "python3.11", "echo 'no such version' >&2; exit 127")
    assert server_env._probe(str(shim)) == "no such version"
    assert "No such file" in str(server_env._probe(str(tmp_path / "absent")))
    old = program(tmp_path / "python3", """echo '[[3, 9], "/lib", "libpython3.9.so", 1]'""")
    assert server_env._probe(str(old)) == "is 3.9"
    static = program(tmp_path / "python", """echo '[[3, 12], "/lib", "libpython3.12.a", 0]'""")
    assert server_env._probe(str(static)) == "has no shared library libpython3.12.a"


def test_no_fitting_interpreter_names_all_that_were_tried_and_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = program(tmp_path / "bin" / "python3.11", "exit 127")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "versions" / "x"))
    with pytest.raises(LooptrtError, match=r"needs a CPython 3\.11 or 3\.12") as raised:
        install_server(tmp_path / "env", str(shim.parent))
    assert f"{shim}: no output" in str(raised.value)
    assert "container" in str(raised.value)
    assert not (tmp_path / "env").exists()


def test_interpreters_of_a_version_manager_are_found_beside_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "versions" / "3.12.1" / "lib" / "libpython3.12.so.1.0"
    says = f"""echo '[[3, 12], "{library.parent}", "{library.name}", 1]'"""
    python = program(tmp_path / "versions" / "3.12.1" / "bin" / "python3.12", says)
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "versions" / "3.13.0"))
    found = server_env._find_python("/nowhere")
    assert (found.executable, found.version, found.library) == (str(python), "3.12", library)


def test_many_that_want_the_environment_make_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(target: Path, _python: object) -> None:
        made.append(stamped(target))

    monkeypatch.setattr(server_env, "_make", make)
    monkeypatch.setattr(server_env, "_find_python", lambda _: None)
    target = tmp_path / "cache" / "env"
    threads = [threading.Thread(target=install_server, args=(target, "")) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [target]


def test_held_lock_is_an_error_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_env, "_LOCK_TIMEOUT_S", 0.3)
    with (
        server_env._locked(tmp_path / "env.lock"),
        pytest.raises(LooptrtError, match="another process has held it"),
    ):
        install_server(tmp_path / "env", "")


@pytest.mark.full
@pytest.mark.skipif(sys.version_info[:2] not in SUPPORTED, reason="this interpreter fits no stub")
def test_installation_that_fails_leaves_the_old_environment_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = server_env._probe(sys.executable)
    if isinstance(python, str):
        pytest.skip(f"this interpreter {python}")
    monkeypatch.setattr(server_env, "SERVER_REQUIREMENT", str(tmp_path / "absent.whl"))
    old = stamped(tmp_path / "cache" / "env", recipe={"format": 0})
    with pytest.raises(LooptrtError, match=r"pip install .*absent.whl: failed: "):
        install_server(old, os.defpath)
    assert sorted(one.name for one in old.parent.iterdir()) == ["env", "env.lock"]
    assert json.loads((old / server_env._STAMP).read_text())["recipe"] == {"format": 0}


def test_what_a_stub_imports_needs_none_of_the_engines_packages() -> None:
    code = f"""
import sys
for name in {_BLOCKED!r}:
    sys.modules[name] = None
import looptrt.runtime.triton.models
import looptrt.runtime.llm
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert run.returncode == 0, run.stderr
