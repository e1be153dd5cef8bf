"""Slow twins of the topology functions: rank matching, choice of senders, and redirections to the home node."""

from __future__ import annotations

import numpy as np

from tests.solver.slow.tables import holders_of, tables_par


def overlaps(phy2log_RS, deployed_RS):
    """Return the number of experts that each new row shares with each current rank."""
    return np.array(
        [[len(set(row) & set(rank)) for rank in deployed_RS.tolist()] for row in phy2log_RS.tolist()]
    )


def match_ranks(phy2log_RS, deployed_RS, nodes_R):
    """Match rows to ranks by largest overlap with the rank, then with its node, then lowest row, then lowest rank."""
    shared_RR = overlaps(phy2log_RS, deployed_RS)
    ranks = range(len(phy2log_RS))
    nodes_RX = [np.unique(deployed_RS[nodes_R == nodes_R[rank]]) for rank in ranks]
    near_RR = np.array([[np.isin(row, held).sum() for held in nodes_RX] for row in phy2log_RS])
    pairs = sorted((-shared_RR[row, rank], -near_RR[row, rank], row, rank) for row in ranks for rank in ranks)
    dealt = {}
    for _, _, row, rank in pairs:
        if row not in dealt.values() and rank not in dealt:
            dealt[rank] = row
    return np.array([phy2log_RS[dealt[rank]] for rank in ranks])


def keep_slots(phy2log_RS, deployed_RS):
    """Keep experts that stay in their slots, and fill the free slots with the new experts in order."""
    kept = []
    moves = 0
    for row, was in zip(phy2log_RS.tolist(), deployed_RS.tolist(), strict=True):
        arriving = [expert for expert in row if expert not in was]
        moves += len(arriving)
        kept.append([expert if expert in row else arriving.pop(0) for expert in was])
    return np.array(kept), moves


def choose_senders(deployed_RS, phy2log_RS, nodes_R):
    """For each move, choose the nearest holder, then the least busy, then the one with the lowest rank."""
    sent = [0] * len(deployed_RS)
    moves = []
    for (r, s), expert in np.ndenumerate(phy2log_RS):
        if deployed_RS[r, s] == expert:
            continue
        holders = [q for q, row in enumerate(deployed_RS) if expert in row]
        sender = min(holders, key=lambda q: (nodes_R[q] != nodes_R[r], sent[q], q))
        sent[sender] += 1
        moves.append([sender, deployed_RS[sender].tolist().index(expert), r, s, int(expert)])
    return np.array(moves, dtype=np.int32).reshape(-1, 5)


def crossing(log2phy_GE, share_GE, mean_E, node_G, node_R, slots):
    """Return the fraction of tokens that leave their source's node. Sources that span several nodes never count."""
    leaving = total = 0.0
    for (g, e), slot in np.ndenumerate(log2phy_GE):
        tokens = float(share_GE[g, e]) * float(mean_E[e])
        total += tokens
        if node_G[g] not in (-1, node_R[slot // slots]):
            leaving += tokens
    return leaving / total if total else 0.0


def redirections(phy2log_RS, log2phy_GE, source, expert, node_G, node_R):
    """Yield ``(slot, partner)`` and the new tables for every redirection of a share to its home node.

    The share either moves alone (partner -1) or is exchanged for the share of a source that is not at home on that
    node.
    """
    slots = phy2log_RS.shape[1]
    for target in holders_of(phy2log_RS, expert):
        if node_R[target // slots] != node_G[source]:
            continue
        users = [int(g) for g in np.flatnonzero(log2phy_GE[:, expert] == target)]
        for partner in (-1, *(g for g in users if node_G[g] != node_G[source])):
            trial_GE = log2phy_GE.copy()
            trial_GE[source, expert] = target
            if partner >= 0:
                trial_GE[partner, expert] = log2phy_GE[source, expert]
            yield (int(target), partner), trial_GE


def peak_of(phy2log_RS, log2phy_GE, scaled_EN, share_N, share_GE):
    """Return the hottest rank's load, averaged over the episodes; 0 without tokens."""
    return tables_par(phy2log_RS, log2phy_GE, scaled_EN, share_N, share_GE) if share_N.sum() else 0.0
