"""An engine's figures on the server's own metrics port.

Owns when they are taken and how each kind is told to the server; leaves names and values to
`runtime.metrics`. Invariant: the server's counters and histograms only grow.

A server's histogram takes single observations, so those of requests come as they end. Loops are
observed for every token, too often for a call each: their histogram is a family of counters with
the names and the `le` label of one. Gauges and counters are set a few times a second.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Mapping

from looptrt.errors import EngineError
from looptrt.runtime.llm import LLM
from looptrt.runtime.metrics import (
    Distribution,
    Family,
    HistogramSpec,
    Kind,
    Sample,
    observations,
)
from looptrt.runtime.outputs import FinishedRequest, StepOutput
from looptrt.runtime.triton.channel import ServerModule, ServerObject

_PERIOD_S = 0.25
_STOP_TIMEOUT_S = 10.0
_MAX_ENDED_AHEAD = 100_000  # ended requests whose observations wait for the server
_PER_TOKEN = "looptrt_loop_depth"

_logger = logging.getLogger(__name__)


class ServerMetrics:
    """Keeps a server's metrics up to date with an LLM's until it is closed.

    Args:
        module: `triton_python_backend_utils`.
        llm: whose figures.
        labels: put on everything.
    """

    def __init__(self, module: ServerModule, llm: LLM, labels: Mapping[str, str]) -> None:
        self._module = module
        self._llm = llm
        self._labels = dict(labels)
        self._families: dict[str, ServerObject] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], ServerObject] = {}
        self._ended: queue.Queue[FinishedRequest] = queue.Queue(_MAX_ENDED_AHEAD)
        self._is_closed = threading.Event()
        llm.observe(self._take)
        self._worker = threading.Thread(target=self._run, name="looptrt-metrics", daemon=True)
        self._worker.start()

    def close(self) -> None:
        """Stop, and take the figures off the server."""
        self._is_closed.set()
        self._worker.join(_STOP_TIMEOUT_S)
        self._metrics.clear()
        self._families.clear()

    def _take(self, output: StepOutput) -> None:
        for ended in output.finished:
            try:
                self._ended.put_nowait(ended)
            except queue.Full:
                _logger.warning("the server takes metrics too slowly; a request is left out")

    def _run(self) -> None:
        while not self._is_closed.wait(_PERIOD_S):
            try:
                self._update()
            except EngineError:
                return
            except Exception:  # figures are no reason to stop serving
                _logger.exception("metrics could not be set")

    def _update(self) -> None:
        for family in self._llm.metrics(self._labels):
            for flat in _flat(family):
                self._set(flat)
        for _ in range(self._ended.qsize()):
            for spec, value in observations(self._ended.get_nowait()):
                self._histogram(spec).observe(value)

    def _set(self, family: Family) -> None:
        for sample in family.samples:
            assert isinstance(sample.value, float)
            metric = self._metric(family, sample.labels)
            if family.kind is Kind.GAUGE:
                metric.set(sample.value)
            elif (grown := sample.value - metric.value()) > 0:
                metric.increment(grown)

    def _metric(self, family: Family, labels: Mapping[str, str]) -> ServerObject:
        key = (family.name, tuple(sorted(labels.items())))
        if key not in self._metrics:
            kinds = self._module.MetricFamily
            kind = kinds.GAUGE if family.kind is Kind.GAUGE else kinds.COUNTER
            made = self._family(family.name, family.help, kind)
            self._metrics[key] = made.Metric(labels=dict(labels))
        return self._metrics[key]

    def _histogram(self, spec: HistogramSpec) -> ServerObject:
        key = (spec.name, ())
        if key not in self._metrics:
            family = self._family(spec.name, spec.help, self._module.MetricFamily.HISTOGRAM)
            labels = {**self._labels, **spec.labels}
            self._metrics[key] = family.Metric(labels=labels, buckets=list(spec.buckets))
        return self._metrics[key]

    def _family(self, name: str, text: str, kind: ServerObject) -> ServerObject:
        if name not in self._families:
            self._families[name] = self._module.MetricFamily(name=name, description=text, kind=kind)
        return self._families[name]


def _flat(family: Family) -> Iterator[Family]:
    """Families of plain numbers for one; none for a histogram of single observations."""
    if family.kind is not Kind.HISTOGRAM:
        yield family
        return
    if family.name != _PER_TOKEN:
        return
    (sample,) = family.samples
    assert isinstance(sample.value, Distribution)
    bounds = (*(f"{bound:g}" for bound in family.buckets), "+Inf")
    counts = map(float, sample.value.counts)
    buckets = tuple(
        Sample({**sample.labels, "le": bound}, count)
        for bound, count in zip(bounds, counts, strict=True)
    )
    total = Sample(sample.labels, float(sample.value.total))
    count = Sample(sample.labels, float(sample.value.counts[-1]))
    for end, samples in (("bucket", buckets), ("sum", (total,)), ("count", (count,))):
        yield Family(f"{family.name}_{end}", Kind.COUNTER, family.help, samples)
