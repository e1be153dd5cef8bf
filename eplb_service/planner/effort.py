"""How hard each policy searches a layer of a given shape."""

from __future__ import annotations

from statistics import NormalDist

from eplb_service.placement import Placement
from eplb_service.planner.settings import PlannerSettings
from eplb_service.solver.candidates import Search

_DEEPSEEK = Search(z=0.0, price=0.0, groups=0, spread=0, beam=0, leaves=1, patience=1, steps=0, tables=False)
_FEW_CELLS = 20_000
"""Slots x (experts + ranks) up to which a wide tree and several leaves cost next to nothing."""


def search_for(settings: PlannerSettings, placement: Placement) -> Search:
    """The search that ``settings`` ask for; small layers get a wide tree, large ones a narrow tree."""
    if settings.policy == "deepseek":
        return _DEEPSEEK
    slots = placement.ranks * placement.slots
    small = slots * (placement.experts + placement.ranks) <= _FEW_CELLS
    return Search(
        z=expected_hottest(placement.ranks) if settings.z is None else settings.z,
        price=settings.move_price / slots,
        groups=(4 if small else 2) if settings.tree_search else 0,
        spread=2 if small else 1,
        beam=4 if small else 1,
        leaves=8 if small and settings.tree_search else 1,
        patience=1,
        steps=16 * slots if settings.local_search else 0,
        tables=settings.solve_tables,
    )


def expected_hottest(ranks: int) -> float:
    """Standard deviations by which the largest of so many normal values is expected above their mean (Blom)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
