"""What follows from a change of a deployment, for the world around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.plan_tracker import PlanTracker
from eplb_service.planner.plan import LayerPlan


@dataclass(frozen=True)
class PlacementKnown:
    """All ranks have come and agree on what they serve."""

    live: LivePlacement


@dataclass(frozen=True)
class LayerCommitted:
    """One layer of a plan has switched; ``live`` is what is served since."""

    plan_id: int
    update: LayerPlan
    live: LivePlacement
    bytes_moved: int


@dataclass(frozen=True)
class PlanEnded:
    """A plan has its outcome."""

    plan: PlanTracker


@dataclass(frozen=True)
class StreamsOutdated:
    """The ranks serve what the service cannot follow: end their streams, so that they introduce themselves again."""

    reason: str


Event: TypeAlias = PlacementKnown | LayerCommitted | PlanEnded | StreamsOutdated
