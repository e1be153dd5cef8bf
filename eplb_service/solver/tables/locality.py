"""Tables that keep tokens on their own node where that costs no balance.

Tokens that leave their node cross the slower network, and which replica a source uses is free where balance stays. So
each part (one source, one expert) that leaves its node although a replica is there is brought home, alone or in
exchange for another source's part, as long as the peak-to-average ratio stays at or below what it was. This
project's own: a source that always takes the nearest replica, as SGLang's static dispatch does, may spoil the balance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import (
    CHOSEN,
    EVEN,
    STEPWISE,
    Candidate,
    Float32,
    Int32,
    Layer,
    SearchParams,
    set_row,
)
from eplb_service.solver.search.construction import descending
from eplb_service.solver.search.evaluation import (
    SMALLEST_GAIN,
    hottest_of_others,
    loads_in_episodes,
    raise_to,
)
from eplb_service.solver.tables.log2phy import slot_shares, slots_by_expert, tables_par

_SWEEPS = 2
"""Passes over all experts: what one brings home leaves room for others; a third pass finds next to nothing."""


class Parts(NamedTuple):
    """One expert's parts, with what rerouting them is judged by."""

    slot_G: Int32
    """int32 ``[G]``, physical slot that each source sends its part to; changes in place."""
    share_G: Float32
    """float32 ``[G]``, each source's part of the expert's tokens."""
    node_G: Int32
    """int32 ``[G]``, node of each source, -1 where its ranks are on several."""
    node_P: Int32
    """int32 ``[R*S]``, node of each physical slot."""
    replica_K: Int32
    """int32 ``[K]``, the expert's physical slots."""
    mean: float
    """The expert's mean heat."""
    heat_N: Float32
    """float32 ``[N]``, the expert's normalised heat."""
    share_N: Float32
    """float32 ``[N]``, the episodes' weights."""
    load_RN: Float32
    """float32 ``[R, N]``, load of each rank in each episode; changes in place."""
    others_N: Float32
    """float32 ``[N]``, load of the hottest rank that does not hold the expert."""
    width: int = 1
    """Parts in a row that are one source's: of its entries that go to one slot, any is as good to send back."""


