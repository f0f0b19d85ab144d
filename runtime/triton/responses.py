"""A growing answer to the output tensors of `tensorrt_llm`, response by response.

Owns what each response holds and what was sent before; leaves the sending to `service`.
Invariant: the pieces of a stream, joined, are the whole answer, ids and text alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from looptrt.runtime.outputs import CompletionOutput, RequestOutput
from looptrt.runtime.triton.requests import Wishes

Outputs = dict[str, np.ndarray]

# How often a response asks `postprocessing` to look for the caller of an ensemble: a look is a
# message to the server and back, as dear as the response.
_LOOK_S = 0.1


@dataclass
class AnswerResponses:
    """Responses for one row of a request: its answer, or its n answers, each on its own.

    Args:
        wishes: of the request.
        batch_index: of the row, None for a request of one row.
        stop_key: see `tensors`; in the first response, and then every _LOOK_S.
        outputs: names of the tensors that the caller reads; others are not made.
    """

    wishes: Wishes
    batch_index: int | None
    stop_key: str
    outputs: frozenset[str]
    _next_look_s: float = 0.0
    _scores: dict[int, float] = field(default_factory=dict)
    _num_sent: dict[int, int] = field(default_factory=dict)
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)

    def of(self, output: RequestOutput) -> list[Outputs]:
        """Tensors for what is new in an output of the answer; none while a whole one grows."""
        new = (self._response(output, one) for one in output.outputs)
        return [response for response in new if response is not None]

    def _response(self, output: RequestOutput, one: CompletionOutput) -> Outputs | None:
        is_end = one.finish_reason is not None
        if one.index in self._ended:
            return None
        self._texts.setdefault(one.index, []).append(one.delta)
        sent = self._num_sent.get(one.index, 0)
        has_news = one.num_tokens > sent or bool(one.delta)
        if not is_end and not (self.wishes.is_streaming and has_news):
            return None
        if is_end:
            self._ended.add(one.index)
        self._num_sent[one.index] = one.num_tokens
        text = "".join(self._texts.pop(one.index))
        return self._tensors(output, one, sent, text)

    def _tensors(
        self, output: RequestOutput, one: CompletionOutput, sent: int, text: str
    ) -> Outputs:
        """Tensors of one answer from its token number `sent` on."""
        num_prompt = len(one.token_ids) - one.num_tokens  # where the answer holds its prompt
        ids = one.token_ids[num_prompt + sent :] if sent else one.token_ids
        made: dict[str, Callable[[], np.ndarray]] = {
            "output_ids": lambda: np.array([[ids]], np.int32),
            "sequence_length": lambda: np.array([[len(ids)]], np.int32),
            "text": lambda: _text(text),
            "stop_key": lambda: _text(self._key()),
            "loops_used": lambda: np.array([one.depths[sent:]], np.int32),
        }
        tensors = {name: make() for name, make in made.items() if name in self.outputs}
        if self.batch_index is not None:
            tensors["batch_index"] = _number(self.batch_index)
        if len(output.outputs) > 1:
            tensors["sequence_index"] = _number(one.index)
        if self.wishes.num_input_tokens:
            tensors["num_input_tokens"] = _number(len(output.prompt_token_ids))
        if self.wishes.num_output_tokens:
            tensors["num_output_tokens"] = _number(one.num_tokens)
        if self.wishes.log_probs and one.logprobs is not None:
            scores = [at.logprobs[0] for at in one.logprobs[sent:]]
            total = self._scores[one.index] = self._scores.get(one.index, 0.0) + sum(scores)
            tensors["cum_log_probs"] = np.array([[total]], np.float32)
            tensors["output_log_probs"] = np.array([[scores]], np.float32)
        return tensors | self._end_tensors(output, one)

    def _key(self) -> str:
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return ""
        self._next_look_s = now_s + _LOOK_S
        return self.stop_key

    def _end_tensors(self, output: RequestOutput, one: CompletionOutput) -> Outputs:
        if one.finish_reason is None:
            return {}
        stop_reason = "" if one.stop_reason is None else str(one.stop_reason)
        tensors = {
            "finish_reason": _text(one.finish_reason.value),
            "stop_reason": _text(stop_reason),
        }
        if output.num_cached_tokens is not None:
            tensors["num_cached_tokens"] = _number(output.num_cached_tokens)
        metrics = output.metrics
        if self.wishes.perf_metrics and metrics is not None:
            new, reused = metrics.num_allocated_pages, metrics.num_reused_pages
            tensors |= {
                "kv_cache_alloc_new_blocks": _number(new),
                "kv_cache_reused_blocks": _number(reused),
                "kv_cache_alloc_total_blocks": _number(new + reused),
                "arrival_time_ns": _stamp(metrics.arrival_s),
                "first_scheduled_time_ns": _stamp(metrics.first_scheduled_s),
                "first_token_time_ns": _stamp(metrics.first_token_s),
                "last_token_time_ns": _stamp(metrics.last_token_s),
            }
        return tensors


def _text(value: str) -> np.ndarray:
    return np.array([[value.encode()]], object)


def _number(value: int) -> np.ndarray:
    return np.array([[value]], np.int32)


def _stamp(seconds: float | None) -> np.ndarray:
    """Nanoseconds of CLOCK_MONOTONIC; 0 for what never happened."""
    return np.array([[0 if seconds is None else int(seconds * 1e9)]], np.int64)
