"""Request bodies: OpenAI's fields and ours, to prompts and `SamplingParams`.

Owns OpenAI's defaults and what is refused, ignored or renamed at this border; leaves ranges to
`SamplingParams` and the engine's limits to `Admission`. Invariant: a field that would change
the answer is obeyed or refused by name, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from looptrt.errors import RequestError
from looptrt.runtime.admission import Prompt
from looptrt.runtime.sampling_params import MAX_SEED, SamplingParams, shown

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, of completions
_MAX_BIAS = 100.0

_STREAM_OPTIONS = ("include_usage", "include_obfuscation")  # the latter changes no answer

# Fields of OpenAI's that change nothing in an answer, or say what a server may do.
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prediction", "parallel_tool_calls"),
)
# Fields that would change it: values that ask for nothing, and why others are refused.
_NO_TOOLS = "tools are not called"
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "suffix": (("",), "text is not filled in between"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), "answers are not constrained by a grammar"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "web_search_options": ((), "nothing is searched"),
    "reasoning_effort": ((), "use loops"),
    "verbosity": ((), "use max_completion_tokens"),
    "exclude_input": ((True,), "use echo"),
    "prompt_logprobs": ((), "use echo with logprobs"),
}


class _Body(BaseModel):
    """What both kinds of body share; further fields are those of `SamplingParams`.

    Lists and objects are checked by hand, up to the first entry that is wrong: pydantic would
    make an error of every one.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logit_bias: dict[str, Any] | None = None
    return_token_ids: bool | None = None

    @classmethod
    def of(cls, values: object) -> Self:
        """Check a parsed body.

        Raises:
            RequestError: names the first field that is wrong.
        """
        if not isinstance(values, Mapping):
            raise RequestError(f"body: expected a JSON object, got {shown(values)}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))  # names of ours: no entry is checked here
            raise RequestError(
                f"{where}: {first['msg']}"
                + ("" if first["type"] == "missing" else f", got {shown(first['input'])}")
            ) from None

    def _sampling(self, vocab_size: int) -> dict[str, Any]:
        """Its fields of `SamplingParams`; those that are null are as if absent.

        Args:
            vocab_size: length of a dense bias.
        """
        self._check_stream_options()
        extra = self.model_extra or {}
        given = {name: value for name, value in extra.items() if value is not None}
        for name in _IGNORED:
            given.pop(name, None)
        for name, (neutral, reason) in _REFUSED.items():
            if name in given and given.pop(name) not in neutral:
                raise RequestError(f"{name}: not supported; {reason}")
        given.setdefault("temperature", 1.0)
        seed = given.get("seed")
        if isinstance(seed, int) and not isinstance(seed, bool):
            given["seed"] = seed % (MAX_SEED + 1)  # OpenAI's seeds may be negative
        if self.logit_bias:
            if "embedding_bias" in given:
                raise RequestError("logit_bias: not together with embedding_bias")
            given["embedding_bias"] = _dense_bias(self.logit_bias, vocab_size)
        return given

    def _check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only with stream")
        for name, value in (self.stream_options or {}).items():
            if name not in _STREAM_OPTIONS:
                raise RequestError(f"stream_options: {shown(name)}: not supported")
            if value is not None and not isinstance(value, bool):
                raise RequestError(
                    f"stream_options.{name}: expected true or false, got {shown(value)}"
                )

    def _asked(self, params: dict[str, Any], **shown_too: bool) -> Asked:
        return Asked(
            params=SamplingParams(**params),
            stream=bool(self.stream),
            include_usage=bool((self.stream_options or {}).get("include_usage")),
            return_token_ids=bool(self.return_token_ids),
            **shown_too,
        )


@dataclass(frozen=True)
class Asked:
    """What a body asks for, beside its prompts.

    Attributes:
        include_usage: a stream ends in a chunk with the usage.
        return_token_ids: token ids and loops in each choice.
        echo: the prompt comes before the answer, with its log-probabilities if any are asked.
        scores_only: `max_tokens` is 0: the one token that the engine makes is not shown.
    """

    params: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool
    echo: bool = False
    scores_only: bool = False


class CompletionBody(_Body):
    """Of `/v1/completions`."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def prompts(self) -> list[Prompt]:
        """Its prompts: a text, texts, token ids, or lists of them."""
        value = self.prompt
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            is_one = not any(isinstance(entry, str | list) for entry in value)
            if is_one:
                return [value]
            if all(isinstance(entry, str) for entry in value) or all(
                isinstance(entry, list) for entry in value
            ):
                return cast(list[Prompt], value)
        raise RequestError(
            "prompt: expected a text, a list of texts, a list of token ids or a list of such "
            f"lists, got {shown(value)}"
        )

    def asked(self, vocab_size: int) -> Asked:
        """What it asks for.

        Raises:
            RequestError: names the field that cannot be served.
        """
        given = self._sampling(vocab_size)
        num_answers = given.get("n", 1)
        if self.best_of is not None and self.best_of != num_answers:
            raise RequestError(
                f"best_of: answers are not ranked; expected n, {shown(num_answers)}, "
                f"got {self.best_of}"
            )
        max_tokens = given.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
        scores_only = type(max_tokens) is int and max_tokens == 0
        if scores_only:
            given["max_tokens"] = 1
        given["logprobs"] = self.logprobs
        given["prompt_logprobs"] = self.logprobs if self.echo else None
        return self._asked(given, echo=bool(self.echo), scores_only=scores_only)


class ChatBody(_Body):
    """Of `/v1/chat/completions`."""

    messages: list[Any]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> list[dict[str, str]]:
        """Its messages with text as content.

        Raises:
            RequestError: a message holds something else than text.
        """
        return [_message(index, message) for index, message in enumerate(self.messages)]

    def enable_thinking(self) -> bool | None:
        """The one argument of a template that may be given."""
        kwargs = dict(self.chat_template_kwargs or {})
        value = kwargs.pop("enable_thinking", None)
        for name in kwargs:
            raise RequestError(f"chat_template_kwargs: only enable_thinking, got {name!r:.80}")
        if value is not None and not isinstance(value, bool):
            raise RequestError(
                f"chat_template_kwargs: enable_thinking: expected true or false, got {shown(value)}"
            )
        return value

    def asked(self, vocab_size: int) -> Asked:
        """What it asks for.

        Raises:
            RequestError: names the field that cannot be served.
        """
        given = self._sampling(vocab_size)
        limit, old_limit = self.max_completion_tokens, given.get("max_tokens")
        if None not in (limit, old_limit) and limit != old_limit:
            raise RequestError(
                "max_completion_tokens: expected the same as max_tokens, its old name, "
                f"got {limit} and {shown(old_limit)}"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs: only with logprobs true")
        given["max_tokens"] = old_limit if limit is None else limit
        given["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return self._asked(given)


def _dense_bias(bias: Mapping[str, Any], vocab_size: int) -> NDArray[np.float32]:
    """[vocab] numbers of `logit_bias`, which names token ids."""
    dense = np.zeros(vocab_size, np.float32)
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias: expected token ids from 0 to {vocab_size - 1}, got {shown(key)}"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -_MAX_BIAS <= value <= _MAX_BIAS:
            raise RequestError(
                f"logit_bias: expected numbers from {-_MAX_BIAS:g} to {_MAX_BIAS:g}, "
                f"got {shown(value)}"
            )
        dense[int(key)] = value
    return dense


def _message(index: int, message: object) -> dict[str, str]:
    """A message with one text as its content; further keys must be empty, but for `name`."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected a JSON object, got {shown(message)}")
    for key in message.keys() - {"role", "content", "name"}:
        if message[key]:
            raise RequestError(f"{where}: {shown(key)}: not supported")
    kept = {key: value for key in ("role", "name") if (value := message.get(key)) is not None}
    return {**kept, "content": _text_of(where, message.get("content"))}


def _text_of(where: str, content: object) -> Any:  # noqa: ANN401 - ChatTemplate checks it
    """The texts of a list of parts, one a line; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise RequestError(f"{where}: expected parts of type text, got {shown(part)}")
        texts.append(text)
    return "\n".join(texts)
