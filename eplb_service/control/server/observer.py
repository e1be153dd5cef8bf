"""Recent balance, decisions and heartbeats per deployment, for pictures and metrics; nothing depends on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.health import (
    BalanceSeries,
    mean_measured_par,
    measured_par,
    problems,
    rank_loads,
)
from eplb_service.placement import mean_par
from eplb_service.planner.plan import Plan
from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.agent import Heartbeat
from eplb_service.wire.operator import BalancePoint, PastPlan

_LOAD_STEPS = 16
"""Newest steps of a rank's load: few, because this is done every second on the event loop."""
_RANKS_AT_A_TIME = 256


@dataclass
class _Observed:
    """Records of one deployment: balance over time, last decision and plan, per rank the last report and heartbeat."""

    series: BalanceSeries = field(default_factory=BalanceSeries)
    last_decision: PastPlan | None = None
    last_plan: PastPlan | None = None
    heard_R: dict[int, float] = field(default_factory=dict)
    beats_R: dict[int, Heartbeat] = field(default_factory=dict)


class Observer:
    """Records of all deployments, by ``wall_clock`` (seconds since 1970) and a ``clock`` that never jumps."""

    def __init__(
        self, wall_clock: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_clock = wall_clock
        self._clock = clock
        self._observed: dict[str, _Observed] = {}

    def of(self, name: str) -> _Observed:
        """Return the records of a deployment."""
        return self._observed.setdefault(name, _Observed())

    def heard(self, name: str, rank: int) -> None:
        """Note that a rank has reported something."""
        self.of(name).heard_R[rank] = self._clock()

    def count_calls(self, name: str, rank: int, beat: Heartbeat, metrics: Metrics) -> None:
        """Count the agent's calls since the heartbeat before, unless that was another start's."""
        beats_R = self.of(name).beats_R
        before, beats_R[rank] = beats_R.get(rank), beat
        if before is None:
            return
        calls, micros = beat.calls - before.calls, beat.call_micros - before.call_micros
        votes = beat.vote_micros - before.vote_micros
        if min(calls, micros, votes) >= 0:
            metrics.count("eplb_agent_calls", name, by=calls)
            metrics.count("eplb_agent_call_seconds", name, by=micros / 1e6)
            metrics.count("eplb_agent_vote_seconds", name, by=votes / 1e6)

    def silent_seconds(self, name: str, rank: int) -> float | None:
        """Return the time since the last report of a rank; ``None`` where there was none."""
        heard = self.of(name).heard_R.get(rank)
        return None if heard is None else max(0.0, self._clock() - heard)

    def decided(self, name: str, plan: Plan, seconds: float) -> None:
        """Record a decision that took ``seconds``."""
        moves = {layer.layer: layer.moves_M5 for layer in plan.layers}
        self.of(name).last_decision = PastPlan(
            0, self._wall_clock(), "", "", 0, plan.verdicts, solve_seconds=seconds, moves=moves
        )

    def offered(self, name: str, plan_id: int) -> None:
        """Record that the last decision is offered as a plan."""
        observed = self.of(name)
        if observed.last_decision is not None:
            observed.last_decision = replace(observed.last_decision, plan_id=plan_id)
            observed.last_plan = observed.last_decision

    def tick(self, deployment: Deployment) -> None:
        """Record the balance as it is now, where anything is measured."""
        observed = self.of(deployment.name)
        par = mean_measured_par(measured_par(deployment))
        if not par:
            return
        verdicts = observed.last_decision.verdicts if observed.last_decision else ()
        planned = mean_par(np.array([verdict.par_planned for verdict in verdicts])) if verdicts else math.nan
        floor = mean_par(np.array([verdict.noise_floor for verdict in verdicts])) if verdicts else math.nan
        switched = deployment.totals.layers_switched
        observed.series.add(BalancePoint(self._wall_clock(), par, float(planned), float(floor), switched))

    def regrouped(self, name: str) -> None:
        """Keep only the balance over time: the ranks have formed another group, perhaps of another shape."""
        self._observed[name] = _Observed(self.of(name).series)

    def forget(self, name: str) -> None:
        """Drop the records of a deployment that is known no more."""
        self._observed.pop(name, None)


def report_gauges(deployment: Deployment, metrics: Metrics, observer: Observer) -> Iterator[None]:
    """Set the gauges of ``deployment``, part by part; those that need ranks are removed while none is connected.

    Done every second: many ranks at once would hold the event loop.
    """
    name, connected = deployment.name, deployment.connected
    metrics.set("eplb_agents_connected", len(connected), name)
    metrics.set("eplb_agents_expected", deployment.group.shape.ranks if deployment.group else 0, name)
    metrics.set("eplb_paused", deployment.paused, name)
    metrics.set("eplb_agents_halted", sum(bool(member.error) for member in connected), name)
    metrics.set("eplb_dropped_steps", sum(member.dropped_steps for member in connected), name)
    metrics.set("eplb_heat_one_in", deployment.shedding.one_in, name)
    metrics.set("eplb_last_decision_age_seconds", deployment.without_decision.seconds, name)
    metrics.set("eplb_problems", len(problems(deployment)), name)
    if deployment.heat is not None:
        metrics.set("eplb_empty_steps", deployment.heat.pending.empty_steps, name)
        metrics.set("eplb_dummy_steps", deployment.heat.pending.dummy_steps, name)
    if deployment.live is not None:
        metrics.set("eplb_epoch", deployment.live.epoch, name)
    if not connected:
        metrics.forget_balance(name)
        return
    silent = [observer.silent_seconds(name, member.rank) or 0.0 for member in connected]
    metrics.set("eplb_agent_silent_seconds", max(silent), name)
    staging = [member.staging_bytes for member in connected if member.staging_bytes is not None]
    rings = [member.ring_bytes for member in connected if member.ring_bytes is not None]
    metrics.set("eplb_agent_staging_bytes", max(staging, default=None), name)
    metrics.set("eplb_agent_heat_ring_bytes", max(rings, default=None), name)
    if deployment.live is not None:
        yield
        _report_par(deployment, metrics)
        yield
        yield from _reporting_loads(deployment, metrics)


def _report_par(deployment: Deployment, metrics: Metrics) -> None:
    par_L = measured_par(deployment)
    for layer, par in enumerate(par_L.tolist()):
        if par > 0:  # 0 where nothing was measured
            metrics.set("eplb_par_realised", par, deployment.name, str(layer))
    for layer, par in deployment.planned_par.items():
        metrics.set("eplb_par_planned", par, deployment.name, str(layer))
    if mean_measured_par(par_L):
        metrics.set("eplb_deployment_par_realised", mean_measured_par(par_L), deployment.name)


def _reporting_loads(deployment: Deployment, metrics: Metrics) -> Iterator[None]:
    steps, loads_LR = rank_loads(deployment, _LOAD_STEPS)
    measured_L = loads_LR.any(axis=1) if steps else np.zeros(0, dtype=bool)
    if not measured_L.any():
        return
    for rank, load in enumerate(loads_LR[measured_L].mean(axis=0).tolist()):
        if rank % _RANKS_AT_A_TIME == 0:
            yield
        metrics.set("eplb_rank_load", load, deployment.name, str(rank))
