"""Question and answer of every policy, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scene:
    """Window and placement that a policy decides on.

    ``heat_TLE`` int32 are tokens per step, layer and logical expert, ``placement_LRS`` and ``tables_RLE`` int32 what
    serves now. ``source_RLE`` float64 are tokens by the rank that they come from, over the window; ``None``: evenly.
    """

    heat_TLE: Int32
    placement_LRS: Int32
    tables_RLE: Int32
    source_RLE: Float64 | None = None


@dataclass(frozen=True)
class Decision:
    """Placement and tables that a policy wants to serve, and the cost of deciding.

    Peers may put an expert twice on a rank of ``placement_LRS``; ``tables_RLE`` is ``None`` for the engines' rule,
    replica ``rank % replicas``. ``promised_L`` is the PAR that it expects of the window, where it says so. Seconds are
    of the decision alone: heat is in the policy's own form when the clock starts.
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
