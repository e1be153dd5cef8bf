"""Adaptation of a new placement to the current layout and the nodes, to reduce moves and traffic between nodes.

- ``match_ranks``: load balance does not depend on which rank holds which set of experts, so the sets of a placement
  solved from scratch can be assigned to the ranks that already hold most of their experts.
- ``keep_slots``: an expert that stays on a rank keeps its slot.
- ``choose_senders``: each move gets a sender that is near the receiver and has little else to send.
- ``localised``: tables prefer replicas on the source's node if that does not raise the peak load.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.construction import descending
from eplb_core.solver.evaluation import (
    MIN_GAIN,
    TopRanks,
    loads_in_episodes,
    mean_peak,
    peak_of_two_changed,
    top_ranks_of,
    update_loads,
)
from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import (
    CHOSEN,
    EVEN,
    STEPWISE,
    Candidate,
    Episodes,
    Float32,
    Int32,
    LayerLayout,
    SearchParams,
    set_row,
)
from eplb_core.solver.tables import TablesByExpert, slot_shares, slots_by_expert, tables_par

_ROUNDING = 1e-6
"""Maximum increase in the mean peak that counts as a rounding error. For example, exchanging two equal shares changes
no load."""
_SWEEPS = 2
"""Number of passes over all experts. A share that moves to its home node makes room for others, which the next pass can
use. A third pass gains almost nothing."""


@kernel
def choose_senders(deployed_RS: Int32, phy2log_RS: Int32, node_R: Int32) -> Int32:
    """Choose a sender for each move.

    Every rank that holds the expert can send it. Ranks on the receiver's node are preferred, then ranks with the fewest
    sends so far, then the lowest rank.

    Parameters
    ----------
    deployed_RS
        int32 ``[R, S]``, current placement.
    phy2log_RS
        int32 ``[R, S]``, new placement.
    node_R
        int32 ``[R]``, node of each rank.

    Returns
    -------
    Int32
        int32 ``[M, 5]``, one row per move, ordered by destination: source rank, source slot, destination rank,
        destination slot, expert.

    Examples
    --------
    Slot 1 of rank 0 receives expert 2, which only rank 1 holds, in slot 0:

    >>> current_RS = np.array([[0, 1], [2, 1]], dtype=np.int32)
    >>> choose_senders(current_RS, np.array([[0, 2], [2, 1]], dtype=np.int32), np.zeros(2, dtype=np.int32))
    array([[1, 0, 0, 1, 2]], dtype=int32)
    """
    ranks, slots = deployed_RS.shape
    # There are at most as many experts as slots.
    first_E1, slot_P = slots_by_expert(deployed_RS, ranks * slots)
    sent_R = np.zeros(ranks, dtype=np.int32)
    move_M5 = np.empty((ranks * slots, 5), dtype=np.int32)
    moves = 0
    for r in range(ranks):
        for s in range(slots):
            expert = phy2log_RS[r, s]
            if expert == deployed_RS[r, s]:
                continue
            holder_K = slot_P[first_E1[expert] : first_E1[expert + 1]]
            sender = holder_K[0]
            for holder in holder_K[1:]:
                is_near = node_R[holder // slots] == node_R[r]
                sender_is_near = node_R[sender // slots] == node_R[r]
                sends_less = sent_R[holder // slots] < sent_R[sender // slots]
                if (is_near and not sender_is_near) or (is_near == sender_is_near and sends_less):
                    sender = holder
            sent_R[sender // slots] += 1
            move_M5[moves, 0] = sender // slots
            move_M5[moves, 1] = sender % slots
            move_M5[moves, 2] = r
            move_M5[moves, 3] = s
            move_M5[moves, 4] = expert
            moves += 1
    filled_M5: Int32 = move_M5[:moves].copy()
    return filled_M5


@kernel
def match_ranks(phy2log_RS: Int32, deployed_RS: Int32, experts: int, node_R: Int32) -> Int32:
    """Assign the rows of a placement to ranks greedily, starting with the pairs that share the most experts.

    Among pairs with equal overlap, the one whose node holds most of the row's experts comes first, so that moves stay
    within a node.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, placement whose rows are to be assigned.
    deployed_RS
        int32 ``[R, S']``, current placement; it may have a different number of slots per rank.
    experts
        Number of logical experts.
    node_R
        int32 ``[R]``, node of each rank, numbered from 0.

    Returns
    -------
    Int32
        int32 ``[R, S]``, the same rows in rank order.

    Examples
    --------
    The row with experts 2 and 3 goes to rank 0, which already holds them:

    >>> current_RS = np.array([[2, 3], [0, 1]], dtype=np.int32)
    >>> match_ranks(np.array([[0, 4], [3, 2]], dtype=np.int32), current_RS, 5, np.zeros(2, dtype=np.int32))
    array([[3, 2],
           [0, 4]], dtype=int32)
    """
    ranks, slots = phy2log_RS.shape
    score_RR = _match_scores(phy2log_RS, deployed_RS, experts, node_R)
    occurs_C = np.zeros((slots + 1) ** 2, dtype=np.bool_)
    # The rows and the ranks that are still unassigned, both in ascending order.
    row_U = np.empty(ranks, dtype=np.int32)
    rank_U = np.empty(ranks, dtype=np.int32)
    for row in range(ranks):
        row_U[row] = row
        rank_U[row] = row
        for r in range(ranks):
            occurs_C[score_RR[row, r]] = True
    matched_RS = np.empty_like(phy2log_RS)
    assigned_R = np.zeros(ranks, dtype=np.bool_)
    for score in range(occurs_C.shape[0] - 1, -1, -1):
        if not occurs_C[score]:
            continue
        remaining_rows = 0
        remaining_ranks = 0
        for pending_row in row_U:
            is_assigned = False
            for rank in rank_U:
                if score_RR[pending_row, rank] == score and not assigned_R[rank]:
                    set_row(matched_RS[rank], phy2log_RS[pending_row])
                    assigned_R[rank] = True
                    is_assigned = True
                    break
            if not is_assigned:
                row_U[remaining_rows] = pending_row
                remaining_rows += 1
        for rank in rank_U:
            if not assigned_R[rank]:
                rank_U[remaining_ranks] = rank
                remaining_ranks += 1
        row_U = row_U[:remaining_rows]
        rank_U = rank_U[:remaining_ranks]
    return matched_RS


@part
def _match_scores(phy2log_RS: Int32, deployed_RS: Int32, experts: int, node_R: Int32) -> Int32:
    """Score how well each row of a placement fits each rank, int32 ``[R, R]``.

    The number of the row's experts that the rank holds counts most, then the number that its node holds.
    """
    ranks, slots = phy2log_RS.shape
    # At most ``slots`` of a row's experts are elsewhere on the rank's node, so a single expert on the rank outweighs
    # them.
    worth_ER = np.zeros((experts, ranks), dtype=np.int32)
    nodes = 0
    for node in node_R:
        nodes = max(nodes, node + 1)
    node_holds_KE = np.zeros((nodes, experts), dtype=np.bool_)
    for r in range(ranks):
        for expert in deployed_RS[r]:
            worth_ER[expert, r] = slots + 1
            node_holds_KE[node_R[r], expert] = True
    for e in range(experts):
        for r in range(ranks):
            worth_ER[e, r] += node_holds_KE[node_R[r], e]
    score_RR = np.zeros((ranks, ranks), dtype=np.int32)
    for row in range(ranks):
        for expert in phy2log_RS[row]:
            for r in range(ranks):
                score_RR[row, r] += worth_ER[expert, r]
    return score_RR


@kernel
def keep_slots(phy2log_RS: Int32, deployed_RS: Int32) -> tuple[Int32, int]:
    """Reorder each rank's slots so that experts that stay on the rank keep their current slots.

    Returns
    -------
    tuple of Int32 and int
        The placement, int32 ``[R, S]``, and the number of moves: slots whose expert has changed.

    Examples
    --------
    Expert 1 stays in slot 1, and expert 2 gets the slot that expert 0 vacates:

    >>> keep_slots(np.array([[1, 2]], dtype=np.int32), np.array([[0, 1]], dtype=np.int32))
    (array([[2, 1]], dtype=int32), 1)
    """
    ranks, slots = phy2log_RS.shape
    kept_RS = np.full((ranks, slots), -1, dtype=np.int32)
    moves = 0
    for r in range(ranks):
        for s in range(slots):
            for t in range(slots):
                if phy2log_RS[r, t] == deployed_RS[r, s]:
                    kept_RS[r, s] = deployed_RS[r, s]
        free = 0
        for t in range(slots):
            is_new = True
            for s in range(slots):
                if kept_RS[r, s] == phy2log_RS[r, t] and deployed_RS[r, s] == phy2log_RS[r, t]:
                    is_new = False
            if is_new:
                while kept_RS[r, free] >= 0:
                    free += 1
                kept_RS[r, free] = phy2log_RS[r, t]
                moves += 1
    return kept_RS, moves


class _RoutedLoads(NamedTuple):
    """Tables with the resulting rank loads. All arrays except the shares and the heat are updated in place."""

    tables: TablesByExpert
    heat: Episodes
    top: TopRanks
    """Rank loads under the tables."""
    first_P: Int32
    """int32 ``[P]``, first source of each slot, for the slots of one expert; see ``_list_sources``."""
    next_G: Int32
    """int32 ``[G]``, next source with the same slot."""
    changed_RN: Float32
    """float32 ``[R + 1, N]``, loads of the ranks that a change would alter. The last row remains zero."""


def _routed_loads(
    phy2log_RS: Int32, log2phy_GE: Int32, heat: Episodes, deployed: LayerLayout
) -> _RoutedLoads:
    """Return a copy of the tables, int32 ``[G, E]``, with the resulting rank loads and empty source lists."""
    sources, experts = log2phy_GE.shape
    share_RS = slot_shares(phy2log_RS, log2phy_GE, deployed.share_GE)
    load_RN = loads_in_episodes(phy2log_RS, share_RS, heat.scaled_EN)
    chosen_EG = np.array(log2phy_GE.T, order="C")
    share_EG = np.ascontiguousarray(deployed.share_GE.T)
    first_E1, slot_P = slots_by_expert(phy2log_RS, experts)
    return _RoutedLoads(
        TablesByExpert(chosen_EG, share_EG, first_E1, slot_P),
        heat,
        top_ranks_of(load_RN),
        np.full(slot_P.size, -1, dtype=np.int32),
        np.empty(sources, dtype=np.int32),
        np.zeros((len(load_RN) + 1, load_RN.shape[1]), dtype=np.float32),
    )


@kernel
def _localise_tables(routed: _RoutedLoads, deployed: LayerLayout, pair_X2: Int32, limit: float) -> None:
    """Redirect sources to replicas on their own nodes, one at a time, as chosen by ``_best_home_slot``.

    Parameters
    ----------
    routed
        Tables and loads, changed in place.
    deployed
        Current layout, for the nodes of ranks and sources.
    pair_X2
        int32 ``[X, 2]``, pairs of expert and source to redirect, in the order returned by ``_pairs_with_home``.
    limit
        Upper bound on the mean peak: its value before the first change.
    """
    ranks, slots = deployed.phy2log_RS.shape
    tables, heat, top, first_P, next_G, changed_RN = routed
    chosen_EG = tables.chosen_EG
    share_EG = tables.share_EG
    changed_R1 = np.zeros(ranks + 1, dtype=np.bool_)
    rank_K = np.zeros(2, dtype=np.int32)
    for _ in range(_SWEEPS):
        listed_expert = -1
        for e, g in pair_X2:
            old_slot = chosen_EG[e, g]
            if deployed.node_R[old_slot // slots] == deployed.node_G[g]:
                continue
            if e != listed_expert:
                listed_expert = e
                _list_sources(chosen_EG[e], first_P, next_G)
            new_slot, partner = _best_home_slot(routed, deployed, e, g, limit)
            if new_slot < 0:
                continue
            shifted = share_EG[e, g]
            chosen_EG[e, g] = new_slot
            _relist(first_P, next_G, g, old_slot, new_slot)
            if partner >= 0:
                shifted = shifted - share_EG[e, partner]
                chosen_EG[e, partner] = old_slot
                _relist(first_P, next_G, partner, new_slot, old_slot)
            rank_K[0] = old_slot // slots
            rank_K[1] = new_slot // slots
            changed_R1[rank_K[0]] = True
            changed_R1[rank_K[1]] = True
            _shift(top, heat.scaled_EN[e], shifted, rank_K[0], rank_K[1], changed_RN)
            update_loads(top, rank_K, 2, changed_R1, changed_RN)
            changed_R1[rank_K[0]] = False
            changed_R1[rank_K[1]] = False


@part
def _list_sources(near_G: Int32, first_P: Int32, next_G: Int32) -> None:
    """Build a linked list of each slot's sources, in ascending order.

    ``first_P`` is the first source of each slot. ``next_G`` is the source that follows each source in its list. The
    value -1 marks the end of a list.
    """
    for g in range(near_G.shape[0]):
        first_P[near_G[g]] = -1
    for g in range(near_G.shape[0] - 1, -1, -1):
        next_G[g] = first_P[near_G[g]]
        first_P[near_G[g]] = g


@part
def _relist(first_P: Int32, next_G: Int32, source: int, old_slot: int, new_slot: int) -> None:
    """Move a source from one slot's list to another's, keeping both in ascending order."""
    before = -1
    at = first_P[old_slot]
    while at != source:
        before = at
        at = next_G[at]
    if before < 0:
        first_P[old_slot] = next_G[source]
    else:
        next_G[before] = next_G[source]
    before = -1
    at = first_P[new_slot]
    while 0 <= at < source:
        before = at
        at = next_G[at]
    next_G[source] = at
    if before < 0:
        first_P[new_slot] = source
    else:
        next_G[before] = source


def _pairs_with_home(phy2log_RS: Int32, heat: Episodes, deployed: LayerLayout) -> Int32:
    """Return the pairs of expert and source that have tokens and a replica on the source's node.

    Returns
    -------
    Int32
        int32 ``[X, 2]``, expert and source, in order of decreasing expert heat, then decreasing share.
    """
    share_GE = deployed.share_GE
    mean_E = heat.scaled_EN @ heat.share_N
    # A source on several nodes has node -1 and so reads the last row, which is empty.
    holds_KE = np.zeros((deployed.node_R.max() + 2, share_GE.shape[1]), dtype=np.bool_)
    holds_KE[deployed.node_R[:, None], phy2log_RS] = True
    order_E = descending(mean_E)
    home_GE = holds_KE[deployed.node_G]
    home_GE &= share_GE * mean_E > MIN_GAIN
    # Indexing only the pairs with a home is faster because, with many nodes, each node holds few experts.
    position_X, source_X = home_GE.T[order_E].nonzero()
    expert_X = order_E[position_X]
    order_X = np.lexsort((-share_GE[source_X, expert_X], position_X))
    return np.stack([expert_X, source_X], axis=1)[order_X].astype(np.int32)


@kernel
def _best_home_slot(
    routed: _RoutedLoads, deployed: LayerLayout, expert: int, source: int, limit: float
) -> tuple[int, int]:
    """Find the replica on a source's node that leads to the lowest mean peak.

    Either only the source's share moves there, or it is exchanged for the share of a partner, a source that currently
    uses the replica. A partner must be on a different node than the replica.

    Parameters
    ----------
    routed
        Tables and loads, with the sources of ``expert`` listed.
    deployed
        Current layout, for the nodes of ranks and sources.
    expert
        Expert whose tokens are redirected.
    source
        Source to redirect.
    limit
        Upper bound on the mean peak.

    Returns
    -------
    new_slot : int
        The replica's slot; -1 if every choice raises the mean peak above ``limit``.
    partner : int
        The source that gets the old slot in exchange; -1 for none.
    """
    tables, heat, top, first_P, next_G, changed_RN = routed
    ranks, slots = deployed.phy2log_RS.shape
    share_G = tables.share_EG[expert]
    home = deployed.node_G[source]
    old_rank = tables.chosen_EG[expert, source] // slots
    empty_N = changed_RN[ranks]
    new_slot = -1
    partner = -1
    lowest = np.float32(limit)
    for replica in tables.slot_P[tables.first_E1[expert] : tables.first_E1[expert + 1]]:
        new_rank = replica // slots
        if deployed.node_R[new_rank] != home:
            continue
        # Shares outside the range from ``low`` to ``high`` cannot be better than the best share so far.
        low = np.float32(-np.inf)
        high = np.float32(np.inf)
        best_shift = low
        best_peak = high
        # The mean peak of the remaining ranks is a lower bound on that of every choice.
        floor = peak_of_two_changed(top, heat.share_N, old_rank, new_rank, empty_N, empty_N)
        # First try moving only the share, then exchanging it with each source that uses the replica.
        g = -1
        next_source = first_P[replica]
        while True:
            shifted = share_G[source] - (share_G[g] if g >= 0 else np.float32(0.0))
            if low < shifted < high and (g < 0 or deployed.node_G[g] != home):
                _shift(top, heat.scaled_EN[expert], shifted, old_rank, new_rank, changed_RN)
                peak = peak_of_two_changed(
                    top, heat.share_N, old_rank, new_rank, changed_RN[old_rank], changed_RN[new_rank]
                )
                low, high, best_shift, best_peak = _narrowed(low, high, best_shift, best_peak, shifted, peak)
                if peak < lowest:
                    new_slot = np.int64(replica)
                    partner = g
                    lowest = peak
            if next_source < 0 or best_peak <= floor:
                break
            g = next_source
            next_source = next_G[next_source]
    return new_slot, partner


@part
def _narrowed(
    low: float, high: float, best_shift: float, best_peak: float, shift: float, peak: float
) -> tuple[float, float, float, float]:
    """Return the range from ``low`` to ``high`` and its best shift and peak after one more shift has been tried.

    The mean peak is convex in the share that changes ranks, so no shift beyond the worse of two tried shifts can be the
    best.
    """
    worse_shift = shift
    if peak < best_peak:
        worse_shift = best_shift
        best_shift = shift
        best_peak = peak
    if worse_shift < best_shift:
        low = worse_shift
    else:
        high = worse_shift
    return low, high, best_shift, best_peak


@part
def _shift(
    top: TopRanks, heat_N: Float32, share: float, old_rank: int, new_rank: int, changed_RN: Float32
) -> None:
    """Compute both ranks' loads after a move of the fraction ``share`` of an expert's tokens.

    The loads are written to ``changed_RN``.
    """
    for n in range(heat_N.shape[0]):
        changed_RN[old_rank, n] = top.load_RN[old_rank, n] - share * heat_N[n]
        changed_RN[new_rank, n] = top.load_RN[new_rank, n] + share * heat_N[n]


def localised(candidate: Candidate, heat: Episodes, deployed: LayerLayout, params: SearchParams) -> Candidate:
    """Return the candidate with tables that keep more tokens on their source's node without raising the PAR.

    With a single node, or if the solver does not choose the tables, the candidate is returned unchanged.

    Parameters
    ----------
    candidate
        Placement with its tables.
    heat
        Heat on which the PAR must not rise.
    deployed
        Current layout, with the nodes of ranks and sources.
    params
        Search parameters. Only ``tables`` is used.
    """
    if params.tables not in CHOSEN or not deployed.node_R.any():
        return candidate
    placed_RS = candidate.phy2log_RS
    routed = _routed_loads(placed_RS, candidate.log2phy_GE, heat, deployed)
    limit = mean_peak(routed.top.peak_KN[0], heat.share_N) + _ROUNDING
    _localise_tables(routed, deployed, _pairs_with_home(placed_RS, heat, deployed), limit)
    near_GE = np.ascontiguousarray(routed.tables.chosen_EG.T)
    after = tables_par(placed_RS, near_GE, heat, deployed.share_GE)
    return candidate._replace(log2phy_GE=near_GE, par=after)


def crossing_share(candidate: Candidate, heat: Episodes, deployed: LayerLayout, tables: int) -> float:
    """Return the fraction of the tokens that leave their source's node.

    It is 0 on a single node and for splits without tables. Tokens from a source that spans several nodes never count as
    leaving, because they are present on each of its nodes.

    Parameters
    ----------
    candidate
        Placement with its tables.
    heat
        Heat of the layer.
    deployed
        Current layout, with the nodes of ranks and sources.
    tables
        Split of the tokens: ``EVEN``, ``RULE``, ``SOLVED``, ``DEALT`` or ``STEPWISE``.
    """
    if tables in (EVEN, STEPWISE) or not deployed.node_R.any():
        return 0.0
    node_P = np.repeat(deployed.node_R, candidate.phy2log_RS.shape[1])
    return _leaving_share(candidate.log2phy_GE, node_P, heat.scaled_EN @ heat.share_N, deployed)


@kernel
def _leaving_share(log2phy_GE: Int32, node_P: Int32, mean_E: Float32, deployed: LayerLayout) -> float:
    """Return the fraction of the tokens that leave their source's node; ``node_P``, ``[P]``, is each slot's node."""
    leaving = total = 0.0
    for g in range(log2phy_GE.shape[0]):
        home = deployed.node_G[g]
        for e in range(log2phy_GE.shape[1]):
            tokens = deployed.share_GE[g, e] * mean_E[e]
            total += tokens
            if home >= 0 and node_P[log2phy_GE[g, e]] != home:
                leaving += tokens
    return leaving / max(total, 1e-30)
