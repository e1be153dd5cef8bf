"""What a store remembers, as it gives it back."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.control.core.plan_tracker import Outcome
from eplb_service.control.core.totals import Totals
from eplb_service.placement import Placement
from eplb_service.planner.plan import LayerVerdict


@dataclass(frozen=True)
class StoredDeployment:
    """A deployment as the last service left it; ``leader_term`` is 0 unless it was raised for this deployment."""

    name: str
    paused: bool
    totals: Totals
    last_decision: str
    leader_term: int = 0


@dataclass(frozen=True)
class StoredPlacement:
    """The newest placement known of a deployment."""

    epoch: int
    digest: int
    placement: Placement


@dataclass(frozen=True)
class StoredPlan:
    """A plan of the past; ``outcome`` is ``None`` while it is under way."""

    plan_id: int
    at: float
    leader_term: int
    base_epoch: int
    verdicts: tuple[LayerVerdict, ...]
    outcome: Outcome | None
    reason: str
    committed: int
