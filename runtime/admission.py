"""The border: a caller's prompt and wishes, checked against the engine, to a Request.

Owns every check of a request that needs the engine directory and every default that comes
from it; leaves values that no engine can serve to `sampling_params`. Invariant: a Request
that passed is one that the engine can run.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from looptrt.errors import RequestError
from looptrt.manifest import BuildLimits, Manifest
from looptrt.runtime.chat import ChatTemplate, Message
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.kv.sequence_kv import tokens_in_units, units_of_sequence
from looptrt.runtime.request import (
    ExitKv,
    ExitParams,
    ExitRule,
    LogprobsMode,
    Request,
    SamplerParams,
)
from looptrt.runtime.sampling_params import MAX_SEED, SamplingParams, Word, shown
from looptrt.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]

_CRITERION_THRESHOLDS = {
    ExitRule.ENTROPY_DIFF: 1e-3,
    ExitRule.LATENT_DIFF: 0.03,
    ExitRule.KL: 1e-3,
    ExitRule.ARGMAX_STABILITY: 5.0,
}
_REFERENCE_THRESHOLD = 1.0  # of Ouro's config.json


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt, and its text where there was one."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True)
class Admitted:
    """A checked request.

    Attributes:
        prompt: as it runs, cut where the caller asked for it.
        params: what only the front end needs is read from here.
        requests: one for each of the n answers, with consecutive ids.
    """

    prompt: EncodedPrompt
    params: SamplingParams
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Admission:
    """Checks requests for one engine.

    Attributes:
        num_units: units of the KV pool that requests may own.
        limits: the engine's limits as configured (see `EngineConfig.limits`).
        tokenizer: None for an engine that takes and gives token ids only.
        template: None where messages cannot be rendered.
    """

    manifest: Manifest
    num_units: int
    limits: BuildLimits
    config: EngineConfig
    tokenizer: Tokenizer | None
    template: ChatTemplate | None

    def encode(self, prompt: Prompt | EncodedPrompt) -> EncodedPrompt:
        """Token ids of a prompt given as text or as token ids; an encoded one as it is.

        Raises:
            RequestError: the prompt is neither, is not valid text, or is text and there is
                no tokenizer.
        """
        if isinstance(prompt, EncodedPrompt):
            return prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prompt: this engine directory has no tokenizer.json; give token ids"
                )
            self.tokenizer.check_length("prompt", prompt, self.limits.max_input_len)
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
        self.tokenizer.check_length("messages", text, self.limits.max_input_len)
        return EncodedPrompt(text, self.tokenizer.encode(text, add_special_tokens=False))

    def admit(self, request_id: int, prompt: EncodedPrompt, params: SamplingParams) -> Admitted:
        """Check a request and fill in the engine's defaults.

        `max_tokens` beyond the room that the prompt leaves of max_seq_len is cut to it, and
        None also to what the KV pool holds: the answer then ends with finish reason `length`.

        Args:
            request_id: of the first of the n answers; the others take the ids after it.
            prompt: from `encode` or `encode_chat`.
            params: what the caller asks for.

        Raises:
            RequestError: names the field, the limit and the value.
        """
        prompt = _truncated(prompt, params.truncate_prompt_tokens)
        self._check_prompt(prompt.token_ids)
        self._check_limits(prompt, params)
        loops, prefill_loops = self._loops(params)
        fields: dict[str, Any] = {
            "prompt": np.array(prompt.token_ids, np.int32),
            "max_new_tokens": self._room(params, len(prompt.token_ids), loops, prefill_loops),
            "stop_token_ids": self._stop_token_ids(params),
            "loops": loops,
            "prefill_loops": prefill_loops,
            "noise_seed": self.config.noise_seed
            if params.noise_seed is None
            else params.noise_seed,
            "cache_salt": _utf8("cache_salt", params.cache_salt),
            "priority": params.priority,
            "exit": self._exit(params, loops),
        }
        first = Request(request_id=request_id, sampler=self._sampler(params), **fields)
        others = (
            Request(
                request_id=request_id + index,
                sampler=_sibling(first.sampler, params.seed, index),
                fork_of=request_id,
                **fields,
            )
            for index in range(1, params.n)
        )
        return Admitted(prompt, params, (first, *others))

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
                    f"prompt: expected token ids from 0 to {vocab_size - 1}, got {shown(token_id)}"
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

    def _room(self, params: SamplingParams, num_prompt: int, loops: int, prefill_loops: int) -> int:
        """New tokens of the longest answer, which fits max_seq_len and the KV pool."""
        layout = self.manifest.layout
        room = self.limits.max_seq_len - num_prompt
        if params.max_tokens is not None:
            room = min(room, params.max_tokens)
        else:
            held = tokens_in_units(layout, num_prompt, self.num_units, prefill_loops, loops)
            room = max(min(room, held - num_prompt), params.min_tokens, 1)
        needed = units_of_sequence(layout, num_prompt, num_prompt + room, prefill_loops, loops)
        if needed > self.num_units:
            raise RequestError(
                f"prompt and max_tokens: {num_prompt} + {room} tokens at depth {loops} need "
                f"{needed} KV units, the pool has {self.num_units}"
            )
        return room

    def _check_limits(self, prompt: EncodedPrompt, params: SamplingParams) -> None:
        """What depends on the engine directory, its configuration or the prompt's length."""
        if params.n > self.config.max_waiting:
            raise RequestError(
                f"n: expected at most max_waiting {self.config.max_waiting}, got {params.n}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.config.max_logprobs:
                raise RequestError(
                    f"{name}: expected at most max_logprobs {self.config.max_logprobs}, got {value}"
                )
        room = self.limits.max_seq_len - len(prompt.token_ids)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens: expected at most {room}, what {len(prompt.token_ids)} prompt tokens "
                f"leave of max_seq_len {self.limits.max_seq_len}, got {params.min_tokens}"
            )
        for name in ("stop", "bad_words"):
            for word in getattr(params, name):
                self._check_word(name, word)
        self._check_ids("stop_token_ids", params.stop_token_ids)

    def _check_word(self, name: str, word: Word) -> None:
        if not isinstance(word, str):
            self._check_ids(name, word)
        elif self.tokenizer is None:
            raise RequestError(
                f"{name}: this engine directory has no tokenizer.json; give lists of token ids"
            )
        else:
            _utf8(name, word)

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        vocab_size = self.manifest.spec.vocab_size
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name}: expected token ids from 0 to {vocab_size - 1}, got {token_id}"
                )

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        if params.ignore_eos:
            return ()
        return tuple(dict.fromkeys((*self.manifest.tokens.eos, *params.stop_token_ids)))

    def _sampler(self, params: SamplingParams) -> SamplerParams:
        vocab_size = self.manifest.spec.vocab_size
        end_ids = [token_id for token_id in self._stop_token_ids(params) if token_id < vocab_size]
        bias = params.embedding_bias
        if bias is not None and len(bias) != vocab_size:
            raise RequestError(
                f"embedding_bias: expected {vocab_size} numbers, one for each token, "
                f"got {len(bias)}"
            )
        return SamplerParams(
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=_seed(params.seed, 0),
            prompt_logprobs=params.prompt_logprobs,
            logprobs=params.logprobs,
            logprobs_mode=LogprobsMode(params.logprobs_mode),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens,
            end_ids=tuple(end_ids) if params.min_tokens else (),
            bad_words=self._bad_words(params),
            embedding_bias=None if bias is None else np.array(bias, "<f4").tobytes(),
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences to mask: a text's encoding with and without a space in front."""
        sequences: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if not isinstance(word, str):
                sequences.append(word)
                continue
            assert self.tokenizer is not None
            encoded = [
                tuple(self.tokenizer.encode(text, add_special_tokens=False))
                for text in (word, f" {word.lstrip()}")
            ]
            if not encoded[0]:
                raise RequestError(f"bad_words: {word!r} is no token")
            sequences += filter(None, encoded)
        return tuple(dict.fromkeys(sequences))

    def _exit(self, params: SamplingParams, loops: int) -> ExitParams:
        """When generated tokens stop: `exit_at_step`, else the model's gate or a criterion."""
        kv = ExitKv(params.exit_kv)
        self._check_exit_kind(params)
        if params.exit_at_step is not None:
            if params.exit_at_step >= loops:
                raise RequestError(
                    f"exit_at_step: expected from 0 to {loops - 1}, the last of the request's "
                    f"loops, got {params.exit_at_step}"
                )
            return ExitParams(ExitRule.STEP, params.exit_at_step + 1, kv)
        threshold = params.exit_threshold
        if params.exit_criterion is not None:
            rule = ExitRule(params.exit_criterion)
            default = _CRITERION_THRESHOLDS[rule]
            return ExitParams(rule, default if threshold is None else threshold, kv)
        if params.exit_mode == "reference":
            default = _REFERENCE_THRESHOLD
            exact = default if threshold is None else threshold
            return ExitParams(ExitRule.GATE_REFERENCE, exact, kv)
        if threshold is None or threshold >= 1:
            return ExitParams()
        return ExitParams(ExitRule.GATE, threshold, kv)

    def _check_exit_kind(self, params: SamplingParams) -> None:
        """The gate's fields need a gate, a criterion needs a model without one."""
        architecture = self.manifest.spec.architecture
        if self.manifest.spec.exit_gate:
            if params.exit_criterion is not None:
                raise RequestError(
                    f"exit_criterion: {architecture} has an exit gate; use exit_threshold, "
                    f"got {params.exit_criterion!r}"
                )
            return
        if params.exit_mode == "reference":
            raise RequestError(f"exit_mode: {architecture} has no exit gate, got 'reference'")
        if params.exit_threshold is not None and params.exit_criterion is None:
            raise RequestError(
                f"exit_threshold: {architecture} has no exit gate; name an exit_criterion, "
                f"got {params.exit_threshold:g} alone"
            )


def _truncated(prompt: EncodedPrompt, num_tokens: int | None) -> EncodedPrompt:
    """The last `num_tokens` of a longer prompt, whose text is then unknown."""
    if num_tokens is None or num_tokens >= len(prompt.token_ids):
        return prompt
    return EncodedPrompt(None, prompt.token_ids[-num_tokens:])


def _token_ids(prompt: object) -> list[int]:
    is_list = isinstance(prompt, Sequence) or (isinstance(prompt, np.ndarray) and prompt.ndim > 0)
    if not is_list or isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(f"prompt: expected text or a list of token ids, got {shown(prompt)}")
    return [_token_id(token_id) for token_id in cast(Sequence[object], prompt)]


def _token_id(token_id: Any) -> int:  # noqa: ANN401 - whatever a caller's list holds
    try:
        if not isinstance(token_id, bool):
            return operator.index(token_id)
    except TypeError:
        pass
    raise RequestError(f"prompt: expected integer token ids, got {shown(token_id)}")


def _seed(seed: int | None, index: int) -> int:
    """Seed of the answer number `index` of a prompt."""
    return secrets.randbelow(MAX_SEED + 1) if seed is None else (seed + index) % (MAX_SEED + 1)


def _sibling(first: SamplerParams, seed: int | None, index: int) -> SamplerParams:
    """Parameters of a further answer: other draws, and the prompt is scored only once."""
    return replace(first, seed=_seed(seed, index), prompt_logprobs=None)


def _utf8(name: str, text: str | None) -> bytes | None:
    try:
        return None if text is None else text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}: not valid Unicode text: {error}") from None
