"""What a rank sends and receives in each round of a layer's transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eplb_service.placement import Int32
from worker_agent.swap.schedule import rounds


@dataclass(frozen=True)
class Leg:
    """One expert, all its tensors, on its way to or from ``peer``."""

    peer: int
    expert: int
    parts: tuple[torch.Tensor, ...]


def incoming_slots(moves_M5: Int32, rank: int) -> list[int]:
    """The slots of ``rank`` that get another expert, in the order of the moves, which is that of staged rows."""
    return [slot for _, _, destination, slot, _ in moves_M5.tolist() if destination == rank]


def legs(
    moves_M5: Int32, rank: int, weights: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]
) -> list[tuple[Leg | None, Leg | None]]:
    """Round by round, what ``rank`` sends of live ``[S, ...]`` weights and receives into ``[rows, ...]`` staging."""
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
