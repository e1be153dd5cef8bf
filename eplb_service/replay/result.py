"""What a replay found: every decision of every policy, and what it realised."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Decision:
    """One decision and the steps served under it.

    Parameters
    ----------
    step
        First step served under the decision; its window ends just before.
    steps
        Steps served until the next decision.
    layers_changed
        Layers that got other slots or tables.
    moves
        Slots that had to receive weights.
    par_seen
        PAR of the window before the decision, mean over layers.
    par_planned
        PAR of the window that the decision promised, mean over layers.
    par_realised_L
        float64 ``[L]``, PAR of the steps served, each step an episode.
    seconds
        Time that the decision took.
    """

    step: int
    steps: int
    layers_changed: int
    moves: int
    par_seen: float
    par_planned: float
    par_realised_L: npt.NDArray[np.float64]
    seconds: float

    @property
    def par_realised(self) -> float:
        """Mean over layers."""
        return float(self.par_realised_L.mean())


@dataclass(frozen=True)
class PolicyReplay:
    """One policy's way along the trace; ``decisions`` is never empty."""

    policy: str
    decisions: tuple[Decision, ...]

    @property
    def par_realised_L(self) -> npt.NDArray[np.float64]:
        """PAR of all steps served, each step an episode, float64 ``[L]``."""
        par_DL = np.stack([decision.par_realised_L for decision in self.decisions])
        steps_D = np.array([decision.steps for decision in self.decisions])
        mean_L: npt.NDArray[np.float64] = np.average(par_DL, axis=0, weights=steps_D)
        return mean_L

    @property
    def par_realised(self) -> float:
        """Mean over layers and steps: the figure that counts."""
        return float(self.par_realised_L.mean())

    @property
    def par_planned(self) -> float:
        """Mean over decisions of what they promised for the window that they saw."""
        return fmean(decision.par_planned for decision in self.decisions)

    @property
    def moves(self) -> int:
        """Slots that had to receive weights, over all decisions."""
        return sum(decision.moves for decision in self.decisions)

    @property
    def moves_per_decision(self) -> float:
        """Slots that had to receive weights, mean over decisions."""
        return self.moves / len(self.decisions)

    @property
    def seconds_mean(self) -> float:
        """Time of a decision, mean."""
        return fmean(decision.seconds for decision in self.decisions)

    @property
    def seconds_max(self) -> float:
        """Time of the slowest decision."""
        return max(decision.seconds for decision in self.decisions)


@dataclass(frozen=True)
class Replay:
    """All policies over the same steps of one trace.

    Parameters
    ----------
    window, interval
        Steps that a decision sees, and steps between two decisions.
    steps
        Steps served and scored: those after the first window.
    policies
        In the order asked for.
    """

    window: int
    interval: int
    steps: int
    policies: tuple[PolicyReplay, ...]
