"""Placements that the scenarios order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eplb_lab.conformance.engine import Placement


def rotated(placement_LP: Placement) -> Placement:
    """Move the expert in each slot to the next slot, in every layer.

    Examples
    --------
    >>> rotated(np.array([[0, 1, 2, 0]]))
    array([[0, 0, 1, 2]])
    """
    rotated_LP: Placement = np.roll(placement_LP, 1, axis=1)
    return rotated_LP


def swap_rounds(slots: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs of slots that contain every pair exactly once.

    This is the schedule of a round-robin tournament (the circle method).

    Examples
    --------
    >>> swap_rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    players = list(range(slots + slots % 2))
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < slots])
        players = [players[0], players[-1], *players[1:-1]]
    return [sorted(pairs) for pairs in rounds]


def swapped(placement_LP: Placement, number: int) -> Placement:
    """Exchange the experts of all pairs in one round of ``swap_rounds``. Each layer uses a different round."""
    rounds = swap_rounds(placement_LP.shape[1])
    out: Placement = placement_LP.copy()
    for layer, row in enumerate(out):
        for first, second in rounds[(number + layer) % len(rounds)]:
            row[[first, second]] = row[[second, first]]
    return out


def random_placements(placement_LP: Placement, count: int, seed: int) -> Iterator[Placement]:
    """Yield random placements that contain every expert in every layer.

    Replica counts are random too, and an expert may have several slots on a rank. In the last placement, one expert
    has all spare slots.
    """
    layers, slots = placement_LP.shape
    experts = int(placement_LP.max()) + 1
    draw = np.random.default_rng(seed)
    for number in range(count):
        out = np.empty_like(placement_LP)
        for layer in range(layers):
            spare = draw.integers(experts, size=slots - experts)
            if number == count - 1:
                spare[:] = draw.integers(experts)
            out[layer] = draw.permutation(np.concatenate([np.arange(experts), spare]))
        yield out
