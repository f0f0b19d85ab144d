"""What every kind of benchmark is given, and the order in which its runs alternate.

Owns the settings that kinds share and the interleaving of arms; leaves the runs to the kinds.
Invariant: in each repeat every arm runs once, in turn forwards and backwards, and the first
repeat counts for nothing but its failures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from looptrt.bench.arms import DEFAULT, Arm, with_default
from looptrt.errors import EngineError
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams

T = TypeVar("T")
OnRun = Callable[[str, int], None]


def _ignore(_label: str, _total: int) -> None:
    pass


@dataclass(frozen=True)
class Setup:
    """Settings that all kinds share.

    Attributes:
        engine_dir: written by `looptrt build`.
        config: of the default arm.
        params: of the default arm's requests; kinds set lengths, seeds and salts.
        others: arms beside the default one.
        repeats: runs that count, of each arm; one more is made first and dropped.
        seed: of prompts, arrival times and, where answers are sampled, draws.
        deadline_s: of one run; what is not answered by then counts as failed.
        in_process: engines on threads of this process, for tests.
        commit: see `results.machine`.
        on_run: told what runs next, and how many runs there are in all.
    """

    engine_dir: Path
    config: EngineConfig = field(default_factory=EngineConfig)
    params: SamplingParams = field(default_factory=SamplingParams)
    others: tuple[Arm, ...] = ()
    repeats: int = 3
    seed: int = 0
    deadline_s: float = 600.0
    in_process: bool = False
    commit: str | None = None
    on_run: OnRun = _ignore

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise EngineError(f"repeats: expected at least 1, got {self.repeats}")
        if not 0 < self.deadline_s <= 86_400:
            raise EngineError(
                f"deadline_s: expected seconds above 0 and at most 86400, got {self.deadline_s}"
            )

    @property
    def arms(self) -> list[Arm]:
        """The default arm, then the others."""
        return with_default(self.others)

    def request(
        self,
        arm: Arm,
        index: int,
        *,
        output_tokens: int,
        salt: str,
        **more: Any,  # noqa: ANN401
    ) -> SamplingParams:
        """Parameters of one request of an arm: a fixed length, a draw of its own.

        Args:
            arm: whose settings hold.
            index: of the request in its run.
            output_tokens: of the answer, which no end token cuts short.
            salt: keeps the pages of one run from the next; arms that share an engine find none of
                each other's.
            more: fields that the kind sets.
        """
        params = dataclasses.replace(
            self.params,
            max_tokens=output_tokens,
            ignore_eos=True,
            seed=self.seed + index,
            cache_salt=f"{arm.name}: {salt}",
        )
        return arm.params(dataclasses.replace(params, **more))

    def check_room(self, llms: Mapping[str, LLM], prompt_tokens: int, output_tokens: int) -> None:
        """Refuse lengths that the engine of an arm would cut or refuse.

        Raises:
            EngineError: prompt and answer do not fit; has the numbers.
        """
        for name, llm in llms.items():
            limits = llm.limits
            if prompt_tokens > limits.max_input_len or (
                prompt_tokens + output_tokens > limits.max_seq_len
            ):
                raise EngineError(
                    f"arm {name}: {prompt_tokens} prompt and {output_tokens} output tokens: the "
                    f"engine takes prompts up to {limits.max_input_len} and {limits.max_seq_len} "
                    "tokens in all"
                )


@dataclass
class Repeats(Generic[T]):
    """An arm's outcomes.

    Attributes:
        dropped: of the first repeat.
        kept: of the others.
    """

    dropped: list[T] = field(default_factory=list)
    kept: list[T] = field(default_factory=list)


def interleave(
    names: Sequence[str], repeats: int, once: Callable[[str, int], T]
) -> dict[str, Repeats[T]]:
    """Run every arm `repeats + 1` times, alternating.

    Args:
        names: arms.
        repeats: outcomes to keep.
        once: runs an arm; the number of the repeat counts from 0, the dropped one.
    """
    outcomes: dict[str, Repeats[T]] = {name: Repeats() for name in names}
    for repeat in range(repeats + 1):
        for name in names if repeat % 2 == 0 else reversed(names):
            outcome = once(name, repeat)
            (outcomes[name].kept if repeat else outcomes[name].dropped).append(outcome)
    return outcomes


def check_distinct(what: str, values: Sequence[float]) -> None:
    """Refuse a cell that would be measured twice, and find its own pages the second time.

    Raises:
        EngineError: a value is there twice.
    """
    if len(set(values)) != len(values):
        raise EngineError(f"{what}: expected different values, got {values}")


def check_counts(what: str, counts: Sequence[int]) -> None:
    """Refuse cells of no requests, and none or the same twice.

    Raises:
        EngineError: a count is below 1 or there twice, or there is none.
    """
    if not counts or min(counts) < 1:
        raise EngineError(f"{what}: expected counts from 1, got {counts}")
    check_distinct(what, counts)


def is_default(name: str) -> bool:
    """Whether an arm is the one that others are compared with."""
    return name == DEFAULT
