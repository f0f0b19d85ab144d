"""The exactness ladder as a table: every change of speed or memory, its switch and its rung.

Owns what each change is said to preserve; leaves showing it to `ladder`. Invariant: a change
that needs a check of quality (R3) is no default unless that check was passed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from looptrt.bench.arms import DEFAULT, Arm, KvLayout
from looptrt.errors import EngineError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.speculation import MOST_REQUESTS


class Rung(StrEnum):
    """What may differ from the engine without a change."""

    R0 = "R0"  # nothing at equal batches: the same bits
    R1 = "R1"  # which rows share a batch: the same operations of each row
    R2 = "R2"  # the random numbers: the same distribution
    R3 = "R3"  # the arithmetic: to be checked on a task


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        preserves: what stays the same, in words.
        on: settings that switch it on, empty where it is on by default.
        off: settings that switch it off, empty where it is off by default.
        on_request, off_request: the same of requests. In all of them `HALF_LOOPS` stands for
            half of the request's loops.
        off_kv_layout: how the pool is reckoned without the change.
        shares_prompts: whether it shows only where prompts begin alike.
        gpu_only: whether an engine on the CPU lacks it, or what it is said to preserve.
        needs_graphs: values of `cuda_graphs` with which it shows; empty for all.
        needs_noise: whether it is about random initial states, which other models do not have.
        needs_recomputing: whether it needs KV that can be computed again (`is_recomputable`).
        needs_joined: whether it is about projections that the engine joins.
        few_rows: whether it is about steps of as few rows as our own products take, and would
            not show where more requests run at once.
        most_requests: that run at once, beyond which it would not show; None where it always does.
    """

    name: str
    rung: Rung
    preserves: str
    on: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, Any] = field(default_factory=dict)
    on_request: Mapping[str, Any] = field(default_factory=dict)
    off_request: Mapping[str, Any] = field(default_factory=dict)
    off_kv_layout: KvLayout = KvLayout.UNITS
    shares_prompts: bool = False
    gpu_only: bool = False
    needs_graphs: tuple[str, ...] = ()
    needs_noise: bool = False
    needs_recomputing: bool = False
    needs_joined: bool = False
    few_rows: bool = False
    most_requests: int | None = None

    @property
    def halves_loops(self) -> bool:
        """Whether `HALF_LOOPS` is in it."""
        return HALF_LOOPS in (*self.on.values(), *self.on_request.values())

    @property
    def is_default(self) -> bool:
        """Whether an engine that is told nothing has the change, by the settings' defaults."""
        on = _are_defaults(EngineConfig, self.on)
        on &= _are_defaults(SamplingParams, self.on_request)
        off = bool(self.off or self.off_request)
        off &= _are_defaults(EngineConfig, self.off)
        off &= _are_defaults(SamplingParams, self.off_request)
        return on and not off

    def arms(self, loops: int) -> tuple[Arm, Arm]:
        """The arm with the change and the one without; the side that is default is so called.

        Args:
            loops: of the requests' generated tokens.

        Raises:
            EngineError: this looptrt does not have the switch.
        """
        with_arm = Arm(
            DEFAULT if self.is_default else self.name,
            _loops(self.on, loops),
            _loops(self.on_request, loops),
        )
        without = Arm(
            f"no {self.name}" if self.is_default else DEFAULT,
            _loops(self.off, loops),
            _loops(self.off_request, loops),
            self.off_kv_layout,
        )
        return with_arm, without


HALF_LOOPS = "half of the loops"

CHANGES = (
    Change(
        "plane units",
        Rung.R0,
        "every value; only addresses differ, and more tokens fit",
        off_kv_layout=KvLayout.ALL_LAYERS,
    ),
    Change(
        "fused kernels",
        Rung.R0,
        "PyTorch's bits at the same rows: its order of sums, its roundings",
        off={"fused_kernels": False},
        gpu_only=True,
    ),
    Change(
        "joined projections",
        Rung.R0,
        "the bits of q, k, v, gate and up multiplied apart; joined where a check found them equal",
        off={"joined_projections": "never"},
        gpu_only=True,
        needs_joined=True,
    ),
    Change(
        "CUDA graphs",
        Rung.R1,
        "every row's operations; a batch is padded to the rows of its graph",
        off={"cuda_graphs": "off"},
        gpu_only=True,
        needs_graphs=("auto", "step", "loop"),
    ),
    Change(
        "scheduling ahead",
        Rung.R1,
        "every row's operations; an answer that ended has one more row, a prompt may wait a step",
        off={"look_ahead": False},
        gpu_only=True,
        needs_graphs=("auto", "step"),  # whole steps
    ),
    Change(
        "packed prefill",
        Rung.R1,
        "every row's operations, attention's bits included; prompts share matrix products",
        off={"packed_prefill": False},
    ),
    Change(
        "prefill share",
        Rung.R1,
        "every row's operations; prompts are admitted earlier",
        off={"prefill_share": False},
    ),
    Change(
        "prefix cache",
        Rung.R1,
        "every row's operations; a hit's prompt has fewer rows",
        off={"enable_prefix_cache": False},
        shares_prompts=True,
        needs_recomputing=True,
    ),
    Change(
        "speculation",
        Rung.R1,
        "every row's operations; guesses at half of the loops are verified in wider batches",
        on={"speculative_loops": HALF_LOOPS},
        needs_recomputing=True,
        most_requests=MOST_REQUESTS,
    ),
    Change(
        "position-keyed noise",
        Rung.R2,
        "the distribution of initial states; numbers follow from seed, position and channel",
        # What needs it goes with it.
        off={
            "noise": "sequential",
            "cuda_graphs": "auto",
            "enable_prefix_cache": False,
            "prefix_grid": None,
            "prefix_depth": "exact",
            "speculative_loops": None,
        },
        needs_noise=True,
    ),
    Change(
        "products of few rows",
        Rung.R3,
        "products up to rounding: float32 sums in another order than cuBLAS's",
        off={"skinny_linear_rows": 0},
        gpu_only=True,
        few_rows=True,
    ),
    Change(
        "shallow prompt",
        Rung.R3,
        "answers' depth; prompt tokens but the last run half of the loops",
        on_request={"prefill_loops": HALF_LOOPS},
    ),
)


def changes_named(names: tuple[str, ...]) -> tuple[Change, ...]:
    """The changes of these names, all for none.

    Raises:
        EngineError: there is no change of a name.
    """
    known = {change.name: change for change in CHANGES}
    for name in names:
        if name not in known:
            raise EngineError(f"change {name!r:.40}: expected one of {', '.join(known)}")
    return tuple(known[name] for name in names) or CHANGES


def _are_defaults(owner: type, settings: Mapping[str, Any]) -> bool:
    fields = {item.name: item.default for item in dataclasses.fields(owner)}
    return all(fields.get(name) == value for name, value in settings.items())


def _loops(settings: Mapping[str, Any], loops: int) -> dict[str, Any]:
    half = max(1, loops // 2)
    return {name: half if value == HALF_LOOPS else value for name, value in settings.items()}
