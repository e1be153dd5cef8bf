"""Rank loads of a whole window: each slot's share of its expert's tokens, summed over the rank."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float64, Int32, Int64
from eplb_service.solver.jit import kernel


@kernel
def loads_of_ranks(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, share_LP: Float64) -> Float64:
    """Tokens that each rank receives, float64 ``[N, L, R]``.

    ``share_LP`` float64 ``[L, R*S]`` is the part of its expert's tokens that each slot receives.
    """
    layers, ranks, slots = phy2log_LRS.shape
    loads_NLR = np.empty((heat_NLE.shape[0], layers, ranks))
    for n in range(heat_NLE.shape[0]):
        for layer in range(layers):
            heat_E = heat_NLE[n, layer]
            slot = 0
            for r in range(ranks):
                load = 0.0
                for s in range(slots):
                    load += heat_E[np.uint32(phy2log_LRS[layer, r, s])] * share_LP[layer, slot]
                    slot += 1
                loads_NLR[n, layer, r] = load
    return loads_NLR
