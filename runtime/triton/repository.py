"""A model repository for a server, made from the templates in `triton_server_repo/`.

Owns what the fields of the templates are filled with; leaves what they mean to the models.
Invariant: no field stays open, and a path of any spelling stays one string.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

import looptrt
from looptrt.errors import LooptrtError
from looptrt.models.tokenizer_file import TOKENIZER_NAME
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.triton.engine_files import read_manifest
from looptrt.runtime.triton.settings import text_of
from looptrt.runtime.triton.tensors import MODELS

_CONFIG = "config.pbtxt"
_TEMPLATES = "triton_server_repo"
_TEXT_MODELS = ("preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls")


@dataclass(frozen=True, kw_only=True)
class RepositoryOptions:
    """What the templates are filled with.

    Attributes:
        engine_dir: as the server will see it.
        engine_config: of the engine.
        drain_file: while it exists, new requests are refused; None for never.
        engine_python: interpreter of the engine process; "" is python3 on the server's PATH.
        decoupled_mode: False for servers whose clients use plain `infer` only.
        lazy_load: load the engine behind `is_ready()`.
        exclude_input_in_output: what an answer is where a request does not say.
        skip_special_tokens: of `postprocessing`, for ids without text.
        accumulate_tokens: a BLS stream repeats the text so far.
        preprocessing_instance_count: processes that tokenise.
        bls_max_requests: requests that the BLS model carries at a time.
    """

    engine_dir: Path
    engine_config: EngineConfig
    drain_file: Path | None = None
    engine_python: str = ""
    decoupled_mode: bool = True
    lazy_load: bool = False
    exclude_input_in_output: bool = True
    skip_special_tokens: bool = True
    accumulate_tokens: bool = False
    preprocessing_instance_count: int = 1
    bls_max_requests: int = 256


def templates_dir() -> Path:
    """The folder of the templates, beside or inside the package.

    Raises:
        LooptrtError: this installation has none.
    """
    package = Path(looptrt.__file__).resolve().parent
    for folder in (package / _TEMPLATES, package.parent / _TEMPLATES):
        if (folder / "ensemble" / _CONFIG).is_file():
            return folder
    raise LooptrtError(f"{package}: this installation of looptrt has no {_TEMPLATES}")


def write_repository(target: Path, options: RepositoryOptions, *, links_package: bool) -> list[str]:
    """Write the models of an engine.

    An engine directory without a tokenizer gets `tensorrt_llm` alone.

    Args:
        target: an empty or absent directory.
        options: what the templates are filled with.
        links_package: give each model this installation of looptrt; without, the server's own
            Python has to have one.

    Returns:
        Names of the models.

    Raises:
        LooptrtError: the target is not empty, or the engine directory is damaged.
    """
    manifest = read_manifest(options.engine_dir)
    has_tokenizer = (options.engine_dir / TOKENIZER_NAME).is_file()
    models = [name for name in MODELS if has_tokenizer or name not in _TEXT_MODELS]
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise LooptrtError(f"{target}: expected an empty directory")
    limits = options.engine_config.limits(manifest)
    fields = _fields(options, limits.max_batch_size)
    templates = templates_dir()
    for name in models:
        _write_model(templates / name, target / name, fields, links_package=links_package)
    return models


def _write_model(
    template: Path, target: Path, fields: Mapping[str, str], *, links_package: bool
) -> None:
    version = target / "1"
    version.mkdir(parents=True)  # a version without a file, too, as the ensemble's
    config = Template((template / _CONFIG).read_text("utf-8")).substitute(fields)
    (target / _CONFIG).write_text(config, "utf-8")
    code = template / "1" / "model.py"
    if code.is_file():
        shutil.copyfile(code, version / code.name)
        if links_package:
            (version / "looptrt").symlink_to(Path(looptrt.__file__).resolve().parent)


def _fields(options: RepositoryOptions, max_batch_size: int) -> dict[str, str]:
    engine_dir = str(options.engine_dir.resolve())
    values = {
        "triton_max_batch_size": max_batch_size,
        "engine_dir": engine_dir,
        "tokenizer_dir": engine_dir,
        "tensorrt_llm_model_name": "tensorrt_llm",
        "drain_file": "" if options.drain_file is None else str(options.drain_file),
        "engine_python": options.engine_python,
        "decoupled_mode": options.decoupled_mode,
        "lazy_load": options.lazy_load,
        "exclude_input_in_output": options.exclude_input_in_output,
        "skip_special_tokens": options.skip_special_tokens,
        "accumulate_tokens": options.accumulate_tokens,
        "preprocessing_instance_count": options.preprocessing_instance_count,
        "bls_max_requests": options.bls_max_requests,
        **options.engine_config.to_json(),
    }
    return {name: _escaped(text_of(value)) for name, value in values.items()}


def _escaped(text: str) -> str:
    """A string's content in the text form of protocol buffers."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
