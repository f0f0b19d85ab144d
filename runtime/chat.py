"""Chat messages to a prompt, by the checkpoint's template or the family's own.

Owns the search for the template and its sandbox; leaves tokens to `tokenizer`. Invariant: a
template can read what it is given and nothing else, and a bad one fails the request only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from looptrt.errors import ManifestError, RequestError

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

Message = Mapping[str, str]

_OURO = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""
_HUGINN = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'Huginn' if message['role'] == 'assistant' else message['role'] -%}
{{- '<|begin_header|>' + role + '<|end_header|>\\n\\n' -}}
{{- message['content'] | trim + '<|end_turn|>' -}}
{%- endfor -%}
{{- '<|begin_header|>Huginn<|end_header|>\\n\\n' if add_generation_prompt else '<|end_text|>' -}}
"""
_FAMILY_TEMPLATES = {"OuroForCausalLM": _OURO, "RavenForCausalLM": _HUGINN}
_FAMILY_TOKENS = {"RavenForCausalLM": {"bos_token": "<|begin_text|>"}}


class ChatTemplate:
    """A compiled template and the special tokens that it may name.

    Raises:
        ManifestError: the source is not a Jinja template; `where` is named.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        self.where = where
        self._tokens = dict(tokens)
        try:
            self._template = _compile(source)
        except TemplateError as error:
            raise ManifestError(f"{where}: not a usable chat template: {error}") from error

    @staticmethod
    def of_engine(engine_dir: Path, architecture: str) -> ChatTemplate | None:
        """The template of an engine directory.

        The first of: chat_template.jinja, `chat_template` of tokenizer_config.json, the
        default of the family. None where there is none.

        Raises:
            ManifestError: a file that should hold the template cannot be read.
        """
        config_path = engine_dir / TOKENIZER_CONFIG_NAME
        config = _read_config(config_path)
        tokens = {**_FAMILY_TOKENS.get(architecture, {}), **_special_tokens(config)}
        file_path = engine_dir / TEMPLATE_NAME
        if file_path.is_file():
            return ChatTemplate(_read_text(file_path), tokens, str(file_path))
        source = _template_of_config(config, config_path)
        if source is not None:
            return ChatTemplate(source, tokens, f"{config_path}: chat_template")
        if architecture in _FAMILY_TEMPLATES:
            return ChatTemplate(
                _FAMILY_TEMPLATES[architecture], tokens, f"default of {architecture}"
            )
        return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: each with a `role` and a `content`, both strings.
            add_generation_prompt: end where the assistant's turn begins.
            enable_thinking: given to the template; None leaves it undefined there.

        Raises:
            RequestError: a message is malformed, or the template refuses the conversation.
        """
        _check_messages(messages)
        names: dict[str, Any] = {**self._tokens, "add_generation_prompt": add_generation_prompt}
        if enable_thinking is not None:
            names["enable_thinking"] = enable_thinking
        try:
            return self._template.render(messages=[dict(message) for message in messages], **names)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RequestError(
                f"messages: the chat template ({self.where}) says: {error}"
            ) from error


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which templates written for transformers do not expect.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages: expected a list of at least 1 message, got {messages!r}")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str):
                raise RequestError(f"messages[{index}]: expected a string {key!r}, got {message!r}")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ManifestError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ManifestError(f"{path}: expected a JSON object")
    return config


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; an entry is a string or an object with `content`."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _template_of_config(config: Mapping[str, Any], path: Path) -> str | None:
    """`chat_template`: a string, or a list of named templates of which one is `default`."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ManifestError(f"{path}: chat_template: expected a string, got {value!r}")
    return value
