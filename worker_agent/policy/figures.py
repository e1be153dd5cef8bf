"""Figures that policy mode logs for each decision."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

_log = logging.getLogger("eplb.agent")

Int64 = npt.NDArray[np.int64]


def log_decision(
    heat_NLE: npt.NDArray[np.generic], old_LP: Int64, new_LP: Int64, ranks: int, seconds: float, split: str
) -> None:
    """Log the PAR of an even split before and after a decision, and the number of experts to fetch.

    If the engine uses a different split, its PAR differs, so the line says that the figures assume an even split.

    Parameters
    ----------
    heat_NLE
        ``[N, L, E]``, tokens per part of the window.
    old_LP
        int64 ``[L, P]``, placement before the decision.
    new_LP
        int64 ``[L, P]``, placement after it.
    ranks
        R, number of ranks.
    seconds
        Time that the decision took.
    split
        The engine's split.
    """
    fetched_L = fetched_experts(old_LP, new_LP, ranks)
    _log.info(
        "policy: PAR %.3f -> %.3f on the window%s; %d of %d layers change, %d experts to fetch; decided in %.0f ms",
        par_of_even_split(heat_NLE, old_LP, ranks),
        par_of_even_split(heat_NLE, new_LP, ranks),
        "" if split == "even" else f" if tokens were split evenly (they are split by {split})",
        np.count_nonzero(fetched_L),
        len(old_LP),
        fetched_L.sum(),
        1e3 * seconds,
    )


def fetched_experts(old_LP: Int64, new_LP: Int64, ranks: int) -> Int64:
    """Return the number of experts that ranks must fetch in each layer, summed over the ranks, int64 ``[L]``.

    Examples
    --------
    Rank 1 replaces expert 1 with expert 2:

    >>> fetched_experts(np.array([[0, 1, 2, 3, 0, 1]]), np.array([[0, 1, 2, 3, 0, 2]]), ranks=2).tolist()
    [1]
    """
    layers = len(old_LP)
    old_LRS = old_LP.reshape(layers, ranks, -1)
    new_LRS = new_LP.reshape(layers, ranks, -1)
    return np.array(
        [
            sum(
                len(set(new_S) - set(old_S))
                for old_S, new_S in zip(old_RS.tolist(), new_RS.tolist(), strict=True)
            )
            for old_RS, new_RS in zip(old_LRS, new_LRS, strict=True)
        ],
        dtype=np.int64,
    )


def par_of_even_split(heat_NLE: npt.NDArray[np.generic], placement_LP: Int64, ranks: int) -> float:
    """Return the mean PAR over parts and layers if each expert's tokens are split evenly over its slots.

    The result is NaN if there are no tokens.

    Examples
    --------
    Expert 0 has two replicas, so rank 1 receives 5 + 4 of the 16 tokens, and the mean is 8:

    >>> round(par_of_even_split(np.array([[[10, 2, 4]]]), np.array([[0, 1, 0, 2]]), ranks=2), 3)
    1.125
    """
    pars = []
    for layer, slots_P in enumerate(placement_LP):
        replicas_E = np.bincount(slots_P, minlength=heat_NLE.shape[2])
        share_NE = heat_NLE[:, layer].astype(np.float64) / np.maximum(replicas_E, 1)
        loads_NR = share_NE[:, slots_P].reshape(len(heat_NLE), ranks, -1).sum(axis=2)
        loads_NR = loads_NR[loads_NR.any(axis=1)]
        pars += (loads_NR.max(axis=1) / loads_NR.mean(axis=1)).tolist()
    return float(np.mean(pars)) if pars else float("nan")
