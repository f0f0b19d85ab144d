"""The next token chosen on the GPU: two numbers a row come back, not a row of logits.

Owns which rows the kernel serves and the columns that it reads; leaves what a request does to
its logits, and log-probabilities, to `Sampler` on the CPU. Invariant: who serves a row depends
on its own request alone, so neighbours cannot move a draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from looptrt.plugins import launch
from looptrt.runtime.executor.staging import Staging
from looptrt.runtime.padding import filled
from looptrt.runtime.sampler import Sampler
from looptrt.runtime.step_plan import Int32Array, SlotStart, StepPlan, StepResult

MAX_VOCAB = 2**19  # of the kernel; larger ones are sampled on the CPU

# What the kernel reads of each sampled row.
COLUMNS: Mapping[str, torch.dtype] = {
    "temperatures": torch.float64,
    "top_ks": torch.int32,
    "top_ps": torch.float64,
    "min_ps": torch.float64,
    "seeds": torch.int64,
    "positions": torch.int32,
}


class CudaSampler(Sampler):
    """Chooses tokens for the running requests from logits on a GPU.

    Args:
        max_slots: slots of the scheduler.
        staging: to the logits' device.
        vocab_size: width of the logits.
    """

    def __init__(self, max_slots: int, staging: Staging, vocab_size: int) -> None:
        super().__init__(max_slots)
        self._staging = staging
        self._fits = vocab_size <= MAX_VOCAB
        self._needs_logits = np.zeros(max_slots, np.bool_)
        self._params: dict[str, np.ndarray] = {
            "temperatures": np.zeros(max_slots),
            "top_ks": np.zeros(max_slots, np.int32),
            "top_ps": np.ones(max_slots),
            "min_ps": np.zeros(max_slots),
            "seeds": np.zeros(max_slots, np.int64),
        }

    def start(self, slot_starts: Iterable[SlotStart]) -> None:
        """Take the parameters and the known tokens of newly filled slots."""
        starts = list(slot_starts)
        super().start(starts)
        for start in starts:
            slot, params = start.slot, start.sampler
            self._needs_logits[slot] = self.slot(slot).needs_logits
            self._params["temperatures"][slot] = params.temperature
            self._params["top_ks"][slot] = min(params.top_k, MAX_VOCAB)
            self._params["top_ps"][slot] = params.top_p
            self._params["min_ps"][slot] = params.min_p
            self._params["seeds"].view(np.uint64)[slot] = params.seed

    def fits(self, plan: StepPlan) -> bool:
        """Whether all the kernel is asked for is a token a sample: no prompt row is scored."""
        return self._fits and not len(plan.prompt_rows)

    def serves(self, plan: StepPlan) -> bool:
        """Whether the kernel alone makes the plan's result; logits are not read."""
        return self.fits(plan) and not self._needs_logits[plan.sample_slots].any()

    def columns(self, plan: StepPlan, size: int) -> dict[str, np.ndarray]:
        """[size] values of every column: of the plan's samples, then of greedy rows."""
        columns = {name: values[plan.sample_slots] for name, values in self._params.items()} | {
            "positions": plan.positions[plan.logit_rows]
        }
        return {name: filled(values, size) for name, values in columns.items()}

    def result(self, plan: StepPlan, tokens: Int32Array, has_failed: Int32Array) -> StepResult:
        """The step's result where no request reads logits."""
        failed = tuple(np.flatnonzero(has_failed).tolist())
        return replace(StepResult.at_planned_depths(plan, tokens), failed=failed)

    def sample(self, logits: Tensor, plan: StepPlan) -> StepResult:
        """Choose one token for each of the plan's samples; see `Sampler.sample`."""
        if not self._fits:
            return super().sample(logits.cpu(), plan)
        tokens, has_failed = self._choose(logits[: len(plan.logit_rows)], plan)
        if self.serves(plan):
            return self.result(plan, tokens, has_failed)
        return self.read(logits, plan, tokens, has_failed)

    def read(
        self, logits: Tensor, plan: StepPlan, tokens: Int32Array, has_failed: Int32Array
    ) -> StepResult:
        """The step's result where requests read logits: their rows come to the host.

        Args:
            logits: as in `sample`.
            plan: the step.
            tokens: [num_samples] of the kernel; those of requests that read logits are replaced.
            has_failed: [num_samples] of the kernel.
        """
        num_samples = len(plan.logit_rows)
        result = self.result(plan, tokens, has_failed)
        on_host = np.flatnonzero(self._needs_logits[plan.sample_slots]).tolist()
        rows = torch.tensor([*on_host, *range(num_samples, len(logits))], device=logits.device)
        part = replace(
            plan, logit_rows=plan.logit_rows[on_host], sample_slots=plan.sample_slots[on_host]
        )
        theirs = super().sample(logits[rows].cpu(), part)
        tokens[on_host] = theirs.token_ids
        logprobs = {on_host[index]: entry for index, entry in theirs.logprobs.items()}
        return replace(result, logprobs=logprobs, prompt_logprobs=theirs.prompt_logprobs)

    def _choose(self, logits: Tensor, plan: StepPlan) -> tuple[Int32Array, Int32Array]:
        """[n] tokens, and [n] that are 1 where logits are not finite, in one transfer each way."""
        if not len(logits):
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        columns = self._staging.stage(self.columns(plan, len(logits)))
        tokens, failed = launch.sample(logits, **columns).cpu().numpy()
        return tokens, failed
