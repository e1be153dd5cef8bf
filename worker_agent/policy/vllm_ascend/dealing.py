"""Shares of a routing table's rows: a replica gets more rows if its rank has less other work."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.solver.stepwise import level, replicas_in, split_evenly
from eplb_core.solver.window import loads_of_ranks
from worker_agent.policy.figures import Int64
from worker_agent.policy.vllm_ascend.routing_table import ROWS


def rows_of_slots(heat_NLE: npt.NDArray[np.generic], phy2log_LP: Int64, ranks: int) -> Int64:
    """Return the number of table rows of each slot, int64 ``[L, P]``. Each expert has ``ROWS`` rows in total.

    The rows are proportional to the split that minimises the hottest rank's load over the whole window. A layer keeps
    equal rows if these are better on average over the parts of the window.

    Parameters
    ----------
    heat_NLE
        Integers ``[N, L, E]``, tokens per part of the window.
    phy2log_LP
        int64 ``[L, P]``, expert in each slot.
    ranks
        Number of ranks.

    Examples
    --------
    Expert 0 has a replica on each of two ranks. The second rank also has the hot expert 2, so it gets fewer rows:

    >>> rows_of_slots(np.array([[[400, 0, 200]]]), np.array([[0, 1, 0, 2]]), ranks=2).tolist()
    [[768, 1024, 256, 1024]]
    """
    experts = heat_NLE.shape[2]
    phy2log_LRS = phy2log_LP.reshape(len(phy2log_LP), ranks, -1).astype(np.int32)
    even_LP = np.stack([_even_shares(slots_P, experts) for slots_P in phy2log_LP])
    best_LP = np.stack(
        [
            _best_shares(heat_E, phy2log_RS, even_P)
            for heat_E, phy2log_RS, even_P in zip(
                heat_NLE.sum(axis=0).astype(np.float64), phy2log_LRS, even_LP, strict=True
            )
        ]
    )
    whole_NLE: Int64 = np.ascontiguousarray(heat_NLE, dtype=np.int64)
    peak_L = loads_of_ranks(whole_NLE, phy2log_LRS, best_LP).max(axis=2).mean(axis=0)
    even_peak_L = loads_of_ranks(whole_NLE, phy2log_LRS, even_LP).max(axis=2).mean(axis=0)
    share_LP = np.where((peak_L < even_peak_L)[:, None], best_LP, even_LP)
    return np.stack(
        [_whole_rows(share_P, slots_P) for share_P, slots_P in zip(share_LP, phy2log_LP, strict=True)]
    )


def warm_up() -> None:
    """Compile the kernels that ``rows_of_slots`` uses."""
    rows_of_slots(np.ones((1, 1, 2), dtype=np.int64), np.array([[0, 1, 0, 1]]), ranks=2)


def _even_shares(slots_P: Int64, experts: int) -> npt.NDArray[np.float64]:
    """Return each slot's share of its expert's tokens in an even split of one layer, ``[P]``."""
    share_P: npt.NDArray[np.float64] = 1.0 / np.bincount(slots_P, minlength=experts)[slots_P]
    return share_P


def _best_shares(
    heat_E: npt.NDArray[np.float64], phy2log_RS: npt.NDArray[np.int32], even_P: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the shares that minimise the hottest rank's load, ``[P]``. Experts without tokens get even shares."""
    ranks = len(phy2log_RS)
    slots_P = phy2log_RS.ravel()
    replicas = replicas_in(phy2log_RS, len(heat_E))
    flow_P = np.zeros(slots_P.size)
    load_R = np.zeros(ranks)
    split_evenly(replicas, heat_E, flow_P, load_R, False)
    level(replicas, flow_P, load_R, False)
    total_P = np.bincount(slots_P, flow_P, minlength=len(heat_E))[slots_P]
    share_P: npt.NDArray[np.float64] = np.divide(flow_P, total_P, out=even_P.copy(), where=total_P > 0)
    return share_P


def _whole_rows(share_P: npt.NDArray[np.float64], slots_P: Int64) -> Int64:
    """Round a layer's shares to whole rows that add up to ``ROWS`` for each expert (largest remainder)."""
    exact_P = share_P * ROWS
    rows_P = np.floor(exact_P + 1e-9).astype(np.int64)
    missing_E = ROWS - np.bincount(slots_P, rows_P).astype(np.int64)
    order_P = np.lexsort((rows_P - exact_P, slots_P))
    expert_P = slots_P[order_P]
    place_P = np.arange(expert_P.size) - np.searchsorted(expert_P, expert_P)
    rows_P[order_P] += place_P < missing_E[expert_P]
    return rows_P
