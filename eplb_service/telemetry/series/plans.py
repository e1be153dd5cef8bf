"""Series of decisions, the plans that they lead to, and how these are switched in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eplb_service.telemetry.series.registry import SeriesRegistry

_SOLVE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TRANSFER_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
_COMMIT_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)


class PlanSeries:
    """Decisions and plans by what became of them, times of their parts, and what was moved."""

    def __init__(self, registry: SeriesRegistry) -> None:
        self.decisions = registry.counter(
            "eplb_decisions",
            "Decisions by what they led to: plan, kept, dropped or failed.",
            ("deployment", "result"),
        )
        self.offered = registry.counter("eplb_plans", "Plans offered, by outcome.", ("deployment", "outcome"))
        self.solve_seconds = registry.histogram(
            "eplb_solve_seconds", "Time that one decision took to compute.", _SOLVE_BUCKETS
        )
        self.transfer_seconds = registry.histogram(
            "eplb_transfer_seconds",
            "Time in which a rank staged the experts of one layer.",
            _TRANSFER_BUCKETS,
        )
        self.commit_seconds = registry.histogram(
            "eplb_commit_seconds",
            "Time for which a rank's step waited for one layer's commit.",
            _COMMIT_BUCKETS,
        )
        self.layers_switched = registry.counter("eplb_layers_switched", "Layers whose switch was committed.")
        self.moves = registry.counter("eplb_moves", "Experts moved by committed switches.")
        self.moved_bytes = registry.counter("eplb_moved_bytes", "Weights moved by committed switches.")
        self.epoch = registry.gauge("eplb_epoch", "Version of the placement in force.")
        self.paused = registry.gauge("eplb_paused", "1 while planning is paused.")
        self.last_decision_age = registry.gauge(
            "eplb_last_decision_age_seconds",
            "Time since the last decision, or since the ranks came together.",
        )

    def expect(self, deployment: str, results: Sequence[str], outcomes: Sequence[str]) -> None:
        """Begin the counters of ``deployment`` at 0, by ``results`` of decisions and ``outcomes`` of plans."""
        for result in results:
            self.decisions.labels(deployment, result)
        for outcome in outcomes:
            self.offered.labels(deployment, outcome)
        for metric in (self.layers_switched, self.moves, self.moved_bytes):
            metric.labels(deployment)

    def transferred(self, deployment: str, seconds: float) -> None:
        """A rank has staged a layer, in what it says were ``seconds``."""
        if math.isfinite(seconds) and seconds >= 0:
            self.transfer_seconds.labels(deployment).observe(seconds)

    def committed(self, deployment: str, seconds: float) -> None:
        """A rank has switched a layer, in what it says were ``seconds``."""
        if math.isfinite(seconds) and seconds >= 0:
            self.commit_seconds.labels(deployment).observe(seconds)
