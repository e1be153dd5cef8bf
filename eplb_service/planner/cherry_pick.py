"""Which layers a decision looks at: those past the threshold, worst first (FlashLB's third idea)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.planner.scoring import Float64
from eplb_service.planner.settings import PlannerSettings


def cherry_pick(par_L: Float64, settings: PlannerSettings) -> npt.NDArray[np.int64]:
    """Indices of the layers worth solving, worst first, at most ``max_layers``; ``par_L`` float64 ``[L]``."""
    worst_first = np.argsort(-par_L, kind="stable")
    return worst_first[par_L[worst_first] > settings.par_threshold][: settings.max_layers]
