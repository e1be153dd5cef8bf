"""Input and output of a decision, in a form common to all policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scene:
    """Input of a decision: the window and the current layout.

    Parameters
    ----------
    heat_TLE
        int32 ``[T, L, E]``, tokens per step, layer and logical expert.
    placement_LRS
        int32 ``[L, R, S]``, current placement.
    tables_RLE
        int32 ``[R, L, E]``, current tables.
    source_RLE
        float64 ``[R, L, E]``, number of tokens by source rank, summed over the window. ``None`` if they come equally
        from all ranks.
    """

    heat_TLE: Int32
    placement_LRS: Int32
    tables_RLE: Int32
    source_RLE: Float64 | None = None


@dataclass(frozen=True)
class Decision:
    """New layout chosen by a policy, and the time that the decision took.

    Parameters
    ----------
    placement_LRS
        int32 ``[L, R, S]``, new placement. Peers may place an expert twice on the same rank.
    tables_RLE
        int32 ``[R, L, E]``, new tables. ``None`` for the engines' rule: rank ``r`` sends to replica
        ``r % replicas``.
    promised_L
        float64 ``[L]``, PAR that the policy expects on the window. ``None`` if it does not report one.
    changed_layers
        Number of layers that differ from the current layout.
    cpu_seconds
        CPU time of the decision. Converting the heat to the policy's own format is not included.
    wall_seconds
        Wall-clock time of the same work.
    """

    placement_LRS: Int32
    tables_RLE: Int32 | None
    promised_L: Float64 | None
    changed_layers: int
    cpu_seconds: float
    wall_seconds: float


class Policy(Protocol):
    """A balancer. It may keep state between decisions."""

    def decide(self, scene: Scene) -> Decision:
        """Make the decision for one window."""
        ...
