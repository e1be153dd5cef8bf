"""The ranks' side of an explored service: what they really serve, what they hold, and what they have yet to say.

How ranks switch together is explored by itself, with the real machine (``tests/swap``). What of it matters to a service
is here: all ranks commit a layer at once, if all hold the plan; they drop a plan together, at any moment; what each
says of it waits in its outbox, statuses before heat, and may be lost on its way.
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

LAYERS, EXPERTS, SLOTS = 2, 4, 2
RANKS_BY_FORMING = (3, 2)
"""The group is formed with three ranks, and again with two."""


class Given(NamedTuple):
    """A plan as a service of this term offered it."""

    plan: int
    layers: tuple[int, ...]
    term: int
    forming: int
    path: tuple[Given, ...]
    """Plans, one entry for each layer that was switched, that led to where this one starts."""


class Version(NamedTuple):
    """Where a forming of the group is: by which plans' layers it got there."""

    forming: int
    path: tuple[Given, ...]


@cache
def live_at(version: Version) -> DeployedLayout:
    """What is served at a version."""
    if not version.path:
        placement = Placement.linear(LAYERS, EXPERTS, RANKS_BY_FORMING[version.forming], SLOTS)
        return DeployedLayout.of(placement, placement.default_log2phy(), 0, (0,) * LAYERS)
    given = version.path[-1]
    before = live_at(Version(version.forming, version.path[:-1]))
    update = offer_of(given).decision.layers[len(version.path) - 1 - len(given.path)]
    return before.with_layer(update.layer, update.phy2log_RS, update.log2phy_RE)


@cache
def offer_of(given: Given) -> PlanTracker:
    """The offer itself."""
    base = live_at(Version(given.forming, given.path))
    layers = given.layers
    verdicts = tuple(
        LayerVerdict(layer, 1.5, 1.1, 1.01, 2, layer in layers, "test") for layer in range(LAYERS)
    )
    updates = tuple(_update(base, layer, 1 + given.plan) for layer in layers)
    return PlanTracker.of(1 + given.plan + 10 * given.term, base, Plan(updates, verdicts))


def _update(base: DeployedLayout, layer: int, turn: int) -> LayerPlan:
    new_RS = np.ascontiguousarray((base.placement.phy2log_LRS[layer] + turn) % EXPERTS, dtype=np.int32)
    return LayerPlan(layer, new_RS, default_log2phy(new_RS, EXPERTS), np.zeros((0, 5), dtype=np.int32))


@cache
def hello_at(version: Version, rank: int) -> Hello:
    """How a rank introduces itself there."""
    live = live_at(version)
    return Hello(
        deployment="decode",
        rank=rank,
        node="here",
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
    """How one introduces itself that is no rank of any forming."""
    return replace(hello_at(Version(0, ()), rank), group_id="forming of a stranger")


class Status(NamedTuple):
    """What a rank reports of a plan: which plan, what, and the version that was served when it was said."""

    given: Given
    state: int
    layer: int
    version: Version


class Rank(NamedTuple):
    """One rank's agent."""

    service: int | None = None
    """The service that its stream leads to."""
    term: int = 0
    """The highest leader term that it has heard of."""
    held: Given | None = None
    coming: Given | None = None
    """A plan on its way here, on the present stream."""
    call: Given | None = None
    """The plan named by a call-off that is on its way to this rank, behind the plan itself."""
    stops: bool = False
    """True if the rank holds a plan and knows that it is called off."""
    statuses: tuple[Status, ...] = ()
    said: Status | None = None
    """The last status that was received, for one that comes twice."""
    shown: Version | None = None
    """The newest version that the present stream has reported."""


class Crew(NamedTuple):
    """All ranks of the present forming of the group."""

    version: Version
    ranks: tuple[Rank, ...]

    @classmethod
    def formed(cls, forming: int, term: int = 0) -> Crew:
        """A group that has just met; its agents are new, and know of no service."""
        return cls(Version(forming, ()), (Rank(term=term),) * RANKS_BY_FORMING[forming])

    def with_rank(self, rank: int, **changes: Any) -> Crew:
        """One rank changed."""
        return self._replace(
            ranks=(*self.ranks[:rank], self.ranks[rank]._replace(**changes), *self.ranks[rank + 1 :])
        )

    def hears(self, rank: int) -> Crew:
        """The plan on its way arrives: it is taken, or refused with a status."""
        one = self.ranks[rank]
        given = one.coming
        assert given is not None
        crew = self.with_rank(rank, coming=None)
        if one.held == given:
            return crew
        offer, live = offer_of(given), live_at(self.version)
        fits = (
            given.forming == self.version.forming
            and (offer.base_epoch, offer.base_digest) == (live.epoch, live.digest)
            and given.term >= one.term
            and one.held is None
        )
        if fits:
            return crew.with_rank(rank, held=given, term=given.term)
        return crew.says(rank, given, PlanState.REFUSED)

    def hears_call(self, rank: int) -> Crew:
        """Deliver the call-off: the rank will vote the plan down, or report that it does not hold it."""
        one = self.ranks[rank]
        given = one.call
        assert given is not None
        crew = self.with_rank(rank, call=None)
        if one.held == given:
            return crew.with_rank(rank, stops=True)
        return crew.says(rank, given, PlanState.CALLED_OFF)

    @property
    def may_commit(self) -> bool:
        """Whether all hold one plan."""
        held = {rank.held for rank in self.ranks}
        return len(held) == 1 and None not in held

    def commits(self) -> Crew:
        """All switch the next layer of the plan that all hold."""
        given = self.ranks[0].held
        assert given is not None
        layers = offer_of(given).decision.layers
        index = len(self.version.path) - len(given.path)
        crew = self._replace(version=Version(self.version.forming, (*self.version.path, given)))
        for rank in range(len(self.ranks)):
            crew = crew.says(rank, given, PlanState.COMMITTED, layers[index].layer)
            if index + 1 == len(layers):
                crew = crew.with_rank(rank, held=None, stops=False)
        return crew

    def drops(self, state: int = PlanState.ABORTED) -> Crew:
        """Whatever is held is given up by all: some rank voted so, or a deadline has passed."""
        crew = self
        for rank, one in enumerate(self.ranks):
            if one.held is not None:
                crew = crew.says(rank, one.held, state).with_rank(rank, held=None, stops=False)
        return crew

    def says(self, rank: int, given: Given, state: int, layer: int = 0) -> Crew:
        """A status goes into the rank's outbox."""
        status = Status(given, state, layer, self.version)
        return self.with_rank(rank, statuses=(*self.ranks[rank].statuses, status))
