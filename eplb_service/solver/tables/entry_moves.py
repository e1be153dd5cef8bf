"""Moves of single entries of dealing tables, two at a time: where one is more than a rank has room for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Demand, Float32, Int32
from eplb_service.solver.search.construction import Assignment, hottest_rank, shift_load
from eplb_service.solver.search.evaluation import SMALLEST_GAIN
from eplb_service.solver.search.neighbourhood import risk_of_both
from eplb_service.solver.tables.log2phy import risk_with


class EntryMove(NamedTuple):
    """An entry that goes to another physical slot; -1 for none."""

    entry: int
    expert: int
    to: int


@kernel
def cool_by_two(
    assignment: Assignment,
    chosen_VE: Int32,
    first_E1: Int32,
    slot_P: Int32,
    demand: Demand,
    share_VE: Float32,
    z: float,
) -> None:
    """Move an entry off the hottest rank and another one on from where it goes, while all three are cooler then.

    Single moves end where one entry is more than a rank has room for; two that follow each other differ by less.
    The work grows with the square of the entries.

    Parameters
    ----------
    assignment, chosen_VE
        A complete placement with its shares, and int32 ``[V, E]`` the physical id of each entry; both change in
        place.
    first_E1, slot_P
        Where each expert's replicas are, see ``slots_by_expert``.
    demand
        The layer's heat.
    share_VE
        float32 ``[V, E]``, each entry's part of its expert's tokens.
    z
        Weight of the standard deviation.
    """
    ranks, slots = assignment.phy2log_RS.shape
    for _ in range(4 * ranks * slots):
        hot, hottest = hottest_rank(assignment, z)
        one, two = best_two(assignment, chosen_VE, first_E1, slot_P, demand, share_VE, z, hot, hottest)
        if one.entry < 0:
            return
        for move in (one, two):
            expert, share = move.expert, share_VE[move.entry, move.expert]
            shift_load(assignment, demand, expert, chosen_VE[move.entry, expert] // slots, -share)
            shift_load(assignment, demand, expert, move.to // slots, share)
            chosen_VE[move.entry, expert] = move.to


@kernel
def best_two(
    assignment: Assignment,
    chosen_VE: Int32,
    first_E1: Int32,
    slot_P: Int32,
    demand: Demand,
    share_VE: Float32,
    z: float,
    hot: int,
    hottest: float,
) -> tuple[EntryMove, EntryMove]:
    """The two moves of ``cool_by_two`` that leave their ranks coolest; none where they do not cool the hottest.

    Parameters
    ----------
    assignment, chosen_VE, first_E1, slot_P, demand, share_VE, z
        As for ``cool_by_two``; nothing changes.
    hot, hottest
        The rank with the highest risk, and that risk.
    """
    slots = assignment.phy2log_RS.shape[1]
    entries = share_VE.shape[0]
    lowest = np.float32(hottest - SMALLEST_GAIN)
    one, two = EntryMove(-1, -1, -1), EntryMove(-1, -1, -1)
    for s in range(slots):
        a = assignment.phy2log_RS[hot, s]
        for v in range(entries if first_E1[a] + 1 < first_E1[a + 1] else 0):
            u = share_VE[v, a]
            if chosen_VE[v, a] != hot * slots + s or u <= 0:
                continue
            for place in range(first_E1[a], first_E1[a + 1]):
                rank = slot_P[place] // slots
                if rank == hot:
                    continue
                for t in range(slots):
                    b = assignment.phy2log_RS[rank, t]
                    for w in range(entries if first_E1[b] + 1 < first_E1[b + 1] else 0):
                        x = share_VE[w, b]
                        if chosen_VE[w, b] != rank * slots + t or x <= 0:
                            continue
                        middle = risk_of_both(assignment, demand, rank, a, u, b, -x, z)
                        if middle >= lowest:
                            continue
                        for other in range(first_E1[b], first_E1[b + 1]):
                            last = slot_P[other] // slots
                            if last == rank:
                                continue
                            more = x if last == hot else np.float32(0.0)
                            after = max(middle, risk_of_both(assignment, demand, hot, a, -u, b, more, z))
                            if last != hot and after < lowest:
                                after = max(after, risk_with(assignment, demand, b, last, x, z))
                            if after < lowest:
                                lowest = after
                                one = EntryMove(v, np.int64(a), np.int64(slot_P[place]))
                                two = EntryMove(w, np.int64(b), np.int64(slot_P[other]))
    return one, two
