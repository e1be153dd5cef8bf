"""What one policy did along a trace: each decision with what it saw, planned and realised, and their means."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np

from eplb_service.placement import Float64, mean_par
from eplb_service.replay.schedule import Schedule


@dataclass(frozen=True)
class Setup:
    """What all policies of one comparison share: slots on each rank, and when decisions fall."""

    slots: int
    schedule: Schedule


@dataclass(frozen=True)
class ReplayedDecision:
    """One decision and the steps served until the next.

    Parameters
    ----------
    step
        First step after the decision's window.
    steps
        Steps served until the next decision.
    late
        Those of them that were served before the decision took effect.
    layers_changed
        Layers that got other slots or tables.
    layers_moved
        Those of them that had to receive weights.
    moves
        Slots that had to receive weights.
    moves_busiest
        Those on the rank that received most.
    par_seen
        PAR of the window before the decision, mean over layers.
    par_planned
        PAR of the window that the decision promised, mean over layers.
    par_realised_L
        float64 ``[L]``, PAR of the steps served, each step an episode.
    seconds
        Time that the decision took here.
    us_realised_L
        float64 ``[L]``, microseconds of each layer's slowest rank, mean over the steps served that had tokens; ``None``
        without a cost curve.
    decisions
        Decisions that these steps are of: another number than one where the policy decides on change.
    busy_L
        float64 ``[L]``, steps served in which each layer had tokens; ``None`` where all had.
    """

    step: int
    steps: int
    late: int
    layers_changed: int
    layers_moved: int
    moves: int
    moves_busiest: int
    par_seen: float
    par_planned: float
    par_realised_L: Float64
    seconds: float
    us_realised_L: Float64 | None = None
    decisions: int = 1
    busy_L: Float64 | None = None

    @property
    def par_realised(self) -> float:
        """Mean over the layers that had tokens; NaN where none had."""
        return float(mean_par(self.par_realised_L))


@dataclass(frozen=True)
class PolicyReplay:
    """One policy's way along the trace; ``decisions`` is never empty.

    ``label`` names it uniquely in a sweep; ``loads_LR`` are the tokens of each rank, float64
    ``[L, R]``, over the steps of the last decision.
    """

    policy: str
    label: str
    setup: Setup
    decisions: tuple[ReplayedDecision, ...]
    loads_LR: Float64

    @property
    def par_realised_L(self) -> Float64:
        """PAR of all steps served, each step an episode, float64 ``[L]``."""
        par_DL = np.stack([decision.par_realised_L for decision in self.decisions])
        return weighted(par_DL, self.decisions)

    @property
    def par_realised(self) -> float:
        """Mean over layers and steps that had tokens: the figure that counts."""
        return float(mean_par(self.par_realised_L))

    @property
    def moe_ms(self) -> float | None:
        """Milliseconds of the slowest ranks of all layers in a step, mean; ``None`` without a cost curve."""
        us_DL = [decision.us_realised_L for decision in self.decisions if decision.us_realised_L is not None]
        return summed_ms(np.stack(us_DL), self.decisions) if us_DL else None

    @property
    def par_planned(self) -> float:
        """Mean over decisions of what they promised for the window that they saw; NaN where no window had tokens."""
        return float(mean_par(np.array([decision.par_planned for decision in self.decisions])))

    @property
    def steps(self) -> int:
        """Steps served."""
        return sum(decision.steps for decision in self.decisions)

    @property
    def moves(self) -> int:
        """Slots that had to receive weights, over all decisions."""
        return sum(decision.moves for decision in self.decisions)

    @property
    def moves_per_decision(self) -> float:
        """Slots that had to receive weights, mean over decisions."""
        return self.moves / len(self.decisions)

    @property
    def layers_moved(self) -> int:
        """Layers that had to receive weights, over all decisions."""
        return sum(decision.layers_moved for decision in self.decisions)

    @property
    def seconds_mean(self) -> float:
        """Time of a decision, mean."""
        return fmean(decision.seconds for decision in self.decisions)

    @property
    def seconds_max(self) -> float:
        """Time of the slowest decision."""
        return max(decision.seconds for decision in self.decisions)


def weighted(rows_DL: Float64, decisions: tuple[ReplayedDecision, ...]) -> Float64:
    """Mean over the steps that had tokens of rows that are such means for each decision, float64 ``[L]``."""
    layers = rows_DL.shape[1]
    steps_DL = np.stack(
        [
            np.full(layers, float(decision.steps)) if decision.busy_L is None else decision.busy_L
            for decision in decisions
        ]
    )
    return mean_par(rows_DL, axis=0, weights=steps_DL)


def summed_ms(us_DL: Float64, decisions: tuple[ReplayedDecision, ...]) -> float:
    """Milliseconds of all layers together, each row of microseconds counting by its decision's steps."""
    return float(np.nansum(weighted(us_DL, decisions))) / 1e3
