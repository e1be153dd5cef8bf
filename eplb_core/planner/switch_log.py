"""Log of the ranks' reports on recent plans, used to estimate the cost of moves.

Only the service uses this module. It is separate from ``price`` because it depends on the wire format, which decisions
must not import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from eplb_core.cost.moving import (
    MovingCosts,
    Switch,
    SwitchedPlan,
    SwitchEffect,
    compared,
    moving_costs,
)
from eplb_core.heat.sources import NO_STEPS, ServedSteps
from eplb_core.placement import Float64
from eplb_core.planner.measured_gain import effect_of
from eplb_core.planner.plan import LayerPlan
from eplb_core.wire.agent import PlanState, PlanStatus

_MAX_PLANS = 16
"""Number of recent plans used to estimate the cost of moves."""
_MAX_STEPS = 1024
"""Number of recent steps to keep for comparing the steps before and after each plan. It covers the windows of the last
two decisions."""
_CLOCK_TOLERANCE_SECONDS = 1.0
"""Tolerance for reported durations that exceed the time since the plan was offered, in seconds. It is needed because
the ranks and the service have different clocks."""
_ACCEPTED = PlanState.ACCEPTED, -1
"""State and layer of an acceptance report, which concerns the whole plan."""
_TRANSFERRED = PlanState.TRANSFERRED
_COMMITTED = PlanState.COMMITTED


class SwitchLog:
    """Log of the ranks' reports on recent plans, used to estimate the cost of moves.

    The log starts when the ranks form a group, and step numbers continue from one plan to the next. Reports come from
    other processes and are not trusted. Each one counts only once, and a report is ignored if its duration exceeds the
    time since the plan was offered. Memory use is bounded, because the log keeps only the current plan and a fixed
    number of earlier plans.
    """

    def __init__(self) -> None:
        self._reports: _PlanReports | None = None
        self._plans: list[SwitchedPlan] = []
        self._steps = NO_STEPS

    def offered(self, plan_id: int, layers: Sequence[LayerPlan], ranks: int, now: float) -> None:
        """Start collecting reports on a plan offered to the ranks, and stop collecting reports on the previous plan.

        ``now`` is in seconds, on the same clock as for ``heard``.
        """
        self._close()
        decided_from = float(self._steps.step_T[-1]) + 1 if self._steps.steps else None
        self._reports = _PlanReports(plan_id, layers, ranks, now, decided_from)

    def heard(self, rank: int, status: PlanStatus, now: float) -> None:
        """Record a rank's report on the latest plan; reports on earlier plans are ignored."""
        if self._reports is not None:
            self._reports.record(rank, status, now)

    def looked_at(self, served: ServedSteps) -> None:
        """Add the newest steps, and update each plan's effect by comparing the steps before and after it.

        Call this when a decision begins and no plan is in progress.
        """
        self._close()
        self._steps = self._steps.followed_by(served, _MAX_STEPS)
        self._plans = [self._compared(plan) for plan in self._plans]

    def _compared(self, plan: SwitchedPlan) -> SwitchedPlan:
        """Return the plan with an updated estimate of its effect, unless the previous estimate used more steps."""
        plan = compared(plan, self._plans, self._steps.step_T, self._steps.us_T)
        effect = effect_of(plan, self._plans, self._steps)
        steps_before = 0 if plan.effect is None else plan.effect.steps
        return replace(plan, effect=effect) if effect is not None and effect.steps >= steps_before else plan

    def effects(self) -> list[SwitchEffect]:
        """Return the effects of all plans with enough timed steps before and after them."""
        return [plan.effect for plan in self._plans if plan.effect is not None]

    def costs(self) -> MovingCosts:
        """Return the move costs measured so far."""
        return moving_costs(self._plans)

    def _close(self) -> None:
        """Store what the ranks have reported on the latest plan, and stop collecting reports on it."""
        switched = None if self._reports is None else self._reports.switched()
        self._reports = None
        if switched is not None:
            self._plans = [*self._plans, switched][-_MAX_PLANS:]


