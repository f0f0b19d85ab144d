"""What comes out: of a step (engine side) and of a request (the caller's side).

Owns the shapes of both; leaves the making to `scheduler` and `answer`. Invariant: a token
reaches the caller once, and a finished request is reported once, after its last token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from looptrt.runtime.request import FinishReason


@dataclass(frozen=True)
class FinishedRequest:
    """The engine's account of a request that has ended.

    Attributes:
        stop_token_id: the id that ended it, which is also its last token; else None.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        kv_bytes: KV memory that it held when it ended.
        arrival_s, first_scheduled_s, first_token_s, finished_s: times of `time.monotonic`,
            None for what never happened.
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


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token that stands there, then the most likely.

    Attributes:
        token_ids, logprobs, ranks: the position's own token first, whatever its rank; then
            the most likely ones in order. Rank 1 is the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True)
class StepOutput:
    """Tokens of one step, in parallel lists, and the requests that ended with it.

    Attributes:
        request_ids: request of each token.
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
    """

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    num_preemptions: int

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to the end."""
        return self.finished_s - self.arrival_s


@dataclass(frozen=True)
class CompletionOutput:
    """An answer, so far or whole.

    Attributes:
        index: which of a request's answers this is.
        text: visible text; neither a stop string nor a stop token is part of it.
        delta: what `text` gained since the previous output of the same stream.
        token_ids: every generated token, the stop token or the one that completed a stop
            string included.
        depths: loops run to make each token of `token_ids`.
        finish_reason: None while the answer grows.
        stop_reason: the stop string or the token id that ended the answer, else None.
    """

    index: int
    text: str
    delta: str
    token_ids: list[int]
    depths: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request's state as its caller sees it.

    Attributes:
        prompt: the prompt's text, None when it came as token ids.
        finished: whether this is the last output.
        num_cached_tokens, kv_bytes, metrics: see `FinishedRequest`; None until finished.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    kv_bytes: int | None = None
    metrics: RequestMetrics | None = None
