"""Runs the layer solver over many layers, several at a time.

Layers are handed to threads, not to a parallel loop inside a kernel: kernels hold no lock, a layer that fails
spoils no other, the clock can be read between layers, and a process may fork or plan for several deployments at
once without harm.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Int32
from eplb_service.solver.arrays import Bool, Float64
from eplb_service.solver.candidates import Deployed, Search, homes
from eplb_service.solver.layer import Answer, solve_layer


class SolverError(RuntimeError):
    """What went wrong in one layer; the message is what the solver said."""


class OutOfTimeError(SolverError):
    """A layer whose turn had not come when the budget was spent."""


def solve_many(
    heat_LNE: Float64,
    deployed_LRS: Int32,
    deployed_LGE: Int32,
    share_LGE: npt.NDArray[np.floating],
    search: Search,
    half_life_H: Float64,
    min_gain: float,
    unplaced_L: Bool,
    threads: int | None = None,
    budget_ms: float | None = None,
) -> list[Answer | SolverError]:
    """Solve all layers; without a budget the answers do not depend on ``threads`` (``None``: one for each CPU).

    ``heat_LNE`` float64 ``[L, N, E]``, ``deployed_LRS`` int32, ``deployed_LGE`` int32, ``share_LGE`` float,
    ``unplaced_L`` bool; see ``layer.solve_layer``. Layers begin in the order given. One not begun within
    ``budget_ms`` comes back as ``OutOfTimeError``; one that fails as another ``SolverError``.
    """
    deadline = np.inf if budget_ms is None else time.monotonic() + budget_ms / 1e3
    heat_LNE = np.ascontiguousarray(heat_LNE, dtype=np.float64)
    deployed_LRS = np.array(deployed_LRS, dtype=np.int32, order="C")
    deployed_LGE = np.array(deployed_LGE, dtype=np.int32, order="C")
    share32_LGE = np.ascontiguousarray(share_LGE, dtype=np.float32)

    def solve(layer: int) -> Answer | SolverError:
        if time.monotonic() >= deadline:
            return OutOfTimeError(f"the budget of {budget_ms:g} ms was spent")
        try:
            home_ER = homes(deployed_LRS[layer], heat_LNE.shape[2])
            deployed = Deployed(deployed_LRS[layer], deployed_LGE[layer], share32_LGE[layer], home_ER)
            return solve_layer(
                heat_LNE[layer], deployed, search, half_life_H, min_gain, bool(unplaced_L[layer])
            )
        except Exception as error:  # one layer's failure must not spoil the others
            return SolverError(f"{type(error).__name__}: {error}")

    layers = range(heat_LNE.shape[0])
    wanted = min(threads or os.cpu_count() or 1, os.cpu_count() or 1, len(layers))
    if wanted <= 1:
        return [solve(layer) for layer in layers]
    with ThreadPoolExecutor(wanted, thread_name_prefix="eplb-solver") as pool:
        return list(pool.map(solve, layers))
