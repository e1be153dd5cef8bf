"""Whether a stepwise split pays on recorded heat: net of what it takes itself, beside tables without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eplb_service.planner.scoring import replicas_woken
from eplb_service.planner.split_cost import SplitCost

if TYPE_CHECKING:
    from eplb_service.heat.window import Counts
    from eplb_service.offline import Solution
    from eplb_service.placement import Placement
    from eplb_service.planner.settings import PlannerSettings


@dataclass(frozen=True)
class SplitWorth:
    """What the stepwise split costs and wins under a cost curve.

    Parameters
    ----------
    cost
        Of one layer of a step.
    ms
        The same of all layers.
    woken
        Replicas that it wakes, per rank and layer.
    ms_net, ms_by_tables
        A step's slowest ranks of all layers and the split itself; and of a placement made for tables.
    """

    cost: SplitCost
    ms: float
    woken: float
    ms_net: float
    ms_by_tables: float

    @classmethod
    def of(
        cls,
        settings: PlannerSettings,
        heat_TLE: Counts,
        solved: Placement,
        solution: Solution,
        by_tables: Solution,
    ) -> SplitWorth | None:
        """``None`` where no layer has tokens."""
        choices = float(heat_TLE.sum(axis=2).mean())
        cost = SplitCost.of(settings, solved.ranks, solved.experts, choices)
        if cost is None or solution.ms_after is None or by_tables.ms_after is None:
            return None
        ms = cost.ms_of_step(solved.layers)
        woken = replicas_woken(heat_TLE, solved)
        return cls(cost, ms, woken, solution.ms_after + ms, by_tables.ms_after)

    def __str__(self) -> str:
        won = self.ms_by_tables - self.ms_net
        verdict = f"pays, by {won:.3f} ms" if won > 0 else f"does not pay: it loses {-won:.3f} ms"
        return (
            f"The split itself takes {self.ms:.3f} ms of a step more, {self.ms_net:.3f} ms in all: {self.cost}. "
            f"It wakes {self.woken:.2f} replicas per rank and layer. Placed for tables, without it, "
            f"{self.ms_by_tables:.3f} ms: on these steps the stepwise split {verdict}."
        )
