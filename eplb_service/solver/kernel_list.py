"""The kernels that Python calls, and of which types: enough to compile them before there is anything to solve.

Kernels that only kernels call come with those. What is missing here is compiled when it is first called, by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import numba
import numpy as np

from eplb_service.solver.model import (
    DEALT,
    SOLVED,
    STEPWISE,
    SearchParams,
    demand_of,
    homes,
    normalise,
)
from eplb_service.solver.search.annealing import anneal
from eplb_service.solver.search.construction import assignment_of, even_shares, greedy_replicas
from eplb_service.solver.search.evaluation import expert_heat, mean_of_max
from eplb_service.solver.search.local_search import local_search
from eplb_service.solver.search.tree_search import place, search_counts
from eplb_service.solver.stepwise.search import step_search
from eplb_service.solver.stepwise.split import expected_level
from eplb_service.solver.tables.dealing import cool_shares, deal_out, trusted_shares
from eplb_service.solver.tables.entry_moves import cool_by_two
from eplb_service.solver.tables.locality import crossing, localise_tables
from eplb_service.solver.tables.log2phy import (
    cool,
    fixed_rule,
    slot_shares,
    slots_by_expert,
    spread_parts,
    tables_par,
)
from eplb_service.solver.tables.table_swaps import rehoused, swap_through_tables
from eplb_service.solver.time.evaluation import mean_slowest, split_us
from eplb_service.solver.time.replicas import fill_cheaply, takers
from eplb_service.solver.time.tables import cool_tables, even_tables, one_replica_each, used_slots
from eplb_service.solver.topology import choose_senders, keep_slots, match_ranks
from eplb_service.solver.window import loads_of_ranks, served_window, sum_episodes

Entry = tuple[Any, tuple[Any, ...]]
"""A kernel, and the numba types of its arguments."""

HEAT_TYPES = ("int32", "int64", "float64")
"""Of a window's heat, as the planner hands it over."""

_WINDOW = (served_window, sum_episodes)
_SCRATCH = (place, expert_heat, greedy_replicas, normalise, demand_of, homes, mean_of_max)
_PLACED = (even_shares, match_ranks, choose_senders, keep_slots, slots_by_expert, fixed_rule, slot_shares)
_SOLVED = (tables_par, rehoused, cool, spread_parts, swap_through_tables)
_DEALT = (rehoused, trusted_shares, deal_out, cool_shares, cool_by_two, swap_through_tables)
_STEPWISE = (expected_level, step_search)
_TIME = (split_us, mean_slowest, takers, fill_cheaply, one_replica_each, used_slots, even_tables, cool_tables)
_NODES = (crossing, localise_tables)
_SEARCH = (assignment_of, local_search)


def all_kernels() -> list[str]:
    """Names of all that is listed, in the order in which they should be compiled."""
    whole = (
        search_counts,
        *_SCRATCH,
        *_PLACED,
        *_SOLVED,
        *_NODES,
        anneal,
        *_STEPWISE,
        *_TIME,
        *_DEALT,
        *_SEARCH,
    )
    window = [name_of(kernel, kind) for kind in HEAT_TYPES for kernel in (*_WINDOW, loads_of_ranks)]
    return window + list(dict.fromkeys(map(name_of, whole)))


def kernels_of(params: SearchParams, heat_type: str, *, fitted: bool = False) -> list[str]:
    """Names of the kernels that placing layers from scratch runs, in the order in which they should be compiled.

    Long ones are at both ends, so that two processes that begin there have about as much to do.

    Parameters
    ----------
    params
        How the layers are searched.
    heat_type
        Of the window's heat, one of ``HEAT_TYPES``.
    fitted
        Whether a cost curve is planned for.
    """
    by_split: dict[int, Iterable[Any]] = {SOLVED: _SOLVED, DEALT: _DEALT, STEPWISE: _STEPWISE}
    found: list[Any] = [search_counts] if params.tree_groups else []
    found += [*_SCRATCH, *_PLACED, *(_TIME if fitted else ()), *by_split.get(params.tables, ())]
    found += [anneal] if params.annealing_tries else []
    found += _SEARCH if params.local_search_steps else ()
    return [name_of(kernel, heat_type) for kernel in _WINDOW] + list(map(name_of, found))


def name_of(kernel: Any, heat_type: str = "") -> str:
    """Of a kernel, as ``entry`` takes it, like ``window.sum_episodes:int32``; the type where it takes several."""
    function = getattr(kernel, "py_func", kernel)
    name = f"{function.__module__.removeprefix(f'{__package__}.')}.{function.__name__}"
    return f"{name}:{heat_type}" if heat_type else name


@cache
def entry(name: str) -> Entry:
    """The kernel of a name, and the types that it is compiled for.

    Types are those of its annotations, with as many dimensions as an argument's name has letters.
    """
    path, _, heat_type = name.partition(":")
    kernel = _kernels()[path]
    hints = get_type_hints(getattr(kernel, "py_func", kernel))
    hints.pop("return", None)
    given = (_example(argument, hint, heat_type) for argument, hint in hints.items())
    return kernel, tuple(map(numba.typeof, given))


@cache
def _kernels() -> dict[str, Any]:
    searched = (
        search_counts,
        anneal,
        *_SCRATCH,
        *_PLACED,
        *_SOLVED,
        *_DEALT,
        *_STEPWISE,
        *_TIME,
        *_NODES,
        *_SEARCH,
    )
    return {name_of(kernel): kernel for kernel in (*_WINDOW, loads_of_ranks, *searched)}


def _example(argument: str, hint: Any, heat_type: str) -> Any:
    """A value of an argument's type: empty arrays are as good as any."""
    if hint in (int, float, bool):
        return hint()
    if hasattr(hint, "_fields"):
        return hint(*(_example(field, kind, heat_type) for field, kind in get_type_hints(hint).items()))
    if get_origin(hint) is np.ndarray:
        (item,) = get_args(get_args(hint)[1])
    else:
        item = np.dtype(heat_type)
    found = re.search(r"_([A-Z0-9]+)$", argument)
    dimensions = sum(letter.isalpha() for letter in found[1]) if found else 1
    return np.empty((0,) * dimensions, dtype=item)
