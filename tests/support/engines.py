"""Engines under test: built once a session, run step by step, held against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from looptrt.plugins import reference
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.outputs import FinishedRequest, StepOutput
from looptrt.runtime.request import Request
from looptrt.runtime.step_plan import StepPlan, StepResult
from tests.support.oracle import DenseOracle


@dataclass
class Answer:
    """What an engine did for one request.

    Attributes:
        logits: [vocab] float32 of each generated token.
        chunks: (start, end) positions of each step's rows, recomputed ones included.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    finished: FinishedRequest | None = None


class Harness:
    """An EngineCore driven one step at a time, recording logits and chunks."""

    CONFIG: ClassVar[dict[str, Any]] = {"device": "cpu"}  # of every engine that is not told other

    def __init__(self, engine_dir: Path, **config: Any) -> None:
        self.core = EngineCore(engine_dir, EngineConfig(**{**self.CONFIG, **config}))
        self.answers: dict[int, Answer] = {}
        self._sample = self.core.executor.sampler.sample
        self.core.executor.sampler.sample = self._record_logits  # type: ignore[method-assign]

    def add(self, prompt: Sequence[int], max_new_tokens: int = 6, **fields: Any) -> int:
        """Queue a request with all loops unless told otherwise; returns its id."""
        loops = fields.pop("loops", self.core.manifest.spec.num_loops)
        request = Request(
            request_id=len(self.answers),
            prompt=np.array(prompt, np.int32),
            max_new_tokens=max_new_tokens,
            stop_token_ids=fields.pop("stop_token_ids", ()),
            loops=loops,
            prefill_loops=fields.pop("prefill_loops", loops),
            **fields,
        )
        self.submit(request)
        return request.request_id

    def submit(self, request: Request) -> None:
        """Queue a request made elsewhere."""
        self.core.add_request(request)
        self.answers[request.request_id] = Answer(request)

    def step(self) -> StepOutput:
        """One step, with the books checked after it."""
        scheduler = self.core.scheduler
        plan = scheduler.schedule()
        if plan is None:
            output = StepOutput(finished=scheduler.take_ended())
        else:
            self._record_chunks(plan)
            output = scheduler.commit(plan, self.core.executor.execute(plan))
        for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
            self.answers[request_id].token_ids.append(token)
        for entry in output.finished:
            self.answers[entry.request_id].finished = entry
        scheduler.check_integrity()
        return output

    def drain(self, max_steps: int = 1000) -> None:
        """Step until nothing is left; fails when that takes too long."""
        for _ in range(max_steps):
            if not self.core.has_work():
                stats = self.core.scheduler.stats()
                assert stats.num_free_units + stats.num_cached_units == stats.num_units
                return
            self.step()
        raise AssertionError(f"not drained after {max_steps} steps")

    def poison(self) -> None:
        """Fill every unit that nobody owns, and the null unit, with NaN (all bits set)."""
        poison_free_units(self.core)

    def _record_logits(self, logits: torch.Tensor, plan: StepPlan) -> StepResult:
        for row, slot in enumerate(plan.sample_slots.tolist()):
            request = self.core.scheduler.slots.request(slot)
            self.answers[request.request_id].logits.append(logits[row].float().cpu().clone())
        return self._sample(logits, plan)

    def _record_chunks(self, plan: StepPlan) -> None:
        for seq, slot in enumerate(plan.seq_slots.tolist()):
            rows = plan.positions[plan.cu_seqlens[seq] : plan.cu_seqlens[seq + 1]]
            request = self.core.scheduler.slots.request(slot)
            self.answers[request.request_id].chunks.append((int(rows[0]), int(rows[-1]) + 1))


def poison_free_units(core: EngineCore) -> None:
    """See `Harness.poison`."""
    pool = core.scheduler.kv.pool
    units = core.executor.pool.view(-1, core.manifest.layout.unit_bytes)
    free = [unit for unit in range(len(units)) if unit == 0 or pool.units.is_free(unit)]
    units[free] = 0xFF


def depths_of(answer: Answer) -> list[int]:
    """Loops of every token of prompt and answer."""
    request = answer.request
    shallow = [request.prefill_loops] * (request.num_prompt - 1)
    return shallow + [request.loops] * (1 + len(answer.token_ids))


def initial_states(core: EngineCore, num_tokens: int, noise_seed: int) -> torch.Tensor | None:
    """[num_tokens, hidden] initial states of a model that draws them, else None."""
    spec = core.manifest.spec
    if spec.state_std == 0:
        return None
    return reference.position_keyed_noise(
        torch.empty(num_tokens, spec.hidden_size),
        torch.arange(num_tokens, dtype=torch.int32),
        torch.full((num_tokens,), noise_seed, dtype=torch.int64),
        std=spec.state_std,
        scale=spec.state_scale,
    )


def oracle_logits(oracle: DenseOracle, core: EngineCore, answer: Answer) -> torch.Tensor:
    """[num_generated, vocab] what a dense recompute gives for each generated token."""
    token_ids = [*answer.request.prompt.tolist(), *answer.token_ids]
    noise = initial_states(core, len(token_ids), answer.request.noise_seed)
    ring = core.manifest.layout.strategy.ring
    if ring is None:
        logits = oracle.logits(token_ids, depths_of(answer), noise)
    else:
        chunks = [*answer.chunks, (len(token_ids) - 1, len(token_ids))]
        logits = oracle.ring_logits(token_ids, depths_of(answer), chunks, ring, noise)
    first = answer.request.num_prompt - 1
    return logits[first : first + len(answer.token_ids)]


def assert_equals_oracle(
    oracle: DenseOracle, harness: Harness, request_id: int, bound: float = 2e-4
) -> None:
    """Logits within `bound` of the largest logit, tokens equal where the lead exceeds it."""
    answer = harness.answers[request_id]
    expected = oracle_logits(oracle, harness.core, answer)
    got = torch.stack(answer.logits)
    assert got.shape == expected.shape
    limit = bound * expected.abs().max()
    worst = (got - expected).abs().max()
    assert worst <= limit, f"request {request_id}: logits off by {worst:.2e}, bound {limit:.2e}"
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > limit
    tokens = torch.tensor(answer.token_ids)
    assert clear.any()
    assert torch.equal(tokens[clear], expected.argmax(-1)[clear])
