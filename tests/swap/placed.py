"""A small placement, and plans without moves that start from it, for tests of wire messages."""

from __future__ import annotations

import numpy as np

from eplb_core.placement import Placement, default_log2phy
from eplb_core.wire.plan import RankLayer, RankPlan, shared_digests
from worker_agent.swap.rank_layout import RankLayout

RANKS = 3
LAYERS = 2
EXPERTS = 4
SLOTS = 2
LINEAR = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
INSTALLED = RankLayout.first(1, LINEAR, LINEAR.default_log2phy()[1])
"""Initial layout of rank 1."""


def plan_of(*turns: int, token_groups: tuple[int, ...] = (0, 1, 2)) -> RankPlan:
    """Return rank 1's plan for the first layers.

    In layer ``i``, ``turns[i]`` is added to every expert number, modulo ``EXPERTS``. A turn of 0 changes only the
    tables.
    """
    layers = []
    for layer, turn in enumerate(turns):
        new_RS = np.ascontiguousarray((LINEAR.phy2log_LRS[layer] + turn) % EXPERTS, dtype=np.int32)
        tables_RE = default_log2phy(new_RS, EXPERTS)
        kept_RS = np.arange(new_RS.size, dtype=np.int32).reshape(new_RS.shape)
        layers.append(
            RankLayer(layer, new_RS, kept_RS, tables_RE[1], shared_digests(tables_RE, token_groups))
        )
    return RankPlan.of(1, 1, 0, LINEAR.digest(), tuple(layers))
