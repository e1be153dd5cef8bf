"""The steps that a placement for stepwise splits is searched with: some of the window's, made more extreme."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.model import Bool, Float32, Float64, Heat, Int32, SearchParams
from eplb_service.solver.step_search import step_search

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


def searched_for_steps(
    phy2log_RS: Int32, heat: Heat, home_ER: Bool, price_K: Float64, params: SearchParams
) -> Int32:
    """A placement improved for stepwise splits, int32 ``[K, R, S]``, one for each price; see ``step_search``."""
    scaled_EN, share_N = scenarios_of(heat)
    found_KRS, _ = step_search(
        np.ascontiguousarray(phy2log_RS), scaled_EN, share_N, home_ER, price_K, params.step_tries, params.seed
    )
    return found_KRS
