"""A model that is a table: the logits after a token are that token's row.

`TableCore` has the interface of EngineCore: the real scheduler and the real sampler around a
table instead of a network, so that a token's distribution is known.
"""

from __future__ import annotations

import dataclasses

import torch

from looptrt.runtime.outputs import StepOutput
from looptrt.runtime.request import FinishReason, Request
from looptrt.runtime.sampler import Sampler
from looptrt.runtime.scheduler import Scheduler, SchedulerConfig
from looptrt.runtime.step_plan import StepPlan, StepResult
from tests.support.scripted import manifest
from tests.support.tiny import IDENTITY


class TableCore:
    """An engine over `table`, [vocab, vocab] logits of the next token by the last one.

    Guesses, made if there is such a table, are drawn from `shallow`.
    """

    def __init__(
        self,
        table: torch.Tensor,
        *,
        num_units: int = 1000,
        max_batch_size: int = 8,
        max_num_tokens: int = 64,
        eos: tuple[int, ...] = (),
        shallow: torch.Tensor | None = None,
    ) -> None:
        base = manifest(eos=eos)
        spec = dataclasses.replace(base.spec, vocab_size=len(table))
        limits = dataclasses.replace(base.limits, max_batch_size=max_batch_size)
        self.manifest = dataclasses.replace(base, spec=spec, limits=limits)
        self.table, self.shallow = table, shallow
        self.sampler = Sampler(max_batch_size)
        config = SchedulerConfig(
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=limits.max_seq_len,
            num_units=num_units,
            draft_loops=None if shallow is None else 1,
        )
        self.scheduler = Scheduler(config, self.manifest.layout, IDENTITY)
        self.seen: list[Request] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.sampler.start(plan.slot_starts)
        rows = [*plan.logit_rows.tolist(), *plan.prompt_rows.tolist()]
        table = self.table
        if plan.is_draft:
            assert self.shallow is not None
            table = self.shallow
        return self.sampler.sample(table[plan.input_ids[rows]], plan)

    def add_request(self, request: Request) -> None:
        self.scheduler.add(request)
        self.seen.append(request)

    def abort_request(self, request_id: int, reason: FinishReason) -> None:
        self.scheduler.abort(request_id, reason)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> StepOutput:
        plan = self.scheduler.schedule()
        if plan is None:
            return StepOutput(finished=self.scheduler.take_ended())
        output = self.scheduler.commit(plan, self.execute(plan))
        self.scheduler.check_integrity()
        return output

    def stats(self) -> dict[str, int | float]:
        memory = {"cpu_memory_bytes": 1, "gpu_memory_bytes": 0}
        return {**dataclasses.asdict(self.scheduler.stats()), **memory}

    def close(self) -> None:
        pass
