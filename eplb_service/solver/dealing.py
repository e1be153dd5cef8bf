"""Dealing tables: which share of an expert's tokens each replica gets, and the entries that deal them out.

A dealing table has D entries for each expert, and a source's tokens go to them in turn; so to the rest of the solver
each entry is a source of its own, with its part of that source's tokens. V of them: entry ``k`` of source ``g`` is
``g*D + k``.

Shares come first: tokens move from replicas on the hottest rank to others as long as that cools it, at whatever share
does so best. They lean on the heat that they were fitted to, so a layer whose heat does not keep them up goes only a
part of the way from even shares (``trust``, which ``holdout`` chooses), or deals round its replicas. Then entries are
dealt out, each to the replica that is furthest behind its share: among all sources, so that the shares come true, and
among its own source's entries, so that each source deals as all do and even its first few tokens are spread. Last,
where shares are trusted, single entries move where that cools the hottest rank, and in small layers two at a time.

References
----------
R. Tijdeman, *The Chairman Assignment Problem*, 1980: of whose turn it is, so that everyone's share comes true at any
time.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.construction import Assignment, assignment_of, even_shares, hottest_rank, shift_load
from eplb_service.solver.evaluation import SMALLEST_GAIN, risk, smooth_max_of
from eplb_service.solver.jit import kernel
from eplb_service.solver.local_search import risk_of_both
from eplb_service.solver.model import Float32, Heat, Int32, Layer, SearchParams
from eplb_service.solver.tables import cool, fixed_rule, risk_with, slot_shares, slots_by_expert, tables_par

_HALVINGS = 12
"""Bisections for the share that two ranks are equally hot at: to a 4096th of what there is to move."""
_FEW_CELLS = 4096
"""Entries x slots of a layer up to which pairs of moves take a millisecond; larger ones have fine enough shares."""
_STEPS = 16
"""Shifts of a share for each slot at most; chosen by hand, few layers need a quarter of it."""


def solve_dealing(phy2log_RS: Int32, layer: Layer, params: SearchParams) -> tuple[Int32, float]:
    """Choose every source's entries; never worse on this heat than dealing round the replicas."""
    heat, deployed = layer
    share_VE = deployed.share_GE
    first_E1, slot_P = slots_by_expert(phy2log_RS, share_VE.shape[1])
    rule_VE = fixed_rule(first_E1, slot_P, share_VE.shape[0], params.width)
    rule_par = tables_par(phy2log_RS, rule_VE, heat, share_VE)
    if params.trust == 0:
        return rule_VE, rule_par
    even_RS = even_shares(phy2log_RS, share_VE.shape[1])
    assignment = assignment_of(phy2log_RS, even_RS, heat)
    _cool_shares(assignment, heat, first_E1, slot_P, params.z)
    trusted_P = _trusted_shares(assignment, even_RS, params.trust)
    chosen_VE = _deal_out(trusted_P, share_VE, first_E1, slot_P, params.width)
    if params.trust == 1:
        dealt_RS = slot_shares(phy2log_RS, chosen_VE, share_VE)
        assignment = assignment_of(phy2log_RS, dealt_RS, heat)
        cool(assignment, chosen_VE, first_E1, slot_P, heat, share_VE, params.z)
        if share_VE.shape[0] * phy2log_RS.size <= _FEW_CELLS:
            _cool_by_two(assignment, chosen_VE, first_E1, slot_P, heat, share_VE, params.z)
    chosen_par = tables_par(phy2log_RS, chosen_VE, heat, share_VE)
    return (chosen_VE, chosen_par) if chosen_par < rule_par else (rule_VE, rule_par)


@kernel
def _cool_shares(assignment: Assignment, heat: Heat, first_E1: Int32, slot_P: Int32, z: float) -> None:
    """Move shares off the hottest rank while that cools it; one that nothing cools waits until others have."""
    ranks, slots = assignment.phy2log_RS.shape
    stuck_R = np.zeros(ranks, dtype=np.bool_)
    for _ in range(_STEPS * ranks * slots):
        now = smooth_max_of(assignment.load_R, assignment.variance_R, z)
        hot = -1
        for r in range(ranks):
            if not stuck_R[r] and (hot < 0 or now.of_R[r] > now.of_R[hot]):
                hot = r
        if hot < 0:
            return
        hottest = risk(assignment.load_R[hot], assignment.variance_R[hot], z)
        expert, to, share, lowest = -1, -1, np.float32(0.0), np.float32(hottest - SMALLEST_GAIN)
        for s in range(slots):
            e = assignment.phy2log_RS[hot, s]
            if assignment.share_ER[e, hot] <= 0:
                continue
            for place in range(first_E1[e], first_E1[e + 1]):
                rank = slot_P[place] // slots
                if rank == hot or assignment.load_R[rank] >= lowest:
                    continue
                shifted, after = _levelled(assignment, heat, e, hot, rank, z)
                if after < lowest:
                    expert, to, share, lowest = e, rank, shifted, after
        if expert < 0:
            stuck_R[hot] = True
            continue
        shift_load(assignment, heat, expert, hot, -share)
        shift_load(assignment, heat, expert, to, share)
        stuck_R[:] = False


