"""Results of a replay: each policy's decisions beside its baseline, scored on the same steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from eplb_core.placement import Float64, mean_par
from eplb_service.replay.costs import Costs
from eplb_service.replay.policy import Setup

_NOTHING_L: Float64 = np.zeros(0)


@dataclass(frozen=True)
class ReplayedDecision:
    """One decision and the steps served until the next.

    Parameters
    ----------
    step, steps
        First step after the decision's window, and steps served until the next decision.
    late
        Steps of those that were served before the decision took effect.
    layers_changed, layers_moved
        Layers that got other slots or tables, and those of them that had to receive weights.
    moves, moves_busiest
        Slots that had to receive weights, and those on the rank that received most.
    par_seen, par_planned
        PAR of the window before the decision and as promised, means over layers.
    seconds
        Time that the decision took here.
    forecasts, forecasts_held
        Forecasts of what is won over the first placement that were compared with what came, and how many held it.
    decisions
        Decisions that these steps are of: another number than one where the policy decides on change.
    par_realised_L
        float64 ``[L]``, PAR of the steps served, each step an episode.
    us_realised_L
        float64 ``[L]``, microseconds of each layer's slowest rank, mean over the steps served that had tokens; ``None``
        without a cost curve.
    busy_L
        float64 ``[L]``, steps served in which each layer had tokens.
    loads_LR
        Tokens of each rank over the steps served, float64 ``[L, R]``; only the last decision's is kept.
    floor_L, hindsight_L
        float64 ``[L]`` of a baseline: PAR that token sampling alone leaves, and of a placement fitted on the very steps
        that it serves; ``None`` for a policy, or where not asked for.
    """

    step: int = 0
    steps: int = 0
    late: int = 0
    layers_changed: int = 0
    layers_moved: int = 0
    moves: int = 0
    moves_busiest: int = 0
    par_seen: float = 1.0
    par_planned: float = 1.0
    seconds: float = 0.0
    forecasts: int = 0
    forecasts_held: int = 0
    decisions: int = 1
    par_realised_L: Float64 = field(default_factory=lambda: _NOTHING_L)
    us_realised_L: Float64 | None = None
    busy_L: Float64 = field(default_factory=lambda: _NOTHING_L)
    loads_LR: Float64 | None = None
    floor_L: Float64 | None = None
    hindsight_L: Float64 | None = None

    @property
    def par_realised(self) -> float:
        """Mean over the layers that had tokens; NaN where none had."""
        return float(mean_par(self.par_realised_L))


@dataclass(frozen=True)
class PolicyReplay:
    """One policy's way along the trace, or that of a baseline; ``decisions`` is never empty.

    ``label`` names it uniquely in a sweep.
    """

    policy: str
    label: str
    setup: Setup
    decisions: tuple[ReplayedDecision, ...]

    def rows(self, name: str) -> Float64:
        """Array of this name of all decisions, float64 ``[D, L]``; all must have it."""
        return np.stack([getattr(decision, name) for decision in self.decisions])

    def mean_L(self, rows_DL: Float64) -> Float64:
        """Mean over the steps that had tokens of rows that are such means for each decision, float64 ``[L]``."""
        return mean_par(rows_DL, axis=0, weights=self.rows("busy_L"))

    @property
    def par_DL(self) -> Float64:
        """PAR of each decision's steps, float64 ``[D, L]``."""
        return self.rows("par_realised_L")

    @property
    def loads_LR(self) -> Float64:
        """Tokens of each rank over the steps of the last decision, float64 ``[L, R]``."""
        loads_LR = self.decisions[-1].loads_LR
        assert loads_LR is not None
        return loads_LR

    @property
    def par_realised_L(self) -> Float64:
        """PAR of all steps served, each step an episode, float64 ``[L]``."""
        return self.mean_L(self.par_DL)

    @property
    def par_realised(self) -> float:
        """Mean over layers and steps that had tokens: the figure that counts."""
        return float(mean_par(self.par_realised_L))

    @property
    def moe_ms(self) -> float | None:
        """Milliseconds of the slowest ranks of all layers in a step, mean; ``None`` without a cost curve."""
        if self.decisions[0].us_realised_L is None:
            return None
        return float(np.nansum(self.mean_L(self.rows("us_realised_L")))) / 1e3

    @property
    def par_planned(self) -> float:
        """Mean over decisions of what they promised for the window that they saw; NaN where no window had tokens."""
        return float(mean_par(np.array([decision.par_planned for decision in self.decisions])))

    def total(self, name: str) -> int:
        """Sum of a count over all decisions, such as ``steps``, ``moves`` or ``layers_moved``."""
        return sum(getattr(decision, name) for decision in self.decisions)

    @property
    def steps(self) -> int:
        """Steps served."""
        return self.total("steps")

    @property
    def moves(self) -> int:
        """Slots that had to receive weights, over all decisions."""
        return self.total("moves")

    @property
    def moves_per_interval(self) -> float:
        """Slots that had to receive weights, mean over intervals."""
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
class Score:
    """One policy against its baseline, means over layers and steps.

    Parameters
    ----------
    par, par_left_alone, floor
        Realised; under the starting placement; by token sampling alone.
    hindsight, regret
        Best of all that is known with hindsight, and what the policy realised above it; ``None`` where not asked for.
    bytes_moved
        Weights received by all ranks.
    saved_ms, stall_ms
        Time per step that balancing saves (``None`` if the experts' time is not stated), and time that switching costs.
    moe_ms, moe_ms_left_alone
        Of a step: the slowest ranks of all layers, as realised and under the starting placement; ``None`` without a
        cost curve.
    """

    par: float
    par_left_alone: float
    floor: float
    hindsight: float | None
    regret: float | None
    bytes_moved: int
    saved_ms: float | None
    stall_ms: float
    moe_ms: float | None = None
    moe_ms_left_alone: float | None = None

    @property
    def net_ms(self) -> float | None:
        """Milliseconds of a step that balance saves, less what moves and switches cost; ``None`` if not known."""
        return None if self.saved_ms is None else self.saved_ms - self.stall_ms


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
        One for each setup: the starting placement, left alone.
    costs
        Costs that decisions were made by and are charged with.
    interrupted
        True where it was stopped early: then it holds the decisions that all policies had made.
    """

    first: int
    steps: int
    ranks: int
    layers: int
    experts: int
    policies: tuple[PolicyReplay, ...]
    baselines: tuple[PolicyReplay, ...]
    costs: Costs = field(default_factory=Costs)
    interrupted: bool = False

    def baseline(self, setup: Setup) -> PolicyReplay:
        """Return the results of the starting placement on the same steps.

        Parameters
        ----------
        setup
            Setup of one of the replay's policies.

        Returns
        -------
        PolicyReplay
            Results without balancing.
        """
        return next(baseline for baseline in self.baselines if baseline.setup == setup)

    def hindsight_DL(self, setup: Setup) -> Float64 | None:
        """The best PAR known with hindsight for each decision and layer: of fitted placements and of all policies."""
        baseline = self.baseline(setup)
        if baseline.decisions[0].hindsight_L is None:
            return None
        known = [policy.par_DL for policy in self.policies if policy.setup == setup]
        best_DL: Float64 = np.minimum.reduce([baseline.rows("hindsight_L"), baseline.par_DL, *known])
        return best_DL

    def moved_per_100_steps(self, policy: PolicyReplay) -> float:
        """Slots that receive weights in 100 steps, as a share of all slots."""
        slots = self.layers * self.ranks * policy.setup.slots
        return 100 * policy.moves / (policy.steps * slots)

    def score(self, policy: PolicyReplay) -> Score:
        """Compare one policy with its baseline.

        Parameters
        ----------
        policy
            One of ``policies`` or ``baselines``.

        Returns
        -------
        Score
            Means over layers and steps.
        """
        baseline, par, moe_ms = self.baseline(policy.setup), policy.par_realised, policy.moe_ms
        left_alone, left_alone_ms = baseline.par_realised, baseline.moe_ms
        floor = float(mean_par(baseline.mean_L(baseline.rows("floor_L"))))
        hindsight_DL = self.hindsight_DL(policy.setup)
        hindsight = None if hindsight_DL is None else float(mean_par(baseline.mean_L(hindsight_DL)))
        saved_ms = self.costs.saved_ms(self.layers, par, left_alone)
        if moe_ms is not None and left_alone_ms is not None:
            saved_ms = left_alone_ms - moe_ms
        received, layers_moved = policy.total("moves_busiest"), policy.total("layers_moved")
        return Score(
            par=par,
            par_left_alone=left_alone,
            # Sampling leaves no more than what some placement reached.
            floor=min(floor, par, left_alone, par if hindsight is None else hindsight),
            hindsight=hindsight,
            regret=None if hindsight is None else par - hindsight,
            bytes_moved=policy.moves * self.costs.bytes_per_expert,
            saved_ms=saved_ms,
            stall_ms=self.costs.stall_ms(policy.setup.slots, received, layers_moved) / policy.steps,
            moe_ms=moe_ms,
            moe_ms_left_alone=left_alone_ms,
        )
