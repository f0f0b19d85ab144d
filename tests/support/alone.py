"""A request run alone, and what the same request among others may differ in.

Owns the comparison; leaves the load to `soak`. What is promised (docs/exactness.md, case C14):
up to the first token that differs, logits are those of the request alone but for rounding, and
the token that differs is the one that the request's own sampling makes of its rounded logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from looptrt.runtime.admission import Admitted
from looptrt.runtime.answer import Completion
from looptrt.runtime.engine_client import _updates
from looptrt.runtime.outputs import CompletionOutput, TokenLogprobs
from looptrt.runtime.request import ExitRule, FinishReason, LogprobsMode, Request
from looptrt.runtime.sampler import Sampler
from looptrt.runtime.step_plan import PlaneCopies, SlotStart, StepPlan, TableUpdates
from looptrt.runtime.tokenizer import Tokenizer
from tests.support.engines import Harness
from tests.support.random_requests import Case

ROUNDING = 2e-4  # of the largest logit, float32
_TRIES = 32  # draws of rounding noise
_NO_INTS = np.zeros(0, np.int32)


class Fault(AssertionError):
    """What must not be."""


@dataclass(frozen=True)
class Solo:
    """A request run alone on an idle engine.

    Attributes:
        output: what its caller gets.
        token_ids: generated.
        logits: [vocab] of each of them.
        prompt_logprobs: by position.
    """

    request: Request
    output: CompletionOutput
    token_ids: list[int]
    logits: list[torch.Tensor]
    prompt_logprobs: dict[int, TokenLogprobs]

    def check_sampled(self, index: int, token: int, logits: torch.Tensor) -> None:
        """A token among others is what the request's own sampling makes of its logits there."""
        for what, row, chosen in (
            ("", logits, token),
            ("alone ", self.logits[index], self.token_ids[index]),
        ):
            (again,) = _sampled(self.request, self._before(index), row[None]).tolist()
            if again != chosen:
                raise Fault(f"token {index} {what}is {chosen}, its logits give {again}")

    def may_give(self, index: int, token: int, rounding: float) -> bool:
        """Whether rounding of the logits can make the token `index` this one."""
        row = self.logits[index]
        spread = rounding * float(row.abs().max())
        generator = torch.Generator().manual_seed(index)
        noise = (2 * torch.rand(_TRIES, len(row), generator=generator) - 1) * spread
        return token in _sampled(self.request, self._before(index), row + noise).tolist()

    def _before(self, index: int) -> list[int]:
        return [*self.request.prompt.tolist(), *self.token_ids[:index]]


class SoloRuns:
    """Answers of requests run alone, step by step and without a prefix cache, each once.

    Args:
        engine_dir: the engine of the soak.
        config: settings that change what a request gives.
    """

    def __init__(self, engine_dir: Path, **config: Any) -> None:
        self.harness = Harness(engine_dir, enable_prefix_cache=False, cuda_graphs="off", **config)
        self._tokenizer = Tokenizer.of_engine(engine_dir)
        self._known: dict[tuple[int, int], Solo] = {}
        self._num_runs = 0

    def of(self, case: Case, admitted: Admitted, index: int) -> Solo:
        """The answer number `index` to an admitted prompt."""
        key = case.number, index
        if key not in self._known:
            self._known[key] = self._run(admitted, admitted.requests[index])
        return self._known[key]

    def _run(self, admitted: Admitted, request: Request) -> Solo:
        harness, self._num_runs = self.harness, self._num_runs + 1
        alone = Request(
            request_id=self._num_runs,
            prompt=request.prompt,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            loops=request.loops,
            prefill_loops=request.prefill_loops,
            noise_seed=request.noise_seed,
            sampler=request.sampler,
            exit=request.exit,
        )
        only = Admitted(admitted.prompt, admitted.params, (alone,))
        completion = Completion(0, only, self._tokenizer)
        harness.submit(alone)
        while harness.core.has_work():
            for update in _updates(harness.step()).values():
                completion.take(update)
            if completion.is_stopped:
                harness.core.abort_request(alone.request_id, FinishReason.STOP)
        output = completion.output()
        answer = harness.answers.pop(alone.request_id)
        return Solo(
            request=alone,
            output=output,
            token_ids=generated(output),
            logits=answer.logits,
            prompt_logprobs=completion.prompt_logprobs,
        )


def generated(output: CompletionOutput) -> list[int]:
    """Generated tokens, without a prompt in front of them."""
    return output.token_ids[len(output.token_ids) - output.num_tokens :]


