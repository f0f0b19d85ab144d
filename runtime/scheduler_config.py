"""The limits of a scheduler, and what they refuse: settings and requests that could never run.

Owns both checks at a scheduler's border; leaves what a caller may ask of an engine to
`admission`. Invariant: a configuration that exists lets every running request into one step,
and a request that passed fits an empty pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from looptrt.errors import EngineError, RequestError
from looptrt.runtime.kv.sequence_kv import SequenceKv
from looptrt.runtime.request import Request


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a scheduler.

    Attributes:
        max_batch_size: running requests at most.
        max_num_tokens: rows of a step at most; at least max_batch_size.
        max_seq_len: prompt and answer of a request at most.
        num_units: units of the KV pool, the null unit included.
        max_waiting: requests in the waiting queue at most, preempted ones not counted.
        enable_prefix_cache: whether finished pages are shared.
        prefix_at_least: share pages deeper than asked.
        prefix_grid: tokens; chunks and hits end at its multiples; then max_num_tokens must
            leave room for a whole chunk beside the other requests' rows.
        recomputable: False where KV depends on the chunk schedule: then all pages are
            reserved at admission, and there is neither preemption nor a prefix cache.
        prefill_share: whether prompts that do not fit beside the running answers' rows may
            have whole steps: after each step with answers up to S of them, S being the loops
            of the deepest answer.
        packed_prefill: whether a step may run rows of several prompts.
        draft_loops: loops of guesses that full depth verifies; None makes none.

    Raises:
        EngineError: max_num_tokens is too small for max_batch_size and prefix_grid.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    num_units: int
    max_waiting: int = 1024
    enable_prefix_cache: bool = True
    prefix_at_least: bool = False
    prefix_grid: int | None = None
    recomputable: bool = True
    prefill_share: bool = True
    packed_prefill: bool = True
    draft_loops: int | None = None

    def __post_init__(self) -> None:
        check_rows(self.max_num_tokens, self.max_batch_size, self.prefix_grid)


def check_rows(max_num_tokens: int, max_batch_size: int, prefix_grid: int | None) -> None:
    """Refuse steps that a chunk of a prompt could never be part of.

    Raises:
        EngineError: max_num_tokens is too small.
    """
    least = max_batch_size + (prefix_grid or 1) - 1
    if max_num_tokens < least:
        raise EngineError(
            f"max_num_tokens: expected at least {least}, so that max_batch_size "
            f"{max_batch_size} requests fit a step and all but one leave room for a chunk of "
            f"prefix_grid {prefix_grid}, got {max_num_tokens}"
        )


def check_fits(config: SchedulerConfig, kv: SequenceKv, request: Request) -> None:
    """Refuse a request that could never run, even alone.

    Raises:
        RequestError: names the field, the limit and the value.
    """
    if not 1 <= request.num_prompt < config.max_seq_len:
        raise RequestError(
            f"prompt: expected 1 to {config.max_seq_len - 1} tokens, got {request.num_prompt}"
        )
    max_loops = kv.layout.max_loops
    if not 1 <= request.prefill_loops <= request.loops <= max_loops:
        raise RequestError(
            f"loops: expected 1 <= prefill_loops <= loops <= {max_loops}, "
            f"got prefill_loops {request.prefill_loops}, loops {request.loops}"
        )
    needed, held = kv.units_needed(request), config.num_units - 1
    if needed > held:
        raise RequestError(
            f"prompt and max_tokens: {request.num_prompt} + {request.max_new_tokens} tokens at "
            f"depth {request.loops} need {needed} KV units, the pool has {held}"
        )
