"""Answers in the shapes of OpenAI's API: whole objects and the chunks of streams.

Owns ids, choices, usage and log-probability objects; leaves when something is sent to `app`
and `events`. Invariant: the chunks of a choice, joined, hold what the whole choice holds.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from looptrt.runtime.openai.bodies import Asked
from looptrt.runtime.openai.faults import ApiFault
from looptrt.runtime.openai.token_texts import Offsets, TokenTexts, utf8_bytes
from looptrt.runtime.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from looptrt.runtime.request import FinishReason
from looptrt.runtime.tokenizer import Tokenizer

Json = dict[str, Any]

_LEAST_LOGPROB = -9999.0  # OpenAI's value for what almost never comes; JSON has no infinity


@dataclass
class _Choice:
    """How much of a choice was sent.

    Attributes:
        unsent: text that waits for the prompt's log-probabilities.
        num_tokens: generated tokens sent; last_token: the last of them.
        offsets: of its generated tokens.
    """

    unsent: str = ""
    num_tokens: int = 0
    last_token: int | None = None
    offsets: Offsets | None = None
    is_begun: bool = False
    is_ended: bool = False


@dataclass(frozen=True)
class Row:
    """A token with its log-probabilities, as a reply shows it.

    Attributes:
        text: the token as a string.
        offset: where it begins in the choice's text, in characters.
        own: its log-probability, None for the first token of a prompt.
        likely: (string, log-probability, rank) of it and the most likely others.
    """

    text: str
    offset: int
    own: float | None
    likely: list[tuple[str, float, int]]


class Reply(ABC):
    """What one HTTP request gets; choice number j of prompt i has the index i * n + j.

    Args:
        asked: what the body asks for.
        model: name of the served model.
        tokenizer: of the engine.
    """

    id_prefix: str
    whole_kind: str
    chunk_kind: str
    has_opening: bool  # whether the first chunk says something without any text

    def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer | None) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._choices: dict[int, _Choice] = {}
        self._usage = _Usage()
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model

    @abstractmethod
    def whole_choice(self, text: str, rows: list[Row] | None) -> Json:
        """Text and log-probabilities of a whole choice."""

    @abstractmethod
    def chunk_choice(self, text: str, rows: list[Row] | None, *, is_first: bool) -> Json:
        """The same of a chunk; the first of a choice may say more."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The reply of a request that does not stream, from finished outputs.

        Raises:
            ApiFault: an answer ended in an error.
        """
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._usage.add(output, self._asked)
            for completion in output.outputs:
                index = self._index(prompt_index, completion)
                choice, text = _Choice(), self._echo(output)
                if not self._asked.scores_only:
                    text += completion.text
                rows = self._rows(choice, output, completion)
                shown = self.whole_choice(text, rows)
                choices.append(self._with_end(index, shown, output, completion, choice))
        return self._object(self.whole_kind, choices) | {"usage": self._usage.to_json()}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Json]:
        """What a stream's output brings.

        Raises:
            ApiFault: an answer ended in an error.
        """
        if output.finished:
            self._usage.add(output, self._asked)
        for completion in output.outputs:
            index = self._index(prompt_index, completion)
            choice = self._choices.setdefault(index, _Choice())
            if not self._asked.scores_only:
                choice.unsent += completion.delta
            if choice.is_ended or not (self._is_scored(output) or output.finished):
                continue
            if (chunk := self._chunk(index, choice, output, completion)) is not None:
                yield self._object(self.chunk_kind, [chunk]) | self._no_usage()

    def last_chunk(self) -> Json | None:
        """The usage, where a stream asks for it."""
        if not self._asked.include_usage:
            return None
        return self._object(self.chunk_kind, []) | {"usage": self._usage.to_json()}

    # ---- inside

    def _chunk(
        self, index: int, choice: _Choice, output: RequestOutput, completion: CompletionOutput
    ) -> Json | None:
        """The next chunk of a choice; None while there is nothing to show."""
        is_first, is_last = not choice.is_begun, completion.finish_reason is not None
        text, choice.unsent = choice.unsent, ""
        if is_first:
            text = self._echo(output) + text
        rows = self._rows(choice, output, completion)
        has_tokens = completion.num_tokens > choice.num_tokens
        is_news = has_tokens and (rows is not None or self._asked.return_token_ids)
        if not (text or is_last or is_news or (is_first and self.has_opening)):
            return None
        shown = self.chunk_choice(text, rows, is_first=is_first)
        choice.is_ended = is_last
        return self._with_end(index, shown, output, completion, choice)

    def _index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * self._asked.params.n + completion.index

    def _is_scored(self, output: RequestOutput) -> bool:
        """Whether the prompt's log-probabilities, if they are asked for, are all there."""
        scored = output.prompt_logprobs
        return scored is None or len(scored) == len(output.prompt_token_ids)

    def _echo(self, output: RequestOutput) -> str:
        """The prompt's text where it comes before the answer."""
        if not self._asked.echo:
            return ""
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        skip = self._asked.params.skip_special_tokens
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)

    def _rows(
        self, choice: _Choice, output: RequestOutput, completion: CompletionOutput
    ) -> list[Row] | None:
        """Tokens that were not shown yet, where log-probabilities are asked for."""
        if self._asked.params.logprobs is None:
            return None
        rows: list[Row] = []
        scored: Sequence[TokenLogprobs | None]
        if choice.offsets is None:
            choice.offsets = self._offsets(len(self._echo(output)))
            if self._asked.echo:
                ids, scored = output.prompt_token_ids, output.prompt_logprobs or []
                rows += self._rows_of(ids, scored, None, self._offsets(0))
        if not self._asked.scores_only:
            ids = completion.token_ids[choice.num_tokens :]
            scored = (completion.logprobs or [])[choice.num_tokens :]
            rows += self._rows_of(ids, scored, choice.last_token, choice.offsets)
            choice.last_token = ids[-1] if ids else choice.last_token
        return rows

    def _offsets(self, start: int) -> Offsets:
        skip = self._asked.params.skip_special_tokens
        return Offsets(self._tokenizer, start=start, skip_special_tokens=skip)

    def _rows_of(
        self,
        token_ids: list[int],
        scored: Sequence[TokenLogprobs | None],
        after: int | None,
        offsets: Offsets,
    ) -> Iterator[Row]:
        for token_id, at, offset in zip(token_ids, scored, offsets.of(token_ids), strict=True):
            text = self._texts.text(token_id, after)
            if at is None:
                yield Row(text, offset, None, [])
            else:
                values = [max(value, _LEAST_LOGPROB) for value in at.logprobs]
                texts = [text, *(self._texts.text(other, after) for other in at.token_ids[1:])]
                yield Row(text, offset, values[0], list(zip(texts, values, at.ranks, strict=True)))
            after = token_id

    def _with_end(
        self,
        index: int,
        shown: Json,
        output: RequestOutput,
        completion: CompletionOutput,
        choice: _Choice,
    ) -> Json:
        """A choice or a chunk of one with its place, its end and our extras."""
        ids: list[int] = []
        depths: list[int] = []
        extras: Json = {}
        if self._asked.return_token_ids:
            if not self._asked.scores_only:
                ids = completion.token_ids[choice.num_tokens :]
                depths = completion.depths[choice.num_tokens :]
            extras = {"token_ids": ids, "loops_used": depths}
            if not choice.is_begun:
                extras["prompt_token_ids"] = output.prompt_token_ids
        reason = None
        if completion.finish_reason is not None:
            reason = "length" if self._asked.scores_only else _finish_reason(completion)
            extras["stop_reason"] = completion.stop_reason
        choice.is_begun, choice.num_tokens = True, completion.num_tokens
        return {"index": index, **shown, "finish_reason": reason, **extras}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices}

    def _no_usage(self) -> Json:
        return {"usage": None} if self._asked.include_usage else {}


