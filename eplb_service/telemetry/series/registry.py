"""A registry of Prometheus series whose labels are known, so that those of one deployment can be removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

Metric: TypeAlias = Gauge | Counter | Histogram
MetricOf = TypeVar("MetricOf", Gauge, Counter, Histogram)

DEPLOYMENT = ("deployment",)
LAYER = ("deployment", "layer")


class SeriesRegistry:
    """Makes metrics, each with its labels; ``deployment`` is the first of them where a metric has it."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self._labels: dict[Metric, Sequence[str]] = {}

    def gauge(self, name: str, text: str, labels: Sequence[str] = DEPLOYMENT) -> Gauge:
        """A gauge ``name`` with its help ``text``."""
        return self._add(Gauge(name, text, labels, registry=self.collectors), labels)

    def counter(self, name: str, text: str, labels: Sequence[str] = DEPLOYMENT) -> Counter:
        """A counter ``name``, to which Prometheus adds ``_total``, with its help ``text``."""
        return self._add(Counter(name, text, labels, registry=self.collectors), labels)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = DEPLOYMENT
    ) -> Histogram:
        """A histogram ``name`` with its help ``text``; ``buckets`` are upper bounds, in seconds."""
        return self._add(Histogram(name, text, labels, buckets=buckets, registry=self.collectors), labels)

    def process(self) -> ProcessCollector:
        """CPU, memory and open files of this process, as ``eplb_process_*``."""
        return ProcessCollector(namespace="eplb", registry=self.collectors)

    def remove(self, metric: Metric, deployment: str) -> None:
        """Remove the series of ``metric`` that are of ``deployment``."""
        samples = [sample.labels for family in metric.collect() for sample in family.samples]
        names = self._labels[metric]
        for labels in {
            tuple(of[name] for name in names) for of in samples if of.get("deployment") == deployment
        }:
            metric.remove(*labels)

    def set_or_remove(self, gauge: Gauge, deployment: str, value: float | None, scale: float = 1.0) -> None:
        """Set the series of ``deployment`` to ``value * scale``; it is removed where there is no value."""
        if value is None:
            self.remove(gauge, deployment)
        else:
            gauge.labels(deployment).set(value * scale)

    def forget(self, deployment: str) -> None:
        """Remove every series of ``deployment``."""
        for metric in self._labels:
            self.remove(metric, deployment)

    def _add(self, metric: MetricOf, labels: Sequence[str]) -> MetricOf:
        self._labels[metric] = labels
        return metric
