"""What comes out: of a step (engine side) and of a request (the caller's side).

Owns the shapes of both; leaves the making to `scheduler` and `answer`. Invariant: a token
reaches the caller once, and a finished request is reported once, after its last token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from looptrt.runtime.request import FinishReason


@dataclass(frozen=True)
class FinishedRequest:
    """The engine's account of a request that has ended.

    Attributes:
        stop_token_id: the id that ended it, which is also its last token; else None.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        kv_bytes: KV memory that it held when it ended.
        arrival_s, first_scheduled_s, first_token_s, finished_s, last_token_s: times of
            `time.monotonic`, None for what never happened.
        num_generated_tokens: tokens that were given out.
        num_allocated_pages: pages taken from the pool, those taken again after a preemption
            included.
        num_reused_pages, num_missed_pages: pages of the prompt that at first admission were
            shared with an earlier request, and those that were not.
        num_draft_tokens, num_accepted_tokens: guesses of speculation that were verified, and
            those that the answer kept.
    """

    request_id: int
    reason: FinishReason
    stop_token_id: int | None
    num_cached_tokens: int
    kv_bytes: int
    num_preemptions: int
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    last_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_allocated_pages: int = 0
    num_reused_pages: int = 0
    num_missed_pages: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token that stands there, then the most likely.

    Attributes:
        token_ids, logprobs, ranks: the position's own token first, whatever its rank; then
            the most likely others in order. Rank 1 is the most likely; of equally likely
            tokens the one with the lower id comes first.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True)
class StepOutput:
    """Tokens of one step, in parallel lists, and the requests that ended with it.

    Attributes:
        request_ids: request of each token; a request's tokens are in order, with speculation
            there may be several.
        token_ids: new tokens, the stop token of a stopped request included.
        depths: loops run to make each token.
        finished: requests ended by the step or aborted since the last one.
        logprobs: {index into the lists: log-probabilities} of tokens that ask for them.
        prompt_logprobs: (request, position, log-probabilities) of prompt tokens scored.
    """

    request_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[tuple[int, int, TokenLogprobs]] = field(default_factory=list)


@dataclass(frozen=True)
class RequestMetrics:
    """When a request passed each point, in seconds of `time.monotonic`.

    A point that the request never reached is None.

    Attributes:
        num_preemptions, num_allocated_pages, num_reused_pages, num_missed_pages,
            num_draft_tokens, num_accepted_tokens: see `FinishedRequest`.
    """

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float
    num_preemptions: int
    num_allocated_pages: int
    num_reused_pages: int
    num_missed_pages: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to the end."""
        return self.finished_s - self.arrival_s


@dataclass(frozen=True, eq=False)
class Transcript:
    """All of an answer so far; its lists are only ever appended to.

    Attributes:
        pieces: the visible text, joined.
        prompt_ids: in front of the answer's, where the request asks for that, else empty.
    """

    pieces: list[str]
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, eq=False, repr=False)
class CompletionOutput:
    """An answer, so far or whole.

    It costs the same however long the answer is: what it holds of the answer is taken from
    the transcript, which all outputs of a stream share, when it is first asked for.

    Attributes:
        index: which of a request's answers this is.
        delta: what `text` gained since the previous output of the same stream.
        finish_reason: None while the answer grows.
        stop_reason: the stop string, stop sequence or token id that ended the answer; with
            finish reason `error` what went wrong; else None.
        num_tokens: generated tokens.
    """

    index: int
    delta: str
    finish_reason: FinishReason | None
    stop_reason: str | int | tuple[int, ...] | None
    num_tokens: int
    _num_pieces: int
    _has_logprobs: bool
    _transcript: Transcript

    @cached_property
    def text(self) -> str:
        """Visible text.

        What stopped the answer is part of it only with `include_stop`, the prompt only without
        `exclude_input`.
        """
        return "".join(self._transcript.pieces[: self._num_pieces])

    @cached_property
    def token_ids(self) -> list[int]:
        """Every generated token, also the stop token or the one that completed a stop string.

        Without `exclude_input` the prompt's come before them.
        """
        return self._transcript.prompt_ids + self._transcript.token_ids[: self.num_tokens]

    @cached_property
    def depths(self) -> list[int]:
        """Loops run to make each generated token."""
        return self._transcript.depths[: self.num_tokens]

    @cached_property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Of each generated token, where the request asks for them."""
        return self._transcript.logprobs[: self.num_tokens] if self._has_logprobs else None

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole answer, where the request asks for log-probabilities."""
        return None if self.logprobs is None else sum(at.logprobs[0] for at in self.logprobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompletionOutput):
            return NotImplemented
        return self._shown() == other._shown()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"CompletionOutput({shown})"

    def _shown(self) -> dict[str, object]:
        names = ("index", "text", "delta", "token_ids", "depths")
        ends = ("finish_reason", "stop_reason", "logprobs")
        return {name: getattr(self, name) for name in (*names, *ends)}


@dataclass(frozen=True)
class RequestOutput:
    """A request's state as its caller sees it.

    Attributes:
        request_id: for `LLM.abort`.
        prompt: the prompt's text, None when it came as token ids or was cut.
        prompt_token_ids: as they ran.
        outputs: its n answers by index.
        finished: whether this is the last output: all answers are whole.
        num_cached_tokens, kv_bytes, metrics: see `FinishedRequest`; None until finished. Of
            several answers: of the first, the sum, and from the earliest to the latest.
        prompt_logprobs: where the request asks for them: None for the first prompt token,
            then one entry for each; complete with the first generated token.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    kv_bytes: int | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
