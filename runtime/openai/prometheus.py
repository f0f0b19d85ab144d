"""Metric families in Prometheus's text format.

Invariant: what `runtime.metrics` counts is shown under its names, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from looptrt.runtime.metrics import Distribution, Family, Kind

CONTENT_TYPE = CONTENT_TYPE_LATEST

_KINDS = {
    Kind.GAUGE: GaugeMetricFamily,
    Kind.COUNTER: CounterMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def prometheus_text(families: Iterable[Family]) -> bytes:
    """The text of these families."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._families)


def _metric(family: Family) -> Metric:
    names = list(family.samples[0].labels) if family.samples else []
    metric: Any = _KINDS[family.kind](family.name, family.help, labels=names)
    for sample in family.samples:
        labels = [sample.labels[name] for name in names]
        if isinstance(sample.value, Distribution):
            bounds = [*map(str, family.buckets), "+Inf"]
            buckets = list(zip(bounds, sample.value.counts, strict=True))
            metric.add_metric(labels, buckets, sample.value.total)
        else:
            metric.add_metric(labels, sample.value)
    made: Metric = metric
    return made
