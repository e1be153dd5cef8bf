"""The order of a layer's moves: rounds in which a rank talks to one peer at a time."""

from __future__ import annotations

from eplb_service.placement import Int32


def rounds(moves_M5: Int32) -> list[list[int]]:
    """Indices of ``moves_M5`` (source rank first, destination rank third) in conflict-free rounds.

    Within a round every rank sends at most one expert and receives at most one. Greedy on the busiest ranks first, so
    the number of rounds is at most one short of twice the best. Deterministic: all ranks find the same rounds.
    """
    sends: dict[int, int] = {}
    receives: dict[int, int] = {}
    for source, _, destination, _, _ in moves_M5.tolist():
        sends[source] = sends.get(source, 0) + 1
        receives[destination] = receives.get(destination, 0) + 1
    pressure = [
        -(sends[source] + receives[destination]) for source, _, destination, _, _ in moves_M5.tolist()
    ]
    waiting = sorted(range(len(pressure)), key=lambda move: (pressure[move], move))
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