class CompletionReply(Reply):
    """Of `/v1/completions`."""

    id_prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"
    has_opening = False

    def whole_choice(self, text: str, rows: list[Row] | None) -> Json:
        """See `Reply`."""
        return {"text": text, "logprobs": None if rows is None else _completion_logprobs(rows)}

    def chunk_choice(self, text: str, rows: list[Row] | None, *, is_first: bool) -> Json:
        """See `Reply`."""
        return self.whole_choice(text, rows)


class ChatReply(Reply):
    """Of `/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    has_opening = True

    def whole_choice(self, text: str, rows: list[Row] | None) -> Json:
        """See `Reply`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(rows)}

    def chunk_choice(self, text: str, rows: list[Row] | None, *, is_first: bool) -> Json:
        """See `Reply`."""
        delta = {"role": "assistant"} if is_first else {}
        if text or is_first:
            delta["content"] = text
        return {"delta": delta, "logprobs": self._logprobs(rows)}

    def _logprobs(self, rows: list[Row] | None) -> Json | None:
        most = self._asked.params.logprobs
        if rows is None or most is None:
            return None
        content = []
        for row in rows:
            likely = sorted((rank, text, value) for text, value, rank in row.likely if rank <= most)
            shown = [_chat_token(text, value) for _, text, value in likely]
            content.append({**_chat_token(row.text, row.own), "top_logprobs": shown})
        return {"content": content, "refusal": None}


@dataclass
class _Usage:
    """Tokens of a whole HTTP request; a prompt counts once, however many answers it has."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    loops_used: int = 0

    def add(self, output: RequestOutput, asked: Asked) -> None:
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens or 0
        for completion in () if asked.scores_only else output.outputs:
            self.completion_tokens += completion.num_tokens
            self.loops_used += sum(completion.depths)

    def to_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "loops_used": self.loops_used,
        }


def _completion_logprobs(rows: list[Row]) -> Json:
    top: list[dict[str, float] | None] = []
    for row in rows:
        likely: dict[str, float] = {}
        for text, value, _ in row.likely:  # different tokens can have the same string
            likely[text] = max(value, likely.get(text, value))
        top.append(None if row.own is None else likely)
    return {
        "tokens": [row.text for row in rows],
        "token_logprobs": [row.own for row in rows],
        "top_logprobs": top,
        "text_offset": [row.offset for row in rows],
    }


def _chat_token(text: str, value: float | None) -> Json:
    return {"token": text, "logprob": value, "bytes": utf8_bytes(text)}


def _finish_reason(completion: CompletionOutput) -> str:
    """`stop` or `length`: all that OpenAI knows; the other ends are errors."""
    if completion.finish_reason is FinishReason.ERROR:
        raise ApiFault(str(completion.stop_reason), status=500, kind="server_error")
    if completion.finish_reason is FinishReason.ABORT:
        raise ApiFault("the request was aborted", status=503, kind="server_error")
    assert completion.finish_reason is not None
    return completion.finish_reason.value
