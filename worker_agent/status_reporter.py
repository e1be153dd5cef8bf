"""Reports what became of plans to the service, by way of the outbox, and cuts the heat where a layer switches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eplb_service.wire.status import PlanState, PlanStatus
from worker_agent.heat import HeatRecorder
from worker_agent.outbox import Outbox
from worker_agent.swap.installed import Installed
from worker_agent.swap.listener import Committed


class StatusReporter:
    """The switch's listener.

    Parameters
    ----------
    outbox
        Takes the statuses.
    heat
        Is cut before a layer switches.
    present
        Returns the step and what is installed now.
    """

    def __init__(
        self, outbox: Outbox, heat: HeatRecorder, present: Callable[[], tuple[int, Installed]]
    ) -> None:
        self._outbox = outbox
        self._heat = heat
        self._present = present

    def before_commit(self, layer_epochs: tuple[int, ...]) -> None:
        """What was counted until here was counted under ``layer_epochs``."""
        self._heat.cut(layer_epochs)

    def accepted(self, plan_id: int, layer: int) -> None:
        """The plan is valid here."""
        self._report(plan_id, layer, PlanState.ACCEPTED)

    def refused(self, plan_id: int, reason: str) -> None:
        """The plan is not valid here; nothing changed."""
        self._report(plan_id, 0, PlanState.REFUSED, reason=reason)

    def transferred(self, plan_id: int, layer: int, bytes_received: int, seconds: float) -> None:
        """All bytes of the layer are staged here."""
        self._report(
            plan_id,
            layer,
            PlanState.TRANSFERRED,
            bytes_received=bytes_received,
            transfer_seconds=seconds,
        )

    def committed(self, done: Committed) -> None:
        """The layer is in place."""
        self._report(
            done.plan_id,
            done.layer,
            PlanState.COMMITTED,
            installed=done.installed,
            bytes_received=done.bytes_received,
            transfer_seconds=done.transfer_seconds,
            commit_seconds=done.commit_seconds,
        )

    def aborted(self, plan_id: int, layer: int, reason: str) -> None:
        """The layer and those after it stay as they were."""
        self._report(plan_id, layer, PlanState.ABORTED, reason=reason)

    def _report(
        self,
        plan_id: int,
        layer: int,
        state: PlanState,
        *,
        installed: Installed | None = None,
        **facts: Any,
    ) -> None:
        step, installed_now = self._present()
        served = installed or installed_now
        self._outbox.put(
            PlanStatus(
                plan_id=plan_id,
                layer=layer,
                state=state,
                epoch=served.epoch,
                digest=served.digest,
                step=step,
                **facts,
            )
        )
