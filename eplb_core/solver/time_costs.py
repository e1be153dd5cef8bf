"""Time of the slowest rank under a cost curve, replica counts to try, and tables that lower this time.

In each step, a rank takes ``floor + sum over slots with n > 0 tokens of max(read, launch + slope * n)``. A curve is
float64 ``[4]``: floor, read and launch in microseconds, and slope in microseconds per token.

Unlike tokens, the total time is not constant. Every replica that receives tokens must read the expert's weights,
whereas a replica without tokens costs nothing. Nor is time a function of token sums, so steps are judged individually
and never summed into episodes.

Additional replicas shorten the longest slot but increase the total work, because each replica reads the weights again.
Replicas are therefore added one by one to the expert whose slots take longest, as long as this makes those slots
clearly shorter. Placements are tried at several stages of this process.

Tables may leave replicas unused. At first, each expert's sources are split as evenly as possible over the replicas in
use. Then single sources, or all sources of a slot, are moved from one of the slowest ranks to a different replica, used
or unused, as long as this lowers the slowest rank's mean time. Every move is judged exactly, in every step.
"""

from __future__ import annotations

import numpy as np

from eplb_core.solver.construction import descending, largest_first
from eplb_core.solver.evaluation import TopRanks, peak_of_two_changed, top_ranks_of, update_loads
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Bool, Float32, Float64, Int32
from eplb_core.solver.tables import slot_shares

