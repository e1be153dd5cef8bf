"""Replica counts: handed out one by one, cut into groups, or simply all that there are."""

from __future__ import annotations

import itertools
from fractions import Fraction


def hand_out(replicas_E, heat_E, budget, ranks):
    """Each further replica to the expert with the hottest replicas, the first of equals; exact arithmetic."""
    replicas_E = [int(replicas) for replicas in replicas_E]
    for left in range(budget, 0, -1):
        open_E = [expert for expert, replicas in enumerate(replicas_E) if replicas < ranks]
        if not open_E:
            return replicas_E, left
        hottest = max(
            open_E, key=lambda expert: (Fraction(float(heat_E[expert])) / replicas_E[expert], -expert)
        )
        replicas_E[hottest] += 1
    return replicas_E, 0


def all_counts(experts, ranks, slots):
    """Every way to hand out all slots, each expert at least one and at most one on each rank."""
    for counts_E in itertools.product(range(1, ranks + 1), repeat=experts):
        if sum(counts_E) == ranks * slots:
            yield counts_E


def group_bounds(replicas_E, by_heat_E, groups):
    """A group ends where its part of all replicas is reached; each has an expert until there are no more."""
    experts = len(replicas_E)
    groups = min(groups, experts)
    seen_E = list(itertools.accumulate(int(replicas_E[expert]) for expert in by_heat_E))
    bounds = [0]
    for group in range(1, groups):
        reached = next(place + 1 for place, seen in enumerate(seen_E) if seen * groups >= seen_E[-1] * group)
        bounds.append(min(max(reached, bounds[-1] + 1), experts))
    return [*bounds, experts]


def hottest_copy(replicas_E, heat_E, fixed):
    return max((heat_E[expert] / replicas_E[expert] for expert in fixed), default=0.0)
