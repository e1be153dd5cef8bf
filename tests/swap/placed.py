"""A small placement, and plans from it that need no moves, for tests of what crosses the wire."""

from __future__ import annotations

import numpy as np

from eplb_service.placement import Placement, default_log2phy
from eplb_service.wire.plan import RankLayer, RankPlan, table_digest
from worker_agent.swap.installed import Installed

RANKS, LAYERS, EXPERTS, SLOTS = 3, 2, 4, 2
LINEAR = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
INSTALLED = Installed.first(1, LINEAR, LINEAR.default_log2phy()[1])
"""Of rank 1."""


def plan_of(*turns: int) -> RankPlan:
    """Rank 1's plan for the first layers; each turns the experts by so many, and 0 changes its tables only."""
    layers = []
    for layer, turn in enumerate(turns):
        new_RS = np.ascontiguousarray((LINEAR.phy2log_LRS[layer] + turn) % EXPERTS, dtype=np.int32)
        tables_RE = default_log2phy(new_RS, EXPERTS)
        digests = tuple(table_digest(row) for row in tables_RE)
        none_M5 = np.zeros((0, 5), dtype=np.int32)
        layers.append(RankLayer(layer, new_RS, tables_RE[1], digests, none_M5))
    return RankPlan.of(1, 1, 0, LINEAR.digest(), tuple(layers))
