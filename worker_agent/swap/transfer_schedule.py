"""The order of a layer's moves, and what one rank sends and receives in each round of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eplb_service.placement import Int32
from worker_agent.adapters.live_layer import ExpertWeights


@dataclass(frozen=True)
class Leg:
    """One expert, all its tensors, on its way to or from ``peer``."""

    peer: int
    expert: int
    parts: tuple[torch.Tensor, ...]


def rounds(moves_M5: Int32) -> list[list[int]]:
    """Conflict-free rounds: within one, every rank sends at most one expert and receives at most one.

    An edge colouring of the bipartite graph of senders and receivers, greedy on the busiest ranks first, so the number
    of rounds is at most one short of twice the best. Deterministic: all ranks find the same rounds.

    Parameters
    ----------
    moves_M5
        int32 ``[M, 5]``: source rank and slot, destination rank and slot, expert.

    Returns
    -------
    list
        Per round, indices into ``moves_M5``.
    """
    sends: dict[int, int] = {}
    receives: dict[int, int] = {}
    for source, _, destination, _, _ in moves_M5.tolist():
        sends[source] = sends.get(source, 0) + 1
        receives[destination] = receives.get(destination, 0) + 1
    load = [-(sends[source] + receives[destination]) for source, _, destination, _, _ in moves_M5.tolist()]
    waiting = sorted(range(len(load)), key=lambda move: (load[move], move))
    ordered = []
    while waiting:
        senders: set[int] = set()
        receivers: set[int] = set()
        chosen, left = [], []
        for move in waiting:
            source, destination = int(moves_M5[move, 0]), int(moves_M5[move, 2])
            if source in senders or destination in receivers:
                left.append(move)
                continue
            senders.add(source)
            receivers.add(destination)
            chosen.append(move)
        ordered.append(chosen)
        waiting = left
    return ordered


def incoming_slots(moves_M5: Int32, rank: int) -> list[int]:
    """Slots of ``rank`` that get another expert, in the order of the moves, which is that of staged rows."""
    return [slot for _, _, destination, slot, _ in moves_M5.tolist() if destination == rank]


def legs(
    moves_M5: Int32, rank: int, weights: Sequence[ExpertWeights], staged: Sequence[ExpertWeights]
) -> list[tuple[Leg | None, Leg | None]]:
    """What ``rank`` sends and receives in each round, either of them ``None``.

    Parameters
    ----------
    moves_M5
        int32 ``[M, 5]``: source rank and slot, destination rank and slot, expert.
    rank
        This rank.
    weights
        Live weights, S experts of each kind.
    staged
        Their staging buffers, one row per incoming expert in each.
    """
    moves = moves_M5.tolist()
    incoming = [move for move, (_, _, destination, _, _) in enumerate(moves) if destination == rank]
    row_of = {move: row for row, move in enumerate(incoming)}
    found: list[tuple[Leg | None, Leg | None]] = []
    for batch in rounds(moves_M5):
        sent = received = None
        for move in batch:
            source, source_slot, destination, _, expert = moves[move]
            if source == rank:
                sent = Leg(destination, expert, tuple(weight[source_slot] for weight in weights))
            if destination == rank:
                received = Leg(source, expert, tuple(buffer[row_of[move]] for buffer in staged))
        found.append((sent, received))
    return found
