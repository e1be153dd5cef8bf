"""Greedy placing with all episodes in view: each replica to the coolest rank, room made where none is left."""

from __future__ import annotations

import numpy as np

from tests.solver.slow.heat import rank_risks, risk_of


def place(replicas_E, order_E, scaled_EN, share_N, ranks, slots, z):
    """The experts of each rank in slot order, and by how little the closest choice was made."""
    rows = [[] for _ in range(ranks)]
    margin = np.inf
    for expert in order_E:
        for _ in range(replicas_E[expert]):
            open_ranks = [r for r in range(ranks) if len(rows[r]) < slots and expert not in rows[r]]
            if open_ranks:
                risks = [_risk_with(rows[r], expert, replicas_E, scaled_EN, share_N, z) for r in open_ranks]
                best = open_ranks[int(np.argmin(risks))]
                margin = min(margin, _lead(best, open_ranks, risks, rows))
            else:
                best = make_room(rows, expert, slots)
            rows[best].append(expert)
    return np.array(rows), margin


def make_room(rows, expert, slots):
    """A full rank without the expert passes one on to the first rank with room, whose like it is not."""
    roomy = next(row for row in rows if len(row) < slots)
    for rank, row in enumerate(rows):
        if expert in row:
            continue
        for slot, passed in enumerate(row):
            if passed not in roomy:
                row[slot] = row[-1]
                row.pop()
                roomy.append(passed)
                return rank
    raise AssertionError("no rank can make room")


def _risk_with(row, expert, replicas_E, scaled_EN, share_N, z):
    series_N = sum((scaled_EN[held] / replicas_E[held] for held in [*row, expert]), np.zeros(len(share_N)))
    return risk_of(series_N, share_N, z)


def _lead(best, open_ranks, risks, rows):
    """How much cooler the best rank is than the next one; empty ranks are alike, the first of them counts."""
    others = [
        risk for r, risk in zip(open_ranks, risks, strict=True) if r != best and (rows[r] or rows[best])
    ]
    return min(others, default=np.inf) - min(risks)


def in_order(phy2log_RS, order_E):
    """Whether no room had to be made: then each rank's slots hold experts in the order in which they came."""
    turn = {int(expert): at for at, expert in enumerate(order_E)}
    return all(
        [turn[expert] for expert in row] == sorted(turn[expert] for expert in row) for row in phy2log_RS
    )


def regret(phy2log_RS, replicas_E, order_E, scaled_EN, share_N, z):
    """By how much the worst choice of a placement made without making room missed the coolest rank then open."""
    ranks, slots = phy2log_RS.shape
    rows = [[] for _ in range(ranks)]
    worst = 0.0
    for expert in order_E:
        risks = {
            r: _risk_with(rows[r], expert, replicas_E, scaled_EN, share_N, z)
            for r in range(ranks)
            if len(rows[r]) < slots
        }
        chosen = [r for r in range(ranks) if expert in phy2log_RS[r]]
        left = [risk for r, risk in risks.items() if r not in chosen]
        worst = max(worst, max(risks[r] for r in chosen) - min(left, default=np.inf))
        for r in chosen:
            rows[r].append(expert)
    return worst


def peak(replicas_E, order_E, scaled_EN, share_N, ranks, slots, z):
    """Risk of the hottest rank once the replicas are placed."""
    phy2log_RS, _ = place(replicas_E, order_E, scaled_EN, share_N, ranks, slots, z)
    share_RS = 1 / np.asarray(replicas_E)[phy2log_RS]
    return rank_risks(phy2log_RS, share_RS, scaled_EN, share_N, z).max()