_SHORTER = 0.95
"""An additional replica is worth trying if it reduces the slot's time to less than this fraction."""
_STAGES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Fractions of all added replicas at which placements are tried."""
_MIN_GAIN = 1e-4
"""Minimum improvement by a move, as a fraction of the time; smaller improvements are rounding errors."""
_PATIENCE = 4
"""Number of consecutive ranks without an improving move after which the search for better tables ends."""


@part
def _slot_us(tokens: float, read: float, launch: float, slope: float) -> float:
    """Return the time of one slot with the given number of tokens, in microseconds."""
    us: float = np.float32(0.0)
    if tokens > 0:
        us = max(read, launch + slope * tokens)
    return us


@kernel
def rank_us(tokens_EN: Float32, phy2log_RS: Int32, share_RS: Float32, curve_4: Float64) -> Float32:
    """Return the time of each rank in each step without the floor, in microseconds, float32 ``[R, N]``.

    Parameters
    ----------
    tokens_EN
        float32 ``[E, N]``, tokens of each expert in each step.
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    share_RS
        float32 ``[R, S]``, fraction of its expert's tokens that each slot receives.
    curve_4
        float64 ``[4]``, a cost curve; see the module docstring.
    """
    ranks = phy2log_RS.shape[0]
    us_RN = np.empty((ranks, tokens_EN.shape[1]), dtype=np.float32)
    share_P = share_RS.ravel()
    for r in range(ranks):
        _sum_rank(phy2log_RS, share_P, tokens_EN, curve_4, r, us_RN[r])
    return us_RN


def mean_slowest(
    tokens_EN: Float32, weight_N: Float32, phy2log_RS: Int32, share_RS: Float32, curve_4: Float64
) -> float:
    """Return the weighted mean over the steps of the slowest rank's time, including the floor, in microseconds.

    Parameters
    ----------
    tokens_EN
        float32 ``[E, N]``, tokens of each expert in each step.
    weight_N
        float32 ``[N]``, weights of the steps.
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    share_RS
        float32 ``[R, S]``, fraction of its expert's tokens that each slot receives.
    curve_4
        float64 ``[4]``, a cost curve; see the module docstring.
    """
    us_RN = rank_us(tokens_EN, phy2log_RS, share_RS, curve_4)
    return float(curve_4[0] + (us_RN.max(axis=0) * weight_N).sum(dtype=np.float64))


@kernel
def split_us(tokens_EN: Float32, replicas_E: Int32, curve_4: Float64) -> Float32:
    """Return the total time of each expert's replicas under an even split, in microseconds, float32 ``[E, N]``.

    Parameters
    ----------
    tokens_EN
        float32 ``[E, N]``, tokens of each expert in each step.
    replicas_E
        int32 ``[E]``, replica count of each expert.
    curve_4
        float64 ``[4]``, a cost curve; see the module docstring.
    """
    read = np.float32(curve_4[1])
    launch = np.float32(curve_4[2])
    slope = np.float32(curve_4[3])
    us_EN = np.empty_like(tokens_EN)
    for e in range(us_EN.shape[0]):
        count = np.float32(replicas_E[e])
        for n in range(us_EN.shape[1]):
            us_EN[e, n] = count * _slot_us(tokens_EN[e, n] / count, read, launch, slope)
    return us_EN


def replica_counts_to_try(
    tokens_EN: Float32, weight_N: Float32, curve_4: Float64, ranks: int, slots: int, z: float
) -> list[Int32]:
    """Return replica counts to try, each int32 ``[E]``, fewest replicas first.

    The counts may sum to less than the number of slots. The remaining slots get no tokens.

    Parameters
    ----------
    tokens_EN
        float32 ``[E, N]``, tokens of each expert in each step.
    weight_N
        float32 ``[N]``, weights of the steps.
    curve_4
        float64 ``[4]``, a cost curve; see the module docstring.
    ranks
        Number of ranks.
    slots
        Slots per rank.
    z
        Weight of the standard deviation in a slot's time.
    """
    experts = tokens_EN.shape[0]
    receiver_B = _replica_receivers(tokens_EN, weight_N, curve_4, ranks, ranks * slots - experts, z)
    counts = sorted({round(part * receiver_B.size) for part in _STAGES})
    return [(1 + np.bincount(receiver_B[:count], minlength=experts)).astype(np.int32) for count in counts]


def with_all_slots_used(
    tokens_EN: Float32, weight_N: Float32, curve_4: Float64, replicas_E: Int32, ranks: int, slots: int
) -> Int32:
    """Return replica counts that fill all slots, adding replicas to the experts whose total time grows least.

    This is for hosts that send tokens to every replica.

    Parameters
    ----------
    tokens_EN
        float32 ``[E, N]``, tokens of each expert in each step.
    weight_N
        float32 ``[N]``, weights of the steps.
    curve_4
        float64 ``[4]``, a cost curve; see the module docstring.
    replicas_E
        int32 ``[E]``, replica counts to start from. They are not changed.
    ranks
        Number of ranks.
    slots
        Slots per rank.
    """
    replicas_E = replicas_E.copy()
    left = ranks * slots - int(replicas_E.sum())
    _fill_cheaply(tokens_EN, weight_N, curve_4, replicas_E, ranks, left)
    return replicas_E


@kernel
def _replica_receivers(
    tokens_EN: Float32, weight_N: Float32, curve_4: Float64, ranks: int, budget: int, z: float
) -> Int32:
    """Return the experts that each get an additional replica, in this order, int32 ``[B]``.

    There are fewer than ``budget`` entries if no further replica helps.
    """
    experts = tokens_EN.shape[0]
    replicas_E = np.ones(experts, dtype=np.int32)
    us_E = np.empty(experts, dtype=np.float32)
    next_E = np.empty(experts, dtype=np.float32)
    for e in range(experts):
        us_E[e] = _slot_risk(tokens_EN, weight_N, curve_4, e, 1, z)
        next_E[e] = _slot_risk(tokens_EN, weight_N, curve_4, e, 2, z)
    receiver_B = np.empty(budget, dtype=np.int32)
    for given in range(budget):
        receiver = -1
        for e in range(experts):
            helps = replicas_E[e] < ranks and next_E[e] < np.float32(_SHORTER) * us_E[e]
            if helps and (receiver < 0 or us_E[e] > us_E[receiver]):
                receiver = e
        if receiver < 0:
            helped_B: Int32 = receiver_B[:given].copy()
            return helped_B
        receiver_B[given] = receiver
        replicas_E[receiver] += 1
        us_E[receiver] = next_E[receiver]
        next_E[receiver] = _slot_risk(tokens_EN, weight_N, curve_4, receiver, replicas_E[receiver] + 1, z)
    return receiver_B


@kernel
def _fill_cheaply(
    tokens_EN: Float32, weight_N: Float32, curve_4: Float64, replicas_E: Int32, ranks: int, budget: int
) -> None:
    """Add ``budget`` replicas in place, each to the expert whose total time grows least."""
    experts = replicas_E.shape[0]
    added_E = np.empty(experts, dtype=np.float32)
    for e in range(experts):
        added_E[e] = _added_us(tokens_EN, weight_N, curve_4, e, replicas_E[e])
    for _ in range(budget):
        receiver = -1
        for e in range(experts):
            if replicas_E[e] < ranks and (receiver < 0 or added_E[e] < added_E[receiver]):
                receiver = e
        replicas_E[receiver] += 1
        added_E[receiver] = _added_us(tokens_EN, weight_N, curve_4, receiver, replicas_E[receiver])


@kernel
def _added_us(tokens_EN: Float32, weight_N: Float32, curve_4: Float64, expert: int, replicas: int) -> float:
    """Return the mean time that an additional replica adds to the total of an expert's replicas, in microseconds."""
    more = np.float32(replicas + 1) * _slot_risk(tokens_EN, weight_N, curve_4, expert, replicas + 1, 0.0)
    added: float = more - np.float32(replicas) * _slot_risk(
        tokens_EN, weight_N, curve_4, expert, replicas, 0.0
    )
    return added


