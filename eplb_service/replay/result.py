"""Results of a replay: decisions of each policy and its baseline, scored on the same steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from eplb_core.placement import Float64, mean_par
from eplb_service.replay.costs import Costs
from eplb_service.replay.policy import Setup

_EMPTY: Float64 = np.zeros(0)


@dataclass(frozen=True)
class ReplayedDecision:
    """One decision, or all decisions in one interval, with the outcome of the steps served until the next one.

    Parameters
    ----------
    step
        First step after the decision's window.
    steps
        Number of steps served until the next decision.
    late
        Number of these steps that were served before the decision took full effect.
    layers_changed
        Number of layers whose placement or tables changed.
    layers_moved
        Number of layers that received weights.
    moves
        Number of slots that received weights.
    moves_busiest
        Number of slots that received weights on the rank with the most such slots.
    par_seen
        PAR of the window under the layout before the decision, averaged over the layers.
    par_planned
        PAR that the decision promised, averaged over the layers.
    seconds
        Duration of the decision on this machine, in seconds.
    forecasts
        Number of gain forecasts (relative to the initial layout) that were compared with the gain observed later.
    forecasts_held
        Number of those forecasts whose interval contained the observed gain.
    decisions
        Number of decisions. It may differ from 1 if the policy decides when heat changes.
    par_realised_L
        float64 ``[L]``, mean PAR of the served steps.
    us_realised_L
        float64 ``[L]``, time of each layer's slowest rank in microseconds, averaged over the served steps with tokens;
        ``None`` if there is no cost curve.
    par_T
        float64 ``[T]``, PAR of each served step, averaged over the layers with tokens; NaN if no layer has tokens.
    us_T
        float64 ``[T]``, time of the slowest ranks of all layers in each served step, in microseconds; ``None`` if there
        is no cost curve.
    busy_L
        float64 ``[L]``, number of served steps in which each layer had tokens.
    loads_LR
        float64 ``[L, R]``, total tokens of each rank in the served steps; only kept for the last decision.
    floor_L
        float64 ``[L]``, noise floor of the served steps, for a baseline; otherwise ``None``.
    hindsight_L
        float64 ``[L]``, PAR of a placement that is fitted to the served steps themselves, for a baseline; ``None`` for
        a policy, or if not requested.
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
    par_realised_L: Float64 = field(default_factory=lambda: _EMPTY)
    us_realised_L: Float64 | None = None
    par_T: Float64 = field(default_factory=lambda: _EMPTY)
    us_T: Float64 | None = None
    busy_L: Float64 = field(default_factory=lambda: _EMPTY)
    loads_LR: Float64 | None = None
    floor_L: Float64 | None = None
    hindsight_L: Float64 | None = None

    @property
    def par_realised(self) -> float:
        """Mean PAR of the layers with tokens; NaN if no layer has tokens."""
        return float(mean_par(self.par_realised_L))


@dataclass(frozen=True)
class PolicyReplay:
    """Results of one policy, or of a baseline, over the trace.

    Parameters
    ----------
    policy
        Name of the policy; empty for a baseline.
    label
        Name of the job, unique within the replay.
    setup
        Slots and schedule.
    decisions
        Decisions in order; at least one.
    """

    policy: str
    label: str
    setup: Setup
    decisions: tuple[ReplayedDecision, ...]

    def rows(self, name: str) -> Float64:
        """Stack the named field of all decisions and return it, float64 ``[D, L]``."""
        return np.stack([getattr(decision, name) for decision in self.decisions])

    def mean_L(self, rows_DL: Float64) -> Float64:
        """Return the mean row, float64 ``[L]``, weighted by each layer's number of steps with tokens."""
        return mean_par(rows_DL, axis=0, weights=self.rows("busy_L"))

    @property
    def par_DL(self) -> Float64:
        """PAR of each decision's steps, float64 ``[D, L]``."""
        return self.rows("par_realised_L")

    @property
    def loads_LR(self) -> Float64:
        """Total tokens of each rank in the steps after the last decision, float64 ``[L, R]``."""
        loads_LR = self.decisions[-1].loads_LR
        assert loads_LR is not None
        return loads_LR

    @property
    def par_realised_L(self) -> Float64:
        """Mean PAR of all served steps, float64 ``[L]``."""
        return self.mean_L(self.par_DL)

    @property
    def par_realised(self) -> float:
        """Mean PAR over all served steps and layers with tokens, which is the policy's score."""
        return float(mean_par(self.par_realised_L))

    @property
    def moe_ms(self) -> float | None:
        """Mean milliseconds per step of the slowest ranks, summed over layers; ``None`` if there is no cost curve."""
        if self.decisions[0].us_realised_L is None:
            return None
        return float(np.nansum(self.mean_L(self.rows("us_realised_L")))) / 1e3

    @property
    def par_planned(self) -> float:
        """Mean PAR that the decisions promised; NaN if no window had tokens."""
        return float(mean_par(np.array([decision.par_planned for decision in self.decisions])))

    def total(self, name: str) -> int:
        """Return the sum over all decisions of a count field, such as ``steps``, ``moves`` or ``layers_moved``."""
        return sum(getattr(decision, name) for decision in self.decisions)

    @property
    def steps(self) -> int:
        """Number of served steps."""
        return self.total("steps")

    @property
    def moves(self) -> int:
        """Number of slots that received weights, over all decisions."""
        return self.total("moves")

    @property
    def moves_per_interval(self) -> float:
        """Mean number of slots that received weights per interval."""
        return self.moves / len(self.decisions)

    @property
    def seconds_mean(self) -> float:
        """Mean time per decision, in seconds."""
        return fmean(decision.seconds for decision in self.decisions)

    @property
    def seconds_max(self) -> float:
        """Time of the slowest decision, in seconds."""
        return max(decision.seconds for decision in self.decisions)


