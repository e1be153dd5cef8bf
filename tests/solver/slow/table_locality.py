"""Tables near home: every way to reroute a part is tried on a replica, and tokens are counted one source at a time."""

from __future__ import annotations

import numpy as np

from tests.solver.slow.tables import holders_of, tables_par


def crossing(log2phy_GE, share_GE, mean_E, node_G, node_R, slots):
    """Part of the tokens whose rank is on another node than their source; a source on several is at home on all."""
    leaving = total = 0.0
    for (g, e), slot in np.ndenumerate(log2phy_GE):
        tokens = float(share_GE[g, e]) * float(mean_E[e])
        total += tokens
        if node_G[g] not in (-1, node_R[slot // slots]):
            leaving += tokens
    return leaving / total if total else 0.0


def ways_home(phy2log_RS, log2phy_GE, share_GE, source, expert, node_G, node_R):
    """Every rerouting of a part to its source's node, alone or for another's: tables, target, other, share won."""
    slots = phy2log_RS.shape[1]
    own = log2phy_GE[source, expert]

    def away(table_GE):
        return sum(
            share_GE[g, expert]
            for g in range(len(table_GE))
            if node_G[g] not in (-1, node_R[table_GE[g, expert] // slots])
        )

    if node_G[source] == -1 or node_R[own // slots] == node_G[source] or share_GE[source, expert] <= 0:
        return
    for target in holders_of(phy2log_RS, expert):
        if node_R[target // slots] != node_G[source]:
            continue
        there = [int(g) for g in np.flatnonzero(log2phy_GE[:, expert] == target)]
        for other in (-1, *there):
            tried_GE = log2phy_GE.copy()
            tried_GE[source, expert] = target
            if other >= 0:
                tried_GE[other, expert] = own
            yield tried_GE, int(target), other, away(log2phy_GE) - away(tried_GE)


def peak_of(phy2log_RS, log2phy_GE, scaled_EN, share_N, share_GE):
    """Mean over the episodes of the hottest rank's load; 0 where there are no tokens."""
    return tables_par(phy2log_RS, log2phy_GE, scaled_EN, share_N, share_GE) if share_N.sum() else 0.0
