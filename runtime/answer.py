"""A request's answers as they grow: tokens in, text and the caller's outputs out.

Owns text, stops and the finish reason of each of the n answers; leaves sending aborts to its
owner. Invariant: after the first stop is complete no later token changes an answer.
"""

from __future__ import annotations

from looptrt.runtime.admission import Admitted
from looptrt.runtime.detokenizer import AnswerText
from looptrt.runtime.engine_client import Update
from looptrt.runtime.outputs import (
    CompletionOutput,
    FinishedRequest,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    Transcript,
)
from looptrt.runtime.request import FinishReason, Request
from looptrt.runtime.tokenizer import Tokenizer

_NOT_FINITE = "the model's logits are not finite"


class Completion:
    """One of the answers to a prompt: accumulates the updates of one request.

    A request that completed a stop string is finished once the engine has let go of it, so
    a finished answer holds no KV.

    Attributes:
        request: as the engine gets it.
        ended: the engine's account of its end, None before.
        prompt_logprobs: those of prompt tokens that came so far, by position.
    """

    def __init__(self, index: int, admitted: Admitted, tokenizer: Tokenizer | None) -> None:
        params = admitted.params
        self.request: Request = admitted.requests[index]
        self.ended: FinishedRequest | None = None
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._index = index
        self._include_stop = params.include_stop
        self._text = AnswerText(
            tokenizer,
            params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
        )
        prompt_ids: list[int] = []
        if not params.exclude_input:
            prompt_ids = admitted.prompt.token_ids
            self._text.pieces.append(_prompt_text(admitted, tokenizer))
        self._transcript = Transcript(self._text.pieces, prompt_ids)
        self._num_shown = 0  # pieces of text

    @property
    def request_id(self) -> int:
        """Id of its request in the engine."""
        return self.request.request_id

    @property
    def is_stopped(self) -> bool:
        """Whether a stop is complete; the engine is to be told to end the request."""
        return self._text.stop is not None

    def take(self, update: Update) -> bool:
        """Add what a step brought; returns whether there is something new to show.

        Raises:
            LooptrtError: the request or the engine failed.
        """
        if update.error is not None:
            raise update.error
        self.prompt_logprobs.update(update.prompt_logprobs)
        ended = update.finished
        stop_token_id = None if ended is None else ended.stop_token_id
        last = len(update.token_ids) - 1
        for index, token_id in enumerate(update.token_ids):
            if self.is_stopped:
                break
            self._transcript.token_ids.append(token_id)
            self._transcript.depths.append(update.depths[index])
            self._transcript.logprobs.extend(update.logprobs[index : index + 1])
            is_stop_token = stop_token_id is not None and index == last
            if not is_stop_token or self._include_stop:
                self._text.push(token_id)
        if ended is not None:
            self._text.end()
            self.ended = ended
            return True
        return bool(update.token_ids) and not self.is_stopped

    def output(self) -> CompletionOutput:
        """The answer so far; its `delta` is the text since the previous call."""
        new = self._transcript.pieces[self._num_shown :]
        self._num_shown += len(new)
        return CompletionOutput(
            index=self._index,
            delta="".join(new),
            finish_reason=self._finish_reason(),
            stop_reason=self._stop_reason(),
            num_tokens=len(self._transcript.token_ids),
            _num_pieces=self._num_shown,
            _has_logprobs=self.request.sampler.logprobs is not None,
            _transcript=self._transcript,
        )

    def _finish_reason(self) -> FinishReason | None:
        if self.ended is None:
            return None
        return FinishReason.STOP if self.is_stopped else self.ended.reason

    def _stop_reason(self) -> str | int | tuple[int, ...] | None:
        if self.ended is None:
            return None
        if self._text.stop is not None:
            return self._text.stop
        return _NOT_FINITE if self.ended.reason is FinishReason.ERROR else self.ended.stop_token_id


class Answer:
    """A request with all its answers.

    Attributes:
        completions: one for each of the n answers.
    """

    def __init__(self, admitted: Admitted, tokenizer: Tokenizer | None) -> None:
        self._admitted = admitted
        indices = range(len(admitted.requests))
        self.completions = [Completion(index, admitted, tokenizer) for index in indices]
        self._scored: list[TokenLogprobs | None] | None = None  # once it is complete

    @property
    def request_id(self) -> int:
        """The request's id: that of its first answer."""
        return self.completions[0].request_id

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return all(completion.ended is not None for completion in self.completions)

    def output(self) -> RequestOutput:
        """The answers so far; each one's `delta` is the text since the previous call."""
        prompt = self._admitted.prompt
        ends = [one.ended for one in self.completions if one.ended is not None]
        finished = len(ends) == len(self.completions)
        return RequestOutput(
            request_id=self.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[completion.output() for completion in self.completions],
            finished=finished,
            num_cached_tokens=ends[0].num_cached_tokens if finished else None,
            kv_bytes=sum(end.kv_bytes for end in ends) if finished else None,
            metrics=_metrics(ends) if finished else None,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        if self._admitted.params.prompt_logprobs is None:
            return None
        if self._scored is not None:
            return self._scored
        by_position = self.completions[0].prompt_logprobs
        scored = [None, *(by_position[position] for position in sorted(by_position))]
        if len(scored) == len(self._admitted.prompt.token_ids):
            self._scored = scored
        return scored


def _prompt_text(admitted: Admitted, tokenizer: Tokenizer | None) -> str:
    """The prompt as text, from its tokens where there is no other or it was cut."""
    prompt = admitted.prompt
    if prompt.text is not None or tokenizer is None:
        return prompt.text or ""
    skip = admitted.params.skip_special_tokens
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=skip)


def _metrics(ends: list[FinishedRequest]) -> RequestMetrics:
    """Of all answers to a prompt: from the earliest start to the latest end."""

    def known(times: list[float | None]) -> list[float]:
        return [time for time in times if time is not None]

    return RequestMetrics(
        arrival_s=min(end.arrival_s for end in ends),
        first_scheduled_s=min(known([end.first_scheduled_s for end in ends]), default=None),
        first_token_s=min(known([end.first_token_s for end in ends]), default=None),
        last_token_s=max(known([end.last_token_s for end in ends]), default=None),
        finished_s=max(end.finished_s for end in ends),
        num_preemptions=sum(end.num_preemptions for end in ends),
        num_allocated_pages=sum(end.num_allocated_pages for end in ends),
        num_reused_pages=sum(end.num_reused_pages for end in ends),
        num_missed_pages=sum(end.num_missed_pages for end in ends),
        num_draft_tokens=sum(end.num_draft_tokens for end in ends),
        num_accepted_tokens=sum(end.num_accepted_tokens for end in ends),
    )
