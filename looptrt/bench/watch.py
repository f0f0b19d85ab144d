"""What an engine's own figures say while requests run.

Owns asking for them in the background and what is made of them; leaves their meaning to the
engine. Invariant: watching costs the engine one message every few steps and changes no request.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from looptrt.bench.statistics import spread
from looptrt.errors import EngineError
from looptrt.runtime.llm import LLM

Stats = dict[str, int | float]

POLL_S = 0.05
# Levels, not counts since the start: a difference of them says nothing.
_GAUGES = frozenset(
    {
        *("num_waiting", "num_running", "num_units", "num_free_units", "num_cached_units"),
        *("num_scheduled", "num_context", "num_context_tokens", "num_paused"),
        *("cpu_memory_bytes", "gpu_memory_bytes"),
    }
)


def gained(before: Stats, after: Stats) -> Stats:
    """What every counter of an engine gained between two looks."""
    return {
        name: value - before.get(name, 0) for name, value in after.items() if name not in _GAUGES
    }


@dataclass
class Watch:
    """Figures of one run.

    Attributes:
        before, after: the engine's figures at both ends.
        samples: those in between, one for each step that was looked at.
    """

    before: Stats
    after: Stats = field(default_factory=dict)
    samples: list[Stats] = field(default_factory=list)

    def counters(self) -> Stats:
        """What every counter of the engine gained, those of graphs among them."""
        return gained(self.before, self.after)

    def kv_use(self) -> dict[str, Any]:
        """Units of the pool, and the most that was in use (pages nobody uses left out)."""
        units = self.after["num_units"]
        used = [units - at["num_free_units"] - at["num_cached_units"] for at in self.samples]
        peak = max(used, default=0)
        return {"units": units, "peak_used_units": peak, "peak_share": peak / units}

    def step_mix(self) -> dict[str, Any]:
        """Rows of the steps that were looked at: all, of prompts, of answers; and requests."""
        busy = [at for at in self.samples if at["num_scheduled"]]
        decodes = [at["num_scheduled"] - at["num_context"] for at in busy]
        prompts = [at["num_context_tokens"] for at in busy]
        rows = [a + b for a, b in zip(decodes, prompts, strict=True)]
        return {
            "steps_sampled": len(busy),
            "steps_with_prompts": sum(count > 0 for count in prompts),
            "rows": spread(rows),
            "prompt_rows": spread(prompts),
            "decode_rows": spread(decodes),
            "waiting_requests": spread([at["num_waiting"] for at in busy]),
        }


@contextlib.contextmanager
def watching(llm: LLM, poll_s: float = POLL_S) -> Iterator[Watch]:
    """Watch an engine while the block runs.

    Args:
        llm: a running engine.
        poll_s: pause between two looks.

    Raises:
        EngineError: the engine ended before the block did.
    """
    watch = Watch(before=llm.stats())
    stop = threading.Event()

    def look() -> None:
        seen = -1
        with contextlib.suppress(EngineError):  # whoever waits for answers hears of its end
            while not stop.wait(poll_s):
                stats = llm.stats()
                if stats["num_steps"] != seen:
                    seen = int(stats["num_steps"])
                    watch.samples.append(stats)

    thread = threading.Thread(target=look, name="looptrt-watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()
    watch.after = llm.stats()
