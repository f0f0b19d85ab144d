"""The plugin library's border: found or not, and its C API and constants told in one way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from looptrt.errors import PluginError
from looptrt.plugins import launch, noise, schema
from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators

INCLUDE = Path(launch.__file__).resolve().parent / "include" / "looptrt"
LETTERS = {"int64_t": "q", "int32_t": "i", "float": "f"}


def declarations() -> dict[str, str]:
    """C functions that take a stream, their arguments in the letters of `launch.SIGNATURES`."""
    header = (INCLUDE / "plugins.h").read_text(encoding="utf-8")
    found = {}
    for name, text in re.findall(r"LOOPTRT_API int looptrt_(\w+)\(([^)]*)\);", header):
        arguments = [" ".join(argument.split()) for argument in text.split(",")]
        if arguments[-1] == "void* stream":
            found[name] = "".join(
                "p" if "*" in argument else LETTERS[argument.split()[0]]
                for argument in arguments[:-1]
            )
    return found


def test_python_and_c_agree_on_every_signature() -> None:
    assert declarations() == launch.SIGNATURES


def test_python_and_c_agree_on_the_version() -> None:
    header = (INCLUDE / "plugins.h").read_text(encoding="utf-8")
    assert f"#define LOOPTRT_PLUGINS_ABI {launch.ABI_VERSION}\n" in header


def test_launchers_are_operators_of_the_schema() -> None:
    assert set(launch.OPERATORS) <= {op.name for op in schema.OPS}


def numbers(name: str, text: str) -> tuple[float, ...]:
    match = re.search(rf"\b{name}(?:\[\])? = \{{?([^;}}]*)", text)
    assert match, name
    return tuple(
        float(int(word, 0)) if word.startswith("0x") else float(word)
        for word in re.split(r"[,\s]+", match[1])
        if word
    )


def test_kernel_has_the_noise_constants() -> None:
    text = (INCLUDE / "noise_constants.cuh").read_text(encoding="utf-8")
    for name in ("CENTRE_TOP", "CENTRE_BOTTOM", "TAIL_TOP", "TAIL_BOTTOM"):
        assert numbers(f"k{name.title().replace('_', '')}", text) == getattr(noise, name), name
    assert numbers("kTailProbability", text) == (noise.TAIL_PROBABILITY,)
    assert numbers("kCentre", text) == (noise.CENTRE,)
    for name in ("Seed", "Position", "Channel"):
        key = re.search(rf"k{name}Key = (0x[0-9A-F]+);", text)
        assert key is not None
        assert int(key[1], 16) == int(getattr(noise, f"{name.upper()}_KEY"))


def test_a_missing_library_is_named_with_the_way_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch._Process, "library", None)
    monkeypatch.setattr(launch, "places", lambda: [tmp_path / launch.LIBRARY_NAME])
    with pytest.raises(PluginError, match=rf"no liblooptrt_plugins.so .*{tmp_path}.*cmake -S"):
        launch.load()


def test_a_file_that_is_no_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch._Process, "library", None)
    path = tmp_path / launch.LIBRARY_NAME
    path.write_text("not a shared object", encoding="utf-8")
    with pytest.raises(PluginError, match=rf"{path}: cannot be opened"):
        launch.load(path)
    with pytest.raises(PluginError, match=r"absent\.so: cannot be opened"):
        launch.load(tmp_path / "absent.so")


def test_cpu_tensors_never_reach_a_launcher() -> None:
    table = torch.zeros(2, 2, 2, dtype=torch.int32)
    index = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(PluginError, match="block_table: expected a CUDA tensor, got cpu"):
        launch.update_tables(table, index, index, torch.zeros(1, 2, dtype=torch.int32))