@kernel
def _slot_risk(
    tokens_EN: Float32, weight_N: Float32, curve_4: Float64, expert: int, replicas: int, z: float
) -> float:
    """Return mean + z*std of the time of one of an expert's ``replicas`` replicas, in microseconds."""
    read = np.float32(curve_4[1])
    launch = np.float32(curve_4[2])
    slope = np.float32(curve_4[3])
    mean = np.float32(0.0)
    squares = np.float32(0.0)
    for n in range(weight_N.shape[0]):
        us = _slot_us(tokens_EN[expert, n] / np.float32(replicas), read, launch, slope)
        mean += weight_N[n] * us
        squares += weight_N[n] * us * us
    found: float = mean + np.float32(z) * np.sqrt(max(squares - mean * mean, np.float32(0.0)))
    return found


def even_tables(first_E1: Int32, slot_P: Int32, share_GE: Float32) -> Int32:
    """Return tables that split the sources as evenly as possible over the given replicas, int32 ``[G, E]``.

    Sources are assigned in order of decreasing share, each to the replica with the fewest tokens so far.

    Parameters
    ----------
    first_E1
        int32 ``[E + 1]``, start of each expert's replicas in ``slot_P``.
    slot_P
        int32, physical ids of the replicas to use, grouped by expert.
    share_GE
        float32 ``[G, E]``, fraction of each expert's tokens that comes from each source.
    """
    return _even_tables(first_E1, slot_P, share_GE, largest_first(np.ascontiguousarray(share_GE.T)))


@kernel
def _even_tables(first_E1: Int32, slot_P: Int32, share_GE: Float32, order_EG: Int32) -> Int32:
    """Return ``even_tables``, given the sources of each expert in the order of assignment, int32 ``[E, G]``."""
    chosen_GE = np.empty(share_GE.shape, dtype=np.int32)
    part_P = np.zeros(slot_P.shape[0], dtype=np.float32)
    for e in range(share_GE.shape[1]):
        for g in order_EG[e]:
            emptiest = first_E1[e]
            for place in range(first_E1[e], first_E1[e + 1]):
                if part_P[place] < part_P[emptiest]:
                    emptiest = place
            part_P[emptiest] += share_GE[g, e]
            chosen_GE[g, e] = slot_P[emptiest]
    return chosen_GE


def one_replica_each(phy2log_RS: Int32, experts: int, us_E: Float32) -> Bool:
    """Choose one replica of each expert to use, and return the choice, bool ``[R, E]``.

    Experts are processed in order of decreasing time. Each uses its replica on the rank with the least time so far.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    experts
        Number of experts.
    us_E
        float32 ``[E]``, mean time of each expert with a single replica, in microseconds.
    """
    ranks = len(phy2log_RS)
    used_RE = np.zeros((ranks, experts), dtype=np.bool_)
    us_R = np.zeros(ranks)
    for e in descending(us_E):
        holders_K = np.flatnonzero((phy2log_RS == e).any(axis=1))
        least = holders_K[us_R[holders_K].argmin()]
        used_RE[least, e] = True
        us_R[least] += us_E[e]
    return used_RE


