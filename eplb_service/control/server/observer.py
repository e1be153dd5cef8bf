"""Recent balance, decisions and heartbeats of each deployment, for charts and metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eplb_core.placement import mean_par
from eplb_core.planner.plan import Plan
from eplb_core.planner.score import Gain
from eplb_core.planner.verdicts import MOVE_PRICES, MovePrice
from eplb_core.wire.agent import Heartbeat
from eplb_core.wire.operator import BalancePoint, PastPlan
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.health import (
    BalanceSeries,
    mean_loads,
    mean_measured_par,
    measured_par,
    problems,
    rank_loads,
    redundancy,
)
from eplb_service.telemetry.metrics import GaugeValue, Metrics

_LOAD_STEPS = 16
"""Number of newest steps from which the rank loads are computed. It is small, because this computation runs every
second on the event loop."""
MEASURED_PRICE, _, STATED_PRICE, _ = MOVE_PRICES


@dataclass
class _Observed:
    """Records of one deployment.

    Parameters
    ----------
    series
        Balance over time.
    last_decision
        The last decision; ``None`` before the first.
    last_plan
        The last decision that led to a plan; ``None`` before the first.
    assembled
        Number of steps with complete heat at the last tick.
    charted
        True if ``series`` already covers these steps.
    stepped_at
        Time at which the newest of these steps was first observed, in seconds; ``None`` before the first step.
    reported_at_R
        Time of each rank's last report, in seconds.
    beats_R
        Last heartbeat of each rank.
    """

    series: BalanceSeries = field(default_factory=BalanceSeries)
    last_decision: PastPlan | None = None
    last_plan: PastPlan | None = None
    assembled: int = 0
    charted: bool = False
    stepped_at: float | None = None
    reported_at_R: dict[int, float] = field(default_factory=dict)
    beats_R: dict[int, Heartbeat] = field(default_factory=dict)

    def mean(self, ratio: str) -> float:
        """Return the mean over layers of the verdict field ``ratio`` in the last decision; NaN if no verdict has it."""
        verdicts = self.last_decision.verdicts if self.last_decision else ()
        values = [getattr(verdict, ratio) for verdict in verdicts]
        return float(mean_par(np.array(values))) if values else math.nan


class Observer:
    """Records of all deployments.

    Parameters
    ----------
    wall_clock
        Clock in seconds since 1970.
    clock
        Monotonic clock in seconds.
    """

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
        """Record that a rank has just sent a message."""
        self.of(name).reported_at_R[rank] = self._clock()

    def count_calls(self, name: str, rank: int, beat: Heartbeat, metrics: Metrics) -> None:
        """Count the agent's calls since its previous heartbeat, unless the agent has restarted since."""
        beats_R = self.of(name).beats_R
        previous = beats_R.get(rank)
        beats_R[rank] = beat
        if previous is None:
            return
        calls = beat.calls - previous.calls
        call_micros = beat.call_micros - previous.call_micros
        vote_micros = beat.vote_micros - previous.vote_micros
        # If the agent has restarted, its counters have restarted from zero.
        if min(calls, call_micros, vote_micros) >= 0:
            metrics.count("eplb_agent_calls", name, by=calls)
            metrics.count("eplb_agent_call_seconds", name, by=call_micros / 1e6)
            metrics.count("eplb_agent_vote_seconds", name, by=vote_micros / 1e6)

    def silent_seconds(self, name: str, rank: int) -> float | None:
        """Return the seconds since a rank's last message; ``None`` before the first one."""
        reported_at = self.of(name).reported_at_R.get(rank)
        return None if reported_at is None else max(0.0, self._clock() - reported_at)

    def decided(self, name: str, plan: Plan, seconds: float) -> None:
        """Record a decision, and the ``seconds`` that it took."""
        moves = {layer.layer: layer.moves_M5 for layer in plan.layers}
        self.of(name).last_decision = PastPlan(
            0, self._wall_clock(), "", "", 0, plan.verdicts, solve_seconds=seconds, moves=moves
        )

    def offered(self, name: str, plan_id: int) -> None:
        """Record that the last decision was offered to the ranks as plan ``plan_id``."""
        observed = self.of(name)
        if observed.last_decision is not None:
            observed.last_decision = replace(observed.last_decision, plan_id=plan_id)
            observed.last_plan = observed.last_decision

    def tick(self, deployment: Deployment) -> float:
        """Record the current balance if the heat of new steps has arrived since the last point.

        Returns
        -------
        float
            The current PAR; 0 if it is unknown or has already been recorded.
        """
        observed = self.of(deployment.name)
        if deployment.assembled != observed.assembled:
            observed.assembled = deployment.assembled
            observed.stepped_at = self._clock()
            observed.charted = False
        par = 0.0 if observed.charted else mean_measured_par(measured_par(deployment))
        if not par:
            return 0.0
        worth = deployment.session.worth
        point = BalancePoint(
            self._wall_clock(),
            par,
            observed.mean("par_planned"),
            observed.mean("noise_floor"),
            deployment.totals.layers_switched,
            math.nan if worth is None else worth.par_left_alone,
        )
        observed.charted = observed.series.add(point)
        return par

    def idle_seconds(self, name: str) -> float | None:
        """Return the seconds since the heat of a new step arrived; ``None`` before the first step."""
        stepped_at = self.of(name).stepped_at
        return None if stepped_at is None else max(0.0, self._clock() - stepped_at)

    def regrouped(self, name: str) -> None:
        """Drop all records except the balance over time, because the ranks have formed a new group."""
        self._observed[name] = _Observed(self.of(name).series)

    def forget(self, name: str) -> None:
        """Drop all records of a deployment."""
        self._observed.pop(name, None)


