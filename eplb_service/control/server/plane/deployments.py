"""Deployments of a service: lookup, restoration from the store, the memory for their heat, and removal."""

from __future__ import annotations

import math
import sqlite3
import time
from dataclasses import replace

import structlog

from eplb_core.heat.assembler import memory_bytes
from eplb_core.wire.agent import Hello, Shape
from eplb_core.wire.fields import check_deployment
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ExhaustedError, UnknownDeploymentError
from eplb_service.control.core.flow import MAX_STEPS, MIN_STEPS, Limits
from eplb_service.control.core.plan_tracker import Outcome
from eplb_service.control.server.deciding.decider import DECISION_RESULTS
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.control.server.store import StoredDeployment, StoreWriter
from eplb_service.telemetry.metrics import Metrics

_MIN_PENDING_STEPS = 64
_PENDING_REPORTS = 8
_PENDING_LONG_REPORTS = 4
MAX_DEPLOYMENTS = 256
"""Maximum number of deployments."""
_PLAN_SECONDS = 60.0
"""Time without a message from any rank after which a plan times out."""

_log = structlog.get_logger(__name__)


def limits_of(settings: ServiceSettings) -> Limits:
    """Return the limits that the settings impose on each deployment."""
    steps = None if settings.report_steps == "auto" else settings.report_steps
    pending = max(_PENDING_REPORTS * MIN_STEPS, _PENDING_LONG_REPORTS * MAX_STEPS)
    if steps is not None:
        pending = max(_MIN_PENDING_STEPS, _PENDING_REPORTS * steps)
    return Limits(
        window_steps=settings.window_steps,
        pending_steps=pending,
        plan_timeout=_PLAN_SECONDS,
        interval=settings.decision_interval,
        by_clock=settings.planner().policy != "flashlb",
        cpu_share=settings.cpu_share,
        report_steps=steps,
        heat_phase=settings.heat_phase,
        split=settings.planner().split,
    )


