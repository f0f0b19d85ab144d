"""An engine whose own loop is run step by step, with an eye on every byte of its KV pool.

Owns the books of what came out and of where steps may write; leaves what is right to the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.outputs import FinishedRequest, StepOutput, TokenLogprobs
from looptrt.runtime.request import FinishReason, Request, SamplerParams
from looptrt.runtime.step_plan import StepPlan, StepResult

LOOPS = 4
GREEDY = SamplerParams()


@dataclass(frozen=True)
class Ask:
    """A request without its id; `sampler` and the rest as in `Request`."""

    prompt: Sequence[int]
    max_new_tokens: int = 8
    loops: int = LOOPS
    prefill_loops: int | None = None
    noise_seed: int = 0
    sampler: SamplerParams = GREEDY

    def request(self, request_id: int) -> Request:
        return Request(
            request_id=request_id,
            prompt=np.array(self.prompt, np.int32),
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=(),
            loops=self.loops,
            prefill_loops=self.prefill_loops or self.loops,
            noise_seed=self.noise_seed,
            sampler=self.sampler,
        )


class Engine:
    """An engine, what came out of it and what its steps may write.

    Attributes:
        units: [units, layer slots of K and V, page_size, bytes] uint8 of the pool.
    """

    def __init__(self, engine_dir: Path, **config: Any) -> None:
        self.core = EngineCore(engine_dir, EngineConfig(**config))
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.scored: dict[int, dict[int, TokenLogprobs]] = {}
        self.finished: dict[int, FinishedRequest] = {}
        layout = self.core.manifest.layout
        units = self.core.executor.pool.view(-1, layout.unit_bytes)
        slots, pair, page_size, *_ = layout.unit_shape
        width = layout.unit_bytes // (slots * pair * page_size)
        self.units = units.view(-1, slots * pair, page_size, width)
        self._planned: list[torch.Tensor] = []
        submit = self.core.executor.submit

        def note(plan: StepPlan) -> Callable[[], StepResult]:
            self._planned.append(self._writes(plan))
            return submit(plan)

        self.core.executor.submit = note  # type: ignore[method-assign]

    def add(self, ask: Ask) -> int:
        request = ask.request(len(self.requests))
        self.core.add_request(request)
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.logprobs[request.request_id] = []
        self.scored[request.request_id] = {}
        return request.request_id

    def step(self) -> StepOutput:
        output = self.core.step()
        rows = zip(output.request_ids, output.token_ids, strict=True)
        for row, (request_id, token) in enumerate(rows):
            self.tokens[request_id].append(token)
            if row in output.logprobs:
                self.logprobs[request_id].append(output.logprobs[row])
        for request_id, position, entry in output.prompt_logprobs:
            self.scored[request_id][position] = entry
        self.finished |= {entry.request_id: entry for entry in output.finished}
        self.core.scheduler.check_integrity()
        return output

    def drain(self) -> None:
        for _ in range(5000):
            if not self.core.has_work():
                self.check_idle()
                return
            self.step()
        raise AssertionError("not drained after 5000 steps")

    def run(self, asks: Iterable[Ask]) -> list[list[int]]:
        """Tokens of each, all queued at once."""
        ids = [self.add(ask) for ask in asks]
        self.drain()
        assert all(self.finished[one].reason is FinishReason.LENGTH for one in ids)
        return [self.tokens[one] for one in ids]

    def check_idle(self) -> None:
        stats = self.core.stats()
        assert stats["num_free_units"] + stats["num_cached_units"] == stats["num_units"]
        assert stats["num_running"] == stats["num_waiting"] == 0

    def bits(self) -> torch.Tensor:
        """A copy of `units`, once no step writes to it."""
        self._wait()
        return self.units.clone()

    def kv_of(self, request_id: int) -> torch.Tensor | None:
        """KV of a running request's computed tokens; None while it has none."""
        request = self.requests[request_id]
        if request.slot is None or not self.core.scheduler.slots.active[request.slot]:
            return None
        self._wait()
        rows = [self.units[list(page.units)] for page in request.pages]
        computed = int(self.core.scheduler.slots.num_computed[request.slot])
        whole = torch.cat([row.flatten(0, 1).transpose(0, 1) for row in rows])
        return whole[:computed].clone()

    def _wait(self) -> None:
        if self.units.is_cuda:
            torch.cuda.synchronize(self.units.device)

    def take_writes(self) -> torch.Tensor:
        """[units, page_size] bool: where steps submitted so far may have written; once."""
        planned, self._planned = self._planned, self._planned[-1:]  # one may be in flight
        return torch.stack(planned).any(dim=0)

    def _writes(self, plan: StepPlan) -> torch.Tensor:
        table, size = self.core.scheduler.kv.table.units, self.core.manifest.layout.page_size
        writes = torch.zeros(self.units.shape[0], size, dtype=torch.bool)
        slots = np.repeat(plan.seq_slots, np.diff(plan.cu_seqlens))
        for slot, position in zip(slots.tolist(), plan.positions.tolist(), strict=True):
            units = table[slot, :, position // size]
            writes[units.tolist(), position % size] = True
        copies = zip(
            *(plan.copies.dst_units, plan.copies.token_begin, plan.copies.token_end), strict=True
        )
        for unit, begin, end in copies:
            writes[unit, begin:end] = True
        return writes
