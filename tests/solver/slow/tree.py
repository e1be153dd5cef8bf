"""The tree over replica counts, group by group, with its judge and its floor handed in."""

from __future__ import annotations

import itertools

import numpy as np

from tests.solver.slow.replicas import group_bounds, hand_out


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
