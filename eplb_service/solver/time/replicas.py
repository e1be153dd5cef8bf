"""How many replicas of each expert are worth having under a cost curve: a few answers for the placement to choose from.

More replicas make the longest slot shorter and the work in all longer, because each reads the weights again. So
replicas are handed out one by one to the expert whose slots take longest, as long as that makes them clearly shorter,
and several stages of that are tried.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Int32
from eplb_service.solver.time.evaluation import Curve, Steps, slot_us

_SHORTER = 0.95
"""Part of a slot's time that it must come below for a further replica to be worth trying."""
_STAGES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Parts of the replicas handed out in all, after which placements are tried."""


def stages(steps: Steps, curve: Curve, ranks: int, slots: int, z: float) -> list[Int32]:
    """Replica counts int32 ``[E]`` worth trying, fewest first; slots that are left over get no tokens.

    Parameters
    ----------
    steps, curve
        The experts' tokens, and what they cost.
    ranks, slots
        How many ranks, and slots of each.
    z
        Weight of the standard deviation over the steps.
    """
    experts = steps.tokens_EN.shape[0]
    taker_B = takers(steps, curve, ranks, ranks * slots - experts, z)
    counts = sorted({round(part * taker_B.size) for part in _STAGES})
    return [(1 + np.bincount(taker_B[:count], minlength=experts)).astype(np.int32) for count in counts]


def filled(steps: Steps, curve: Curve, replicas_E: Int32, ranks: int, slots: int) -> Int32:
    """The counts with all slots in use, what is left over where it adds least: for a host that uses every replica.

    Parameters
    ----------
    steps, curve
        The experts' tokens, and what they cost.
    replicas_E
        int32 ``[E]``, replicas in use.
    ranks, slots
        How many ranks, and slots of each.
    """
    replicas_E = replicas_E.copy()
    fill_cheaply(steps, curve, replicas_E, ranks, ranks * slots - int(replicas_E.sum()))
    return replicas_E


@kernel
def takers(steps: Steps, curve: Curve, ranks: int, budget: int, z: float) -> Int32:
    """The experts that get one replica more each, in order, int32 ``[B]``.

    Parameters
    ----------
    steps, curve
        The experts' tokens, and what they cost.
    ranks
        Most replicas of an expert.
    budget
        Replicas to hand out; fewer are where no more help.
    z
        Weight of the standard deviation over the steps.
    """
    experts = steps.tokens_EN.shape[0]
    replicas_E = np.ones(experts, dtype=np.int32)
    us_E = np.empty(experts, dtype=np.float32)
    next_E = np.empty(experts, dtype=np.float32)
    for e in range(experts):
        us_E[e] = _slot_risk(steps, curve, e, 1, z)
        next_E[e] = _slot_risk(steps, curve, e, 2, z)
    taker_B = np.empty(budget, dtype=np.int32)
    for given in range(budget):
        taker = -1
        for e in range(experts):
            helps = replicas_E[e] < ranks and next_E[e] < np.float32(_SHORTER) * us_E[e]
            if helps and (taker < 0 or us_E[e] > us_E[taker]):
                taker = e
        if taker < 0:
            helped_B: Int32 = taker_B[:given].copy()
            return helped_B
        taker_B[given] = taker
        replicas_E[taker] += 1
        us_E[taker] = next_E[taker]
        next_E[taker] = _slot_risk(steps, curve, taker, replicas_E[taker] + 1, z)
    return taker_B


@kernel
def fill_cheaply(steps: Steps, curve: Curve, replicas_E: Int32, ranks: int, budget: int) -> None:
    """Hand out further replicas, each to the expert whose slots together take least longer for it.

    Parameters
    ----------
    steps, curve
        The experts' tokens, and what they cost.
    replicas_E
        int32 ``[E]``, replicas in use; changed in place.
    ranks
        Most replicas of an expert.
    budget
        Replicas to hand out.
    """
    experts = replicas_E.shape[0]
    added_E = np.empty(experts, dtype=np.float32)
    for e in range(experts):
        added_E[e] = _added(steps, curve, e, replicas_E[e])
    for _ in range(budget):
        taker = -1
        for e in range(experts):
            if replicas_E[e] < ranks and (taker < 0 or added_E[e] < added_E[taker]):
                taker = e
        replicas_E[taker] += 1
        added_E[taker] = _added(steps, curve, taker, replicas_E[taker])


@kernel
def _added(steps: Steps, curve: Curve, expert: int, replicas: int) -> float:
    """Microseconds that one replica more adds to all of an expert's together, mean over the steps."""
    more = np.float32(replicas + 1) * _slot_risk(steps, curve, expert, replicas + 1, 0.0)
    added: float = more - np.float32(replicas) * _slot_risk(steps, curve, expert, replicas, 0.0)
    return added


@kernel
def _slot_risk(steps: Steps, curve: Curve, expert: int, replicas: int, z: float) -> float:
    """Mean + z*std of the microseconds of one of so many replicas."""
    read, launch, slope = np.float32(curve.read), np.float32(curve.launch), np.float32(curve.slope)
    mean, squares = np.float32(0.0), np.float32(0.0)
    for n in range(steps.weight_N.shape[0]):
        us = slot_us(steps.tokens_EN[expert, n] / np.float32(replicas), read, launch, slope)
        mean += steps.weight_N[n] * us
        squares += steps.weight_N[n] * us * us
    found: float = mean + np.float32(z) * np.sqrt(max(squares - mean * mean, np.float32(0.0)))
    return found
