"""Keeps what a picture of a deployment needs and nothing else does: balance over time, last decisions, who was heard.

It is given what happens; nothing depends on it. Bounded by the deployments and ranks that are known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from eplb_service.control.core.balance_series import BalanceSeries
from eplb_service.control.core.deployment_state import DeploymentState
from eplb_service.control.core.health import mean_measured_par, measured_par
from eplb_service.placement import Int32, mean_par
from eplb_service.planner.plan import LayerVerdict, Plan
from eplb_service.wire.balance import BalancePoint
from eplb_service.wire.status import Heartbeat


@dataclass(frozen=True)
class ObservedDecision:
    """What was decided, and when.

    Parameters
    ----------
    at
        Seconds since 1970.
    solve_seconds
        Time that it took.
    verdicts
        One per layer.
    moves
        int32 ``[M, 5]`` by layer that changes, as in ``LayerPlan``.
    plan_id
        Of the plan that was offered; 0 where none was.
    """

    at: float
    solve_seconds: float
    verdicts: tuple[LayerVerdict, ...]
    moves: Mapping[int, Int32]
    plan_id: int = 0

    @property
    def noise_floor(self) -> float:
        """Mean over the layers that had tokens; NaN where none had."""
        return float(mean_par(np.array([verdict.noise_floor for verdict in self.verdicts])))

    @property
    def par_planned(self) -> float:
        """Mean over the layers that had tokens; NaN where none had."""
        return float(mean_par(np.array([verdict.par_planned for verdict in self.verdicts])))


@dataclass
class Observed:
    """What was seen of one deployment: its balance over time, and its last decision and plan, its ranks' heartbeats."""

    series: BalanceSeries = field(default_factory=BalanceSeries)
    last_decision: ObservedDecision | None = None
    last_plan: ObservedDecision | None = None
    heard_R: dict[int, float] = field(default_factory=dict)
    beats_R: dict[int, Heartbeat] = field(default_factory=dict)


class CallsTook(NamedTuple):
    """Calls of an agent by its host, microseconds that they took, and those of them in votes."""

    calls: int
    micros: int
    vote_micros: int


class Observer:
    """What was seen of all deployments.

    Parameters
    ----------
    wall_clock, clock
        Seconds since 1970, and seconds that never jump.
    """

    def __init__(
        self, wall_clock: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_clock = wall_clock
        self._clock = clock
        self._observed: dict[str, Observed] = {}

    def of(self, name: str) -> Observed:
        """What was seen of a deployment so far."""
        if name not in self._observed:
            self._observed[name] = Observed()
        return self._observed[name]

    def heard(self, name: str, rank: int) -> None:
        """A rank has reported something."""
        self.of(name).heard_R[rank] = self._clock()

    def took(self, name: str, rank: int, beat: Heartbeat) -> CallsTook | None:
        """What a rank's agent took since the heartbeat before; ``None`` where that was another start's, or none."""
        beats_R = self.of(name).beats_R
        before, beats_R[rank] = beats_R.get(rank), beat
        if before is None:
            return None
        calls, micros = beat.calls - before.calls, beat.call_micros - before.call_micros
        votes = beat.vote_micros - before.vote_micros
        if min(calls, micros, votes) < 0:
            return None
        return CallsTook(calls, micros, votes)

    def silent_seconds(self, name: str, rank: int) -> float | None:
        """How long nothing was heard of a rank; ``None`` where nothing ever was."""
        heard = self.of(name).heard_R.get(rank)
        return None if heard is None else max(0.0, self._clock() - heard)

    def decided(self, name: str, plan: Plan, seconds: float) -> None:
        """A decision was made."""
        moves = {layer.layer: layer.moves_M5 for layer in plan.layers}
        self.of(name).last_decision = ObservedDecision(self._wall_clock(), seconds, plan.verdicts, moves)

    def offered(self, name: str, plan_id: int) -> None:
        """The last decision is offered as a plan."""
        observed = self.of(name)
        if observed.last_decision is not None:
            observed.last_decision = replace(observed.last_decision, plan_id=plan_id)
            observed.last_plan = observed.last_decision

    def tick(self, deployment: DeploymentState) -> None:
        """Balance as it is now, where anything is measured."""
        observed = self.of(deployment.name)
        par = mean_measured_par(measured_par(deployment))
        if not par:
            return
        decision = observed.last_decision
        observed.series.add(
            BalancePoint(
                self._wall_clock(),
                par,
                decision.par_planned if decision else math.nan,
                decision.noise_floor if decision else math.nan,
                deployment.totals.layers_switched,
            )
        )

    def regrouped(self, name: str) -> None:
        """Another forming of the group, perhaps of another shape, has taken the place of the one before."""
        series = self.of(name).series
        self._observed[name] = Observed(series)

    def forget(self, name: str) -> None:
        """The deployment is known no more."""
        self._observed.pop(name, None)
