"""Choose the effort of the solver's search based on the shape of a layer."""

from __future__ import annotations

from eplb_core.placement import Placement
from eplb_core.planner.score import expected_hottest
from eplb_core.planner.settings import EVEN, STEP, PlannerSettings
from eplb_core.solver import model
from eplb_core.solver.model import SearchOptions, SearchParams

_DEEPSEEK = SearchParams()
_MAX_TREE_CELLS = 20_000
"""Maximum value of slots x (experts + ranks) at which a tree search is run. Up to this size, the search takes almost no
time. Larger layers gain nothing from it."""
_TREE_LEAVES = 8
"""Number of tree-search leaves from which the search continues."""
_FEW_SLOTS = 3
"""Maximum number of slots per rank at which a layer is annealed. With so few slots, a search by individual swaps and
exchanges soon gets stuck."""
_FEW_SLOTS_Z = 1.5
"""Upper bound on ``z`` for layers with few slots per rank. The load of so few experts is far from normally distributed,
so the tail of a normal distribution is a poor estimate of the peak. On the heat used to tune annealing, values of 1.0
and 2.5 change the results by at most 0.2 %."""
_ANNEALING_TRIES = 400
"""Annealing tries per slot, for a layer with few slots per rank and as many spare replicas as experts. With fewer spare
replicas, there are fewer choices, so the number of tries is reduced proportionally. On the heat used to tune annealing,
half as many tries give 0.3 % worse results, and twice as many give 0.15 % better ones."""
_MIN_STEP_TRIES, _MAX_STEP_TRIES = 1000, 2000
"""Minimum and maximum number of tries in the search for stepwise splits.

They were chosen by hand on recorded decode steps (8 ranks x 5 slots) and on synthetic steps (32 ranks x 9 slots). On
the former, reducing the tries from 2,000 to 1,000 raises the PAR by 0.2 %, and increasing them to 3,000 does not change
it (measured in a replay with three seeds). On the latter, doubling the tries lowers the PAR on the next window by at
most 0.2 %.
"""
_STEP_WORK = 16_000
"""Product of step tries and spare replicas, unless ``_MIN_STEP_TRIES`` or ``_MAX_STEP_TRIES`` applies. A try takes
longer with more spare replicas."""
_LOCAL_SEARCH_STEPS_PER_SLOT = 16


def search_params_of(
    settings: PlannerSettings,
    placement: Placement,
    width: int = 1,
    move_price: float = 0.0,
    options: SearchOptions | None = None,
) -> SearchParams:
    """Return the search parameters for a layer.

    Parameters
    ----------
    settings
        Planner settings.
    placement
        Placement from which the numbers of experts, ranks and slots are taken.
    width
        Number of entries per expert in the layer's dealing tables.
    move_price
        Gain required to move every slot of the layer, as a fraction of its PAR.
    options
        Search options, which can disable components of the method; ``None`` to use all of them.

    Examples
    --------
    A layer with three slots per rank is annealed, but a layer with nine is not:

    >>> small = Placement.linear(layers=1, experts=16, ranks=8, slots=3)
    >>> search_params_of(PlannerSettings(), small).annealing_tries
    4800
    >>> large = Placement.linear(layers=1, experts=64, ranks=8, slots=9)
    >>> search_params_of(PlannerSettings(), large).annealing_tries
    0
    """
    if settings.policy == "deepseek":
        return _DEEPSEEK._replace(tables=_tables(settings.split, False, width), width=width)
    options = options or SearchOptions()
    slots = placement.ranks * placement.slots
    # With a stepwise split, a tree search gains nothing, because the step search changes the replica counts as well.
    is_small = slots * (placement.experts + placement.ranks) <= _MAX_TREE_CELLS
    has_tree = options.tree_search and is_small and settings.split != STEP
    has_few_slots = placement.slots <= _FEW_SLOTS and options.local_search
    z = options.z
    if z is None:
        z = expected_hottest(placement.ranks)
        if has_few_slots:
            z = min(z, _FEW_SLOTS_Z)
    annealing_tries = 0
    if has_few_slots and options.annealing:
        spare_per_expert = placement.redundant / placement.experts
        annealing_tries = int(_ANNEALING_TRIES * slots * min(spare_per_expert, 1.0))
    return SearchParams(
        z=z,
        move_price=move_price,
        tree_leaves=_TREE_LEAVES if has_tree else 0,
        local_search_steps=_LOCAL_SEARCH_STEPS_PER_SLOT * slots if options.local_search else 0,
        tables=_tables(settings.split, options.solve_tables, width),
        width=width,
        step_tries=_step_tries(placement.redundant) if options.local_search else 0,
        annealing_tries=annealing_tries,
        seed=settings.seed,
        options=options,
    )


def _step_tries(spare_replicas: int) -> int:
    """Return the number of tries in the search for stepwise splits."""
    return min(max(_STEP_WORK // max(spare_replicas, 1), _MIN_STEP_TRIES), _MAX_STEP_TRIES)


def _tables(split: str, solved: bool, width: int) -> int:
    """Return the value for ``SearchParams.tables``; ``solved`` is True if the solver may choose the tables."""
    if split == EVEN:
        return model.EVEN
    if split == STEP:
        return model.STEPWISE
    if not solved:
        return model.RULE
    return model.SOLVED if width == 1 else model.DEALT
