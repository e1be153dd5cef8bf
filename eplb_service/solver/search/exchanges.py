"""Exchanges of one expert's spare replica for another's.

An exchange gives one slot to an expert of the hot rank, and with it every rank that holds either expert carries another
share of its tokens. This project's own: replica counts need not be right before experts are placed.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Bool, Demand
from eplb_service.solver.search.construction import Assignment, replace, share_of, shift_load
from eplb_service.solver.search.evaluation import SmoothMax, pressure
from eplb_service.solver.search.neighbourhood import risk_of_both


@kernel
def best_exchange(
    assignment: Assignment, demand: Demand, now: SmoothMax, hot: int, z: float, bound: float
) -> tuple[int, int, int, float]:
    """The spare replica that, as one of an expert of ``hot``, takes most pressure away, more than ``bound``.

    An expert is looked at only where sharing it out further takes more than ``bound`` by itself; that the rank which
    gives up its replica gets cooler as well comes on top.

    Parameters
    ----------
    assignment, demand
        A complete placement and its layer's heat.
    now
        The ranks' pressures, on the scale of their risks now.
    hot
        The rank that is to be cooled.
    z
        Weight of the standard deviation.
    bound
        Pressure, in parts of the hottest rank's, that an exchange must take away at least.

    Returns
    -------
    gainer, rank, slot, taken
        Slot of ``hot`` whose expert gains a replica, rank and slot of the replica given up, and the pressure
        taken away; -1 three times where none takes enough.
    """
    ranks, slots = assignment.phy2log_RS.shape
    found = (-1, -1, -1)
    most = bound
    for s in range(slots):
        gainer = assignment.phy2log_RS[hot, s]
        if assignment.replicas_E[gainer] == ranks:
            continue
        share = share_of(assignment.replicas_E[gainer] + 1)
        relief = np.float32(0.0)
        for r in range(ranks):
            if assignment.holds_ER[gainer, r]:
                relief += now.of_R[r] - _pressure_with(
                    assignment,
                    demand,
                    now,
                    r,
                    z,
                    gainer,
                    share - assignment.share_ER[gainer, r],
                    gainer,
                    np.float32(0.0),
                )
        if relief <= bound:
            continue
        gained = share * demand.mean_E[gainer]
        for r in range(ranks):
            if assignment.holds_ER[gainer, r]:
                continue
            # No rank's risk is below its mean load, so a load past this one alone presses too hard.
            limit = now.base + max(now.of_R[r] + relief - most, 0.0) ** 0.125 / now.scale
            for t in range(slots):
                loser = assignment.phy2log_RS[r, t]
                lost = assignment.share_ER[loser, r] * demand.mean_E[loser]
                if assignment.replicas_E[loser] == 1 or assignment.load_R[r] + gained - lost > limit:
                    continue
                taken = relief - _burden(assignment, demand, now, r, z, gainer, share, loser, relief - most)
                if taken > most:
                    most = taken
                    found = (s, r, t)
    return found[0], found[1], found[2], most


@part
def _burden(
    assignment: Assignment,
    demand: Demand,
    now: SmoothMax,
    rank: int,
    z: float,
    gainer: int,
    gained: float,
    loser: int,
    enough: float,
) -> float:
    """Pressure added where a replica of ``loser`` becomes one of ``gainer`` on ``rank``; stops once ``enough``."""
    burden: float = (
        _pressure_with(
            assignment, demand, now, rank, z, gainer, gained, loser, -assignment.share_ER[loser, rank]
        )
        - now.of_R[rank]
    )
    share = share_of(assignment.replicas_E[loser] - 1)
    for r in range(assignment.load_R.shape[0]):
        if burden >= enough:
            break
        if r == rank or not assignment.holds_ER[loser, r]:
            continue
        more = share - assignment.share_ER[loser, r]
        if assignment.holds_ER[gainer, r]:
            less = gained - assignment.share_ER[gainer, r]
            burden += _pressure_with(assignment, demand, now, r, z, gainer, less, loser, more)
            burden -= _pressure_with(assignment, demand, now, r, z, gainer, less, loser, np.float32(0.0))
        else:
            burden += (
                _pressure_with(assignment, demand, now, r, z, loser, more, gainer, np.float32(0.0))
                - now.of_R[r]
            )
    return burden


@kernel
def _pressure_with(
    assignment: Assignment,
    demand: Demand,
    now: SmoothMax,
    rank: int,
    z: float,
    a: int,
    u: float,
    b: int,
    v: float,
) -> float:
    """Pressure of a rank once it receives ``u`` more of expert ``a``'s tokens and ``v`` more of ``b``'s."""
    return pressure(risk_of_both(assignment, demand, rank, a, u, b, v, z), now.base, now.scale)


@kernel
def exchange(assignment: Assignment, demand: Demand, home_ER: Bool, gainer: int, rank: int, slot: int) -> int:
    """Turn the replica in one slot into one of ``gainer``; returns by how many more slots it differs from home.

    Parameters
    ----------
    assignment, demand
        A complete placement and its layer's heat; the placement changes in place.
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the deployed placement.
    gainer
        The expert that gets one replica more.
    rank, slot
        Where the replica is that another expert gives up.
    """
    loser = assignment.phy2log_RS[rank, slot]
    assignment.replicas_E[gainer] += 1
    assignment.replicas_E[loser] -= 1
    replace(assignment, demand, rank, slot, gainer, np.float32(0.0))
    _share_evenly(assignment, demand, gainer)
    _share_evenly(assignment, demand, loser)
    more: int = np.int64(home_ER[loser, rank]) - np.int64(home_ER[gainer, rank])
    return more


@part
def _share_evenly(assignment: Assignment, demand: Demand, expert: int) -> None:
    """Split an expert's tokens evenly over the ranks that hold it."""
    share = share_of(assignment.replicas_E[expert])
    for r in range(assignment.load_R.shape[0]):
        if assignment.holds_ER[expert, r]:
            shift_load(assignment, demand, expert, r, share - assignment.share_ER[expert, r])
