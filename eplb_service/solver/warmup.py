"""Compiles every kernel (or loads it from numba's cache), so that no decision waits for a compiler."""

from __future__ import annotations

import numpy as np

from eplb_service.placement import Placement
from eplb_service.solver.candidates import Search
from eplb_service.solver.engine import solve_many
from eplb_service.solver.moves import choose_senders


def warm_up(threads: int | None = None) -> None:
    """Solve a tiny problem by every path that the planner takes with ``threads`` threads."""
    placement = Placement.linear(layers=2, experts=6, ranks=4, slots=2)
    deployed_LRS = placement.phy2log_LRS
    tables_LGE = np.ascontiguousarray(placement.default_log2phy().transpose(1, 0, 2))
    heat_LNE = np.arange(2 * 4 * 6, dtype=np.float64).reshape(2, 4, 6)
    share_LGE = np.full((2, 4, 6), 0.25, dtype=np.float32)
    search = Search(z=1.0, price=0.0, groups=2, spread=1, beam=1, leaves=1, steps=10, tables=True, warm=True)
    for layers in (1, 2):
        solve_many(
            heat_LNE[:layers],
            deployed_LRS[:layers],
            tables_LGE[:layers],
            share_LGE[:layers],
            search,
            np.array([np.inf, 2.0]),
            0.0,
            threads,
        )
    choose_senders(np.array(deployed_LRS[0]), np.array(deployed_LRS[1, ::-1]), np.zeros(4, dtype=np.int32))
