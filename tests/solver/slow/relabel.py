"""A new placement dealt to the ranks, its experts put into their old slots, and who sends what then moves."""

from __future__ import annotations

import numpy as np


def overlaps(phy2log_RS, deployed_RS):
    """Experts that each new row shares with each deployed rank."""
    return np.array(
        [[len(set(row) & set(rank)) for rank in deployed_RS.tolist()] for row in phy2log_RS.tolist()]
    )


def match_ranks(phy2log_RS, deployed_RS, nodes_R):
    """Largest overlap first, then with what the rank's whole node holds, then the first row, then the first rank."""
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
    """Those that stay keep their slots; the others fill the free ones in order."""
    kept, moves = [], 0
    for row, was in zip(phy2log_RS.tolist(), deployed_RS.tolist(), strict=True):
        come = [expert for expert in row if expert not in was]
        moves += len(come)
        kept.append([expert if expert in row else come.pop(0) for expert in was])
    return np.array(kept), moves


def choose_senders(deployed_RS, phy2log_RS, nodes_R):
    """Nearest, then least busy, then lowest holder of each expert that a slot must receive."""
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
