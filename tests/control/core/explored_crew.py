"""The ranks' side of the service explorer: the layouts that ranks serve, their plans, and their unsent statuses.

The protocol by which ranks commit together has its own explorer (``tests/swap``), which uses the real state machine.
This model keeps only the parts that a service can observe. All ranks commit a layer at the same moment if all of them
hold the plan, and they may drop a plan together at any moment. Each rank queues its statuses in order, and any status
can be lost in transit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from eplb_core.placement import Placement, default_log2phy
from eplb_core.planner.plan import LayerPlan, Plan
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.wire.agent import Hello, PlanState, Shape
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.plan_tracker import PlanTracker

LAYERS = 2
EXPERTS = 4
SLOTS = 2
RANKS_BY_FORMING = (3, 2)
"""Number of ranks in each incarnation of the group: three at first, then two."""


class OfferedPlan(NamedTuple):
    """A plan that a service offered, together with that service's leader term."""

    plan: int
    layers: tuple[int, ...]
    term: int
    forming: int
    path: tuple[OfferedPlan, ...]
    """Plans that led to the layout from which this plan starts, with one entry per committed layer."""


class Version(NamedTuple):
    """Layout version of one incarnation of the group, identified by the plans whose layers the group has committed."""

    forming: int
    path: tuple[OfferedPlan, ...]


@cache
def live_at(version: Version) -> DeployedLayout:
    """Return the layout that ranks use at a version."""
    if not version.path:
        placement = Placement.linear(LAYERS, EXPERTS, RANKS_BY_FORMING[version.forming], SLOTS)
        return DeployedLayout.of(placement, placement.default_log2phy(), 0, (0,) * LAYERS)
    offered = version.path[-1]
    before = live_at(Version(version.forming, version.path[:-1]))
    update = offer_of(offered).decision.layers[len(version.path) - 1 - len(offered.path)]
    return before.with_layer(update.layer, update.phy2log_RS, update.log2phy_RE)


@cache
def offer_of(offered: OfferedPlan) -> PlanTracker:
    """Return the tracker of an offered plan. Calls with equal plans return the same object."""
    base = live_at(Version(offered.forming, offered.path))
    layers = offered.layers
    verdicts = tuple(
        LayerVerdict(layer, 1.5, 1.1, 1.01, 2, layer in layers, "test") for layer in range(LAYERS)
    )
    updates = tuple(_update(base, layer, 1 + offered.plan) for layer in layers)
    return PlanTracker.of(1 + offered.plan + 10 * offered.term, base, Plan(updates, verdicts))


def _update(base: DeployedLayout, layer: int, turn: int) -> LayerPlan:
    new_RS = np.ascontiguousarray((base.placement.phy2log_LRS[layer] + turn) % EXPERTS, dtype=np.int32)
    return LayerPlan(layer, new_RS, default_log2phy(new_RS, EXPERTS), np.zeros((0, 5), dtype=np.int32))


@cache
def hello_at(version: Version, rank: int) -> Hello:
    """Return the Hello that a rank sends at a version."""
    live = live_at(version)
    return Hello(
        deployment="decode",
        rank=rank,
        node="node-0",
        token_group=rank,
        group_id=f"forming {version.forming}",
        shape=Shape(RANKS_BY_FORMING[version.forming], LAYERS, EXPERTS, SLOTS, 64),
        epoch=live.epoch,
        digest=live.digest,
        layer_epochs=live.layer_epochs,
        slots_LS=np.ascontiguousarray(live.placement.phy2log_LRS[:, rank]),
        log2phy_LE=live.log2phy_RLE[rank],
    )


@cache
def stranger_at(rank: int) -> Hello:
    """Return the Hello of a client that belongs to no incarnation of the group."""
    return replace(hello_at(Version(0, ()), rank), group_id="forming of a stranger")


class Status(NamedTuple):
    """A rank's status report on a plan, with the version that the rank served when it queued the report."""

    offered: OfferedPlan
    state: int
    layer: int
    version: Version


