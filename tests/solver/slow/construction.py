"""Replica counts and greedy placing with all episodes in view, and the tree over both."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np

from tests.solver.slow.heat import risk_of


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


def tree_search(judge, floor_of, heat_E, ranks, slots, groups, spread, beam, leaves):
    """Counts of the best leaves and their risks, coolest first; ``judge`` gives the risk of counts once placed."""
    experts = len(heat_E)
    greedy, _ = hand_out([1] * experts, heat_E, ranks * slots - experts, ranks)
    best = [(judge(greedy), greedy)]
    by_heat = sorted(range(experts), key=lambda e: (-heat_E[e], e))
    bounds = group_bounds(greedy, by_heat, groups)
    frontier = [[1] * experts]
    for low, high in itertools.pairwise(bounds):
        children = []
        for node in frontier:
            left = ranks * slots - experts - sum(node[e] - 1 for e in by_heat[:low])
            completed, _ = _handed(node, heat_E, by_heat[low:], left, ranks)
            usual = sum(completed[e] - 1 for e in by_heat[low:high])
            for given in range(max(0, usual - spread), min(left, usual + spread) + 1):
                child, unplaced = _handed(node, heat_E, by_heat[low:high], given, ranks)
                bound = best[-1][0] if len(best) == leaves else np.inf
                if unplaced or floor_of(child, by_heat[:high]) >= bound:
                    continue
                leaf, unplaced = _handed(child, heat_E, by_heat[high:], left - given, ranks)
                if unplaced or child in [known for _, known in children]:
                    continue
                risk = judge(leaf)
                children.append((risk, child))
                if leaf not in [known for _, known in best]:
                    best = sorted([*best, (risk, leaf)], key=lambda pair: pair[0])[:leaves]
        if not children:
            break
        frontier = [child for _, child in sorted(children, key=lambda pair: pair[0])[:beam]]
    return best


def _handed(replicas_E, heat_E, members, budget, ranks):
    """``budget`` replicas handed to ``members`` alone."""
    own, unplaced = hand_out([replicas_E[e] for e in members], [heat_E[e] for e in members], budget, ranks)
    replicas_E = list(replicas_E)
    for expert, replicas in zip(members, own, strict=True):
        replicas_E[expert] = replicas
    return replicas_E, unplaced
