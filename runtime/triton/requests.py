"""Input tensors of `tensorrt_llm` to prompts and sampling parameters.

Owns what each tensor means and the defaults that TensorRT-LLM gives to absent ones; leaves
values and limits to `SamplingParams` and `admission`. Invariant: a tensor that would change
the answer is honoured or refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from looptrt.errors import RequestError
from looptrt.runtime.sampling_params import MAX_SEED, SamplingParams, Word
from looptrt.runtime.triton.tensors import TENSORRT_LLM, ModelTensors

Inputs = Mapping[str, np.ndarray]

# Tensors whose values are checked under another name.
_TENSORS = {
    "prompt": "input_ids",
    "max_tokens": "request_output_len",
    "n": "num_return_sequences",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "stop": "stop_words_list",
    "bad_words": "bad_words_list",
    "stop_token_ids": "end_id",
    "logprobs": "return_log_probs",
}
_NO_END = -1  # TensorRT-LLM's end_id of answers that no token ends


@dataclass(frozen=True)
class Prompt:
    """One row of a request."""

    token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Wishes:
    """What a request asks of its responses."""

    is_streaming: bool
    log_probs: bool
    perf_metrics: bool
    num_input_tokens: bool
    num_output_tokens: bool


def check_refused(inputs: Inputs, tensors: ModelTensors) -> None:
    """Refuse what this product does not serve.

    Raises:
        RequestError: names the tensor and the reason.
    """
    for tensor in tensors.inputs:
        given = inputs.get(tensor.name)
        if tensor.refusal is None or given is None or given.size == 0:
            continue
        neutral = np.array(tensor.refusal.neutral, np.float32)
        is_text = given.dtype == object
        is_neutral = (
            all(not word for word in given.flat)
            if is_text
            else bool(np.isin(given.astype(np.float32), neutral).all())
        )
        if not is_neutral:
            raise RequestError(f"{tensor.name}: not supported; {tensor.refusal.reason}")


def check_inputs(inputs: Inputs, tensors: ModelTensors) -> None:
    """Check what holds for every model: nothing refused, nothing missing, equal batch sizes.

    Raises:
        RequestError: names the tensor.
    """
    check_refused(inputs, tensors)
    for tensor in tensors.inputs:
        if not tensor.optional and tensor.name not in inputs:
            raise RequestError(f"{tensor.name}: a value is required")
    num_rows = len(inputs[tensors.inputs[0].name])
    for name, values in inputs.items():
        if len(values) != num_rows:
            raise RequestError(f"{name}: expected {num_rows} rows, got {len(values)}")


def is_stop(inputs: Inputs) -> bool:
    """Whether the request only ends others.

    Raises:
        RequestError: its rows differ.
    """
    return _shared_flag(inputs, "stop")


def wishes_of(inputs: Inputs) -> Wishes:
    """What the responses are to hold; rows of a batch share it.

    Raises:
        RequestError: rows differ.
    """
    return Wishes(
        is_streaming=_shared_flag(inputs, "streaming"),
        log_probs=_shared_flag(inputs, "return_log_probs"),
        perf_metrics=_shared_flag(inputs, "return_perf_metrics"),
        num_input_tokens=_shared_flag(inputs, "return_num_input_tokens"),
        num_output_tokens=_shared_flag(inputs, "return_num_output_tokens"),
    )


@contextmanager
def named_tensors() -> Iterator[None]:
    """Puts the names of tensors beside those of `SamplingParams`' fields in errors of the block.

    Both, because text models have tensors with the names of some fields, as `max_tokens`.
    """
    try:
        yield
    except RequestError as error:
        subject, colon, rest = str(error).partition(":")
        words = (
            f"{_TENSORS[word]} ({word})" if word in _TENSORS else word for word in subject.split()
        )
        raise type(error)(" ".join(words) + colon + rest) from error


def prompts_of(inputs: Inputs, *, excludes_input: bool) -> Iterator[Prompt]:
    """The rows of a request.

    Args:
        inputs: tensors by name, each with the batch dimension in front.
        excludes_input: whether answers leave their prompt out where the request says nothing.

    Raises:
        RequestError: a tensor is missing, malformed or refused.
    """
    check_inputs(inputs, TENSORRT_LLM)
    for row in range(len(inputs["input_ids"])):
        yield Prompt(_prompt(inputs, row), _params(inputs, row, excludes_input))


def _prompt(inputs: Inputs, row: int) -> list[int]:
    token_ids = inputs["input_ids"][row].reshape(-1)
    length = int(_value(inputs, "input_lengths", row))
    if not 0 <= length <= len(token_ids):
        raise RequestError(
            f"input_lengths: expected from 0 to {len(token_ids)}, the length of input_ids, "
            f"got {length}"
        )
    ids: list[int] = token_ids[:length].tolist()
    return ids


def _params(inputs: Inputs, row: int, excludes_input: bool) -> SamplingParams:
    fields: dict[str, Any] = {}
    for tensor, field in (
        ("request_output_len", "max_tokens"),
        ("num_return_sequences", "n"),
        ("min_tokens", "min_tokens"),
        ("repetition_penalty", "repetition_penalty"),
        ("presence_penalty", "presence_penalty"),
        ("frequency_penalty", "frequency_penalty"),
        ("min_p", "min_p"),
        ("seed", "seed"),
        ("noise_seed", "noise_seed"),
        ("loops", "loops"),
        ("prefill_loops", "prefill_loops"),
        ("exit_threshold", "exit_threshold"),
        ("priority", "priority"),
    ):
        if tensor in inputs:
            fields[field] = _value(inputs, tensor, row)
    for name in ("seed", "noise_seed"):
        if fields.get(name, 0) > MAX_SEED:
            raise RequestError(f"{name}: expected from 0 to {MAX_SEED}, got {fields[name]}")
    fields |= _sampling(inputs, row) | _words(inputs, row) | _ends(inputs, row)
    if "cache_salt" in inputs:
        fields["cache_salt"] = text_of(_value(inputs, "cache_salt", row), "cache_salt")
    bias = inputs["embedding_bias"][row].reshape(-1) if "embedding_bias" in inputs else None
    if bias is not None and bias.size:
        fields["embedding_bias"] = bias
    fields["logprobs"] = 0 if _flag(inputs, "return_log_probs", row) else None
    given = "exclude_input_in_output" in inputs
    excludes = _flag(inputs, "exclude_input_in_output", row) if given else excludes_input
    fields["exclude_input"] = excludes or _flag(inputs, "streaming", row)
    with named_tensors():
        return SamplingParams(**fields)


def _sampling(inputs: Inputs, row: int) -> dict[str, Any]:
    """Temperature, top_k and top_p: an answer is greedy unless one of them says otherwise."""
    top_k = int(_value(inputs, "runtime_top_k", row)) if "runtime_top_k" in inputs else 0
    top_p = float(_value(inputs, "runtime_top_p", row)) if "runtime_top_p" in inputs else 0.0
    keeps_all = top_p <= 0  # false for NaN, which is refused
    is_sampling = top_k > 1 or (top_k == 0 and not keeps_all)
    temperature = 1.0 if is_sampling else 0.0
    if "temperature" in inputs:
        temperature = float(_value(inputs, "temperature", row))
    return {"temperature": temperature, "top_k": top_k, "top_p": 1.0 if keeps_all else top_p}


def _words(inputs: Inputs, row: int) -> dict[str, Any]:
    return {
        field: (*_sequences(inputs, ids, row), *_texts(inputs, texts, row))
        for field, ids, texts in (
            ("stop", "stop_words_list", "stop_words"),
            ("bad_words", "bad_words_list", "bad_words"),
        )
    }


def _ends(inputs: Inputs, row: int) -> dict[str, Any]:
    if "end_id" not in inputs:
        return {}
    end_id = int(_value(inputs, "end_id", row))
    return {"ignore_eos": True} if end_id == _NO_END else {"stop_token_ids": (end_id,)}


def _sequences(inputs: Inputs, name: str, row: int) -> list[Word]:
    """Sequences of a word list: ids one after the other, then where each one ends."""
    if name not in inputs:
        return []
    words = inputs[name][row]
    if words.ndim != 2 or len(words) != 2:
        raise RequestError(f"{name}: expected shape [2, n], got {list(words.shape)}")
    ids, ends = words.tolist()
    sequences: list[Word] = []
    begin = 0
    for end in ends:
        if end == -1:
            continue
        if not begin < end <= len(ids):
            raise RequestError(
                f"{name}: expected ends that rise to at most {len(ids)}, got {end} after {begin}"
            )
        sequences.append(tuple(ids[begin:end]))
        begin = end
    return sequences


def _texts(inputs: Inputs, name: str, row: int) -> list[str]:
    """Texts of a row; clients send an empty one for none."""
    if name not in inputs:
        return []
    return [text_of(word, name) for word in inputs[name][row].reshape(-1) if word]


def text_of(value: bytes | str, name: str) -> str:
    """Text of an element of a BYTES tensor.

    Raises:
        RequestError: it is not UTF-8.
    """
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: expected UTF-8: {error}") from None


def _flag(inputs: Inputs, name: str, row: int) -> bool:
    return name in inputs and bool(_value(inputs, name, row))


def _shared_flag(inputs: Inputs, name: str) -> bool:
    values = {_flag(inputs, name, row) for row in range(len(inputs.get(name, ())))}
    if len(values) > 1:
        raise RequestError(f"{name}: expected the same value in all rows of a request, got both")
    return True in values


def _value(inputs: Inputs, name: str, row: int) -> Any:  # noqa: ANN401 - as the tensor's type
    """The only element of a row."""
    values = inputs[name][row].reshape(-1)
    if values.size != 1:
        raise RequestError(f"{name}: expected 1 value, got {values.size}")
    return values.item()
