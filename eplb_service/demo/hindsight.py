"""The PAR that could have been had by someone who knew the steps beforehand."""

from __future__ import annotations

import numpy as np

from eplb_service.demo.scoreboard import Scoreboard
from eplb_service.demo.stage import Stage
from eplb_service.offline import solve


def hindsight_par(board: Scoreboard, stage: Stage, first: int = 0) -> float:
    """PAR from step ``first`` on, had every ``interval`` steps been placed anew for those very steps."""
    source_TRLE = board.source()[first:]
    if len(source_TRLE) == 0:
        return 1.0
    weighed = 0.0
    for begin in range(0, len(source_TRLE), stage.interval):
        part_TRLE = source_TRLE[begin : begin + stage.interval]
        solved = solve(
            part_TRLE.sum(axis=1), stage.ranks, stage.slots, source_heat=part_TRLE, seed=stage.seed
        )
        weighed += len(part_TRLE) * float(np.minimum(solved.par_before_L, solved.par_after_L).mean())
    return weighed / len(source_TRLE)
