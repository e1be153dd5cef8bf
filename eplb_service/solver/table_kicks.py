"""Kicks, judged through tables: a few copies go to other experts at random, and what is better stays.

What is best under even shares need not be what sources can be dealt out to best. With few sources shares come in
coarse steps, and the placement that suits them is another one. Too dear for large layers, where the steps are fine
anyway.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool, UInt64
from eplb_service.solver.candidates import Candidate, cheaper, touched_up, with_tables
from eplb_service.solver.chance import draw
from eplb_service.solver.exchanges import exchange
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import SMALLEST_GAIN, Demand
from eplb_service.solver.packing import Packing, even_shares, packing_of
from eplb_service.solver.problem import SOLVED, Deployed, Heat, Search

_MOST_EXCHANGED = 3
"""Copies that one kick exchanges at most."""
_TRIES = 50
"""Draws after which a kick gives up."""


@kernel
def kicked_through_tables(
    candidate: Candidate, heat: Heat, deployed: Deployed, search: Search, rounds: int, seed: int
) -> Candidate:
    """The candidate, or a cheaper one found by so many kicks, each with tables made and touched up anew.

    The walk goes on from what is as good as where it stands: many placements share the same worst rank.
    """
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    nowhere_ER = np.zeros_like(deployed.home_ER)
    best = here = candidate
    for _ in range(rounds):
        share_RS = even_shares(here.phy2log_RS, deployed.share_GE.shape[1])
        packing = packing_of(here.phy2log_RS, share_RS, heat.demand)
        for _ in range(1 + draw(state_1, _MOST_EXCHANGED)):
            kick(packing, heat.demand, nowhere_ER, state_1)
        found = with_tables(packing.phy2log_RS, heat, deployed, search.z, SOLVED)
        found = touched_up(found, heat, deployed, search)
        if found.par + search.price * found.moves <= here.par + search.price * here.moves + SMALLEST_GAIN:
            here = found
            best = cheaper(best, here, search.price)
    return best


@kernel
def kick(packing: Packing, demand: Demand, nowhere_ER: Bool, state_1: UInt64) -> None:
    """Turn a random spare copy into a copy of a random expert that its rank lacks; nothing where that finds none."""
    ranks, slots = packing.phy2log_RS.shape
    experts = packing.copies_E.shape[0]
    for _ in range(_TRIES):
        rank, slot, gainer = draw(state_1, ranks), draw(state_1, slots), draw(state_1, experts)
        loser = packing.phy2log_RS[rank, slot]
        if packing.copies_E[loser] > 1 and not packing.holds_ER[gainer, rank]:
            exchange(packing, demand, nowhere_ER, gainer, rank, slot)
            return
