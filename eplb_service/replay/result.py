"""What a replay found: every decision of every policy, what it realised, and what hindsight would have."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from eplb_service.placement import Float64, mean_par
from eplb_service.replay.costs import Costs
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


@dataclass(frozen=True)
class BaselineReplay:
    """What the policies of one setup are measured against, a row per decision, float64 ``[D, L]`` each.

    Parameters
    ----------
    setup
        Of those policies.
    left_alone_DL
        PAR of the steps served under the starting placement.
    floor_DL
        What token sampling alone leaves of it.
    hindsight_DL
        PAR of a placement fitted on the very steps that it serves; ``None`` where not asked for.
    loads_LR
        Tokens of each rank under the starting placement over the steps of the last decision, float64 ``[L, R]``.
    left_alone_us_DL
        Microseconds of each layer's slowest rank under the starting placement; ``None`` without a cost curve.
    """

    setup: Setup
    left_alone_DL: Float64
    floor_DL: Float64
    hindsight_DL: Float64 | None
    loads_LR: Float64
    left_alone_us_DL: Float64 | None = None


@dataclass(frozen=True)
class Score:
    """One policy against its baseline, means over layers and steps.

    Parameters
    ----------
    par, par_left_alone, floor
        Realised; under the starting placement; by token sampling alone.
    avoidable
        Realised less floor: what any balancer could still win.
    hindsight, regret
        Best of all that is known with hindsight, and what the policy realised above it; ``None`` where not asked for.
    bytes_moved
        Weights received by all ranks.
    saved_ms, stall_ms
        Of a step: what balance saves, and what switching costs.
    moe_ms, moe_ms_left_alone
        Of a step: the slowest ranks of all layers, as realised and under the starting placement; ``None`` without a
        cost curve.
    """

    par: float
    par_left_alone: float
    floor: float
    avoidable: float
    hindsight: float | None
    regret: float | None
    bytes_moved: int
    saved_ms: float
    stall_ms: float
    moe_ms: float | None = None
    moe_ms_left_alone: float | None = None


@dataclass(frozen=True)
class Replay:
    """All policies over the same steps of one trace.

    Parameters
    ----------
    first, steps
        First step scored, and how many.
    ranks, layers, experts
        R, L and E.
    policies
        In the order asked for.
    baselines
        One for each setup.
    costs
        As stated.
    interrupted
        Whether it was stopped early: then it holds the decisions that all policies had made.
    """

    first: int
    steps: int
    ranks: int
    layers: int
    experts: int
    policies: tuple[PolicyReplay, ...]
    baselines: tuple[BaselineReplay, ...]
    costs: Costs = field(default_factory=Costs)
    interrupted: bool = False

    def baseline(self, setup: Setup) -> BaselineReplay:
        """Of the policies with ``setup``."""
        return next(baseline for baseline in self.baselines if baseline.setup == setup)

    def hindsight_DL(self, setup: Setup) -> Float64 | None:
        """The best PAR known with hindsight for each decision and layer: of fitted placements and of all policies."""
        baseline = self.baseline(setup)
        if baseline.hindsight_DL is None:
            return None
        known = [
            np.stack([decision.par_realised_L for decision in policy.decisions])
            for policy in self.policies
            if policy.setup == setup
        ]
        best_DL: Float64 = np.minimum.reduce([baseline.hindsight_DL, baseline.left_alone_DL, *known])
        return best_DL

    def score(self, policy: PolicyReplay) -> Score:
        """One policy against its baseline."""
        baseline = self.baseline(policy.setup)
        left_alone = float(mean_par(weighted(baseline.left_alone_DL, policy.decisions)))
        floor = float(mean_par(weighted(baseline.floor_DL, policy.decisions)))
        hindsight_DL = self.hindsight_DL(policy.setup)
        hindsight = (
            None if hindsight_DL is None else float(mean_par(weighted(hindsight_DL, policy.decisions)))
        )
        par = policy.par_realised
        moe_ms, left_alone_ms = policy.moe_ms, self.moe_ms_left_alone(policy)
        saved_ms = self.costs.saved_ms(par, left_alone)
        if moe_ms is not None and left_alone_ms is not None:
            saved_ms = left_alone_ms - moe_ms
        return Score(
            par=par,
            par_left_alone=left_alone,
            floor=floor,
            avoidable=par - floor,
            hindsight=hindsight,
            regret=None if hindsight is None else par - hindsight,
            bytes_moved=policy.moves * self.costs.bytes_per_expert,
            saved_ms=saved_ms,
            stall_ms=self.costs.commit_ms * policy.layers_moved / policy.steps,
            moe_ms=moe_ms,
            moe_ms_left_alone=left_alone_ms,
        )

    def moe_ms_left_alone(self, policy: PolicyReplay) -> float | None:
        """Milliseconds of the slowest ranks of all layers, left alone; ``None`` without a cost curve."""
        us_DL = self.baseline(policy.setup).left_alone_us_DL
        return None if us_DL is None else summed_ms(us_DL, policy.decisions)


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
