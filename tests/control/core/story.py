"""A deployment's state machine without a server, driven by events from its ranks."""

from __future__ import annotations

import numpy as np

from eplb_core.heat.phase import StepPhase
from eplb_core.placement import default_log2phy
from eplb_core.planner.plan import LayerPlan, Plan
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.wire.agent import Heartbeat, PlanState, PlanStatus, decode_hello
from eplb_core.wire.heat import HeatReport
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.deployment import Deployment, Event
from eplb_service.control.core.flow import Limits
from eplb_service.control.core.plan_tracker import PlanTracker
from tests.control.fake_group import EXPERTS, LAYERS, RANKS, SLOTS, first_placement, hello_of, live_of

PLAN_TIMEOUT = 10.0


def swap_of(live: DeployedLayout, layer: int) -> LayerPlan:
    """Return a layer plan that swaps two experts between ranks 0 and 1."""
    new_RS = live.placement.phy2log_LRS[layer].copy()
    new_RS[0, 0], new_RS[1, 0] = new_RS[1, 0], new_RS[0, 0]
    moves_M5 = np.array([[1, 0, 0, 0, new_RS[0, 0]], [0, 0, 1, 0, new_RS[1, 0]]], dtype=np.int32)
    return LayerPlan(layer, new_RS, default_log2phy(new_RS, EXPERTS), moves_M5)


def decision_of(live: DeployedLayout, *layers: int) -> Plan:
    verdicts = tuple(
        LayerVerdict(layer, 1.5, 1.1, 1.01, 2, layer in layers, "test") for layer in range(LAYERS)
    )
    return Plan(tuple(swap_of(live, layer) for layer in layers), verdicts)


class Story:
    """A deployment, with methods for its ranks' actions. Most methods return the resulting events."""

    def __init__(self, pending_steps: int = 8) -> None:
        self.deployment = Deployment("decode", Limits(8, pending_steps, PLAN_TIMEOUT))
        self.live = live_of(first_placement())
        self.now = 0.0

    def joins(self, *ranks: int, live: DeployedLayout | None = None, group_id: str = "first") -> list[Event]:
        """Send a Hello that reports the layout ``live`` from each of ``ranks``, by default from all ranks."""
        for rank in ranks or range(RANKS):
            self.deployment.hello(decode_hello(hello_of(live or self.live, rank, group_id=group_id)))
        return self.new_events()

    def leaves(self, *ranks: int) -> None:
        for rank in ranks or range(RANKS):
            self.deployment.leave(rank)

    def offers(self, *layers: int, plan_id: int = 1) -> PlanTracker:
        assert self.deployment.live is not None
        offer = PlanTracker.of(plan_id, self.deployment.live, decision_of(self.deployment.live, *layers))
        self.deployment.offer(offer, self.now)
        return offer

    def reports(
        self, rank: int, offer: PlanTracker, state: PlanState, layer: int = 0, reason: str = ""
    ) -> list[Event]:
        """Report a plan status. A COMMITTED status carries the version that the plan assigns to the layer."""
        epoch = offer.base_epoch
        digest = offer.base_digest
        for update, version in zip(offer.decision.layers, offer.versions, strict=True):
            if state == PlanState.COMMITTED and update.layer == layer:
                epoch, digest = version
        status = PlanStatus(
            plan_id=offer.plan_id, layer=layer, state=state, reason=reason, epoch=epoch, digest=digest
        )
        self.deployment.plan_status(rank, status, self.now)
        return self.new_events()

    def commits(self, offer: PlanTracker, *layers: int, ranks: range = range(RANKS)) -> list[Event]:
        return [
            event
            for layer in layers
            for rank in ranks
            for event in self.reports(rank, offer, PlanState.COMMITTED, layer)
        ]

    def heartbeat(self, rank: int, epoch: int, digest: int, error: str = "", step: int = 1) -> list[Event]:
        message = Heartbeat(step=step, epoch=epoch, digest=digest, error=error)
        self.deployment.heartbeat(rank, message)
        return self.new_events()

    def reports_heat(
        self,
        first_step: int,
        steps: int,
        epochs: tuple[int, ...] = (0,) * LAYERS,
        ranks: range = range(RANKS),
    ) -> None:
        """Report ``steps`` steps from each of ``ranks``, with one token in each slot."""
        ones = np.ones((steps, LAYERS, SLOTS), dtype=np.int32)
        for rank in ranks:
            self.deployment.heat_report(
                rank, HeatReport(first_step, epochs, ones, np.full(steps, StepPhase.DECODE, dtype=np.uint8))
            )
        self.deployment.assemble_steps()

    def waits(self, seconds: float) -> list[Event]:
        self.now += seconds
        self.deployment.tick(self.now)
        return self.new_events()

    def steps_for(self, seconds: float) -> list[Event]:
        """Advance time while every rank runs one step per second."""
        events = []
        for _ in range(round(seconds)):
            for member in self.deployment.connected:
                self.heartbeat(member.rank, *member.version, step=member.step + 1)
            events += self.waits(1)
        return events

    def new_events(self) -> list[Event]:
        """Return the events since the last call."""
        return self.deployment.process_events()
