"""Which deployments a service knows: found by name, taken up from the store, given room, and forgotten."""

from __future__ import annotations

import sqlite3
import time

import structlog

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ExhaustedError, UnknownDeploymentError
from eplb_service.control.core.limits import Limits
from eplb_service.control.core.plan_tracker import Outcome
from eplb_service.control.server.deciding.decision_outcome import DECISION_RESULTS
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.control.server.store.store_writer import StoreWriter
from eplb_service.control.server.store.stored import StoredPlacement
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.fields import check_deployment

_log = structlog.get_logger(__name__)


class KnownDeployments:
    """Deployments by name, in the order in which they were last heard of.

    Parameters
    ----------
    settings
        Of the service.
    limits
        Of each deployment.
    writer, metrics
        Where history and figures go.

    ``remembered`` holds what a deployment served when the last service, or the last of its ranks, stopped.
    """

    def __init__(
        self, settings: ServiceSettings, limits: Limits, writer: StoreWriter, metrics: Metrics
    ) -> None:
        self.by_name: dict[str, Deployment] = {}
        self.remembered: dict[str, StoredPlacement] = {}
        self._settings = settings
        self._limits = limits
        self._writer = writer
        self._metrics = metrics

    async def resume(self) -> None:
        """Take up what the store remembers."""
        store = self._writer.store
        for stored in await self._writer.run(store.deployments):
            deployment = self.add(stored.name)
            deployment.leader_term = max(store.leader_term, stored.leader_term)
            deployment.paused, deployment.last_decision = stored.paused, stored.last_decision
            deployment.totals, deployment.known = stored.totals, True
            try:
                placement = await self._writer.run(store.latest_placement, stored.name)
                if placement is not None:
                    self.remembered[stored.name] = placement
                deployment.first_layout = await self._writer.run(store.first_layout, stored.name)
            except (sqlite3.DatabaseError, ValueError) as error:
                _log.error("stored_placement_unreadable", deployment=stored.name, reason=str(error))

    def find(self, name: str) -> Deployment:
        """A known deployment.

        Raises
        ------
        WireError
            Where no deployment can have this name.
        UnknownDeploymentError
            Where there is none.
        """
        check_deployment(name, "deployment")
        if name not in self.by_name:
            raise UnknownDeploymentError(
                f"no deployment {name!r}; `eplb deployments` lists those that are known"
            )
        return self.by_name[name]

    def add(self, name: str) -> Deployment:
        """A new deployment."""
        self.by_name[name] = Deployment(name, self._limits, leader_term=self._writer.store.leader_term)
        self._metrics.expect(name, DECISION_RESULTS, [outcome.value for outcome in Outcome])
        return self.by_name[name]

    def in_the_way(self) -> str | None:
        """Which deployment is to make room for another; ``None`` where there is room.

        Only names behind which no whole group has ever been make room.

        Raises
        ------
        ExhaustedError
            Where none may.
        """
        if len(self.by_name) < self._settings.max_deployments:
            return None
        unknown = [one for one in self.by_name.values() if not (one.known or one.paused)]
        idle = [one for one in unknown if not one.connected or one.attendance.forming_overdue]
        if not idle:
            raise ExhaustedError(
                f"{len(self.by_name)} deployments are known, the most that max_deployments allows"
            )
        return idle[0].name

    def heard_last(self, deployment: Deployment) -> None:
        """Nobody has been heard of more recently."""
        if self.by_name.get(deployment.name) is deployment:
            self.by_name[deployment.name] = self.by_name.pop(deployment.name)

    def rest(self, deployment: Deployment) -> None:
        """Give back the memory of a deployment that nobody is connected to."""
        if deployment.live is not None:
            live = deployment.live
            self.remembered[deployment.name] = StoredPlacement(live.epoch, live.digest, live.placement)
        deployment.rest()

    def has_expired(self, deployment: Deployment) -> bool:
        """Whether all ranks left so long ago that none is expected back; one that is paused waits for its operator."""
        departed, limit = deployment.attendance.departed_since, self._settings.forget_after_seconds
        return (
            bool(limit)
            and not (departed is None or deployment.paused)
            and time.monotonic() - departed > limit
        )

    def forget(self, name: str) -> None:
        """Remove a deployment, and what is remembered of it."""
        del self.by_name[name]
        self.remembered.pop(name, None)
        self._writer.post(self._writer.store.forget, name)
