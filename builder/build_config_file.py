"""A --build_config file: TensorRT-LLM's BuildConfig as JSON, read into words for flags.

Owns the file's layout; leaves what a word means to the flag table. Invariant: a key that no
flag knows is refused, and null stands for the default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looptrt.builder.flag_table import FLAGS, Flag, Section
from looptrt.errors import BuildError

_LORA_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "lora_dir": ([], None),
    "lora_ckpt_source": ("hf", None),
    "lora_target_modules": ([], None),
    "trtllm_modules_to_hf_modules": ({}, None),
    "max_lora_rank": (64, None),
    "max_loras": (4, None),
    "max_cpu_loras": (4, None),
    "swap_gate_up_proj_lora_b_weight": (True, None),
}


def read_build_config(path: Path) -> dict[str, str]:
    """Read a file.

    Returns:
        {flag name: word}; booleans are `enable` and `disable`.

    Raises:
        BuildError: the file cannot be read, or a key is unknown or malformed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BuildError(f"--build_config {path}: cannot be read as JSON: {error}") from None
    settings = _object(path, "the file", content)
    plugins = _object(path, Section.PLUGIN, settings.pop(Section.PLUGIN, None) or {})
    plugins.pop("dtype", None)  # the dtype that `auto` stands for: the engine's
    _check_lora(path, _object(path, "lora_config", settings.pop("lora_config", None) or {}))
    return _words(path, settings, Section.BUILD) | _words(path, plugins, Section.PLUGIN)


def _object(path: Path, name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BuildError(f"--build_config {path}: {name}: expected an object, got {value!r:.60}")
    return dict(value)


def _words(path: Path, settings: Mapping[str, Any], section: Section) -> dict[str, str]:
    known = {flag.key or flag.name: flag for flag in FLAGS.values() if flag.section is section}
    words = {}
    for key, value in settings.items():
        if key not in known:
            raise BuildError(f"--build_config {path}: {section}: unknown key {key!r}")
        word = _word(path, known[key], value)
        if word is not None:
            words[known[key].name] = word
    return words


def _word(path: Path, flag: Flag, value: object) -> str | None:
    if value is None:
        # Null switches a plugin off; elsewhere, and where it is the default, nothing is said.
        is_plugin_off = flag.section is Section.PLUGIN and flag.default is not None
        return "disable" if is_plugin_off else None
    if isinstance(value, bool):
        return "enable" if value else "disable"
    if isinstance(value, int | str):
        return str(value)
    raise BuildError(
        f"--build_config {path}: {flag.name}: expected a word, a number, a boolean or null, got "
        f"{value!r:.60}"
    )


def _check_lora(path: Path, settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if key not in _LORA_DEFAULTS:
            raise BuildError(f"--build_config {path}: lora_config: unknown key {key!r}")
        if value not in _LORA_DEFAULTS[key]:
            raise BuildError(
                f"--build_config {path}: lora_config: {key}: LoRA is not supported, got "
                f"{value!r:.60}"
            )
