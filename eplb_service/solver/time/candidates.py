"""Candidates for a layer whose time is to be lowered: other tables, a placement improved, one from scratch.

The search is that of tokens, on other numbers: given how many replicas each expert uses, what it adds to a rank is
its slot's time in each step, and that is laid out and swapped like heat (``construction``, ``local_search``). A slot
without tokens is an expert that adds nothing. What comes of it is judged exactly (``evaluation``), through its
tables. ``Candidate.par`` here is the slowest rank's mean time over that of perfectly even ranks without replicas.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np

from eplb_service.solver.model import (
    EVEN,
    SOLVED,
    Bool,
    Candidate,
    Demand,
    Deployed,
    Float32,
    Float64,
    Int32,
    Layer,
    SearchParams,
    demand_of,
)
from eplb_service.solver.search.construction import Assignment, assignment_of, even_shares
from eplb_service.solver.search.local_search import local_search
from eplb_service.solver.search.tree_search import place
from eplb_service.solver.tables.log2phy import fixed_rule, slot_shares, slots_by_expert, solve_tables
from eplb_service.solver.time.evaluation import Curve, Steps, even_us, mean_slowest, rank_us, split_us
from eplb_service.solver.time.replicas import filled, stages
from eplb_service.solver.time.tables import cool_tables, even_tables, one_replica_each, used_slots
from eplb_service.solver.topology import keep_slots, match_ranks

_SEARCHED = 3
"""Replica counts whose greedy placement is searched further."""
_TABLE_MOVES = 256
"""Moves of sources after which tables are left as they are."""


class TimedLayer(NamedTuple):
    """One MoE layer whose time is to be lowered."""

    layer: Layer
    """The same for the balance of tokens."""
    steps: Steps
    curve: Curve
    even_us: float
    """Microseconds of perfectly even ranks without replicas."""

    @property
    def deployed(self) -> Deployed:
        """What serves now."""
        return self.layer.deployed


def timed(layer: Layer, steps: Steps, curve: Curve) -> TimedLayer:
    """The layer with the scale of its ratios."""
    return TimedLayer(layer, steps, curve, even_us(steps, curve, layer.deployed.phy2log_RS.shape[0]))


def time_ratio(phy2log_RS: Int32, log2phy_GE: Int32, timed: TimedLayer, tables: int) -> float:
    """The slowest rank's mean time over ``even_us``; 1.0 where there are no tokens."""
    share_GE = timed.deployed.share_GE
    if not timed.steps.weight_N.any():
        return 1.0
    if tables == EVEN:
        share_RS = even_shares(phy2log_RS, share_GE.shape[1])
    else:
        share_RS = slot_shares(phy2log_RS, log2phy_GE, share_GE)
    return mean_slowest(timed.steps, phy2log_RS, share_RS, timed.curve) / timed.even_us


def slowest_of_steps(candidate: Candidate, timed: TimedLayer, tables: int) -> Float32:
    """Microseconds of the slowest rank in each step that has tokens, the floor left out, float32 ``[N']``."""
    share_GE = timed.deployed.share_GE
    if tables == EVEN:
        share_RS = even_shares(candidate.phy2log_RS, share_GE.shape[1])
    else:
        share_RS = slot_shares(candidate.phy2log_RS, candidate.log2phy_GE, share_GE)
    us_RN = rank_us(timed.steps, candidate.phy2log_RS, share_RS, timed.curve)
    slowest_N: Float32 = us_RN.max(axis=0)[timed.steps.weight_N > 0]
    return slowest_N


def retabled(phy2log_RS: Int32, timed: TimedLayer, params: SearchParams) -> Candidate:
    """A complete placement, its experts in their deployed slots, with the tables that take least time.

    From two beginnings: one replica of each expert in use, and all of them as the balance of tokens has them.
    """
    deployed = timed.deployed
    kept_RS, moves = keep_slots(phy2log_RS, deployed.phy2log_RS)
    experts = deployed.share_GE.shape[1]
    if params.tables != SOLVED:
        log2phy_GE = fixed_rule(*slots_by_expert(kept_RS, experts), deployed.share_GE.shape[0], params.width)
        return Candidate(kept_RS, log2phy_GE, time_ratio(kept_RS, log2phy_GE, timed, params.tables), moves)
    heat = timed.layer.heat
    us_E = split_us(timed.steps, np.ones(experts, dtype=np.int32), timed.curve) @ timed.steps.weight_N
    alone_RE = one_replica_each(kept_RS, experts, us_E.astype(np.float32))
    beginnings = [
        even_tables(*used_slots(kept_RS, alone_RE), deployed.share_GE),
        solve_tables(kept_RS, heat.demand, heat.scaled_EN, heat.share_N, deployed.share_GE, params.z)[0],
    ]
    return min(
        (_cooled(kept_RS, log2phy_GE, timed, moves) for log2phy_GE in beginnings), key=attrgetter("par")
    )


