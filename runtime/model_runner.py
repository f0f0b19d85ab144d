"""`ModelRunner`: token ids in, a tensor of token ids out, like TensorRT-LLM's Python runtime.

Owns that runtime's names, shapes and defaults; leaves answers to `LLM`. Invariant: what is
asked for and not done here is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from looptrt.errors import EngineError, RequestError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from looptrt.runtime.outputs import RequestOutput
from looptrt.runtime.sampling_params import SamplingParams

PerPrompt = float | Sequence[float] | Tensor
Words = Sequence[Sequence[Sequence[int]]] | np.ndarray | Tensor
Outputs = Tensor | dict[str, Tensor]

NO_END = -1  # as `end_id`: nothing ends an answer before max_new_tokens

# TensorRT-LLM's names of fields of SamplingParams.
_RENAMED = {"random_seed": "seed", "num_return_sequences": "n", "min_length": "min_tokens"}
_OWN_ARGUMENTS = {
    *("max_tokens", "stop", "stop_token_ids", "bad_words", "logprobs"),
    *("ignore_eos", "exclude_input", "include_stop", "skip_special_tokens"),
}
_FIELDS = SamplingParams.__dataclass_fields__.keys() - _OWN_ARGUMENTS
# Arguments for what is not done here, at the values that ask for nothing; so do None and False.
_NEUTRAL: dict[str, object] = {
    "num_beams": 1,
    "max_beam_width": 1,
    "length_penalty": 1.0,
    "rank": 0,
    "lora_ckpt_source": "hf",
    "gpu_weights_percent": 1,
}


class ModelRunner:
    """Answers batches of token ids on an engine directory; made by `from_dir`.

    Use it as a context manager, or call `shutdown`.

    Attributes:
        llm: the engine behind it.
        max_batch_size, max_input_len, max_seq_len: limits of a call of `generate`.
    """

    def __init__(self, llm: LLM, config: EngineConfig) -> None:
        limits = config.limits(llm.manifest)
        self.llm = llm
        self.max_batch_size = limits.max_batch_size
        self.max_input_len = limits.max_input_len
        self.max_seq_len = limits.max_seq_len

    @classmethod
    def from_dir(
        cls,
        engine_dir: str | Path,
        *,
        config: EngineConfig | None = None,
        in_process: bool = False,
        **others: object,
    ) -> Self:
        """Load an engine directory.

        Args:
            engine_dir: directory written by `trtllm-build`.
            config: settings of the engine.
            in_process: run the engine on a thread of this process.
            others: TensorRT-LLM's other arguments, at values that ask for nothing.

        Raises:
            ManifestError: the directory is damaged, incomplete or of another version.
            EngineError: the engine could not start, or an argument cannot be served.
        """
        for name, value in others.items():
            if not _asks_for_nothing(name, value):
                raise EngineError(f"{name}: not supported, got {value!r}; see `config`")
        config = config or EngineConfig()
        return cls(LLM(engine_dir, config, in_process=in_process), config)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self.llm.manifest.spec.vocab_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens of prompt and answer at most."""
        return self.max_seq_len

    def shutdown(self) -> None:
        """Stop the engine."""
        self.llm.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def generate(
        self,
        batch_input_ids: Sequence[Tensor | Sequence[int]],
        *,
        max_new_tokens: int = 1,
        end_id: int | None = None,
        pad_id: int | None = None,
        temperature: PerPrompt = 1.0,
        top_k: PerPrompt | None = None,
        top_p: PerPrompt | None = None,
        stop_words_list: Words | None = None,
        bad_words_list: Words | None = None,
        return_dict: bool = False,
        output_sequence_lengths: bool = False,
        output_log_probs: bool = False,
        output_cum_log_probs: bool = False,
        streaming: bool = False,
        **others: Any,  # noqa: ANN401 - fields of SamplingParams
    ) -> Outputs | Iterator[Outputs]:
        """Answer a batch of prompts.

        Args:
            batch_input_ids: [batch] token ids of each prompt.
            max_new_tokens: tokens of an answer at most.
            end_id: ends an answer, beside the model's own; -1 lets no id end it.
            pad_id: fills the rows behind their answers where there is no `end_id`.
            temperature: a number, or one for each prompt.
            top_k: a number, or one for each prompt; 1 takes the most likely token.
            top_p: a number, or one for each prompt; where neither it nor `top_k` is given or
                above 0, the most likely token is taken.
            stop_words_list: [batch] lists of token sequences, or an array [batch, 2, length]
                of their tokens and of where each ends, then -1.
            bad_words_list: in the same form.
            return_dict: return a dictionary.
            output_sequence_lengths: add `sequence_lengths` to it.
            output_log_probs: add `log_probs`.
            output_cum_log_probs: add `cum_log_probs`.
            streaming: return an iterator over the outputs so far; the last one is whole.
            others: `num_return_sequences`, `random_seed`, `min_length`, and fields of
                SamplingParams such as penalties, `min_p`, `loops` and exits; each a value or
                one for each prompt. Arguments for what is not done here are taken only at
                values that ask for nothing.

        Returns:
            `output_ids` [batch, num_return_sequences, longest prompt + max_new_tokens] int32:
            prompt, answer, then `end_id` (else `pad_id`, else the model's). The dictionary
            may also hold `sequence_lengths` [batch, num_return_sequences] int32, of prompt
            and answer without a final end id; `log_probs` [batch, num_return_sequences,
            max_new_tokens] float32, 0 behind the answer; `cum_log_probs`, their sums.

        Raises:
            RequestError: an argument cannot be served.
            EngineError: the engine has ended.
        """
        prompts = [_token_ids(ids) for ids in batch_input_ids]
        size = len(prompts)
        self._check_batch_size(size)
        scores = output_log_probs or output_cum_log_probs
        columns = {
            "max_tokens": [max_new_tokens] * size,
            "temperature": _column("temperature", temperature, size),
            "top_k": _column("top_k", top_k, size),
            "top_p": _column("top_p", top_p, size),
            "stop": _words("stop_words_list", stop_words_list, size),
            "bad_words": _words("bad_words_list", bad_words_list, size),
            "ignore_eos": [end_id == NO_END] * size,
            "stop_token_ids": [() if end_id in (None, NO_END) else (end_id,)] * size,
            "logprobs": [0 if scores else None] * size,
            **_other_columns(others, size),
        }
        params = [
            _sampling_params({name: column[index] for name, column in columns.items()})
            for index in range(size)
        ]
        self._check_length(prompts, max_new_tokens)
        wanted = {
            "sequence_lengths": output_sequence_lengths,
            "log_probs": output_log_probs,
            "cum_log_probs": output_cum_log_probs,
        }
        shape = _Shape(
            num_sequences=params[0].n,
            max_len=max(map(len, prompts)) + max_new_tokens,
            max_new_tokens=max_new_tokens,
            fill=self._fill_id(end_id, pad_id),
            names=tuple(name for name, is_wanted in wanted.items() if is_wanted),
            as_dict=return_dict,
        )
        if streaming:
            return self._stream(prompts, params, shape)
        return shape.outputs(self.llm.generate(prompts, params))

    def _stream(
        self, prompts: list[list[int]], params: list[SamplingParams], shape: _Shape
    ) -> Iterator[Outputs]:
        """Outputs each time that every unfinished prompt has something new."""
        with ExitStack() as stack:
            streams = []
            for prompt, of_prompt in zip(prompts, params, strict=True):
                streams.append(self.llm.stream(prompt, of_prompt))
                stack.callback(streams[-1].close)
            latest = [next(stream) for stream in streams]
            yield shape.outputs(latest)
            while not all(output.finished for output in latest):
                latest = [next(stream, last) for stream, last in zip(streams, latest, strict=True)]
                yield shape.outputs(latest)

    def _check_batch_size(self, size: int) -> None:
        if not 1 <= size <= self.max_batch_size:
            raise RequestError(
                f"batch_input_ids: expected from 1 to max_batch_size {self.max_batch_size} "
                f"prompts, got {size}"
            )

    def _check_length(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        longest = max(map(len, prompts))
        if longest + max_new_tokens > self.max_seq_len:
            raise RequestError(
                f"max_new_tokens: expected at most {self.max_seq_len - longest}, what the longest "
                f"prompt ({longest} tokens) leaves of max_seq_len {self.max_seq_len}, "
                f"got {max_new_tokens}"
            )

    def _fill_id(self, end_id: int | None, pad_id: int | None) -> int:
        for name, token_id in (("end_id", end_id), ("pad_id", pad_id)):
            is_id = isinstance(token_id, int) and -1 <= token_id < self.vocab_size
            if token_id is not None and not is_id:
                raise RequestError(
                    f"{name}: expected a token id up to {self.vocab_size - 1}, got {token_id}"
                )
        tokens = self.llm.manifest.tokens
        candidates = (None if end_id == NO_END else end_id, pad_id, tokens.pad, *tokens.eos)
        return next((token_id for token_id in candidates if token_id is not None), 0)


@dataclass(frozen=True)
class _Shape:
    """What the tensors of one call look like; see `ModelRunner.generate`."""

    num_sequences: int
    max_len: int
    max_new_tokens: int
    fill: int
    names: tuple[str, ...]
    as_dict: bool

    def outputs(self, answers: list[RequestOutput]) -> Outputs:
        """Tensors of the answers as they are now."""
        size = (len(answers), self.num_sequences)
        ids = torch.full((*size, self.max_len), self.fill, dtype=torch.int32)
        lengths = torch.zeros(size, dtype=torch.int32)
        log_probs = torch.zeros((*size, self.max_new_tokens))
        for row, answer in enumerate(answers):
            for column, completion in enumerate(answer.outputs):
                ended_by_id = isinstance(completion.stop_reason, int)
                tokens = answer.prompt_token_ids + completion.token_ids
                ids[row, column, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
                lengths[row, column] = len(tokens) - ended_by_id
                values = [at.logprobs[0] for at in completion.logprobs or ()]
                log_probs[row, column, : len(values)] = torch.tensor(values)
        if not self.as_dict:
            return ids
        extra = {
            "sequence_lengths": lengths,
            "log_probs": log_probs,
            "cum_log_probs": log_probs.sum(dim=-1),
        }
        return {"output_ids": ids, **{name: extra[name] for name in self.names}}


def _asks_for_nothing(name: str, value: object) -> bool:
    return value is None or value is False or (name in _NEUTRAL and value == _NEUTRAL[name])


def _token_ids(ids: Tensor | Sequence[int]) -> list[int]:
    if isinstance(ids, Tensor | np.ndarray):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple):
        raise RequestError(f"batch_input_ids: expected token ids of each prompt, got {ids!r}")
    return list(ids)


def _column(name: str, value: object, size: int) -> list[Any]:
    """[size] a value for each prompt."""
    if isinstance(value, Tensor | np.ndarray):
        value = value.reshape(-1).tolist()
    if not isinstance(value, list | tuple):
        return [value] * size
    if len(value) != size:
        raise RequestError(f"{name}: expected one for each of {size} prompts, got {len(value)}")
    return list(value)


def _sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """Parameters of one prompt; greedy by TensorRT-LLM's rule for top_k and top_p."""
    top_k, top_p = fields.pop("top_k") or 0, fields.pop("top_p") or 0
    params = SamplingParams(top_k=top_k, top_p=top_p or 1.0, **fields)
    is_greedy = top_k == 1 or top_k == top_p == 0
    return replace(params, temperature=0.0) if is_greedy else params


def _other_columns(others: dict[str, Any], size: int) -> dict[str, list[Any]]:
    """Columns of the arguments that are fields of SamplingParams.

    Raises:
        RequestError: an argument asks for what is not done here.
    """
    columns = {}
    for name, value in others.items():
        field = _RENAMED.get(name, name)
        if field not in _FIELDS and not _asks_for_nothing(name, value):
            raise RequestError(f"{name}: not supported, got {value!r}")
        if field in _FIELDS and value is not None:
            is_one = field == "embedding_bias"
            columns[field] = [value] * size if is_one else _column(name, value, size)
    if len(set(columns.get("n", ()))) > 1:
        raise RequestError("num_return_sequences: expected one number for all prompts")
    return columns


def _words(name: str, words: Words | None, size: int) -> list[Any]:
    """[size] token sequences of each prompt."""
    if words is None:
        return [()] * size
    if isinstance(words, Tensor | np.ndarray):
        words = [_unpacked(name, np.asarray(packed)) for packed in words]
    if not isinstance(words, list | tuple) or len(words) != size:
        raise RequestError(f"{name}: expected token sequences for each of {size} prompts")
    return [of_prompt or () for of_prompt in words]


def _unpacked(name: str, packed: np.ndarray) -> list[list[int]]:
    """Token sequences of a [2, length] array: all tokens in a row, and where each ends."""
    if packed.ndim != 2 or len(packed) != 2:
        raise RequestError(f"{name}: expected an array [batch, 2, length]")
    ends = [end for end in packed[1].tolist() if end > 0]
    begins = [0, *ends[:-1]]
    tokens = packed[0].tolist()
    return [tokens[begin:end] for begin, end in zip(begins, ends, strict=True)]