@kernel
def _levelled(
    assignment: Assignment, heat: Heat, expert: int, hot: int, rank: int, z: float
) -> tuple[float, float]:
    """The share of an expert that leaves ``hot`` and ``rank`` equally hot, or all of it; and how hot that is."""
    low, high = np.float32(0.0), assignment.share_ER[expert, hot]
    if risk_with(assignment, heat, expert, rank, high, z) <= risk_with(
        assignment, heat, expert, hot, -high, z
    ):
        low = high
    else:
        for _ in range(_HALVINGS):
            middle = np.float32(0.5) * (low + high)
            there = risk_with(assignment, heat, expert, rank, middle, z)
            if there <= risk_with(assignment, heat, expert, hot, -middle, z):
                low = middle
            else:
                high = middle
    here = risk_with(assignment, heat, expert, hot, -low, z)
    return low, max(here, risk_with(assignment, heat, expert, rank, low, z))


@kernel
def _trusted_shares(assignment: Assignment, even_RS: Float32, trust: float) -> Float32:
    """Share of each physical slot, so far on the way from even to what was found, float32 ``[R*S]``."""
    ranks, slots = even_RS.shape
    trusted_P = np.empty(ranks * slots, dtype=np.float32)
    for r in range(ranks):
        for s in range(slots):
            even = even_RS[r, s]
            found = assignment.share_ER[assignment.phy2log_RS[r, s], r]
            trusted_P[r * slots + s] = even + np.float32(trust) * (found - even)
    return trusted_P


@kernel
def _deal_out(share_P: Float32, share_VE: Float32, first_E1: Int32, slot_P: Int32, width: int) -> Int32:
    """Entries such that replicas get given shares of their expert's tokens.

    All first entries are dealt before all second ones, and among the sources each time another begins.
    """
    entries, experts = share_VE.shape
    sources = entries // width
    chosen_VE = np.empty((entries, experts), dtype=np.int32)
    behind_P = np.empty(share_P.shape[0], dtype=np.float32)
    own_GP = np.empty((sources, share_P.shape[0]), dtype=np.float32)
    for e in range(experts):
        first, after = first_E1[e], first_E1[e + 1]
        if first + 1 == after:
            for v in range(entries):
                chosen_VE[v, e] = slot_P[first]
            continue
        for place in range(first, after):
            behind_P[slot_P[place]] = 0
            for g in range(sources):
                own_GP[g, slot_P[place]] = 0
        for k in range(width):
            for turn in range(sources):
                g = (turn + k) % sources
                part = share_VE[g * width + k, e]
                # An entry without tokens is dealt as if it had a few: those that may come one day.
                part = max(part, np.float32(1e-6))
                chosen, most = -1, np.float32(-np.inf)
                for place in range(first, after):
                    p = slot_P[place]
                    behind_P[p] += part * share_P[p]
                    own_GP[g, p] += part * share_P[p]
                    if share_P[p] > 0 and behind_P[p] + own_GP[g, p] > most:
                        chosen, most = p, behind_P[p] + own_GP[g, p]
                behind_P[chosen] -= part
                own_GP[g, chosen] -= part
                chosen_VE[g * width + k, e] = chosen
    return chosen_VE


@kernel
def _cool_by_two(
    assignment: Assignment,
    chosen_VE: Int32,
    first_E1: Int32,
    slot_P: Int32,
    heat: Heat,
    share_VE: Float32,
    z: float,
) -> None:
    """Move an entry off the hottest rank and another one on from where it goes, while all three are cooler then.

    Single moves end where one entry is more than a rank has room for; two that follow each other differ by less.
    The work grows with the square of the entries.
    """
    ranks, slots = assignment.phy2log_RS.shape
    for _ in range(4 * ranks * slots):
        hot, hottest = hottest_rank(assignment, z)
        one, two = _best_two(assignment, chosen_VE, first_E1, slot_P, heat, share_VE, z, hot, hottest)
        if one[0] < 0:
            return
        for entry, expert, to in (one, two):
            share = share_VE[entry, expert]
            shift_load(assignment, heat, expert, chosen_VE[entry, expert] // slots, -share)
            shift_load(assignment, heat, expert, to // slots, share)
            chosen_VE[entry, expert] = to


@kernel
def _best_two(
    assignment: Assignment,
    chosen_VE: Int32,
    first_E1: Int32,
    slot_P: Int32,
    heat: Heat,
    share_VE: Float32,
    z: float,
    hot: int,
    hottest: float,
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The two moves of ``_cool_by_two`` that leave their ranks coolest; none where they do not cool the hottest."""
    slots = assignment.phy2log_RS.shape[1]
    entries = share_VE.shape[0]
    lowest = np.float32(hottest - SMALLEST_GAIN)
    one, two = (-1, -1, -1), (-1, -1, -1)
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
                        middle = risk_of_both(assignment, heat, rank, a, u, b, -x, z)
                        if middle >= lowest:
                            continue
                        for other in range(first_E1[b], first_E1[b + 1]):
                            last = slot_P[other] // slots
                            if last == rank:
                                continue
                            more = x if last == hot else np.float32(0.0)
                            after = max(middle, risk_of_both(assignment, heat, hot, a, -u, b, more, z))
                            if last != hot and after < lowest:
                                after = max(after, risk_with(assignment, heat, b, last, x, z))
                            if after < lowest:
                                lowest = after
                                one = (v, np.int64(a), np.int64(slot_P[place]))
                                two = (w, np.int64(b), np.int64(slot_P[other]))
    return one, two
