"""Tokens of every slot under the best split of each step, for those to whom time is no function of a rank's sum."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Float64, Int32, Int64
from eplb_service.solver.stepwise.split import level, search_memory, sharing_of, split_evenly

_ROUNDING = 1e-6
"""Part of a mean rank load that a slot must have of cut tokens to have any: less is rounding."""


@kernel
def slots_by_step(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, whole: bool) -> Float64:
    """Tokens that each slot receives where each row's are split as well as can be, float64 ``[N, L, R*S]``.

    Of all splits that are as good it is one that begins with even shares and takes of the hottest ranks what they must
    hand on; ``loads_by_step`` has the sums of its ranks. ``whole`` as for that.
    """
    layers, ranks, slots = phy2log_LRS.shape
    rows, _, experts = heat_NLE.shape
    tokens_NLP = np.empty((rows, layers, ranks * slots))
    load_R, heat_E = np.empty(ranks), np.empty(experts)
    memory = search_memory(ranks, experts)
    for layer in range(layers):
        sharing = sharing_of(phy2log_LRS[layer], experts)
        for n in range(rows):
            total = 0.0
            for e in range(experts):
                heat_E[e] = heat_NLE[n, layer, e]
                total += heat_E[e]
            flow_P = tokens_NLP[n, layer]
            split_evenly(sharing, heat_E, flow_P, load_R, whole)
            level(sharing, flow_P, load_R, memory, whole)
            for p in range(ranks * slots):
                if flow_P[p] <= _ROUNDING * total / ranks:
                    flow_P[p] = 0.0
    return tokens_NLP
