"""Runs the layer solver over many layers with a set number of threads."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32
from eplb_service.solver.candidates import Search
from eplb_service.solver.layer import solve_layers, solve_layers_parallel

Float64 = npt.NDArray[np.float64]

# One of numba's threading layers cannot be entered by two Python threads at a time.
_one_at_a_time = threading.Lock()


class Answers(NamedTuple):
    """What the solver found for each layer given to it."""

    phy2log_LRS: Int32
    """int32 ``[L, R, S]``."""
    log2phy_LGE: Int32
    """int32 ``[L, G, E]``, one table for each source."""
    par_L2: Float64
    """float64 ``[L, 2]``, peak-to-average ratio before and after."""
    taken_L2: npt.NDArray[np.int64]
    """int64 ``[L, 2]``, slots that move and what was taken (``candidates.KEEP`` and so on)."""


def solve_many(
    heat_LNE: Float64,
    deployed_LRS: Int32,
    deployed_LGE: Int32,
    share_LGE: npt.NDArray[np.float32],
    search: Search,
    half_life_H: Float64,
    min_gain: float,
    threads: int | None = None,
) -> Answers:
    """Solve all layers; the answer does not depend on ``threads`` (``None``: numba's default).

    ``heat_LNE`` float64 ``[L, N, E]``, ``deployed_LRS`` int32, ``deployed_LGE`` int32,
    ``share_LGE`` float32; see ``layer.solve_layer``.
    """
    arguments = (
        np.ascontiguousarray(heat_LNE, dtype=np.float64),
        np.array(deployed_LRS, dtype=np.int32, order="C"),
        np.array(deployed_LGE, dtype=np.int32, order="C"),
        np.ascontiguousarray(share_LGE, dtype=np.float32),
        search,
        np.ascontiguousarray(half_life_H, dtype=np.float64),
        float(min_gain),
    )
    available = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    wanted = min(threads or available, available)
    if wanted == 1 or heat_LNE.shape[0] == 1:
        return Answers(*solve_layers(*arguments))
    with _one_at_a_time:
        before = numba.get_num_threads()
        numba.set_num_threads(wanted)
        try:
            return Answers(*solve_layers_parallel(*arguments))
        finally:
            numba.set_num_threads(before)
