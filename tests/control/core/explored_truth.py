"""What a small group of ranks really serves, version after version, and the plans that lead from one to the next."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.offer import Offer
from eplb_service.placement import Placement, default_log2phy
from eplb_service.planner.plan import LayerPlan, LayerVerdict, Plan
from eplb_service.wire.hello import Hello, Shape

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
def live_at(version: Version) -> LivePlacement:
    """What is served at a version."""
    if not version.path:
        placement = Placement.linear(LAYERS, EXPERTS, RANKS_BY_FORMING[version.forming], SLOTS)
        return LivePlacement.of(placement, placement.default_log2phy(), 0, (0,) * LAYERS)
    given = version.path[-1]
    before = live_at(Version(version.forming, version.path[:-1]))
    update = offer_of(given).milestones[len(version.path) - 1 - len(given.path)].update
    return before.with_layer(update.layer, update.phy2log_RS, update.log2phy_RE)


@cache
def offer_of(given: Given) -> Offer:
    """The offer itself."""
    base = live_at(Version(given.forming, given.path))
    layers = given.layers
    verdicts = tuple(
        LayerVerdict(layer, 1.5, 1.1, 1.01, 2, layer in layers, "test") for layer in range(LAYERS)
    )
    updates = tuple(_update(base, layer, 1 + given.plan) for layer in layers)
    return Offer.of(1 + given.plan + 10 * given.term, base, Plan(updates, verdicts))


def _update(base: LivePlacement, layer: int, turn: int) -> LayerPlan:
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
