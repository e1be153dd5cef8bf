"""Which layers a decision looks at: those past the threshold, worst first (FlashLB's third idea)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.planner.scoring import Float64
from eplb_service.planner.settings import PlannerSettings


def cherry_pick(par_L: Float64, least_L: Float64, settings: PlannerSettings) -> npt.NDArray[np.int64]:
    """Indices of the layers worth solving, worst first, at most ``max_layers``.

    ``par_L`` and ``least_L`` are float64 ``[L]``, the ratio seen and what of it no placement can win. A layer is
    worth it where the ratio is past the threshold and more than ``min_gain`` of it could be won.
    """
    worst_first = np.argsort(least_L - par_L, kind="stable")
    worth_it_L = (par_L > settings.par_threshold) & (par_L - least_L > settings.min_gain)
    return worst_first[worth_it_L[worst_first]][: settings.max_layers]
