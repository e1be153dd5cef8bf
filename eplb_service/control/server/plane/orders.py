"""What operators order of a deployment while its ranks go on."""

from __future__ import annotations

import structlog

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.server.outgoing.streams import Streams
from eplb_service.control.server.plane.consequences import Consequences
from eplb_service.control.server.store.store import higher_term
from eplb_service.control.server.store.store_writer import StoreWriter
from eplb_service.control.server.store.stored import StoredPlan

_log = structlog.get_logger(__name__)

_MOST_PLANS_LISTED = 100


class Orders:
    """Carries out what operators order, first on disk where a restart must know it.

    Parameters
    ----------
    writer
        To the store.
    streams
        Of the ranks.
    consequences
        What else follows.
    """

    def __init__(self, writer: StoreWriter, streams: Streams, consequences: Consequences) -> None:
        self._writer = writer
        self._streams = streams
        self._consequences = consequences

    def set_paused(self, deployment: Deployment, paused: bool) -> None:
        """Stop planning, or plan again."""
        deployment.paused = paused
        self._consequences.remember(deployment)
        _log.info("paused" if paused else "resumed_planning", deployment=deployment.name)

    async def lead(self, deployment: Deployment) -> bool:
        """Have the ranks follow this service, whatever term they have followed; whether its term had to be raised.

        Raises
        ------
        ConflictError
            Where there is no higher term.
        """
        if deployment.group is None or deployment.outdated is None:
            return False
        before, term = deployment.leader_term, higher_term(deployment.group.highest_term)
        # First on disk: after a restart the ranks would refuse a lower one.
        await self._writer.write(self._writer.store.raise_term, deployment.name, term)
        deployment.leader_term = max(deployment.leader_term, term)
        _log.warning("leads", deployment=deployment.name, leader_term=term, before=before)
        self._streams.end(deployment.name, "this service leads from now on; say Hello again")
        return True

    async def history(self, name: str, limit: int) -> list[StoredPlan]:
        """The newest plans of a deployment, newest first, at most ``limit`` of them; 0 for as many as are listed."""
        most = min(limit or _MOST_PLANS_LISTED, _MOST_PLANS_LISTED)
        return await self._writer.run(self._writer.store.plans, name, most)
