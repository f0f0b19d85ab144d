"""The border: a caller's prompt and wishes, checked against the engine, to a Request.

Owns every check of a request that needs the engine directory and every default that comes
from it; leaves values that no engine can serve to `sampling_params`. Invariant: a Request
that passed is one that the engine can run, its pool permitting.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looptrt.errors import RequestError
from looptrt.manifest import BuildLimits, Manifest
from looptrt.runtime.chat import ChatTemplate, Message
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.request import Request, SamplerParams
from looptrt.runtime.sampling_params import MAX_SEED, SamplingParams
from looptrt.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt, and its text where there was one."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True)
class Admitted:
    """A checked request with what only the front end needs of it."""

    prompt: EncodedPrompt
    request: Request
    stops: tuple[str, ...]


@dataclass(frozen=True)
class Admission:
    """Checks requests for one engine.

    Attributes:
        limits: the engine's limits as configured (see `EngineConfig.limits`).
        tokenizer: None for an engine that takes and gives token ids only.
        template: None where messages cannot be rendered.
    """

    manifest: Manifest
    limits: BuildLimits
    config: EngineConfig
    tokenizer: Tokenizer | None
    template: ChatTemplate | None

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Token ids of a prompt given as text or as token ids.

        Raises:
            RequestError: the prompt is neither, is not valid text, or is text and there is
                no tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prompt: this engine directory has no tokenizer.json; give token ids"
                )
            return EncodedPrompt(prompt, self.tokenizer.encode(prompt))
        return EncodedPrompt(None, _token_ids(prompt))

    def encode_chat(
        self, messages: Sequence[Message], enable_thinking: bool | None
    ) -> EncodedPrompt:
        """Token ids of a conversation, up to where the assistant's turn begins.

        Raises:
            RequestError: there is no template or no tokenizer, or a message is malformed.
        """
        if self.tokenizer is None or self.template is None:
            raise RequestError(
                "messages: this engine directory has no tokenizer.json or no chat template"
            )
        text = self.template.render(messages, enable_thinking=enable_thinking)
        return EncodedPrompt(text, self.tokenizer.encode(text, add_special_tokens=False))

    def admit(self, request_id: int, prompt: EncodedPrompt, params: SamplingParams) -> Admitted:
        """Check a request and fill in the engine's defaults.

        `max_tokens` beyond the room that the prompt leaves is cut to it: the answer then ends
        with finish reason `length`.

        Raises:
            RequestError: names the field, the limit and the value.
        """
        self._check_prompt(prompt.token_ids)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop: this engine directory has no tokenizer.json; use stop_token_ids"
            )
        loops, prefill_loops = self._loops(params)
        room = self.limits.max_seq_len - len(prompt.token_ids)
        request = Request(
            request_id=request_id,
            prompt=np.array(prompt.token_ids, np.int32),
            max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=self._stop_token_ids(params),
            loops=loops,
            prefill_loops=prefill_loops,
            noise_seed=self.config.noise_seed if params.noise_seed is None else params.noise_seed,
            cache_salt=None
            if params.cache_salt is None
            else _utf8("cache_salt", params.cache_salt),
            priority=params.priority,
            sampler=_sampler(params),
        )
        return Admitted(prompt, request, params.stop)

    def _check_prompt(self, token_ids: list[int]) -> None:
        num_tokens, limits = len(token_ids), self.limits
        if num_tokens == 0:
            raise RequestError("prompt: expected at least 1 token, got 0")
        if num_tokens > limits.max_input_len:
            raise RequestError(
                f"prompt: expected at most max_input_len {limits.max_input_len} tokens, "
                f"got {num_tokens}"
            )
        if num_tokens >= limits.max_seq_len:
            raise RequestError(
                f"prompt: expected at most {limits.max_seq_len - 1} tokens, so that 1 new token "
                f"fits max_seq_len {limits.max_seq_len}, got {num_tokens}"
            )
        vocab_size = self.manifest.spec.vocab_size
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"prompt: expected token ids from 0 to {vocab_size - 1}, got {token_id}"
                )

    def _loops(self, params: SamplingParams) -> tuple[int, int]:
        max_loops = self.manifest.layout.max_loops
        loops = (
            min(self.manifest.spec.num_loops, max_loops) if params.loops is None else params.loops
        )
        if loops > max_loops:
            raise RequestError(f"loops: expected from 1 to {max_loops}, got {loops}")
        prefill_loops = loops if params.prefill_loops is None else params.prefill_loops
        if prefill_loops > loops:
            raise RequestError(
                f"prefill_loops: expected from 1 to the request's loops {loops}, "
                f"got {prefill_loops}"
            )
        return loops, prefill_loops

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        if params.ignore_eos:
            return ()
        return tuple(dict.fromkeys((*self.manifest.tokens.eos, *params.stop_token_ids)))


def _token_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, Sequence | np.ndarray):
        raise RequestError(f"prompt: expected text or a list of token ids, got {prompt!r}")
    token_ids = []
    for token_id in prompt:
        try:
            token_ids.append(operator.index(token_id))
        except TypeError:
            raise RequestError(f"prompt: expected integer token ids, got {token_id!r}") from None
    return token_ids


def _sampler(params: SamplingParams) -> SamplerParams:
    return SamplerParams(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed,
    )


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}: not valid Unicode text: {error}") from None
