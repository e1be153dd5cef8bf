"""Which replicas get tokens at all, and from which sources, so that the slowest rank takes least.

Under a cost curve a replica that gets tokens costs the reading of its weights, so tables may leave replicas unused.
An expert's sources are split as evenly as they go over the replicas in use; then single sources, or all of a slot at
once, move from a slowest rank to another replica, in use or not, while that lowers the mean of the slowest ranks'
times. Each move is judged exactly, in every step.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Bool, Float32, Int32
from eplb_service.solver.search.construction import descending
from eplb_service.solver.search.top_ranks import TopRanks, top_ranks_of, update_loads
from eplb_service.solver.tables.log2phy import slot_shares
from eplb_service.solver.time.evaluation import Curve, Steps, rank_us, slot_us

_SMALLEST_GAIN = 1e-4
"""Part of the time below which a move is rounding, not progress."""
_PATIENCE = 4
"""Slowest ranks that are looked at before tables are left as they are."""


@kernel
def used_slots(phy2log_RS: Int32, used_RE: Bool) -> tuple[Int32, Int32]:
    """As ``tables.slots_by_expert``, but only of the replicas in use, bool ``[R, E]``."""
    ranks, slots = phy2log_RS.shape
    experts = used_RE.shape[1]
    first_E1 = np.zeros(experts + 1, dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            if used_RE[r, phy2log_RS[r, s]]:
                first_E1[phy2log_RS[r, s] + 1] += 1
    for e in range(experts):
        first_E1[e + 1] += first_E1[e]
    next_E = first_E1[:-1].copy()
    slot_P = np.empty(first_E1[experts], dtype=np.int32)
    for r in range(ranks):
        for s in range(slots):
            expert = phy2log_RS[r, s]
            if used_RE[r, expert]:
                slot_P[next_E[expert]] = r * slots + s
                next_E[expert] += 1
    return first_E1, slot_P


@kernel
def even_tables(first_E1: Int32, slot_P: Int32, share_GE: Float32) -> Int32:
    """Sources split over the replicas given as evenly as they go: largest first, each to the emptiest; ``[G, E]``."""
    sources, experts = share_GE.shape
    chosen_GE = np.empty((sources, experts), dtype=np.int32)
    part_P = np.zeros(slot_P.shape[0], dtype=np.float32)
    for e in range(experts):
        first, after = first_E1[e], first_E1[e + 1]
        if first + 1 == after:
            for g in range(sources):
                chosen_GE[g, e] = slot_P[first]
            continue
        for g in descending(share_GE[:, e].copy()):
            emptiest = first
            for place in range(first + 1, after):
                if part_P[place] < part_P[emptiest]:
                    emptiest = place
            part_P[emptiest] += share_GE[g, e]
            chosen_GE[g, e] = slot_P[emptiest]
    return chosen_GE


@kernel
def one_replica_each(phy2log_RS: Int32, experts: int, us_E: Float32) -> Bool:
    """One replica in use of each expert, the longest expert first, on the rank that has least so far; ``[R, E]``."""
    ranks, slots = phy2log_RS.shape
    used_RE = np.zeros((ranks, experts), dtype=np.bool_)
    us_R = np.zeros(ranks, dtype=np.float32)
    for e in descending(us_E):
        least = -1
        for r in range(ranks):
            for s in range(slots):
                if phy2log_RS[r, s] == e and (least < 0 or us_R[r] < us_R[least]):
                    least = r
        used_RE[least, e] = True
        us_R[least] += us_E[e]
    return used_RE


@kernel
def cool_tables(
    phy2log_RS: Int32, chosen_GE: Int32, steps: Steps, share_GE: Float32, curve: Curve, most_moves: int
) -> None:
    """Move sources off the slowest ranks while that lowers the mean time; ``chosen_GE`` changes in place.

    Parameters
    ----------
    phy2log_RS, chosen_GE
        A complete placement, and int32 ``[G, E]`` its tables.
    steps, curve
        What is to be lowered.
    share_GE
        float32 ``[G, E]``, each source's part of each expert's tokens.
    most_moves
        Moves after which tables are left as they are.
    """
    ranks, slots = phy2log_RS.shape
    share_P = slot_shares(phy2log_RS, chosen_GE, share_GE).ravel()
    tops = top_ranks_of(rank_us(steps, phy2log_RS, share_P.reshape(ranks, slots), curve))
    changed_RN = np.zeros_like(tops.load_RN)
    changed_R1 = np.zeros(ranks + 1, dtype=np.bool_)
    rank_K = np.zeros(2, dtype=np.int32)
    stuck_R = np.zeros(ranks, dtype=np.bool_)
    stuck = 0
    for _ in range(most_moves):
        hot = _slowest(tops, steps.weight_N, stuck_R)
        now = _mean_top(tops, steps.weight_N)
        own, other, g, found = _best_move(phy2log_RS, chosen_GE, steps, share_GE, share_P, tops, curve, hot)
        if own < 0 or found >= now * (1 - _SMALLEST_GAIN):
            stuck_R[hot] = True
            stuck += 1
            if stuck >= min(_PATIENCE, ranks):
                return
            continue
        expert = phy2log_RS[own // slots, own % slots]
        for source in range(chosen_GE.shape[0]):
            if chosen_GE[source, expert] == own and g in (-1, source):
                chosen_GE[source, expert] = other
        share_P[own], share_P[other] = np.float32(0.0), np.float32(0.0)
        for source in range(chosen_GE.shape[0]):
            if chosen_GE[source, expert] in (own, other):
                share_P[chosen_GE[source, expert]] += share_GE[source, expert]
        rank_K[0], rank_K[1] = own // slots, other // slots
        for rank in (own // slots, other // slots):
            changed_R1[rank] = True
            _sum_rank(phy2log_RS, share_P, steps, curve, rank, changed_RN[rank])
        update_loads(tops, rank_K, 2, changed_R1, changed_RN)
        changed_R1[:] = False
        stuck_R[:] = False
        stuck = 0


@kernel
def _sum_rank(
    phy2log_RS: Int32, share_P: Float32, steps: Steps, curve: Curve, rank: int, us_N: Float32
) -> None:
    """Microseconds of one rank in each step, into ``us_N``."""
    slots = phy2log_RS.shape[1]
    read, launch, slope = np.float32(curve.read), np.float32(curve.launch), np.float32(curve.slope)
    us_N[:] = 0
    for s in range(slots):
        tokens_N = steps.tokens_EN[phy2log_RS[rank, s]]
        share = share_P[rank * slots + s]
        for n in range(us_N.shape[0]):
            us_N[n] += slot_us(share * tokens_N[n], read, launch, slope)


@kernel
def _slowest(tops: TopRanks, weight_N: Float32, stuck_R: Bool) -> int:
    """The rank that is slowest most often, of those that are not stuck."""
    often_R = np.zeros(stuck_R.shape[0], dtype=np.float32)
    for n in range(weight_N.shape[0]):
        often_R[tops.rank_KN[0, n]] += weight_N[n]
    found = -1
    for r in range(often_R.shape[0]):
        if not stuck_R[r] and (found < 0 or often_R[r] > often_R[found]):
            found = r
    return found


@kernel
def _mean_top(tops: TopRanks, weight_N: Float32) -> float:
    """Mean of the slowest ranks' times."""
    total = np.float32(0.0)
    for n in range(weight_N.shape[0]):
        total += weight_N[n] * tops.peak_KN[0, n]
    mean: float = total
    return mean


