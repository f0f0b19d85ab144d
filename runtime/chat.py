"""Chat messages to a prompt, by the template of the engine directory.

Owns rendering and what is told of a conversation that cannot be; leaves finding and compiling
the template to `models.chat_template` and tokens to `tokenizer`. Invariant: a bad template
fails the start or the request, with an error of ours, and nothing else.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import meta

from looptrt.errors import CheckpointError, ManifestError, RequestError
from looptrt.models.chat_template import (
    compile_template,
    find_template,
    special_tokens,
)

Message = Mapping[str, str]


class ChatTemplate:
    """A compiled template and the special tokens that it may name.

    Raises:
        ManifestError: the source is not a Jinja template; `where` is named.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        self.where = where
        self._tokens = dict(tokens)
        try:
            self._template = compile_template(source, where)
        except CheckpointError as error:
            raise ManifestError(str(error)) from error
        parsed = self._template.environment.parse(source)
        self._asks_thinking = "enable_thinking" in meta.find_undeclared_variables(parsed)

    @staticmethod
    def of_engine(engine_dir: Path) -> ChatTemplate | None:
        """The template of an engine directory, None where there is none.

        The builder puts a family's default beside a tokenizer that has none of its own.

        Raises:
            ManifestError: a file that should hold the template cannot be used.
        """
        try:
            found = find_template(engine_dir)
            tokens = special_tokens(engine_dir)
        except CheckpointError as error:
            raise ManifestError(str(error)) from error
        return None if found is None else ChatTemplate(found.source, tokens, found.where)

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
            RequestError: a message is malformed, the template refuses the conversation, or
                `enable_thinking` is given and the template knows no such thing.
        """
        _check_messages(messages)
        names: dict[str, Any] = {**self._tokens, "add_generation_prompt": add_generation_prompt}
        if enable_thinking is not None:
            if not self._asks_thinking:
                raise RequestError(
                    f"enable_thinking: the chat template ({self.where}) does not use it, "
                    f"got {enable_thinking}"
                )
            names["enable_thinking"] = enable_thinking
        try:
            return self._template.render(messages=[dict(message) for message in messages], **names)
        except Exception as error:  # a template is foreign code: it may raise anything
            raise RequestError(
                f"messages: the chat template ({self.where}) says: {error}"
            ) from error


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            f"messages: expected a list of at least 1 message, got {reprlib.repr(messages)}"
        )
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str):
                raise RequestError(
                    f"messages[{index}]: expected a string {key!r}, got {reprlib.repr(message)}"
                )