class _PlanReports:
    """The ranks' reports on one plan: step and duration of each rank's first report, keyed by state and layer."""

    def __init__(
        self,
        plan_id: int,
        layers: Sequence[LayerPlan],
        ranks: int,
        now: float,
        decided_from: float | None = None,
    ) -> None:
        self._plan_id = plan_id
        self._offered_at = now
        self._decided_from = decided_from
        self._received = {plan.layer: np.bincount(plan.moves_M5[:, 2], minlength=ranks) for plan in layers}
        kinds = [(state, layer) for state in (_TRANSFERRED, _COMMITTED) for layer in self._received]
        self._rows = {kind: row for row, kind in enumerate((_ACCEPTED, *kinds))}
        # Use arrays, because with tuples the reports from a thousand ranks blocked the event loop.
        self._step_KR = np.full((len(self._rows), ranks), np.nan)
        self._seconds_KR = self._step_KR.copy()

    def record(self, rank: int, status: PlanStatus, now: float) -> None:
        """Record a rank's report if it is the first one for its state and layer and its duration is plausible."""
        if status.plan_id != self._plan_id or rank >= self._step_KR.shape[1]:
            return
        row = self._rows.get(_ACCEPTED if status.state is _ACCEPTED[0] else (status.state, status.layer))
        durations = {_TRANSFERRED: status.transfer_seconds, _COMMITTED: status.commit_seconds}
        seconds = durations.get(status.state, 0.0)
        is_possible = 0 <= seconds <= now - self._offered_at + _CLOCK_TOLERANCE_SECONDS
        if row is not None and is_possible and math.isnan(self._step_KR[row, rank]):
            self._step_KR[row, rank] = status.step
            self._seconds_KR[row, rank] = seconds

    def switched(self) -> SwitchedPlan | None:
        """Return the layers of the plan that the ranks have switched, or ``None`` if no rank accepted the plan."""
        accepted_at = _median(self._step_KR[self._rows[_ACCEPTED]])
        if math.isnan(accepted_at):
            return None
        staged_at = {
            layer: _median(self._step_KR[self._rows[_TRANSFERRED, layer]]) for layer in self._received
        }
        begin = accepted_at
        switches: list[Switch] = []
        # Layers that were staged at the same step belong to the same part of the plan.
        for step, layers in groupby(self._received, key=staged_at.__getitem__):
            if math.isnan(step):
                break
            part = [self._layer_switch(layer) for layer in layers]
            seconds = float(np.nansum([switch.transfer_seconds for switch in part]))
            switches += [
                replace(switch, transfer_seconds=seconds, after_step=begin, by_step=step) for switch in part
            ]
            committed_at = part[-1].by_step
            begin = step if math.isnan(committed_at) else committed_at
        return SwitchedPlan(accepted_at, begin + 1, tuple(switches), decided_from=self._decided_from)

    def _layer_switch(self, layer: int) -> Switch:
        """Return the switch of a single layer, with the step of its commit as ``by_step``."""
        received_R = self._received[layer]
        transferred = self._rows[_TRANSFERRED, layer]
        committed = self._rows[_COMMITTED, layer]
        transfer_R = np.where(received_R > 0, _without_zeros(self._seconds_KR[transferred]), np.nan)
        per_expert = _median(transfer_R / np.maximum(received_R, 1))
        commit = _median(_without_zeros(self._seconds_KR[committed]))
        return Switch(per_expert, _median(transfer_R), commit, math.nan, _median(self._step_KR[committed]))


def _without_zeros(seconds_R: Float64) -> Float64:
    """Replace durations of 0, which ranks report if they did not measure them, with NaN."""
    return np.where(seconds_R > 0, seconds_R, np.nan)


def _median(values_R: Float64) -> float:
    """Return the median of the values that are not NaN, or NaN if all values are."""
    finite = values_R[~np.isnan(values_R)]
    return float(np.median(finite)) if finite.size else math.nan
