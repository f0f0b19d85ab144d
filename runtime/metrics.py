"""Figures of a running engine as plain data, for Prometheus, Triton and whoever else asks.

Owns what is counted, under which names; leaves formats to the front ends. Requests are the
engine's: an answer with `n` counts as n. Invariant: counters and histograms only grow, and a
request is in them before its caller sees its end.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.outputs import FinishedRequest, StepOutput
from looptrt.runtime.request import FinishReason

Stats = Mapping[str, int | float]

_TOKEN_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)  # TensorRT-LLM's
_SECOND_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_LOOP_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Kind(StrEnum):
    """What may happen to a value between two looks: anything, growth, growth of each bucket."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Distribution:
    """A histogram's value.

    Attributes:
        counts: observations up to each of the family's buckets and below it (cumulative), then
            all of them.
        total: sum of the observations.
    """

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True)
class Sample:
    """One value of a family, told from the others by its labels."""

    labels: Mapping[str, str]
    value: float | Distribution


@dataclass(frozen=True)
class Family:
    """Values of one name.

    Attributes:
        name: counters end in `_total`.
        buckets: upper bounds of a histogram, ascending, infinity left out.
        samples: `Distribution` values for a histogram, else numbers.
    """

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...]
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class HistogramSpec:
    """Name, help, buckets and own labels of a histogram."""

    name: str
    help: str
    buckets: tuple[float, ...]
    labels: Mapping[str, str] = field(default_factory=dict)


INPUT_TOKENS = HistogramSpec(
    "nv_llm_input_token_len",
    "Prompt tokens of ended requests",
    _TOKEN_BUCKETS,
    {"response_metric_type": "total_input_tokens"},
)
OUTPUT_TOKENS = HistogramSpec(
    "nv_llm_output_token_len",
    "Generated tokens of ended requests",
    _TOKEN_BUCKETS,
    {"response_metric_type": "total_output_tokens"},
)
TIME_TO_FIRST_TOKEN = HistogramSpec(
    "looptrt_time_to_first_token_seconds", "Arrival to first token", _SECOND_BUCKETS
)
TIME_PER_OUTPUT_TOKEN = HistogramSpec(
    "looptrt_time_per_output_token_seconds",
    "Mean time between the tokens of a request that has at least two",
    _SECOND_BUCKETS,
)
QUEUE_TIME = HistogramSpec(
    "looptrt_request_queue_seconds", "Arrival to the first step of a request", _SECOND_BUCKETS
)
END_TO_END = HistogramSpec(
    "looptrt_request_seconds", "Arrival to the end of a request", _SECOND_BUCKETS
)
_REQUEST_HISTOGRAMS = (
    *(INPUT_TOKENS, OUTPUT_TOKENS, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN),
    *(QUEUE_TIME, END_TO_END),
)


def loop_depth(layout: PlaneLayout) -> HistogramSpec:
    """The histogram of loops behind each generated token."""
    below = (float(depth) for depth in _LOOP_BUCKETS if depth < layout.max_loops)
    return HistogramSpec(
        "looptrt_loop_depth",
        "Loops run to make each generated token",
        (*below, float(layout.max_loops)),
    )


def observations(ended: FinishedRequest) -> Iterator[tuple[HistogramSpec, float]]:
    """What a request adds to the histograms of requests; nothing for one that never ran."""
    if ended.first_scheduled_s is None:
        return
    yield INPUT_TOKENS, ended.num_prompt_tokens
    yield OUTPUT_TOKENS, ended.num_generated_tokens
    yield QUEUE_TIME, ended.first_scheduled_s - ended.arrival_s
    yield END_TO_END, ended.finished_s - ended.arrival_s
    if ended.first_token_s is None:
        return
    yield TIME_TO_FIRST_TOKEN, ended.first_token_s - ended.arrival_s
    if ended.last_token_s is not None and ended.num_generated_tokens > 1:
        between_s = ended.last_token_s - ended.first_token_s
        yield TIME_PER_OUTPUT_TOKEN, between_s / (ended.num_generated_tokens - 1)