def gauges(deployment: Deployment, observer: Observer) -> list[GaugeValue]:
    """Return the gauges of a deployment. Gauges for ranks and balance are omitted while no rank is connected."""
    ranks = deployment.connected
    heat = deployment.heat
    live = deployment.live
    values: dict[str, Any] = {
        "eplb_agents_connected": len(ranks),
        "eplb_agents_expected": deployment.group.shape.ranks if deployment.group else 0,
        "eplb_paused": deployment.paused,
        "eplb_agents_halted": sum(bool(member.error) for member in ranks),
        "eplb_dropped_steps": sum(member.dropped_steps for member in ranks),
        "eplb_heat_one_in": deployment.shedding.one_in,
        "eplb_last_decision_age_seconds": deployment.decision_stall.seconds,
        "eplb_problems": len(problems(deployment)),
        "eplb_empty_steps": heat.pending.empty_steps if heat else None,
        "eplb_dummy_steps": heat.pending.dummy_steps if heat else None,
        "eplb_epoch": live.epoch if live else None,
    }
    if ranks:
        silent = [observer.silent_seconds(deployment.name, member.rank) or 0.0 for member in ranks]
        values["eplb_agent_silent_seconds"] = max(silent)
        values["eplb_agent_staging_bytes"] = max(member.staging_bytes or 0 for member in ranks) or None
        values["eplb_agent_heat_ring_bytes"] = max(member.ring_bytes or 0 for member in ranks) or None
        values |= _balance(deployment) | _worth(deployment)
        values |= _last_decision(observer.of(deployment.name), deployment.session.forecasts.gain)
    shown = []
    for name, value in values.items():
        # A gauge with a second label is a dictionary from that label's values to numbers.
        labelled = value if isinstance(value, dict) else {(): value}
        for label, number in labelled.items():
            if number is not None and not math.isnan(number):
                labels = () if label == () else (str(label),)
                shown.append((name, number, deployment.name, *labels))
    return shown


def _balance(deployment: Deployment) -> dict[str, Any]:
    par_L = measured_par(deployment)
    loads_R = mean_loads(rank_loads(deployment, _LOAD_STEPS)[1])
    _, redundant_bytes = redundancy(deployment)
    return {
        "eplb_redundant_bytes_per_rank": redundant_bytes or None,
        "eplb_hottest_rank": int(loads_R.argmax()) if loads_R.size else None,
        "eplb_hottest_layer": int(par_L.argmax()) if par_L.any() else None,
        "eplb_par_realised": {layer: par for layer, par in enumerate(par_L.tolist()) if par > 0},
        "eplb_par_planned": deployment.planned_par,
        "eplb_deployment_par_realised": mean_measured_par(par_L) or None,
        "eplb_rank_load": dict(enumerate(loads_R.tolist())),
    }


def _last_decision(observed: _Observed, forecast: Gain | None) -> dict[str, Any]:
    verdicts = observed.last_decision.verdicts if observed.last_decision else ()
    return {
        "eplb_noise_floor": {verdict.layer: verdict.noise_floor for verdict in verdicts},
        "eplb_deployment_noise_floor": observed.mean("noise_floor"),
        "eplb_deployment_par_seen": observed.mean("par_seen"),
        "eplb_deployment_par_planned": observed.mean("par_planned"),
        "eplb_deployment_gain": forecast and forecast.mean,
        "eplb_deployment_gain_low": forecast and forecast.low,
        "eplb_deployment_gain_high": forecast and forecast.high,
    }


def _worth(deployment: Deployment) -> dict[str, Any]:
    """Return the gauges for the gain from balancing and for the move price, if they are available.

    Times are included only if they were measured across switches.
    """
    worth = deployment.session.worth
    price = shown_price(deployment.session.move_price)
    values: dict[str, Any] = {}
    if worth is not None:
        values = {
            "eplb_deployment_par_left_alone": worth.par_left_alone,
            "eplb_deployment_par_gain_ratio": worth.par_gain_percent / 100,
            "eplb_gain_verdict_info": {worth.verdict: 1},
            "eplb_gain_switches": worth.switches,
            "eplb_gain_seconds": _scaled(worth.gain_ms, 1e-3),
            "eplb_gain_low_seconds": _scaled(worth.gain_low_ms, 1e-3),
            "eplb_gain_high_seconds": _scaled(worth.gain_high_ms, 1e-3),
            "eplb_gain_ranks": worth.ranks_worth,
            "eplb_step_seconds": _scaled(worth.step_ms, 1e-3),
            "eplb_gain_tokens_per_second": worth.tokens_per_second_won,
        }
    if price is not None:
        values |= {
            "eplb_move_price": price.price,
            "eplb_move_price_info": {price.kind: 1},
            "eplb_move_cost_seconds": _scaled(price.ms_per_move, 1e-3),
            "eplb_move_cost_seconds_per_byte": _scaled(price.ms_per_megabyte, 1e-9),
            "eplb_switch_cost_seconds": _scaled(price.ms_per_switch, 1e-3),
        }
    return values


def shown_price(price: MovePrice | None) -> MovePrice | None:
    """Return the move price for display, without times that are only assumed."""
    if price is None or price.kind in (MEASURED_PRICE, STATED_PRICE):
        return price
    return replace(price, ms_per_move=None, ms_per_megabyte=None, ms_per_switch=None)


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