@kernel
def _best_move(
    phy2log_RS: Int32,
    chosen_GE: Int32,
    steps: Steps,
    share_GE: Float32,
    share_P: Float32,
    tops: TopRanks,
    curve: Curve,
    hot: int,
) -> tuple[int, int, int, float]:
    """The best move of one source (or all of a slot: -1) from ``hot``: its slot, the other, the source, the mean time.

    -1 three times where an expert of ``hot`` has no other replica.
    """
    ranks, slots = phy2log_RS.shape
    best = (-1, -1, -1)
    lowest = np.float32(np.inf)
    for s in range(slots):
        own = hot * slots + s
        expert = phy2log_RS[hot, s]
        if share_P[own] <= 0:
            continue
        parts = 0
        for g in range(chosen_GE.shape[0]):
            if chosen_GE[g, expert] == own and share_GE[g, expert] > 0:
                parts += 1
        for r in range(ranks):
            for t in range(slots):
                if phy2log_RS[r, t] != expert or r == hot:
                    continue
                other = r * slots + t
                for g in range(-1, chosen_GE.shape[0] if parts > 1 else 0):
                    moved = share_P[own]
                    if g >= 0:
                        if chosen_GE[g, expert] != own or share_GE[g, expert] <= 0:
                            continue
                        moved = share_GE[g, expert]
                    left = share_P[own] - moved if g >= 0 else np.float32(0.0)
                    found = _time_of_move(steps, tops, curve, expert, own, other, share_P, left, moved, slots)
                    if found < lowest:
                        lowest = found
                        best = (own, other, g)
    return best[0], best[1], best[2], lowest


@kernel
def _time_of_move(
    steps: Steps,
    tops: TopRanks,
    curve: Curve,
    expert: int,
    own: int,
    other: int,
    share_P: Float32,
    left: float,
    moved: float,
    slots: int,
) -> float:
    """Mean of the slowest ranks' times once slot ``own`` keeps the share ``left`` and ``other`` has ``moved`` more."""
    read, launch, slope = np.float32(curve.read), np.float32(curve.launch), np.float32(curve.slope)
    here, there = own // slots, other // slots
    total = np.float32(0.0)
    for n in range(steps.weight_N.shape[0]):
        tokens = steps.tokens_EN[expert, n]
        rest = tops.peak_KN[2, n]
        if tops.rank_KN[1, n] not in (here, there):
            rest = tops.peak_KN[1, n]
        if tops.rank_KN[0, n] not in (here, there):
            rest = tops.peak_KN[0, n]
        mine = tops.load_RN[here, n] - slot_us(share_P[own] * tokens, read, launch, slope)
        mine += slot_us(left * tokens, read, launch, slope)
        theirs = tops.load_RN[there, n] - slot_us(share_P[other] * tokens, read, launch, slope)
        theirs += slot_us((share_P[other] + moved) * tokens, read, launch, slope)
        total += steps.weight_N[n] * max(rest, mine, theirs)
    mean: float = total
    return mean
