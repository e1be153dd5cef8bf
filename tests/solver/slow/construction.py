"""Slow twins of replica allotment and of greedy placement over all episodes."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np

from tests.solver.slow.heat import risk_of


def allot(replicas_E, heat_E, budget, ranks):
    """Give each extra replica to the expert whose replicas are hottest, in exact arithmetic.

    Ties go to the first expert.
    """
    replicas_E = [int(replicas) for replicas in replicas_E]
    for unused in range(budget, 0, -1):
        open_E = [expert for expert, replicas in enumerate(replicas_E) if replicas < ranks]
        if not open_E:
            return replicas_E, unused
        hottest = max(
            open_E, key=lambda expert: (Fraction(float(heat_E[expert])) / replicas_E[expert], -expert)
        )
        replicas_E[hottest] += 1
    return replicas_E, 0


def all_counts(experts, ranks, slots):
    """Yield all replica counts that fill the slots with 1 to ``ranks`` replicas per expert."""
    for counts_E in itertools.product(range(1, ranks + 1), repeat=experts):
        if sum(counts_E) == ranks * slots:
            yield counts_E


def place(replicas_E, order_E, scaled_EN, share_N, ranks, slots, z):
    """Return each rank's experts in slot order, and the smallest margin by which any choice was made."""
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
    """Free a slot on a full rank that lacks the expert, and return that rank.

    One of its replicas moves to the first rank with a free slot.
    """
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
    """Return the difference in risk between the second-best and the best rank. All empty ranks count as one rank."""
    rival_risks = [
        risk for r, risk in zip(open_ranks, risks, strict=True) if r != best and (rows[r] or rows[best])
    ]
    return min(rival_risks, default=np.inf) - min(risks)
