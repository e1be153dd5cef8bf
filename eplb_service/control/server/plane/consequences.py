"""What follows in the world from what happens to deployments: in store, metrics, logs, recordings and streams."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.events import LayerCommitted, PlacementKnown, PlanEnded
from eplb_service.control.server.outgoing.heat_feed import HeatFeed
from eplb_service.control.server.outgoing.streams import Streams
from eplb_service.control.server.store.store_writer import StoreWriter
from eplb_service.control.server.store.stored import StoredDeployment
from eplb_service.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)


class Consequences:
    """Carries deployments' events to where they are of consequence.

    Parameters
    ----------
    writer, metrics, feed, streams
        There.
    """

    def __init__(self, writer: StoreWriter, metrics: Metrics, feed: HeatFeed, streams: Streams) -> None:
        self._writer = writer
        self._metrics = metrics
        self._feed = feed
        self._streams = streams
        self._store_failures = 0

    def follow(self, deployment: Deployment) -> None:
        """What has happened to a deployment since the last time has its consequences."""
        store, name = self._writer.store, deployment.name
        for event in deployment.take_events():
            if isinstance(event, PlacementKnown):
                self._writer.post(store.save_placement, name, event.live)
                first = deployment.first_layout
                if first is not None and first.is_what(event.live):
                    self._writer.post(store.save_first_layout, name, first)
                self._feed.placed(deployment, event.live)
                _log.info(
                    "placement_known",
                    deployment=name,
                    epoch=event.live.epoch,
                    digest=f"{event.live.digest:#x}",
                )
            elif isinstance(event, LayerCommitted):
                self._layer_committed(name, event)
            elif isinstance(event, PlanEnded):
                self._plan_ended(deployment, event)
            else:
                _log.warning("streams_outdated", deployment=name, reason=event.reason)
                self._streams.end(name, event.reason)

    def _layer_committed(self, name: str, event: LayerCommitted) -> None:
        self._feed.switched(name, event)
        moves = len(event.update.moves_M5)
        self._metrics.plans.layers_switched.labels(name).inc()
        self._metrics.plans.moves.labels(name).inc(moves)
        self._metrics.plans.moved_bytes.labels(name).inc(event.bytes_moved)
        self._writer.post(self._writer.store.save_layer, name, event.live, event.update.layer)
        _log.info(
            "layer_committed", deployment=name, layer=event.update.layer, epoch=event.live.epoch, moves=moves
        )

    def _plan_ended(self, deployment: Deployment, event: PlanEnded) -> None:
        plan = event.plan
        assert plan.outcome is not None
        plan_id = plan.offer.plan_id
        self._streams.withdraw(deployment.name)
        self._metrics.plans.offered.labels(deployment.name, plan.outcome.value).inc()
        self._writer.post(self._writer.store.end_plan, plan_id, plan.outcome, plan.reason, plan.committed)
        self.remember(deployment)
        _log.info(
            "plan_ended",
            deployment=deployment.name,
            plan_id=plan_id,
            outcome=plan.outcome.value,
            reason=plan.reason,
            committed=plan.committed,
        )

    def remember(self, deployment: Deployment) -> None:
        """A restart finds it as it is now."""
        stored = StoredDeployment(
            deployment.name, deployment.paused, deployment.totals, deployment.last_decision
        )
        self._writer.post(self._writer.store.save_deployment, stored)

    def watch_store(self, deployments: Collection[Deployment]) -> None:
        """Say so where the disk does not take what is written, and try again until it does."""
        failures = self._writer.failures
        self._metrics.service.store_failures.inc(failures - self._store_failures)
        self._store_failures = failures
        failing = self._writer.failing
        for deployment in deployments:
            deployment.service_problems = (
                (f"the store cannot be written, so that a restart forgets what happens now: {failing}",)
                if failing
                else ()
            )
        known = next((one for one in deployments if one.known), None)
        if failing and known is not None:
            self.remember(known)
