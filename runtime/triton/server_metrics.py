"""An engine's figures on the server's own metrics port.

Owns when they are taken and how each kind is told to the server; leaves names and values to
`runtime.metrics`. Invariant: the server's counters and histograms only grow.

A server's histogram takes single observations, so those of requests come as they end. Loops are
observed for every token, too often for a call each: their histogram is a family of counters with
the names and the `le` label of one. Gauges and counters are set a few times a second.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections import defaultdict
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

_Key = tuple[str, tuple[tuple[str, str], ...]]  # a family's name, and a sample's labels


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
        self._metrics: dict[_Key, ServerObject] = {}
        self._gauges: list[ServerObject] = []
        self._counted: defaultdict[_Key, float] = defaultdict(float)  # by this engine
        self._ended: queue.Queue[FinishedRequest] = queue.Queue(_MAX_ENDED_AHEAD)
        self._is_closed = threading.Event()
        llm.observe(self._take)
        self._worker = threading.Thread(target=self._run, name="looptrt-metrics", daemon=True)
        self._worker.start()

    def close(self) -> None:
        """Stop; nothing runs any more, and the counters stay as they are."""
        self._is_closed.set()
        self._worker.join(_STOP_TIMEOUT_S)
        for metric in self._gauges:
            metric.set(0.0)

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
            key = (family.name, tuple(sorted(sample.labels.items())))
            metric = self._metric(key, family, sample.labels)
            if family.kind is Kind.GAUGE:
                metric.set(sample.value)
            elif (grown := sample.value - self._counted[key]) > 0:
                metric.increment(grown)
                self._counted[key] = sample.value

    def _metric(self, key: _Key, family: Family, labels: Mapping[str, str]) -> ServerObject:
        if key not in self._metrics:
            kinds = self._module.MetricFamily
            kind = kinds.GAUGE if family.kind is Kind.GAUGE else kinds.COUNTER
            made = self._family(family.name, family.help, kind)
            self._metrics[key] = _kept(made.Metric(labels=dict(labels)))
            if family.kind is Kind.GAUGE:
                self._gauges.append(self._metrics[key])
        return self._metrics[key]

    def _histogram(self, spec: HistogramSpec) -> ServerObject:
        key = (spec.name, ())
        if key not in self._metrics:
            family = self._family(spec.name, spec.help, self._module.MetricFamily.HISTOGRAM)
            labels = {**self._labels, **spec.labels}
            self._metrics[key] = _kept(family.Metric(labels=labels, buckets=list(spec.buckets)))
        return self._metrics[key]

    def _family(self, name: str, text: str, kind: ServerObject) -> ServerObject:
        if name not in self._families:
            made = self._module.MetricFamily(name=name, description=text, kind=kind)
            self._families[name] = _kept(made)
        return self._families[name]


def _kept(made: ServerObject) -> ServerObject:
    """Keep an object for as long as the process lives, and beyond the interpreter's end.

    A family that goes is taken off the server, which uses it on for the same model's next
    instance: a model that is loaded anew over a running one would corrupt the server (2.51).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


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
