"""Chat templates of a directory: where they stand, which tokens they may name, compiled.

Owns the search, the sandbox and every check that can be made without a conversation, for the
builder and the runtime alike; leaves rendering to `runtime.chat`. Invariant: what is returned
compiles, and can read what it is given and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from looptrt.errors import CheckpointError
from looptrt.models.files import is_there, read_json, read_text, shown

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class TemplateSource:
    """A template that compiles.

    Attributes:
        source: Jinja source.
        where: the file and key that hold it, for errors.
    """

    source: str
    where: str


def find_template(directory: Path) -> TemplateSource | None:
    """The first of chat_template.jinja and `chat_template` of tokenizer_config.json.

    Raises:
        CheckpointError: a file cannot be read, or holds no usable template; names it.
    """
    path = directory / TEMPLATE_NAME
    if is_there(path):
        found: TemplateSource | None = TemplateSource(read_text(path), str(path))
    else:
        found = _template_of_config(directory / TOKENIZER_CONFIG_NAME)
    if found is not None:
        compile_template(found.source, found.where)
    return found


def special_tokens(directory: Path) -> dict[str, str]:
    """`bos_token` and the like of tokenizer_config.json; each a string or `{"content": …}`.

    Raises:
        CheckpointError: the file cannot be read, or a token is something else.
    """
    path = directory / TOKENIZER_CONFIG_NAME
    config = _read_config(path)
    tokens = {}
    for name in _TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None and value is None:
            continue
        if not isinstance(content, str):
            raise CheckpointError(f"{path}: {name}: expected a token, found {shown(value)}")
        tokens[name] = content
    return tokens


def compile_template(source: str, where: str) -> Template:
    """Compile a template; `where` is named if that fails.

    Raises:
        CheckpointError: the source is not a Jinja template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except Exception as error:  # Python's compiler and constants of the template raise anything
        raise CheckpointError(f"{where}: not a usable chat template: {error}") from error


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which templates written for transformers do not expect.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_config(path: Path) -> Mapping[str, Any]:
    return read_json(path) if is_there(path) else {}


def _template_of_config(path: Path) -> TemplateSource | None:
    """`chat_template`: a string, or a list of named templates of which one is `default`."""
    value = _read_config(path).get("chat_template")
    where = f"{path}: chat_template"
    if isinstance(value, list):
        value = _named(value, where).get("default")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{where}: expected a string, got {shown(value)}")
    return None if value is None else TemplateSource(value, where)


def _named(entries: list[Any], where: str) -> dict[str, str]:
    templates = {}
    for entry in entries:
        name, source = (
            (entry.get(key) if isinstance(entry, dict) else None) for key in ("name", "template")
        )
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError(
                f"{where}: expected a list of {{name, template}}, found {shown(entry)}"
            )
        templates[name] = source
    return templates
