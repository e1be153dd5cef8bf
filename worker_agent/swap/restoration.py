"""The plan that brings all experts to where a host loads weights for, made by every rank for itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eplb_service.placement import Int32, Placement, dealing_width, dealt_log2phy, without_single_entries
from eplb_service.wire.plan import RankLayer, RankPlan, table_digest
from worker_agent.swap.installed import Installed

PLAN_ID = 0
"""No service gives a plan this number."""


def restoring_plan(
    installed: Installed, target: Placement, token_groups: Sequence[int], leader_term: int
) -> RankPlan | None:
    """What leads from ``installed`` to ``target``, the same on all ranks but for each rank's tables.

    Parameters
    ----------
    installed
        What is served now, equal on all ranks.
    target
        What is to be served. Unlike in a service's plan an expert may change its slot within a rank.
    token_groups
        Of every rank; those of one group get one table.
    leader_term
        The highest that this rank has seen.

    Returns
    -------
    RankPlan or None
        ``None`` where nothing has to move.
    """
    width = dealing_width(installed.log2phy_LE, 2)
    layers = tuple(
        _layer(layer, old_RS, new_RS, target.experts, width, installed.rank, token_groups)
        for layer, (old_RS, new_RS) in enumerate(
            zip(installed.placement.phy2log_LRS, target.phy2log_LRS, strict=True)
        )
        if not np.array_equal(old_RS, new_RS)
    )
    if not layers:
        return None
    return RankPlan.of(PLAN_ID, leader_term, installed.epoch, installed.digest, layers)


def _layer(
    layer: int,
    old_RS: Int32,
    new_RS: Int32,
    experts: int,
    width: int,
    rank: int,
    token_groups: Sequence[int],
) -> RankLayer:
    first_of_group = [token_groups.index(group) for group in token_groups]
    tables_RE = without_single_entries(dealt_log2phy(new_RS, experts, width))[first_of_group]
    return RankLayer(
        layer,
        new_RS,
        tables_RE[rank],
        tuple(table_digest(row_E) for row_E in tables_RE),
        _moves(old_RS, new_RS),
    )


def _moves(old_RS: Int32, new_RS: Int32) -> Int32:
    """One for each slot that changes, from the same rank where it has the expert; int32 ``[M, 5]``."""
    moves = []
    for rank, slot in np.argwhere(old_RS != new_RS).tolist():
        expert = int(new_RS[rank, slot])
        holders = np.argwhere(old_RS == expert).tolist()
        near = [holder for holder in holders if holder[0] == rank]
        # Ranks that want the same expert ask different holders.
        source = near[0] if near else holders[rank % len(holders)]
        moves.append((*source, rank, slot, expert))
    return np.array(moves, dtype=np.int32)
