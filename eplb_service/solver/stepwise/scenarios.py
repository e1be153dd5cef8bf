"""The steps that a placement for stepwise splits is searched with, and the best split of each.

They are some of the window's, made more extreme.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Bool, Float32, Float64, Heat, Int64
from eplb_service.solver.stepwise.split import Search, Sharing, level, split_evenly

_MOST_SCENARIOS = 32
"""Steps looked at: 64 instead won 0.3 % on the next window of 256 experts and took twice as long."""
_STRESS = 1.5
"""What a scenario's departure from the mean is multiplied by. A placement that is perfect on the steps seen has no room
for others; with 1 the next window of recorded routing was up to 1 % worse."""


def scenarios_of(heat: Heat) -> tuple[Float32, Float32]:
    """At most 32 steps, evenly chosen, each farther from the mean than it was.

    Returns
    -------
    scaled_EN, share_N
        float32 ``[E, N]``, mean rank load 1 as in ``heat``, and float32 ``[N]``, summing to 1 or all 0.
    """
    busy_N = np.flatnonzero(heat.share_N > 0)
    count = min(len(busy_N), _MOST_SCENARIOS)
    chosen_N = busy_N[np.arange(count) * len(busy_N) // max(count, 1)]
    seen_EN = heat.scaled_EN[:, chosen_N]
    mean_E1 = heat.demand.mean_E[:, None]
    stressed_EN = np.maximum(mean_E1 + np.float32(_STRESS) * (seen_EN - mean_E1), np.float32(0.0))
    stressed_EN *= seen_EN.sum(axis=0) / np.maximum(stressed_EN.sum(axis=0), np.float32(1e-30))
    share_N = heat.share_N[chosen_N]
    total = share_N.sum()
    return np.ascontiguousarray(stressed_EN), share_N / total if total > 0 else share_N


class Scenarios(NamedTuple):
    """Every scenario's optimal split under a placement, and what proves it."""

    flow_NP: Float64
    """float64 ``[N, P]``, tokens of each slot; the mean rank load is 1."""
    load_NR: Float64
    level_N: Float64
    """float64 ``[N]``, the hottest rank."""
    tight_NR: Bool
    """bool ``[N, R]``, ranks whose experts have no replica outside; none where all ranks are at the mean."""
    size_N: Int64
    """int64 ``[N]``, the ranks in each tight set."""


@kernel
def scenarios_under(
    sharing: Sharing, scaled_EN: Float32, share_N: Float32, memory: Search, ranks: int
) -> Scenarios:
    """The optimum of each scenario, found from even shares.

    Parameters
    ----------
    sharing
        The placement's replicas.
    scaled_EN, share_N
        float32 ``[E, N]`` the experts' heat in each scenario, and ``[N]`` their weights.
    memory
        Working memory of the search.
    ranks
        R.
    """
    experts, episodes = scaled_EN.shape
    found = Scenarios(
        np.zeros((episodes, sharing.rank_P.shape[0])),
        np.zeros((episodes, ranks)),
        np.ones(episodes),
        np.zeros((episodes, ranks), dtype=np.bool_),
        np.zeros(episodes, dtype=np.int64),
    )
    heat_E = np.empty(experts)
    for n in range(episodes):
        if share_N[n] > 0:
            for e in range(experts):
                heat_E[e] = scaled_EN[e, n]
            split_evenly(sharing, heat_E, found.flow_NP[n], found.load_NR[n], False)
            level_scenario(sharing, found, memory, n)
    return found


@kernel
def level_scenario(sharing: Sharing, found: Scenarios, memory: Search, n: int) -> None:
    """Level one scenario, and keep its tight set."""
    found.level_N[n] = level(sharing, found.flow_NP[n], found.load_NR[n], memory, False)
    size = 0
    for r in range(memory.tight_R.shape[0]):
        found.tight_NR[n, r] = memory.tight_R[r]
        size += memory.tight_R[r]
    found.size_N[n] = size


@kernel
def ratio_of(found: Scenarios, share_N: Float32) -> float:
    """Peak-to-average ratio under the best splits, by the scenarios' weights."""
    total = 0.0
    for n in range(share_N.shape[0]):
        total += share_N[n] * found.level_N[n]
    return total