class Metrics:
    """Counts what an engine's steps bring and puts it beside the engine's own figures.

    Thread-safe. `take` costs a few microseconds a step.

    Args:
        layout: of the engine.
        max_active: requests that may run and wait together.
    """

    def __init__(self, layout: PlaneLayout, *, max_active: int) -> None:
        self._layout = layout
        self._max_active = max_active
        self._lock = threading.Lock()
        self._ended: Counter[FinishReason] = Counter(dict.fromkeys(FinishReason, 0))
        self._depths: Counter[int] = Counter()
        self._histograms = {spec: _Histogram(spec) for spec in _REQUEST_HISTOGRAMS}

    def take(self, output: StepOutput) -> None:
        """Count a step's tokens and the requests that ended with it."""
        with self._lock:
            self._depths.update(output.depths)
            for ended in output.finished:
                self._ended[ended.reason] += 1
                for spec, value in observations(ended):
                    self._histograms[spec].observe(value)

    def families(
        self, stats: Stats | None, labels: Mapping[str, str] | None = None
    ) -> list[Family]:
        """All figures.

        Args:
            stats: `LLM.stats()`; None for an engine that has ended: then the figures that only
                it knows are left out.
            labels: put on every sample, beside its own.
        """
        with self._lock:
            families = [*self._counted()]
        engine = [] if stats is None else [*self._tensorrt_llm(stats), *_pool_and_counts(stats)]
        up = _family("looptrt_engine_up", Kind.GAUGE, "1 while the engine runs", float(bool(stats)))
        return [_labelled(family, labels or {}) for family in (up, *engine, *families)]

    def _counted(self) -> Iterator[Family]:
        yield _family(
            "looptrt_requests_total",
            Kind.COUNTER,
            "Requests that have ended; `length` if a stop string came too late to stop one",
            {reason.value: float(count) for reason, count in self._ended.items()},
            "finish_reason",
        )
        yield _family(
            "looptrt_generated_tokens_total",
            Kind.COUNTER,
            "Tokens given out",
            float(self._depths.total()),
        )
        depths = _Histogram(loop_depth(self._layout))
        for depth, count in self._depths.items():
            depths.observe(depth, count)
        for histogram in (*self._histograms.values(), depths):
            yield histogram.family()

    def _tensorrt_llm(self, stats: Stats) -> Iterator[Family]:
        """The families of TensorRT-LLM's Triton backend.

        A block is a page at the deepest loop count, so that `max` times `tokens_per` is what
        the pool surely holds; published pages that nobody uses count as free.
        """
        block_units = self._layout.units_of_page(self._layout.max_loops)
        num_units = stats["num_units"]
        free_units = stats["num_free_units"] + stats["num_cached_units"]
        max_blocks, free_blocks = num_units // block_units, free_units // block_units
        yield _gauges(
            "nv_trt_llm_request_metrics",
            "Requests by state",
            "request_type",
            {
                "waiting": stats["num_waiting"],
                "active": stats["num_waiting"] + stats["num_running"],
                "max": self._max_active,
                "scheduled": stats["num_scheduled"],
                "context": stats["num_context"],
            },
        )
        yield _gauges(
            "nv_trt_llm_runtime_memory_metrics",
            "Memory of the engine in bytes",
            "memory_type",
            {name: stats[f"{name}_memory_bytes"] for name in ("cpu", "gpu")},
        )
        yield _gauges(
            "nv_trt_llm_kv_cache_block_metrics",
            "KV memory in pages at the deepest loop count",
            "kv_cache_block_type",
            {
                "max": max_blocks,
                "free": free_blocks,
                "used": max_blocks - free_blocks,
                "tokens_per": self._layout.page_size,
                "reused": stats["num_hit_tokens"] // self._layout.page_size,
                "fraction": (num_units - free_units) / num_units,
            },
        )
        yield _gauges(
            "nv_trt_llm_inflight_batcher_metrics",
            "The latest step",
            "inflight_batcher_specific_metric",
            {
                "total_context_tokens": stats["num_context_tokens"],
                "generation_requests": stats["num_scheduled"] - stats["num_context"],
                "micro_batch_id": 0,
                "paused_requests": stats["num_paused"],
            },
        )
        yield _gauges(
            "nv_trt_llm_general_metrics",
            "Time of the figures in microseconds since 1970, steps since the start",
            "general_type",
            {"timestamp": int(time.time() * 1e6), "iteration_counter": stats["num_steps"]},
        )


class _Histogram:
    """Counts of a histogram, bucket by bucket."""

    def __init__(self, spec: HistogramSpec) -> None:
        self._spec = spec
        self._counts = [0] * (len(spec.buckets) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(self._spec.buckets, value)] += count
        self._total += value * count

    def family(self) -> Family:
        cumulative, running = [], 0
        for count in self._counts:
            running += count
            cumulative.append(running)
        sample = Sample(self._spec.labels, Distribution(tuple(cumulative), self._total))
        spec = self._spec
        return Family(spec.name, Kind.HISTOGRAM, spec.help, (sample,), spec.buckets)


def _pool_and_counts(stats: Stats) -> Iterator[Family]:
    free, cached = stats["num_free_units"], stats["num_cached_units"]
    yield _gauges(
        "looptrt_kv_units",
        "Plane units of the KV pool: cached ones hold published pages that nobody uses",
        "state",
        {
            "total": stats["num_units"],
            "free": free,
            "cached": cached,
            "used": stats["num_units"] - free - cached,
        },
    )
    for name, key, text in (
        ("prompt_tokens", "num_prompt_tokens", "Prompt tokens of requests that were started"),
        ("prefix_hit_tokens", "num_hit_tokens", "Those of them that were found in shared pages"),
        ("preemptions", "num_preemptions", "Requests that gave up their pages to others"),
        ("evictions", "num_evictions", "Published pages that were taken for new ones"),
        ("draft_tokens", "num_draft_tokens", "Guesses of speculation that were verified"),
        ("accepted_tokens", "num_accepted_tokens", "Those of them that answers kept"),
        ("prefill_only_steps", "num_prefill_only_steps", "Steps in which answers waited"),
    ):
        yield _family(f"looptrt_{name}_total", Kind.COUNTER, text, float(stats[key]))


def _gauges(name: str, text: str, label: str, values: Stats) -> Family:
    as_floats = {key: float(value) for key, value in values.items()}
    return _family(name, Kind.GAUGE, text, as_floats, label)


def _family(
    name: str, kind: Kind, text: str, values: float | Mapping[str, float], label: str = ""
) -> Family:
    """A family of one value, or of one for each value of a label."""
    if isinstance(values, float):
        return Family(name, kind, text, (Sample({}, values),))
    samples = (Sample({label: key}, value) for key, value in values.items())
    return Family(name, kind, text, tuple(samples))


def _labelled(family: Family, labels: Mapping[str, str]) -> Family:
    samples = (Sample({**labels, **sample.labels}, sample.value) for sample in family.samples)
    return Family(family.name, family.kind, family.help, tuple(samples), family.buckets)