@dataclass(frozen=True)
class Score:
    """Comparison of one policy with its baseline, averaged over layers and steps.

    Parameters
    ----------
    par
        Realised PAR.
    par_left_alone
        PAR of the initial layout on the same steps.
    floor
        Noise floor.
    hindsight
        Lowest known PAR in hindsight; ``None`` if not requested.
    regret
        Realised PAR minus ``hindsight``; ``None`` if not requested.
    bytes_moved
        Bytes of weights that all ranks received.
    saved_ms
        Time per step that balancing saves, in milliseconds; ``None`` if the expert time is unknown.
    stall_ms
        Time per step that moves and switches cost, in milliseconds.
    moe_ms
        Realised time per step of each layer's slowest rank, summed over the layers, in milliseconds; ``None`` if there
        is no cost curve.
    moe_ms_left_alone
        ``moe_ms`` under the initial layout.
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
        """``saved_ms`` minus ``stall_ms``; ``None`` if unknown."""
        return None if self.saved_ms is None else self.saved_ms - self.stall_ms


@dataclass(frozen=True)
class Replay:
    """Results of all policies on the same steps of one trace.

    Parameters
    ----------
    first
        First step that is scored.
    steps
        Number of steps that are scored.
    ranks
        R, number of ranks.
    layers
        L, number of layers.
    experts
        E, number of experts per layer.
    policies
        Results of the policies, in the order of the jobs.
    baselines
        Results of the initial layout without decisions, one for each setup.
    costs
        Costs used to price the decisions and to charge for them.
    interrupted
        True if the replay was stopped early. In that case, it contains only the policies that had finished.
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
        """Return the results of the initial layout on the same steps.

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
        """Return the lowest known PAR for each decision and layer, float64 ``[D, L]``.

        It is the minimum over the placements fitted to the served steps, the initial layout and all policies. The
        result is ``None`` if hindsight was not requested.
        """
        baseline = self.baseline(setup)
        if baseline.decisions[0].hindsight_L is None:
            return None
        policies = [policy.par_DL for policy in self.policies if policy.setup == setup]
        best_DL: Float64 = np.minimum.reduce([baseline.rows("hindsight_L"), baseline.par_DL, *policies])
        return best_DL

    def moved_per_100_steps(self, policy: PolicyReplay) -> float:
        """Return the number of slots that receive weights per 100 steps, as a fraction of all slots."""
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
        baseline = self.baseline(policy.setup)
        par = policy.par_realised
        left_alone = baseline.par_realised
        moe_ms = policy.moe_ms
        left_alone_ms = baseline.moe_ms
        floor = float(mean_par(baseline.mean_L(baseline.rows("floor_L"))))
        hindsight_DL = self.hindsight_DL(policy.setup)
        hindsight = None if hindsight_DL is None else float(mean_par(baseline.mean_L(hindsight_DL)))
        saved_ms = self.costs.saved_ms(self.layers, par, left_alone)
        if moe_ms is not None and left_alone_ms is not None:
            saved_ms = left_alone_ms - moe_ms
        received = policy.total("moves_busiest")
        layers_moved = policy.total("layers_moved")
        return Score(
            par=par,
            par_left_alone=left_alone,
            # A PAR that some placement achieved is an upper bound on the floor.
            floor=min(floor, par, left_alone, par if hindsight is None else hindsight),
            hindsight=hindsight,
            regret=None if hindsight is None else par - hindsight,
            bytes_moved=policy.moves * self.costs.bytes_per_expert,
            saved_ms=saved_ms,
            stall_ms=self.costs.stall_ms(policy.setup.slots, received, layers_moved) / policy.steps,
            moe_ms=moe_ms,
            moe_ms_left_alone=left_alone_ms,
        )
