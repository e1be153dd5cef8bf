"""Changes of a placement for stepwise splits: which may take heat out of a tight set, and what each does to a split."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Bool, Float32, Float64, Int32, Int64, UInt64
from eplb_service.solver.search.annealing import draw
from eplb_service.solver.stepwise.scenarios import Scenarios
from eplb_service.solver.stepwise.split import Sharing

_PASSES = 50
"""Of 100 tries those that turn a spare replica into another expert's; the others swap two experts."""


@kernel
def drawn(
    here_RS: Int32, sharing: Sharing, now: Scenarios, share_N: Float32, state_1: UInt64, change: Int64
) -> bool:
    """A random change that takes an expert out of a random tight set, into ``change``; whether there is one.

    Parameters
    ----------
    here_RS
        int32 ``[R, S]``, a complete placement.
    sharing, now
        Its replicas, and the optimum of each scenario under it.
    share_N
        float32 ``[N]``, the scenarios' weights.
    state_1
        State of the random numbers.
    change
        int64 ``[3]``, where the change is put: 0 and the two slots that swap, or 1, the spare slot, and the
        expert that it is to hold.
    """
    ranks, slots = here_RS.shape
    n = draw(state_1, share_N.shape[0])
    if now.size_N[n] == 0 or now.size_N[n] == ranks:
        return False
    inside, outside = draw(state_1, ranks), draw(state_1, ranks)
    while not now.tight_NR[n, inside]:
        inside = (inside + 1) % ranks
    while now.tight_NR[n, outside]:
        outside = (outside + 1) % ranks
    mine, theirs = draw(state_1, slots), draw(state_1, slots)
    if draw(state_1, 100) < _PASSES:
        # Anybody's spare replica outside gives way to an expert from inside.
        gone, come = here_RS[outside, theirs], here_RS[inside, mine]
        if sharing.first_E1[gone + 1] - sharing.first_E1[gone] < 2 or _holds(here_RS, outside, come):
            return False
        change[0], change[1], change[2] = 1, outside * slots + theirs, come
        return True
    one, another = here_RS[inside, mine], here_RS[outside, theirs]
    if _holds(here_RS, outside, one) or _holds(here_RS, inside, another):
        return False
    change[0], change[1], change[2] = 0, inside * slots + mine, outside * slots + theirs
    return True


@kernel
def _holds(here_RS: Int32, rank: int, expert: int) -> bool:
    for s in range(here_RS.shape[1]):  # noqa: SIM110 # numba compiles a loop, not any()
        if here_RS[rank, s] == expert:
            return True
    return False


@kernel
def affected(here_RS: Int32, change: Int64, slots: int) -> tuple[int, int, int, int]:
    """The expert that comes to rank ``other``, the rank that it leaves (-1 for none), the one that goes, ``other``."""
    if change[0] == 1:
        other = change[1] // slots
        return change[2], -1, np.int64(here_RS[other, change[1] % slots]), other
    rank, other = change[1] // slots, change[2] // slots
    return (
        np.int64(here_RS[rank, change[1] % slots]),
        rank,
        np.int64(here_RS[other, change[2] % slots]),
        other,
    )


@kernel
def more_away(home_ER: Bool, mine: int, rank: int, theirs: int, other: int, passes: bool) -> int:
    """Slots that the change takes away from home, less those that it brings back.

    Parameters
    ----------
    home_ER
        bool ``[E, R]``, ranks that hold each expert in the deployed placement.
    mine, rank
        The expert that comes to ``other``, and the rank that it leaves, as ``affected`` gives them.
    theirs, other
        The expert that goes from there, and its rank.
    passes
        Whether a spare replica is turned into another expert's: then no expert comes to ``rank``.
    """
    more: int = np.int64(not home_ER[mine, other]) - np.int64(not home_ER[theirs, other])
    if not passes:
        more += np.int64(not home_ER[theirs, rank]) - np.int64(not home_ER[mine, rank])
    return more