# ---- a request among others against itself alone


def differs(
    got: CompletionOutput, solo: Solo, rounding: float, logits: Mapping[int, torch.Tensor]
) -> bool:
    """Whether rounding led to another token; raises Fault where more than rounding differs.

    Args:
        got: whole or cut short.
        solo: the same request.
        rounding: distance of two runs' logits, as a share of the largest.
        logits: [vocab] behind a token, by its place in the answer, where they are known.
    """
    tokens = generated(got)
    for index, (token, wanted) in enumerate(zip(tokens, solo.token_ids, strict=False)):
        if got.depths[index] != solo.output.depths[index]:
            return _may_exit(solo.request, f"token {index} ran {got.depths[index]} loops")
        if index in logits:
            check_logits(logits[index], solo.logits[index], rounding, f"of token {index}")
        if token != wanted:
            if index in logits:
                solo.check_sampled(index, token, logits[index])
            elif not solo.may_give(index, token, rounding):
                raise Fault(f"token {index} is {token}, alone {wanted}, and not for rounding")
            return True
    if len(tokens) > len(solo.token_ids):
        raise Fault(f"goes on after {solo.token_ids} with {tokens[len(solo.token_ids) :]}")
    return False


def _may_exit(request: Request, what: str) -> bool:
    """A token that stops early compares numbers with a threshold, which rounding can cross."""
    if request.exit.rule is ExitRule.NONE:
        raise Fault(what)
    return True


def check_logits(got: torch.Tensor, wanted: torch.Tensor, rounding: float, what: str) -> None:
    if not wanted.isfinite().all():
        if not got.isfinite().all():
            return
        raise Fault(f"logits {what} are finite, alone they are not")
    limit = rounding * float(wanted.abs().max())
    worst = float((got - wanted).abs().max())
    if not worst <= limit:
        raise Fault(f"logits {what} are off by {worst:.2e}, rounding is {limit:.2e}")


def check_whole(got: CompletionOutput, wanted: CompletionOutput) -> None:
    """Equal tokens end for the same reason and are the same text."""
    for name in ("token_ids", "depths", "text", "finish_reason", "stop_reason"):
        mine, theirs = getattr(got, name), getattr(wanted, name)
        if mine != theirs:
            raise Fault(f"{name} {mine!r}, alone {theirs!r}")


def check_scores(
    got: CompletionOutput, solo: Solo, scored: dict[int, TokenLogprobs], rounding: float
) -> None:
    """Log-probabilities of the tokens themselves are equal but for rounding."""
    pairs = [(scored.get(key), value) for key, value in solo.prompt_logprobs.items()]
    if solo.request.sampler.logprobs_mode is LogprobsMode.RAW:
        pairs += list(zip(got.logprobs or [], solo.output.logprobs or [], strict=True))
    finite = [float(row.abs().max()) for row in solo.logits if row.isfinite().all()]
    limit = 4 * rounding * max(finite, default=1.0)
    for mine, theirs in pairs:
        if mine is None or mine.token_ids[0] != theirs.token_ids[0]:
            raise Fault(f"log-probabilities {mine}, alone {theirs}")
        one, other = mine.logprobs[0], theirs.logprobs[0]
        if not (math.isnan(one) and math.isnan(other)) and not abs(one - other) <= limit:
            raise Fault(f"log-probability {one}, alone {other}")


def _sampled(request: Request, known: list[int], logits: torch.Tensor) -> np.ndarray:
    """[n] tokens of [n, vocab] logits that all follow the same tokens."""
    count = len(logits)
    sampler, slots = Sampler(count), np.arange(count, dtype=np.int32)
    history = np.array(known, np.int32)
    starts = [
        SlotStart(slot, request.sampler, request.exit, request.num_prompt, history)
        for slot in range(count)
    ]
    sampler.start(starts)
    plan = StepPlan(
        input_ids=np.full(count, known[-1], np.int32),
        positions=np.full(count, len(known) - 1, np.int32),
        depths=np.full(count, request.loops, np.int32),
        noise_seeds=np.zeros(count, np.int64),
        cu_seqlens=np.arange(count + 1, dtype=np.int32),
        seq_slots=slots,
        logit_rows=slots,
        sample_slots=slots,
        prompt_rows=_NO_INTS,
        prompt_slots=_NO_INTS,
        table_updates=TableUpdates(_NO_INTS, _NO_INTS, _NO_INTS.reshape(0, 1)),
        copies=PlaneCopies.of([]),
    )
    return sampler.sample(logits, plan).token_ids
