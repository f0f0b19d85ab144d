"""The next token chosen on the GPU: two numbers a row come back, not a row of logits.

Owns which rows the kernel serves and the columns that it reads; leaves what a request does to
its logits, and log-probabilities, to `Sampler` on the CPU. Invariant: who serves a row depends
on its own request alone, so neighbours cannot move a draw.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from looptrt.plugins import launch
from looptrt.runtime.executor.staging import Staging
from looptrt.runtime.request import SamplerParams
from looptrt.runtime.sampler import Sampler
from looptrt.runtime.step_plan import Int32Array, StepPlan, StepResult

MAX_VOCAB = 2**19  # of the kernel; larger ones are sampled on the CPU


class CudaSampler(Sampler):
    """Chooses tokens for the running requests from logits on a GPU.

    Args:
        max_slots: slots of the scheduler.
        staging: to the logits' device.
    """

    def __init__(self, max_slots: int, staging: Staging) -> None:
        super().__init__(max_slots)
        self._staging = staging

    def sample(self, logits: Tensor, plan: StepPlan) -> StepResult:
        """Choose one token for each of the plan's samples; see `Sampler.sample`."""
        if logits.shape[-1] > MAX_VOCAB:
            return super().sample(logits.cpu(), plan)
        num_samples = len(plan.logit_rows)
        slots = [self.slot(index) for index in plan.sample_slots.tolist()]
        params = [slot.params for slot in slots]
        tokens, has_failed = self._choose(logits[:num_samples], params, plan)
        result = replace(
            StepResult.at_planned_depths(plan, tokens),
            failed=tuple(np.flatnonzero(has_failed).tolist()),
        )
        on_host = [row for row, slot in enumerate(slots) if slot.needs_logits]
        if not on_host and len(logits) == num_samples:
            return result
        rows = torch.tensor([*on_host, *range(num_samples, len(logits))], device=logits.device)
        part = replace(
            plan, logit_rows=plan.logit_rows[on_host], sample_slots=plan.sample_slots[on_host]
        )
        theirs = super().sample(logits[rows].cpu(), part)
        tokens[on_host] = theirs.token_ids
        logprobs = {on_host[index]: entry for index, entry in theirs.logprobs.items()}
        return replace(result, logprobs=logprobs, prompt_logprobs=theirs.prompt_logprobs)

    def _choose(
        self, logits: Tensor, params: list[SamplerParams], plan: StepPlan
    ) -> tuple[Int32Array, Int32Array]:
        """[n] tokens, and [n] that are 1 where logits are not finite, in one transfer each way."""
        if not params:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        columns: dict[str, np.ndarray] = {
            "temperatures": np.array([p.temperature for p in params], np.float64),
            "top_ks": np.array([min(p.top_k, MAX_VOCAB) for p in params], np.int32),
            "top_ps": np.array([p.top_p for p in params], np.float64),
            "min_ps": np.array([p.min_p for p in params], np.float64),
            "seeds": np.array([p.seed for p in params], np.uint64).view(np.int64),
            "positions": plan.positions[plan.logit_rows],
        }
        chosen = launch.sample(logits, **self._staging.stage(columns))
        tokens, failed = torch.stack(chosen).cpu().numpy()
        return tokens, failed
