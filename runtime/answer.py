"""One request's answer as it grows: tokens in, text and the caller's outputs out.

Owns text, stop strings and the finish reason; leaves sending the abort to its owner.
Invariant: after the first stop string is complete no later token changes the answer.
"""

from __future__ import annotations

from looptrt.runtime.admission import Admitted
from looptrt.runtime.detokenizer import Detokenizer, StopMatch, StopMatcher
from looptrt.runtime.engine_client import Update
from looptrt.runtime.outputs import (
    CompletionOutput,
    FinishedRequest,
    RequestMetrics,
    RequestOutput,
)
from looptrt.runtime.request import FinishReason
from looptrt.runtime.tokenizer import Tokenizer


class Answer:
    """Accumulates the updates of one request.

    A request that completed a stop string is finished once the engine has let go of it, so
    a finished answer holds no KV.

    Attributes:
        admitted: the request.
        is_stopped: a stop string is complete; the engine is to be told to end the request.
    """

    def __init__(self, admitted: Admitted, tokenizer: Tokenizer | None) -> None:
        self.admitted = admitted
        self.is_stopped = False
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._matcher = StopMatcher(admitted.stops)
        self._stop: str | None = None
        self._pieces: list[str] = []  # joined when asked for
        self._num_shown = 0
        self._token_ids: list[int] = []
        self._depths: list[int] = []
        self._ended: FinishedRequest | None = None

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.admitted.request.request_id

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self._ended is not None

    def take(self, update: Update) -> None:
        """Add what a step brought.

        Raises:
            LooptrtError: the request or the engine failed.
        """
        if update.error is not None:
            raise update.error
        ended = update.finished
        stop_token_id = None if ended is None else ended.stop_token_id
        last = len(update.token_ids) - 1
        for index, token_id in enumerate(update.token_ids):
            if self.is_stopped:
                break
            self._token_ids.append(token_id)
            self._depths.append(update.depths[index])
            is_stop_token = stop_token_id is not None and index == last
            if self._detokenizer is not None and not is_stop_token:
                self._add_text(self._detokenizer.push(token_id))
        if ended is not None:
            if not self.is_stopped and self._detokenizer is not None:
                self._add_text(self._detokenizer.flush())
            self._pieces.append(self._matcher.flush())
            self._ended = ended

    def output(self) -> RequestOutput:
        """The answer so far; its `delta` is the text since the previous call."""
        ended, prompt = self._ended, self.admitted.prompt
        text = "".join(self._pieces)
        self._pieces = [text]
        delta, self._num_shown = text[self._num_shown :], len(text)
        completion = CompletionOutput(
            index=0,
            text=text,
            delta=delta,
            token_ids=list(self._token_ids),
            depths=list(self._depths),
            finish_reason=None if ended is None else self._finish_reason(ended),
            stop_reason=None if ended is None else self._stop or ended.stop_token_id,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            outputs=[completion],
            finished=ended is not None,
            num_cached_tokens=None if ended is None else ended.num_cached_tokens,
            kv_bytes=None if ended is None else ended.kv_bytes,
            metrics=None if ended is None else _metrics(ended),
        )

    def _add_text(self, piece: str) -> None:
        found = self._matcher.push(piece)
        if isinstance(found, StopMatch):
            self.is_stopped, self._stop = True, found.stop
            found = found.text
        self._pieces.append(found)

    def _finish_reason(self, ended: FinishedRequest) -> FinishReason:
        return FinishReason.STOP if self.is_stopped else ended.reason


def _metrics(ended: FinishedRequest) -> RequestMetrics:
    return RequestMetrics(
        arrival_s=ended.arrival_s,
        first_scheduled_s=ended.first_scheduled_s,
        first_token_s=ended.first_token_s,
        finished_s=ended.finished_s,
        num_preemptions=ended.num_preemptions,
    )