@kernel
def cool_tables(
    phy2log_RS: Int32,
    chosen_GE: Int32,
    tokens_EN: Float32,
    weight_N: Float32,
    share_GE: Float32,
    curve_4: Float64,
    most_moves: int,
) -> None:
    """Move sources off the slowest ranks as long as this lowers the mean time.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    chosen_GE
        int32 ``[G, E]``, tables, updated in place.
    tokens_EN
        float32 ``[E, N]``, tokens of each expert in each step.
    weight_N
        float32 ``[N]``, weights of the steps.
    share_GE
        float32 ``[G, E]``, fraction of each expert's tokens that comes from each source.
    curve_4
        float64 ``[4]``, a cost curve; see the module docstring.
    most_moves
        Maximum number of attempted moves.
    """
    ranks, slots = phy2log_RS.shape
    share_P = slot_shares(phy2log_RS, chosen_GE, share_GE).ravel()
    tops = top_ranks_of(rank_us(tokens_EN, phy2log_RS, share_P.reshape(ranks, slots), curve_4))
    changed_RN = np.zeros_like(tops.load_RN)
    changed_R1 = np.zeros(ranks + 1, dtype=np.bool_)
    rank_K = np.zeros(2, dtype=np.int32)
    stuck_R = np.zeros(ranks, dtype=np.bool_)
    stuck = 0
    for _ in range(most_moves):
        hot = _slowest(tops, weight_N, stuck_R)
        now = _mean_top(tops, weight_N)
        own, other, g, found = _best_move(
            phy2log_RS, chosen_GE, tokens_EN, weight_N, share_GE, share_P, tops, curve_4, hot, changed_RN
        )
        if own < 0 or found >= now * (1 - _MIN_GAIN):
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
            _sum_rank(phy2log_RS, share_P, tokens_EN, curve_4, rank, changed_RN[rank])
        update_loads(tops, rank_K, 2, changed_R1, changed_RN)
        changed_R1[:] = False
        stuck_R[:] = False
        stuck = 0


@kernel
def _sum_rank(
    phy2log_RS: Int32, share_P: Float32, tokens_EN: Float32, curve_4: Float64, rank: int, us_N: Float32
) -> None:
    """Write the time of one rank in each step, in microseconds and without the floor, into ``us_N``."""
    slots = phy2log_RS.shape[1]
    read = np.float32(curve_4[1])
    launch = np.float32(curve_4[2])
    slope = np.float32(curve_4[3])
    us_N[:] = 0
    for s in range(slots):
        tokens_N = tokens_EN[phy2log_RS[rank, s]]
        share = share_P[rank * slots + s]
        for n in range(us_N.shape[0]):
            us_N[n] += _slot_us(share * tokens_N[n], read, launch, slope)


@kernel
def _slowest(tops: TopRanks, weight_N: Float32, stuck_R: Bool) -> int:
    """Return the rank that is most often the slowest, among those that are not stuck."""
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
    """Return the slowest rank's mean time, float32."""
    total = np.float32(0.0)
    for n in range(weight_N.shape[0]):
        total += weight_N[n] * tops.peak_KN[0, n]
    mean: float = total
    return mean


@kernel
def _best_move(
    phy2log_RS: Int32,
    chosen_GE: Int32,
    tokens_EN: Float32,
    weight_N: Float32,
    share_GE: Float32,
    share_P: Float32,
    tops: TopRanks,
    curve_4: Float64,
    hot: int,
    changed_RN: Float32,
) -> tuple[int, int, int, float]:
    """Find the best move of one source, or of all sources of a slot, from ``hot`` to a different rank.

    Returns the old slot, the new slot, the source (-1 for all sources of the slot) and the slowest rank's mean time
    after the move. If no used expert on ``hot`` has a replica elsewhere, the first three are -1.
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
                    _note_move(
                        tokens_EN[expert], tops, curve_4, slots, own, other, share_P, left, moved, changed_RN
                    )
                    found = peak_of_two_changed(tops, weight_N, hot, r, changed_RN[hot], changed_RN[r])
                    if found < lowest:
                        lowest = found
                        best = (own, other, g)
    return best[0], best[1], best[2], lowest


@part
def _note_move(
    tokens_N: Float32,
    tops: TopRanks,
    curve_4: Float64,
    slots: int,
    own: int,
    other: int,
    share_P: Float32,
    left: float,
    moved: float,
    changed_RN: Float32,
) -> None:
    """Write the times of both ranks after a move into ``changed_RN``.

    Slot ``own`` keeps the share ``left``, and the share of slot ``other`` grows by ``moved``.
    """
    read = np.float32(curve_4[1])
    launch = np.float32(curve_4[2])
    slope = np.float32(curve_4[3])
    here = own // slots
    there = other // slots
    for n in range(tokens_N.shape[0]):
        tokens = tokens_N[n]
        mine = tops.load_RN[here, n] - _slot_us(share_P[own] * tokens, read, launch, slope)
        changed_RN[here, n] = mine + _slot_us(left * tokens, read, launch, slope)
        theirs = tops.load_RN[there, n] - _slot_us(share_P[other] * tokens, read, launch, slope)
        changed_RN[there, n] = theirs + _slot_us((share_P[other] + moved) * tokens, read, launch, slope)
