"""What a replay found: every policy beside its baseline, scored on the same steps, and what hindsight would have."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from eplb_service.placement import Float64, mean_par
from eplb_service.replay.costs import Costs
from eplb_service.replay.policy_replay import PolicyReplay, Setup, summed_ms, weighted


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