def placed_for_time(timed: TimedLayer, params: SearchParams) -> list[Candidate]:
    """Placements from scratch for a few replica counts, dealt to the ranks so that much stays.

    All counts are placed greedily; the most promising ones are searched further.
    """
    ranks, slots = timed.deployed.phy2log_RS.shape
    begun: list[tuple[float, Assignment, Demand, Int32]] = []
    for replicas_E in stages(timed.steps, timed.curve, ranks, slots, params.z):
        if params.tables != SOLVED:
            replicas_E = filled(timed.steps, timed.curve, replicas_E, ranks, slots)
        demand, unused = _demand_in_time(timed, replicas_E)
        padded_E = np.concatenate([replicas_E, np.ones(unused, dtype=np.int32)])
        assignment = place(padded_E, demand, ranks, slots, params.z)
        begun.append((_greedy_us(assignment, replicas_E, timed), assignment, demand, replicas_E))
    begun.sort(key=lambda one: one[0])
    found = []
    for _, assignment, demand, replicas_E in begun[:_SEARCHED]:
        nowhere_ER = np.zeros_like(assignment.holds_ER)
        swapping = params._replace(exchanges=False)
        found_KRS, _ = local_search(assignment, demand, nowhere_ER, swapping, np.zeros(1))
        used_RE = _used(found_KRS[0], replicas_E.size)
        found.append(_served(_dealt(used_RE, timed), timed, params))
    return found


def improved_for_time(
    now: Candidate, timed: TimedLayer, params: SearchParams, price_K: Float64
) -> list[Candidate]:
    """Swaps from the deployed placement, one candidate for each price of a move; ``now`` is it with its best tables."""
    deployed = timed.deployed
    ranks = now.phy2log_RS.shape[0]
    experts = deployed.share_GE.shape[1]
    in_use_RS = slot_shares(now.phy2log_RS, now.log2phy_GE, deployed.share_GE) > 0
    if params.tables != SOLVED:
        in_use_RS[:] = True
    replicas_E = np.bincount(now.phy2log_RS[in_use_RS], minlength=experts).astype(np.int32)
    # An expert without tokens is used by nobody, but must be somewhere.
    silent_E = replicas_E == 0
    for expert in np.flatnonzero(silent_E):
        in_use_RS[tuple(np.argwhere(now.phy2log_RS == expert)[0])] = True
    replicas_E[silent_E] = 1
    demand, unused = _demand_in_time(timed, replicas_E)
    begin_RS = now.phy2log_RS.copy()
    begin_RS[~in_use_RS] = experts + np.arange(unused)
    padded_E = np.concatenate([replicas_E, np.ones(unused, dtype=np.int32)])
    share_RS = (1.0 / padded_E[begin_RS]).astype(np.float32)
    home_ER = np.concatenate([deployed.home_ER, np.ones((unused, ranks), dtype=np.bool_)])
    assignment = assignment_of(begin_RS, share_RS, demand)
    swapping = params._replace(exchanges=False)
    found_KRS, _ = local_search(assignment, demand, home_ER, swapping, price_K)
    distinct = {
        found_RS.tobytes(): found_RS for found_RS in found_KRS if not np.array_equal(found_RS, begin_RS)
    }
    return [_served(_used(found_RS, experts), timed, params) for found_RS in distinct.values()]


def _cooled(phy2log_RS: Int32, log2phy_GE: Int32, timed: TimedLayer, moves: int) -> Candidate:
    cool_tables(phy2log_RS, log2phy_GE, timed.steps, timed.deployed.share_GE, timed.curve, _TABLE_MOVES)
    return Candidate(phy2log_RS, log2phy_GE, time_ratio(phy2log_RS, log2phy_GE, timed, SOLVED), moves)


