"""Kicks: give a few copies to other experts at random, search again, keep what is better (iterated local search).

Where ranks have only two or three slots, swaps and single exchanges soon find no way on, because a better split of the
copies needs several changes at once. This is what a budget buys: every round can only improve the answer.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool, Float32, Int32, UInt64
from eplb_service.solver.chance import draw
from eplb_service.solver.exchanges import exchange
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, mean_of_max
from eplb_service.solver.packing import Packing, even_shares, packing_of
from eplb_service.solver.peak_search import peak_search
from eplb_service.solver.risk_search import risk_search

MOST_EXCHANGED = 3
"""Copies that one kick exchanges at most."""
_TRIES = 50
"""Draws after which a kick gives up."""
_NEAR = 0.02
"""Ratio above the best up to which the second stage may still make a kicked placement the better one."""


@kernel
def kicked(
    phy2log_RS: Int32,
    demand: Demand,
    scaled_EN: Float32,
    share_N: Float32,
    z: float,
    patience: int,
    most_steps: int,
    rounds: int,
    seed: int,
) -> tuple[Int32, float]:
    """Improve a placement by so many kicks; arguments as for ``risk_search`` and ``peak_search``.

    Returns int32 ``[R, S]`` and its peak-to-average ratio under even shares, never above that of ``phy2log_RS``.
    """
    experts = demand.mean_E.shape[0]
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    best_RS = phy2log_RS.copy()
    best_share_RS = even_shares(best_RS, experts)
    best = peak_search(best_RS, best_share_RS, scaled_EN, share_N, patience, most_steps)
    nowhere_ER = np.zeros((experts, phy2log_RS.shape[0]), dtype=np.bool_)
    for _ in range(rounds):
        packing = packing_of(best_RS, best_share_RS, demand)
        for _ in range(1 + draw(state_1, MOST_EXCHANGED)):
            kick(packing, demand, nowhere_ER, state_1)
        found_KRS, _ = risk_search(packing, demand, nowhere_ER, z, np.zeros(1), 1, most_steps)
        found_RS = found_KRS[0]
        share_RS = even_shares(found_RS, experts)
        found = mean_of_max(scaled_EN, share_N, found_RS, share_RS)
        if found < best + _NEAR:
            found = peak_search(found_RS, share_RS, scaled_EN, share_N, 1, most_steps)
        if found < best:
            best, best_RS, best_share_RS = found, found_RS.copy(), share_RS
    if rounds > 0:
        best = peak_search(best_RS, best_share_RS, scaled_EN, share_N, patience, most_steps)
    return best_RS, best


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
