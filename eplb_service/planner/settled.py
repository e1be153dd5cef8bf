"""What a layer's ratio would be if nothing but its experts' own unrest kept its ranks apart.

From episode to episode an expert's heat jumps, by token sampling and by whatever the workload does. Where the ranks are
balanced in the mean and experts jump independently, these jumps alone make some rank the hottest. A layer no worse
than that needs no search: every placement would have the same volatility.
"""

from __future__ import annotations

import numpy as np

from eplb_service.placement import Placement
from eplb_service.planner.effort import expected_hottest
from eplb_service.planner.scoring import Float64
from eplb_service.solver.window import volatility


def settled_par(heat_NLE: Float64, loads_NLR: Float64, placement: Placement) -> Float64:
    """Peak-to-average ratio that balanced ranks have at this volatility, float64 ``[L]``; 1.0 for a single episode.

    ``heat_NLE`` float64 ``[N, L, E]``, ``loads_NLR`` float64 ``[N, L, R]`` what the ranks make of it. The jumps are
    taken between episodes in a row, so a trend or a slow change of the workload is not mistaken for volatility. Ranks
    jump less than their experts' jumps sum up to where a token's choices make room for each other: it never chooses an
    expert twice. Then theirs count.
    """
    alone_LR = np.ones((placement.layers, placement.ranks), dtype=np.int32)
    unrest_L = np.minimum(volatility(heat_NLE, placement.replicas()), volatility(loads_NLR, alone_LR))
    # Parts of all tokens to parts of a rank's, and the variance of all ranks to that of one.
    spread_L = np.sqrt(unrest_L * placement.ranks)
    settled_L: Float64 = 1.0 + expected_hottest(placement.ranks) * spread_L
    return settled_L