class Rank(NamedTuple):
    """One rank's agent."""

    service: int | None = None
    """Index of the service that the rank is connected to."""
    term: int = 0
    """Highest leader term that the rank has received."""
    held_plan: OfferedPlan | None = None
    plan_in_flight: OfferedPlan | None = None
    """Plan that was sent on the current stream but has not arrived."""
    call_off_in_flight: OfferedPlan | None = None
    """Plan whose call-off was sent but has not arrived. The call-off arrives after the plan itself."""
    is_called_off: bool = False
    """True if the rank holds a plan and has received its call-off."""
    statuses: tuple[Status, ...] = ()
    last_status: Status | None = None
    """Last status that reached the service. A fault can deliver it again."""
    reported_version: Version | None = None
    """Newest version that the rank has reported on the current stream."""


class Crew(NamedTuple):
    """All ranks of the group's current incarnation."""

    version: Version
    ranks: tuple[Rank, ...]

    @classmethod
    def formed(cls, forming: int, term: int = 0) -> Crew:
        """Return a new group, whose agents are not connected to any service."""
        return cls(Version(forming, ()), (Rank(term=term),) * RANKS_BY_FORMING[forming])

    def with_rank(self, rank: int, **changes: Any) -> Crew:
        """Return a copy with one rank changed."""
        return self._replace(
            ranks=(*self.ranks[:rank], self.ranks[rank]._replace(**changes), *self.ranks[rank + 1 :])
        )

    def receive_plan(self, rank: int) -> Crew:
        """Deliver the plan in flight: the rank accepts it, or queues a status that rejects it."""
        agent = self.ranks[rank]
        offered = agent.plan_in_flight
        assert offered is not None
        crew = self.with_rank(rank, plan_in_flight=None)
        if agent.held_plan == offered:
            return crew
        offer = offer_of(offered)
        live = live_at(self.version)
        fits = (
            offered.forming == self.version.forming
            and (offer.base_epoch, offer.base_digest) == (live.epoch, live.digest)
            and offered.term >= agent.term
            and agent.held_plan is None
        )
        if fits:
            return crew.with_rank(rank, held_plan=offered, term=offered.term)
        return crew.report(rank, offered, PlanState.REFUSED)

    def receive_call_off(self, rank: int) -> Crew:
        """Deliver the call-off: a rank that holds the plan marks it as called off; any other rank queues a status."""
        agent = self.ranks[rank]
        offered = agent.call_off_in_flight
        assert offered is not None
        crew = self.with_rank(rank, call_off_in_flight=None)
        if agent.held_plan == offered:
            return crew.with_rank(rank, is_called_off=True)
        return crew.report(rank, offered, PlanState.CALLED_OFF)

    @property
    def may_commit(self) -> bool:
        """True if all ranks hold the same plan."""
        plans = {rank.held_plan for rank in self.ranks}
        return len(plans) == 1 and None not in plans

    def commit(self) -> Crew:
        """Commit the next layer of the plan on all ranks."""
        offered = self.ranks[0].held_plan
        assert offered is not None
        layers = offer_of(offered).decision.layers
        index = len(self.version.path) - len(offered.path)
        crew = self._replace(version=Version(self.version.forming, (*self.version.path, offered)))
        for rank in range(len(self.ranks)):
            crew = crew.report(rank, offered, PlanState.COMMITTED, layers[index].layer)
            if index + 1 == len(layers):
                crew = crew.with_rank(rank, held_plan=None, is_called_off=False)
        return crew

    def drop(self, state: int = PlanState.ABORTED) -> Crew:
        """Drop the plan on every rank that holds it, because a rank voted against it or a deadline passed."""
        crew = self
        for rank, agent in enumerate(self.ranks):
            if agent.held_plan is not None:
                crew = crew.report(rank, agent.held_plan, state).with_rank(
                    rank, held_plan=None, is_called_off=False
                )
        return crew

    def report(self, rank: int, offered: OfferedPlan, state: int, layer: int = 0) -> Crew:
        """Queue a status on the rank."""
        status = Status(offered, state, layer, self.version)
        return self.with_rank(rank, statuses=(*self.ranks[rank].statuses, status))
