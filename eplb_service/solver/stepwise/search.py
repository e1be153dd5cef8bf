"""Improves a placement for a host that splits every step's tokens as well as they can be split.

Under such a split it does not matter how evenly experts' means are spread. What counts is which ranks share replicas: a
set of ranks is too hot when its experts have no replica outside it. So each step of a window is a scenario of its own,
whose optimum (``split``) comes with the tight set of ranks that proves it. A change can only help where it takes
heat out of tight sets; most changes do not, and are turned down by that alone, without solving anything.

References
----------
S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, *Optimization by Simulated Annealing*, 1983.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Bool, Float32, Float64, Heat, Int32, Int64, SearchParams, set_row
from eplb_service.solver.search.annealing import bearable
from eplb_service.solver.stepwise.changes import (
    affected,
    apply,
    carry_over,
    drawn,
    may_pay,
    more_away,
    take_back,
)
from eplb_service.solver.stepwise.scenarios import (
    Scenarios,
    level_scenario,
    ratio_of,
    scenarios_of,
    scenarios_under,
)
from eplb_service.solver.stepwise.split import Search, Sharing, search_memory, sharing_of

_HOTTEST, _COLDEST = 3e-4, 3e-6
"""Temperatures at the first and the last try, in peak-to-average ratio."""


def searched_for_steps(
    phy2log_RS: Int32, heat: Heat, home_ER: Bool, price_K: Float64, params: SearchParams
) -> Int32:
    """A placement improved for stepwise splits, int32 ``[K, R, S]``, one for each price; see ``step_search``."""
    scaled_EN, share_N = scenarios_of(heat)
    found_KRS, _ = step_search(
        np.ascontiguousarray(phy2log_RS), scaled_EN, share_N, home_ER, price_K, params.step_tries, params.seed
    )
    return found_KRS


@kernel
def step_search(
    phy2log_RS: Int32,
    scaled_EN: Float32,
    share_N: Float32,
    home_ER: Bool,
    price_K: Float64,
    tries: int,
    seed: int,
) -> tuple[Int32, Float64]:
    """So many tries to take heat out of tight sets; returns, for each price, the placement with the lowest cost.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    scaled_EN, share_N
        Normalised heat and the scenarios' weights.
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the deployed placement; moving there is free.
    price_K
        float64 ``[K]``, peak-to-average ratio per slot away from home; the search itself goes by the last one.
    tries, seed
        How long, and of which random numbers.

    Returns
    -------
    best_KRS, ratio_K
        int32 ``[K, R, S]`` and their peak-to-average ratios under the best splits, float64 ``[K]``.
    """
    ranks, slots = phy2log_RS.shape
    experts = scaled_EN.shape[0]
    here_RS = phy2log_RS.copy()
    sharing, memory = sharing_of(here_RS, experts), search_memory(ranks, experts)
    now = scenarios_under(sharing, scaled_EN, share_N, memory, ranks)
    tried = Scenarios(
        now.flow_NP.copy(), now.load_NR.copy(), now.level_N.copy(), now.tight_NR.copy(), now.size_N.copy()
    )
    ratio, away = ratio_of(now, share_N), 0
    for r in range(ranks):
        for s in range(slots):
            away += not home_ER[here_RS[r, s], r]
    best_KRS = np.empty((price_K.shape[0], ranks, slots), dtype=np.int32)
    ratio_K, cost_K = np.empty(price_K.shape[0]), np.empty(price_K.shape[0])
    for k in range(price_K.shape[0]):
        _keep(best_KRS[k], here_RS)
        ratio_K[k], cost_K[k] = ratio, ratio + price_K[k] * away
    price = price_K[-1]
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    change = np.empty(4, dtype=np.int64)
    for k in range(tries):
        if ratio <= 1.0 + 1e-6 or ranks < 2:
            break
        if not drawn(here_RS, sharing, now, share_N, state_1, change):
            continue
        temperature = _HOTTEST * (_COLDEST / _HOTTEST) ** (k / tries)
        mine, rank, theirs, other = affected(here_RS, change, slots)
        more = more_away(home_ER, mine, rank, theirs, other, change[0] == 1)
        bound = ratio - price * more + bearable(temperature, state_1)
        if not may_pay(sharing, now, scaled_EN, share_N, mine, rank, theirs, other, bound):
            continue
        apply(here_RS, change, slots)
        changed = sharing_of(here_RS, experts)
        found = _solve_changed(sharing, changed, now, tried, share_N, memory, change, bound)
        if found > bound:
            take_back(here_RS, change, slots, theirs)
            continue
        sharing = changed
        now, tried = tried, now
        ratio, away = found, away + more
        for j in range(price_K.shape[0]):
            cost = ratio + price_K[j] * away
            if cost < cost_K[j] - 1e-9:
                cost_K[j], ratio_K[j] = cost, ratio
                _keep(best_KRS[j], here_RS)
    return best_KRS, ratio_K


@kernel
def _keep(best_RS: Int32, here_RS: Int32) -> None:
    """Note a placement as the best so far."""
    for r in range(best_RS.shape[0]):
        set_row(best_RS[r], here_RS[r])


@kernel
def _solve_changed(
    before: Sharing,
    after: Sharing,
    now: Scenarios,
    tried: Scenarios,
    share_N: Float32,
    memory: Search,
    change: Int64,
    bound: float,
) -> float:
    """The ratio after a change, each scenario levelled on from its split so far; gives up past ``bound``."""
    ranks = now.load_NR.shape[1]
    slots = now.flow_NP.shape[1] // ranks
    left = 0.0
    for n in range(share_N.shape[0]):
        left += share_N[n]
    total = 0.0
    for n in range(share_N.shape[0]):
        left -= share_N[n]
        if share_N[n] > 0:
            for p in range(now.flow_NP.shape[1]):
                tried.flow_NP[n, p] = now.flow_NP[n, p]
            for r in range(ranks):
                tried.load_NR[n, r] = now.load_NR[n, r]
            carry_over(before, tried.flow_NP[n], tried.load_NR[n], change, slots)
            level_scenario(after, tried, memory, n)
            total += share_N[n] * tried.level_N[n]
            if total + left > bound:
                return 2.0 + bound
    return total
