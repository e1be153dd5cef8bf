"""Prometheus metrics of the service; they are given what happens and never ask."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from eplb_service.telemetry.series.agents import AgentSeries
from eplb_service.telemetry.series.balance import BalanceSeries
from eplb_service.telemetry.series.plans import PlanSeries
from eplb_service.telemetry.series.registry import SeriesRegistry
from eplb_service.telemetry.series.service import ServiceSeries
from eplb_service.telemetry.series.worth import WorthSeries


class Metrics:
    """All metrics, in a registry of their own; every label is bounded by the deployments and layers that exist."""

    def __init__(self) -> None:
        self._series = SeriesRegistry()
        self.service = ServiceSeries(self._series)
        self.balance = BalanceSeries(self._series)
        self.worth = WorthSeries(self._series)
        self.plans = PlanSeries(self._series)
        self.agents = AgentSeries(self._series)

    @property
    def registry(self) -> CollectorRegistry:
        """What a scrape collects."""
        return self._series.collectors

    def expect(self, deployment: str, results: Sequence[str], outcomes: Sequence[str]) -> None:
        """Begin the counters of a deployment at 0, so that the first failure is an increase like any other."""
        self.plans.expect(deployment, results, outcomes)
        self.agents.expect(deployment)

    def forget(self, deployment: str) -> None:
        """Remove every series of a deployment that is known no more."""
        self._series.forget(deployment)

    def forget_layers(self, deployment: str) -> None:
        """Remove what was reported of a deployment's layers and ranks; another group may have others."""
        self.balance.forget_layers(deployment)
        self.worth.forget(deployment)

    def forget_balance(self, deployment: str) -> None:
        """Remove what is measured while ranks serve; none is connected."""
        self.forget_layers(deployment)
        agents = self.agents
        for metric in (
            self.balance.deployment_par_realised,
            agents.silent_seconds,
            agents.staging_bytes,
            agents.ring_bytes,
        ):
            self._series.remove(metric, deployment)

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """All metrics in the newest format that ``accept``, a header of HTTP, names; its media type, and the text."""
        encode, kind = choose_encoder(accept)
        return kind, encode(self.registry)
