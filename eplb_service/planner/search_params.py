"""The solver's search parameters for a layer of a given shape, from the planner's settings."""

from __future__ import annotations

from eplb_service.placement import Placement
from eplb_service.planner.move_price import move_price
from eplb_service.planner.noise_floor import expected_hottest
from eplb_service.planner.settings import PlannerSettings
from eplb_service.solver.model import DEALT, EVEN, RULE, SOLVED, STEPWISE, SearchParams

_DEEPSEEK = SearchParams()
_FEW_CELLS = 20_000
"""Slots x (experts + ranks) up to which a tree search costs next to nothing; larger layers win nothing by it."""
_FEW_SLOTS = 3
"""Slots per rank up to which swaps and single exchanges soon find no way on."""
_Z_OF_FEW_SLOTS = 1.5
"""With so few experts per rank its load is far from normal, and a rank far out on the tail is no guide; 1.0
and 2.5 are within 0.2 % on the heat that annealing was tried on."""
_TRIES = 400
"""Of annealing, for each slot of a layer with few slots per rank and as many spare replicas as experts; fewer spare
ones leave less to decide. Half as many are 0.3 % worse on that heat, twice as many 0.15 % better."""

_STEP_TRIES, _STEP_TRIES_PER_SLOT = 2000, 4
"""Of the search for stepwise splits; chosen by hand on recorded and drawn steps of 8 ranks x 5 and 32 ranks x 9 slots,
where ten times as many won less than half a percent on the next window."""


def search_params_of(settings: PlannerSettings, placement: Placement, width: int = 1) -> SearchParams:
    """Search parameters that follow from ``settings`` in a layer of this shape, with tables of ``width`` entries.

    Fields of the same name are the setting itself; ``tree_*``, ``*_steps`` and ``*_tries`` say how hard to search.
    """
    if settings.policy == "deepseek":
        by_split = {"even": EVEN, "step": STEPWISE}
        return _DEEPSEEK._replace(tables=by_split.get(settings.split, RULE), width=width)
    slots = placement.ranks * placement.slots
    tree = settings.tree_search and slots * (placement.experts + placement.ranks) <= _FEW_CELLS
    few = placement.slots <= _FEW_SLOTS and settings.local_search
    spare = placement.redundant / placement.experts
    z = expected_hottest(placement.ranks)
    return SearchParams(
        z=(min(z, _Z_OF_FEW_SLOTS) if few else z) if settings.z is None else settings.z,
        move_price=move_price(settings, placement.slots).value / slots,
        tree_groups=4 if tree else 0,
        tree_spread=2,
        tree_beam=4,
        tree_leaves=8 if tree else 1,
        local_search_patience=1,
        local_search_steps=16 * slots if settings.local_search else 0,
        tables=_tables(settings, width),
        width=width,
        step_tries=_STEP_TRIES + _STEP_TRIES_PER_SLOT * slots if settings.local_search else 0,
        annealing_tries=int(_TRIES * slots * min(spare, 1.0)) if few and settings.annealing else 0,
        swaps=settings.swaps,
        exchanges=settings.exchanges,
        table_swaps=settings.table_swaps,
        table_kicks=settings.table_kicks,
        holdout=settings.holdout,
        sureness=settings.sureness,
        trimmed_mean=settings.trimmed_mean,
        price_ladder=settings.price_ladder,
        seed=settings.seed,
    )


def _tables(settings: PlannerSettings, width: int) -> int:
    if settings.split == "even":
        return EVEN
    if settings.split == "step":
        return STEPWISE
    if not settings.solve_tables:
        return RULE
    return SOLVED if width == 1 else DEALT