def _greedy_us(assignment: Assignment, replicas_E: Int32, timed: TimedLayer) -> float:
    """Microseconds of the slowest rank where every replica in use gets an even share."""
    share_E = np.zeros(assignment.replicas_E.size, dtype=np.float32)
    share_E[: replicas_E.size] = 1.0 / replicas_E
    used_RS = np.minimum(assignment.phy2log_RS, np.int32(replicas_E.size - 1))
    return mean_slowest(timed.steps, used_RS, share_E[assignment.phy2log_RS], timed.curve)


def _demand_in_time(timed: TimedLayer, replicas_E: Int32) -> tuple[Demand, int]:
    """What the experts, split evenly over so many replicas, add to the ranks in time, mean rank 1; and slots unused.

    Each unused slot counts as one more expert, which adds nothing.
    """
    ranks, slots = timed.deployed.phy2log_RS.shape
    us_EN = split_us(timed.steps, replicas_E, timed.curve)
    unused = ranks * slots - int(replicas_E.sum())
    scale = ranks / max(float((us_EN.sum(axis=0) * timed.steps.weight_N).sum()), 1e-30)
    padded_EN = np.zeros((us_EN.shape[0] + unused, us_EN.shape[1]), dtype=np.float32)
    padded_EN[: us_EN.shape[0]] = us_EN * np.float32(scale)
    return demand_of(padded_EN, timed.steps.weight_N), unused


def _used(found_RS: Int32, experts: int) -> Bool:
    """Which experts each rank uses, bool ``[R, E]``; numbers past the experts are unused slots."""
    used_RE = np.zeros((found_RS.shape[0], experts), dtype=np.bool_)
    rank_U, slot_U = np.nonzero(found_RS < experts)
    used_RE[rank_U, found_RS[rank_U, slot_U]] = True
    return used_RE


def _dealt(used_RE: Bool, timed: TimedLayer) -> Bool:
    """The rows dealt to the ranks that hold most of them now."""
    deployed = timed.deployed
    full_RS = _completed(used_RE, np.zeros_like(used_RE), timed)
    dealt_RS = match_ranks(full_RS, deployed.phy2log_RS, used_RE.shape[1], deployed.node_R)
    rows: dict[bytes, list[int]] = {}
    for rank, row_S in enumerate(full_RS):
        rows.setdefault(row_S.tobytes(), []).append(rank)
    return used_RE[[rows[row_S.tobytes()].pop() for row_S in dealt_RS]]


def _served(used_RE: Bool, timed: TimedLayer, params: SearchParams) -> Candidate:
    """Replicas in use, unused slots filled with what is there already, and tables."""
    deployed = timed.deployed
    full_RS = _completed(used_RE, deployed.home_ER.T, timed)
    kept_RS, moves = keep_slots(full_RS, deployed.phy2log_RS)
    if params.tables != SOLVED:
        log2phy_GE = fixed_rule(*slots_by_expert(kept_RS, used_RE.shape[1]), deployed.share_GE.shape[0], 1)
        return Candidate(kept_RS, log2phy_GE, time_ratio(kept_RS, log2phy_GE, timed, params.tables), moves)
    return _cooled(kept_RS, even_tables(*used_slots(kept_RS, used_RE), deployed.share_GE), timed, moves)


def _completed(used_RE: Bool, there_RE: Bool, timed: TimedLayer) -> Int32:
    """Every slot filled, int32 ``[R, S]``: experts in use first, then what is there, then the hottest experts."""
    slots = timed.deployed.phy2log_RS.shape[1]
    heat_E = timed.steps.tokens_EN @ timed.steps.weight_N
    rank_of_E = np.empty(heat_E.size)
    rank_of_E[np.argsort(-heat_E, kind="stable")] = np.arange(heat_E.size)
    order_RE = np.where(used_RE, -2 * heat_E.size, np.where(there_RE, -heat_E.size, 0)) + rank_of_E
    full_RS: Int32 = np.argsort(order_RE, axis=1, kind="stable")[:, :slots].astype(np.int32)
    return full_RS
