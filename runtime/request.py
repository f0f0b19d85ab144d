"""A request as the engine sees it: checked, numeric, with its recorded depths.

Owns the life-cycle states and the depth plan of a request's tokens; leaves the movement
between states to the scheduler. Invariant: once a token has run, its depth never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from looptrt.runtime.kv.page_pool import Page

Int32Array = NDArray[np.int32]


class RequestState(StrEnum):
    """WAITING -> RUNNING -> FINISHED | ABORTED; preempt takes RUNNING back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # the model's logits are not finite


class LogprobsMode(StrEnum):
    """Of what log-probabilities are reported."""

    RAW = "raw"  # float32 log-softmax of the model's logits, unmodified
    PROCESSED = "processed"  # the distribution that the token is drawn from


@dataclass(frozen=True)
class SamplerParams:
    """What the sampler needs of a request; temperature 0 is greedy, seed is always set.

    Attributes:
        prompt_logprobs, logprobs: most likely tokens to report beside the one at a position
            of the prompt or the answer; None reports nothing.
        repetition_penalty: on tokens of prompt and answer; presence_penalty and
            frequency_penalty: on tokens of the answer.
        min_tokens: tokens before any of `end_ids` may come.
        bad_words: token sequences that are never completed.
        embedding_bias: [vocab] little-endian float32, added to the logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: bytes | None = None

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens change a token's logit."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def has_edits(self) -> bool:
        """Whether the request changes its logits before temperature and filters."""
        masks = bool(self.min_tokens or self.bad_words)
        return masks or self.has_penalty or self.embedding_bias is not None


class ExitRule(StrEnum):
    """How a generated token may stop before its last loop."""

    NONE = "none"
    STEP = "step"  # after a fixed number of loops
    GATE = "gate"  # the checkpoint's exit gate: cumulative exit probability
    GATE_REFERENCE = "gate-reference"  # the same sums in the model dtype, as the reference
    ENTROPY_DIFF = "entropy-diff"  # change of the output distribution's entropy
    LATENT_DIFF = "latent-diff"  # relative change of the state
    KL = "kl"  # divergence from the loop before's output distribution
    ARGMAX_STABILITY = "argmax-stability"  # loops in a row with the same best token


class ExitKv(StrEnum):
    """What a token that stopped early leaves for later tokens to attend to."""

    LAST_EXITED = "last_exited"  # its deepest plane
    RUN_ALL = "run_all"  # all planes: the loops go on, only the logits are the early ones


@dataclass(frozen=True)
class ExitParams:
    """When generated tokens of a request stop; prompt tokens run their fixed loops.

    Attributes:
        threshold: of the rule; loops for STEP and ARGMAX_STABILITY.
    """

    rule: ExitRule = ExitRule.NONE
    threshold: float = 0.0
    kv: ExitKv = ExitKv.LAST_EXITED


@dataclass(eq=False)
class Request:
    """One request inside the engine.

    Attributes:
        request_id: unique among live requests.
        prompt: [num_prompt] token ids, at least one.
        max_new_tokens: at least 1; prompt and answer fit the engine's max_seq_len.
        stop_token_ids: every id that ends the answer.
        loops: S; prefill_loops: P <= S.
        token_ids: [num_tokens] prompt and generated tokens, kept while not running.
        depths: [num_tokens] recorded loops of each token, kept while not running.
        arrival: order of arrival, set by the scheduler.
        fork_of: request with the same prompt, depths and salt, whose pages this one shares
            as soon as they are computed; None for a request of its own.
        num_cached_tokens: prompt tokens shared with an earlier request or found in the
            prefix cache at first admission.
        use_prefix_cache: cleared when shared pages are too deep for the request to fit.
        num_allocated_pages, num_reused_pages, num_missed_pages, num_draft_tokens,
            num_accepted_tokens: see `FinishedRequest`.
        pages: pages held, in token order.
        page_keys, token_keys: keys of the full pages so far, with and without depths.
        chained_keys: where deeper pages are shared, {page: (key of the page before it, None at
            the first; its own key behind that)}, so that a waiting request is hashed once.
    """

    request_id: int
    prompt: Int32Array
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    loops: int
    prefill_loops: int
    noise_seed: int = 0
    cache_salt: bytes | None = None
    priority: int = 0
    sampler: SamplerParams = SamplerParams()
    exit: ExitParams = ExitParams()
    fork_of: int | None = None
    state: RequestState = RequestState.WAITING
    arrival: int = -1
    slot: int | None = None
    num_cached_tokens: int | None = None
    use_prefix_cache: bool = True
    pages: list[Page] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    token_keys: list[bytes] = field(default_factory=list)
    chained_keys: dict[int, tuple[bytes | None, bytes]] = field(default_factory=dict)
    num_preemptions: int = 0
    num_allocated_pages: int = 0
    num_reused_pages: int = 0
    num_missed_pages: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_ids: Int32Array = field(init=False)
    depths: NDArray[np.int16] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = self.prompt
        self.depths = np.full(len(self.prompt), self.prefill_loops, np.int16)
        self.depths[-1:] = self.loops

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def max_total_tokens(self) -> int:
        """Tokens the request may reach, prompt included."""
        return self.num_prompt + self.max_new_tokens
