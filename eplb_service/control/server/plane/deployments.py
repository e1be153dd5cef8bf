"""Deployments that a service knows: found by name, taken up from the store, given room for heat, and forgotten."""

from __future__ import annotations

import math
import sqlite3
import time
from dataclasses import replace

import structlog

from eplb_core.heat.assembler import memory_bytes
from eplb_core.planner.settings import DEAL, TABLES
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
_REPORTS_PENDING = 8
_LONG_REPORTS_PENDING = 4
MAX_DEPLOYMENTS = 256
"""Deployments known at a time."""
_PLAN_SECONDS = 60.0
"""Seconds without a word from any rank after which a plan is given up."""

_log = structlog.get_logger(__name__)


def limits_of(settings: ServiceSettings) -> Limits:
    """Return the bounds of every deployment."""
    steps = None if settings.report_steps == "auto" else settings.report_steps
    pending = max(_REPORTS_PENDING * MIN_STEPS, _LONG_REPORTS_PENDING * MAX_STEPS)
    if steps is not None:
        pending = max(_MIN_PENDING_STEPS, _REPORTS_PENDING * steps)
    return Limits(
        window_steps=settings.window_steps,
        pending_steps=pending,
        plan_timeout=_PLAN_SECONDS,
        interval=settings.decision_interval,
        by_clock=settings.planner().policy != "flashlb",
        cpu_share=settings.cpu_share,
        report_steps=steps,
        heat_phase=settings.heat_phase,
        routed_by_tables=settings.planner().split in (TABLES, DEAL),
    )


class KnownDeployments:
    """Deployments by name.

    ``limits`` bounds each; ``remembered`` is each as it was last saved, by this service or the one before.
    """

    def __init__(self, settings: ServiceSettings, writer: StoreWriter, metrics: Metrics) -> None:
        self.by_name: dict[str, Deployment] = {}
        self.remembered: dict[str, StoredDeployment] = {}
        self.limits = limits_of(settings)
        self._settings = settings
        self._writer = writer
        self._metrics = metrics

    async def resume(self) -> None:
        """Take up what the store remembers."""
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
                deployment.restore_first_layout(await self._writer.run(store.first_layout, stored.name))
            except sqlite3.DatabaseError as error:
                _log.error("stored_layout_unreadable", deployment=stored.name, reason=str(error))
        _log.info("resumed", leader_term=store.leader_term, deployments=len(self.by_name))

    def find(self, name: str) -> Deployment:
        """Return a known deployment; raises ``UnknownDeploymentError``, ``WireError`` for what is no name."""
        check_deployment(name, "deployment")
        if name not in self.by_name:
            raise UnknownDeploymentError(
                f"no deployment {name!r}; `eplb deployments` lists those that are known"
            )
        return self.by_name[name]

    def add(self, name: str) -> Deployment:
        """Add a deployment."""
        self.by_name[name] = Deployment(name, self.limits, leader_term=self._writer.store.leader_term)
        self._metrics.expect(name, DECISION_RESULTS, [outcome.value for outcome in Outcome])
        return self.by_name[name]

    def deployment_to_evict(self) -> str | None:
        """Return the one that is to make room for another; ``None`` where there is room.

        Names behind which no whole group has ever been make room, and then those whose ranks are gone and never had a
        plan, the longest gone first; raises ``ExhaustedError`` where none may.
        """
        if len(self.by_name) < MAX_DEPLOYMENTS:
            return None
        unknown = [one for one in self.by_name.values() if not (one.known or one.paused)]
        idle = [one for one in unknown if not one.connected or one.attendance.forming_overdue]
        unplanned = [
            one
            for one in self.by_name.values()
            if one.known and not (one.connected or one.paused or one.has_planned)
        ]
        idle += sorted(unplanned, key=lambda one: one.attendance.departed_since or math.inf)
        if not idle:
            raise ExhaustedError(
                f"{len(self.by_name)} deployments are known, the most that one service takes; "
                "remove those that will not come back: `eplb forget NAME`"
            )
        return idle[0].name

    def heat_bytes(self, deployment: Deployment) -> int:
        """Return the memory for heat that a deployment takes at most."""
        return 0 if deployment.group is None else self._bytes_for(deployment.group.shape)

    def make_room(self, hello: Hello) -> list[Deployment]:
        """Take memory that ``hello`` needs from those to which nobody is connected; returns them.

        Raises ``ExhaustedError`` where even all of them are too few.
        """
        needed, most = self._bytes_for(hello.shape), self._settings.max_heat_bytes
        others = [one for one in self.by_name.values() if one.name != hello.deployment]
        taken, resting = sum(map(self.heat_bytes, others)), []
        for idle in [one for one in others if one.group is not None and not one.connected]:
            if taken + needed <= most:
                break
            taken -= self.heat_bytes(idle)
            resting.append(idle)
        if taken + needed > most:
            raise ExhaustedError(
                f"heat of this shape needs {needed >> 20} MiB, and {taken >> 20} MiB of the "
                f"{most >> 20} MiB that max_heat_bytes allows are taken"
            )
        for idle in resting:
            self.remember(idle)
            idle.rest()
        return resting

    def remember(self, deployment: Deployment) -> None:
        """Note, and write to the store, a deployment as it is now; what it serves as its ranks last reported it."""
        name, live = deployment.name, deployment.live
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
        """Return whether all ranks left so long ago that none is expected back; a paused one waits for its operator."""
        departed, limit = deployment.attendance.departed_since, self._settings.forget_after_seconds
        if not limit or departed is None or deployment.paused:
            return False
        return time.monotonic() - departed > limit

    def forget(self, name: str) -> None:
        """Remove a deployment, and what is remembered of it."""
        del self.by_name[name]
        self.remembered.pop(name, None)
        self._writer.post(self._writer.store.forget, name)

    def _bytes_for(self, shape: Shape) -> int:
        return memory_bytes(shape, self.limits.window_steps, self.limits.pending_steps)
