"""Solver warm-up: run every kernel once, so that no decision has to wait for compilation.

Kernels are loaded from numba's cache or, if they are not cached, compiled.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from eplb_core.placement import Placement
from eplb_core.solver.engine import LayerBatch, Limits, Nodes, SearchRules, solve_many
from eplb_core.solver.model import DEALT, EVEN, RULE, SOLVED, STEPWISE, SearchParams
from eplb_core.solver.topology import choose_senders
from eplb_core.solver.whole_tokens import HostSplit, serve_steps, thinned
from eplb_core.solver.window import (
    episode_loads,
    loads_of_ranks,
    shares_of_groups,
    shares_of_slots,
    sum_episodes,
)

_CURVE_4 = np.array([1.0, 2.0, 1.0, 0.1])


@cache
def warm_up(threads: int | None = None) -> None:
    """Solve a tiny problem on every code path that the planner uses, at most once per process.

    Parameters
    ----------
    threads
        Number of threads, as for ``solve_many``.
    """
    placement = Placement.linear(layers=2, experts=6, ranks=4, slots=2)
    _warm_search(placement, threads)
    _warm_scoring(placement)


def _warm_search(placement: Placement, threads: int | None) -> None:
    """Run the solver for each kind of token split."""
    tables_LGE = np.ascontiguousarray(placement.default_log2phy().transpose(1, 0, 2))
    heat_LNE = np.arange(2 * 32 * 6, dtype=np.float64).reshape(2, 32, 6)
    params = SearchParams(
        z=1.0,
        move_price=0.08,
        tree_leaves=1,
        local_search_steps=10,
        annealing_tries=10,
        step_tries=10,
    )
    two_nodes = np.array([0, 0, 1, 1], dtype=np.int32)
    for tables, width in ((EVEN, 1), (RULE, 1), (SOLVED, 1), (STEPWISE, 1), (DEALT, 2)):
        batch = LayerBatch(
            heat_LNE,
            placement.phy2log_LRS,
            np.repeat(tables_LGE, width, axis=1),
            np.full((2, 4 * width, 6), 0.25 / width),
            np.array([False, True]),
        )
        rules = SearchRules(params._replace(tables=tables, width=width), np.array([np.inf, 2.0]), 0.0)
        nodes = Nodes(two_nodes, np.repeat(two_nodes, width))
        for result in solve_many(batch, rules, nodes, Limits(threads)):
            if isinstance(result, Exception):
                raise result


def _warm_scoring(placement: Placement) -> None:
    """Run the kernels that score a placement, once for each dtype of heat."""
    ones_TLE = np.ones((2, 2, 6), dtype=np.int64)
    no_tables_LRED = np.zeros((2, 0, 6, 1), dtype=np.int32)
    split = HostSplit(np.ones((2, 8)), no_tables_LRED, np.zeros((2, 0, 6)), np.ones((2, 6)))
    for heat_TLE in (ones_TLE.astype(np.int32), ones_TLE, ones_TLE.astype(np.float64)):
        loads_of_ranks(heat_TLE, placement.phy2log_LRS.copy(), np.ones((2, 8)))
        episode_loads(heat_TLE, np.arange(2), placement.phy2log_LRS.copy(), np.ones((2, 8)), 2)
        serve_steps(heat_TLE, np.arange(2), placement.phy2log_LRS.copy(), split, _CURVE_4, 0, True)
        thinned(heat_TLE, 0)
        sum_episodes(heat_TLE, np.arange(2), 2)
    deployed_RS = np.array(placement.phy2log_LRS[0])
    shares_of_slots(deployed_RS, placement.default_log2phy(), 0, np.ones((4, 2, 6)), 0)
    shares_of_groups(np.ones((4, 2, 6)), 0, np.arange(4, dtype=np.int32), 4)
    choose_senders(deployed_RS, deployed_RS[::-1].copy(), np.zeros(4, dtype=np.int32))
