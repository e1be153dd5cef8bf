"""What every policy is asked and what it answers, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scene:
    """What a policy sees when it decides.

    Parameters
    ----------
    heat_TLE
        int32 ``[T, L, E]``, tokens of each logical expert in each step of the window.
    placement_LRS, tables_RLE
        int32 ``[L, R, S]`` and ``[R, L, E]``, what serves now.
    source_RLE
        float64 ``[R, L, E]``, tokens by the rank that they come from, over the window; ``None``: evenly.
    """

    heat_TLE: Int32
    placement_LRS: Int32
    tables_RLE: Int32
    source_RLE: Float64 | None = None


@dataclass(frozen=True)
class Decision:
    """What a policy wants to serve, and what deciding cost.

    Parameters
    ----------
    placement_LRS
        int32 ``[L, R, S]``; peers may put an expert twice on a rank.
    tables_RLE
        int32 ``[R, L, E]``; ``None`` for the engines' rule, replica ``rank % replicas``.
    promised_L
        float64 ``[L]``, peak-to-average ratio that it expects of the window; ``None`` where it does not say.
    changed_layers
        Layers whose placement or tables it changes.
    cpu_seconds, wall_seconds
        Of the decision alone: heat is in the policy's own form when the clock starts.
    """

    placement_LRS: Int32
    tables_RLE: Int32 | None
    promised_L: Float64 | None
    changed_layers: int
    cpu_seconds: float
    wall_seconds: float


class Policy(Protocol):
    """One balancer; it may keep what it saw from one decision to the next."""

    def decide(self, scene: Scene) -> Decision:
        """Decide on one window."""
        ...