class KnownDeployments:
    """Deployments by name (``by_name``), their last saved states (``remembered``), and their shared ``limits``.

    Parameters
    ----------
    settings
        Settings of the service.
    writer
        Writer of the store.
    metrics
        Metrics of the service.
    """

    def __init__(self, settings: ServiceSettings, writer: StoreWriter, metrics: Metrics) -> None:
        self.by_name: dict[str, Deployment] = {}
        self.remembered: dict[str, StoredDeployment] = {}
        self.limits = limits_of(settings)
        self._settings = settings
        self._writer = writer
        self._metrics = metrics

    async def resume(self) -> None:
        """Restore the deployments from the store."""
        store = self._writer.store
        for stored in await self._writer.run(store.deployments):
            deployment = self.add(stored.name)
            deployment.restore(
                leader_term=max(store.leader_term, stored.leader_term),
                paused=stored.paused,
                last_decision=stored.last_decision,
                totals=stored.totals,
            )
            self.remembered[stored.name] = stored
            try:
                deployment.restore_initial_layout(await self._writer.run(store.initial_layout, stored.name))
            except sqlite3.DatabaseError as error:
                _log.error("stored_layout_unreadable", deployment=stored.name, reason=str(error))
        _log.info("resumed", leader_term=store.leader_term, deployments=len(self.by_name))

    def find(self, name: str) -> Deployment:
        """Return a deployment; raises ``UnknownDeploymentError``, or ``WireError`` if ``name`` is not a valid name."""
        check_deployment(name, "deployment")
        if name not in self.by_name:
            raise UnknownDeploymentError(f"no deployment {name!r}; `eplb deployments` lists all deployments")
        return self.by_name[name]

    def add(self, name: str) -> Deployment:
        """Add and return a new deployment."""
        self.by_name[name] = Deployment(name, self.limits, leader_term=self._writer.store.leader_term)
        self._metrics.expect(name, DECISION_RESULTS, [outcome.value for outcome in Outcome])
        return self.by_name[name]

    def deployment_to_evict(self) -> str | None:
        """Return the name of the deployment to evict for a new one; ``None`` if there is room for another.

        Deployments whose ranks have never formed a complete group are evicted first. Next are deployments without
        connected ranks that have never had a plan, starting with the one that has been idle the longest. Raises
        ``ExhaustedError`` if no deployment may be evicted.
        """
        if len(self.by_name) < MAX_DEPLOYMENTS:
            return None
        deployments = self.by_name.values()
        candidates = [
            deployment
            for deployment in deployments
            if not (deployment.known or deployment.paused)
            and (not deployment.connected or deployment.attendance.is_overdue)
        ]
        unplanned = [
            deployment
            for deployment in deployments
            if deployment.known and not (deployment.connected or deployment.paused or deployment.has_planned)
        ]
        candidates += sorted(unplanned, key=lambda deployment: deployment.attendance.empty_since or math.inf)
        if not candidates:
            raise ExhaustedError(
                f"the service already has {len(self.by_name)} deployments, its maximum; "
                "remove deployments that will not return: `eplb forget NAME`"
            )
        return candidates[0].name

    def heat_bytes(self, deployment: Deployment) -> int:
        """Return the maximum memory for the heat of a deployment, in bytes."""
        return 0 if deployment.group is None else self._bytes_for(deployment.group.shape)

    def make_room(self, hello: Hello) -> list[Deployment]:
        """Free the heat of deployments without connected ranks until a new group's heat fits; return those deployments.

        Raises ``ExhaustedError`` if it would not fit even after freeing the heat of all these deployments.
        """
        needed = self._bytes_for(hello.shape)
        limit = self._settings.max_heat_bytes
        deployments = [
            deployment for deployment in self.by_name.values() if deployment.name != hello.deployment
        ]
        used = sum(map(self.heat_bytes, deployments))
        resting = []
        for deployment in deployments:
            if used + needed <= limit:
                break
            if deployment.group is not None and not deployment.connected:
                used -= self.heat_bytes(deployment)
                resting.append(deployment)
        if used + needed > limit:
            raise ExhaustedError(
                f"the group's heat needs {needed >> 20} MiB, but {used >> 20} MiB of the {limit >> 20} MiB that "
                "max_heat_bytes allows are in use; raise max_heat_bytes or lower window_steps"
            )
        for deployment in resting:
            self.remember(deployment)
            deployment.rest()
        return resting

    def remember(self, deployment: Deployment) -> None:
        """Save the current state of a deployment, keeping the last known layout if the current one is unknown."""
        name = deployment.name
        live = deployment.live
        stored = replace(
            self.remembered.get(name, StoredDeployment(name)),
            paused=deployment.paused,
            leader_term=deployment.leader_term,
            totals=deployment.totals,
            last_decision=deployment.last_decision,
        )
        if live is not None:
            placement = live.placement
            layers, ranks, slots = placement.phy2log_LRS.shape
            sizes = {"layers": layers, "experts": placement.experts, "ranks": ranks, "slots": slots}
            stored = replace(stored, epoch=live.epoch, digest=live.digest, **sizes)
        self.remembered[name] = stored
        self._writer.post(self._writer.store.save_deployment, stored)

    def has_expired(self, deployment: Deployment) -> bool:
        """Return True if the last rank left more than ``forget_after_seconds`` ago and the deployment is not paused."""
        empty_since = deployment.attendance.empty_since
        limit = self._settings.forget_after_seconds
        if not limit or empty_since is None or deployment.paused:
            return False
        return time.monotonic() - empty_since > limit

    def forget(self, name: str) -> None:
        """Remove a deployment and its stored state."""
        del self.by_name[name]
        self.remembered.pop(name, None)
        self._writer.post(self._writer.store.forget, name)

    def _bytes_for(self, shape: Shape) -> int:
        return memory_bytes(shape, self.limits.window_steps, self.limits.pending_steps)