@kernel
def may_pay(
    sharing: Sharing,
    now: Scenarios,
    scaled_EN: Float32,
    share_N: Float32,
    mine: int,
    rank: int,
    theirs: int,
    other: int,
    bound: float,
) -> bool:
    """Whether the tight sets as they are leave room for a ratio of ``bound`` after the change.

    Parameters
    ----------
    sharing, now
        The placement's replicas, and the optimum of each scenario under it.
    scaled_EN, share_N
        float32 ``[E, N]`` the experts' heat in each scenario, and ``[N]`` their weights.
    mine, rank, theirs, other
        The change, as ``affected`` gives it.
    bound
        Peak-to-average ratio.
    """
    least = 0.0
    for n in range(share_N.shape[0]):
        level_of = 1.0
        if now.size_N[n] > 0:
            tight_R = now.tight_NR[n]
            held = now.level_N[n] * now.size_N[n]
            held -= scaled_EN[mine, n] * _inside(sharing, tight_R, mine, -1, -1)
            held -= scaled_EN[theirs, n] * _inside(sharing, tight_R, theirs, -1, -1)
            held += scaled_EN[mine, n] * _inside(sharing, tight_R, mine, rank, other)
            held += scaled_EN[theirs, n] * _inside(sharing, tight_R, theirs, other, rank)
            level_of = max(level_of, held / now.size_N[n])
        least += share_N[n] * level_of
        if least > bound:
            return False
    return True


@kernel
def _inside(sharing: Sharing, tight_R: Bool, expert: int, leaves: int, comes: int) -> bool:
    """Whether all replicas of an expert are in a set of ranks, once it has left one rank and come to another."""
    if comes >= 0 and not tight_R[comes]:
        return False
    for k in range(sharing.first_E1[expert], sharing.first_E1[expert + 1]):
        at = sharing.rank_P[sharing.slot_P[k]]
        if at != leaves and not tight_R[at]:
            return False
    return True


@kernel
def apply(here_RS: Int32, change: Int64, slots: int) -> None:
    """Make a change of ``drawn``, in place."""
    if change[0] == 1:
        here_RS[change[1] // slots, change[1] % slots] = change[2]
        return
    mine = here_RS[change[1] // slots, change[1] % slots]
    here_RS[change[1] // slots, change[1] % slots] = here_RS[change[2] // slots, change[2] % slots]
    here_RS[change[2] // slots, change[2] % slots] = mine


@kernel
def take_back(here_RS: Int32, change: Int64, slots: int, theirs: int) -> None:
    """Undo a change that has been made; ``theirs`` is the expert that went."""
    if change[0] == 1:
        here_RS[change[1] // slots, change[1] % slots] = theirs
    else:
        apply(here_RS, change, slots)


@kernel
def carry_over(before: Sharing, flow_P: Float64, load_R: Float64, change: Int64, slots: int) -> None:
    """A split that the changed placement allows, close to the one before.

    Parameters
    ----------
    before
        The replicas of the placement before.
    flow_P, load_R
        float64 ``[R*S]`` and ``[R]``, tokens of each slot and rank; changed in place.
    change
        int64 ``[3]``, as from ``drawn``.
    slots
        Per rank.
    """
    one = change[1]
    if change[0] == 1:
        # The tokens of the slot that gives way go to the first other replica.
        expert = before.expert_P[one]
        heir = before.slot_P[before.first_E1[expert]]
        if heir == one:
            heir = before.slot_P[before.first_E1[expert] + 1]
        flow_P[heir] += flow_P[one]
        load_R[before.rank_P[heir]] += flow_P[one]
        load_R[before.rank_P[one]] -= flow_P[one]
        flow_P[one] = 0.0
        return
    another = change[2]
    moved = flow_P[one] - flow_P[another]
    load_R[one // slots] -= moved
    load_R[another // slots] += moved
    flow_P[one] -= moved
    flow_P[another] += moved