@kernel
def localise_tables(
    phy2log_RS: Int32,
    log2phy_GE: Int32,
    mean_E: Float32,
    scaled_EN: Float32,
    share_N: Float32,
    share_GE: Float32,
    node_G: Int32,
    node_R: Int32,
    width: int = 1,
) -> tuple[Int32, float]:
    """Bring parts home, those of the hottest experts first, each in the way that leaves the ranks coolest.

    ``phy2log_RS`` and ``log2phy_GE`` are a complete placement and its tables, ``mean_E`` float32 ``[E]`` is each
    expert's mean heat, ``node_R`` int32 ``[R]`` each rank's node; for the others see ``Parts``.

    Returns tables int32 ``[G, E]`` and the peak-to-average ratio that they realise, never above that of the tables
    given.
    """
    slots = phy2log_RS.shape[1]
    before = tables_par(phy2log_RS, log2phy_GE, scaled_EN, share_N, share_GE)
    load_RN = loads_in_episodes(phy2log_RS, slot_shares(phy2log_RS, log2phy_GE, share_GE), scaled_EN)
    first_E1, slot_P = slots_by_expert(phy2log_RS, share_GE.shape[1])
    node_P = np.empty(slot_P.shape[0], dtype=np.int32)
    for p in range(node_P.shape[0]):
        node_P[p] = node_R[p // slots]
    near_GE = log2phy_GE.copy()
    peak = np.float32(before)
    for _ in range(_SWEEPS):
        for e in descending(mean_E):
            replica_K = slot_P[first_E1[e] : first_E1[e + 1]]
            if replica_K.shape[0] == 1:
                continue
            others_N = hottest_of_others(load_RN, replica_K, slots)
            slot_G, share_G = near_GE[:, e].copy(), share_GE[:, e].copy()
            parts = Parts(
                slot_G,
                share_G,
                node_G,
                node_P,
                replica_K,
                mean_E[e],
                scaled_EN[e],
                share_N,
                load_RN,
                others_N,
                width,
            )
            # Rounding must not lift the ratio above what it was.
            peak = bring_home(parts, peak, before - SMALLEST_GAIN)
            set_row(near_GE[:, e], slot_G)
    after = tables_par(phy2log_RS, near_GE, scaled_EN, share_N, share_GE)
    return (near_GE, after) if after <= before else (log2phy_GE, before)


@kernel
def bring_home(parts: Parts, peak: float, limit: float) -> float:
    """Bring one expert's parts home, largest first, while the mean peak stays at most ``peak`` or ``limit``.

    Returns the mean peak then.
    """
    slots = parts.node_P.shape[0] // parts.load_RN.shape[0]
    for g in descending(parts.share_G):
        to, other, found = best_way_home(parts, g, peak, limit)
        if to < 0:
            continue
        peak = found
        own, more = parts.slot_G[g], parts.share_G[g]
        parts.slot_G[g] = to
        if other >= 0:
            more -= parts.share_G[other]
            parts.slot_G[other] = own
        for n in range(parts.heat_N.shape[0]):
            shifted = more * parts.heat_N[n]
            parts.load_RN[own // slots, n] -= shifted
            parts.load_RN[to // slots, n] += shifted
    return peak


@kernel
def best_way_home(parts: Parts, source: int, peak: float, limit: float) -> tuple[int, int, float]:
    """How a source's part that leaves its node gets home: where to, whose part comes back, and the mean peak then.

    Of all ways that bring more tokens home than they send away it is the one with the lowest mean peak, no higher
    than ``peak`` (what it is now) or ``limit``. The other source is -1 where nothing comes back. -1 twice where there
    is no such way, or the part leaves no node.
    """
    own, home, share = parts.slot_G[source], parts.node_G[source], parts.share_G[source]
    to, back, lowest = -1, -1, max(np.float32(peak), np.float32(limit))
    if home < 0 or share <= 0 or parts.node_P[own] == home:
        return to, back, lowest
    for replica in parts.replica_K:
        if parts.node_P[replica] != home:
            continue
        rest_N = _rest(parts, own, replica)
        last = -1
        for g in range(-1, parts.slot_G.shape[0]):
            more, won = share, share
            if g >= 0:
                if parts.slot_G[g] != replica or g // parts.width == last:
                    continue
                last = g // parts.width
                more -= parts.share_G[g]
                if parts.node_G[g] == home:
                    won = more
                elif parts.node_G[g] == parts.node_P[own]:
                    won += parts.share_G[g]
            if won * parts.mean <= SMALLEST_GAIN:
                continue
            # Equal parts change no load, and rounding must not say otherwise.
            found = np.float32(peak) if more == 0 else _peak_with(parts, own, replica, more, rest_N)
            if found < lowest or (found == lowest and to < 0):
                to, back, lowest = replica, g, found
    return to, back, lowest


@kernel
def _rest(parts: Parts, one: int, two: int) -> Float32:
    """Load of the hottest rank but those of two of the expert's slots, float32 ``[N]``."""
    slots = parts.node_P.shape[0] // parts.load_RN.shape[0]
    rest_N: Float32 = parts.others_N.copy()
    for replica in parts.replica_K:
        if replica not in (one, two):
            raise_to(rest_N, parts.load_RN[replica // slots])
    return rest_N


@kernel
def _peak_with(parts: Parts, own: int, to: int, more: float, rest_N: Float32) -> float:
    """Mean peak once ``more`` of the expert's tokens go to the slot ``to`` instead of ``own``."""
    slots = parts.node_P.shape[0] // parts.load_RN.shape[0]
    here_N, there_N, heat_N = parts.load_RN[own // slots], parts.load_RN[to // slots], parts.heat_N
    peak: float = np.float32(0.0)
    for n in range(heat_N.shape[0]):
        shifted = more * heat_N[n]
        peak += parts.share_N[n] * max(rest_N[n], here_N[n] - shifted, there_N[n] + shifted)
    return peak


@kernel
def crossing(
    log2phy_GE: Int32, share_GE: Float32, mean_E: Float32, node_G: Int32, node_R: Int32, slots: int
) -> float:
    """Part of all tokens that tables send to another node than their source's.

    Sources whose ranks are on several nodes count as at home
    everywhere: each of their nodes has the tokens.

    Parameters
    ----------
    log2phy_GE
        int32 ``[G, E]``, the physical id that each source's tokens of each expert go to.
    share_GE
        float32 ``[G, E]``, part of each expert's tokens that comes from each source.
    mean_E
        float32 ``[E]``, each expert's heat.
    node_G, node_R
        int32, the node of each source, -1 where it has several, and of each rank.
    slots
        S.
    """
    leaving, total = 0.0, 0.0
    for g in range(log2phy_GE.shape[0]):
        for e in range(log2phy_GE.shape[1]):
            tokens = share_GE[g, e] * mean_E[e]
            total += tokens
            if node_G[g] >= 0 and node_R[log2phy_GE[g, e] // slots] != node_G[g]:
                leaving += tokens
    return leaving / total if total > 0 else 0.0


def localised(candidate: Candidate, layer: Layer, params: SearchParams) -> Candidate:
    """The candidate with tables that keep more tokens on their nodes, no hotter on this heat.

    As it is where there is one node, or where tables are not the solver's to choose.
    """
    heat, deployed = layer
    if params.tables not in CHOSEN or not deployed.node_R.any():
        return candidate
    log2phy_GE, par = localise_tables(
        candidate.phy2log_RS,
        candidate.log2phy_GE,
        heat.demand.mean_E,
        heat.scaled_EN,
        heat.share_N,
        deployed.share_GE,
        deployed.node_G,
        deployed.node_R,
        params.width,
    )
    return candidate._replace(log2phy_GE=log2phy_GE, par=par)


def crossing_share(candidate: Candidate, layer: Layer, tables: int) -> float:
    """Part of the tokens that leave their source's node; 0 on one node, or where the host asks no table."""
    heat, deployed = layer
    if tables in (EVEN, STEPWISE) or not deployed.node_R.any():
        return 0.0
    return crossing(
        candidate.log2phy_GE,
        deployed.share_GE,
        heat.demand.mean_E,
        deployed.node_G,
        deployed.node_R,
        candidate.phy2log_RS.shape[1],
    )
