"""Cost of moves and of a stepwise split: measured by the ranks, stated in the settings, or assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from eplb_core.cost.moving import (
    NOTHING_MEASURED,
    MovingCosts,
    Switch,
    SwitchedPlan,
    SwitchEffect,
    compared,
    moving_costs,
)
from eplb_core.figures import digits
from eplb_core.heat.sources import NO_STEPS, ServedSteps
from eplb_core.placement import Float64
from eplb_core.planner.measured_gain import effect_of
from eplb_core.planner.settings import AUTO, STEP, PlannerSettings
from eplb_core.wire.agent import PlanState, PlanStatus
from eplb_core.wire.operator import MOVE_PRICES, MovePrice

if TYPE_CHECKING:
    from eplb_core.planner.plan import LayerPlan

_MEASURED, _PARTLY, _STATED, _ASSUMED = MOVE_PRICES
"""Origin of a move price. ``measured``: the ranks measured transfers, slowed steps and commits; ``partly measured``:
they measured some of these; ``stated``: the settings contain the price or the link's bandwidth; ``assumed``: neither
the ranks nor the settings have a figure."""
MAX_PRICE = 10.0
"""Upper bound of the move price. At this price no layer moves."""
ASSUMED_BYTES = 16 << 20
"""Assumed size of an expert's weights in one layer."""
_ASSUMED_SLOWDOWN = 0.2
"""Assumed fraction of their time that steps lose during a transfer."""
_COPY_BYTES_PER_SECOND = 1e12
"""Assumed rate at which a commit copies weights within a device."""
_COMMIT_MS = 0.5
"""Assumed milliseconds of a commit, in addition to that copy."""
_ASSUMED_SERVING_STEPS = 256
"""Assumed number of steps that a change serves."""
_MAX_PLANS = 16
"""Number of recent plans that the cost of moves is estimated from."""
_MAX_STEPS = 1024
"""Number of recent steps kept to compare plans by: the window of the decision, and that of the one before."""
_CLOCK_TOLERANCE_SECONDS = 1.0
"""Tolerance for a reported duration that exceeds the time since the plan was offered. Ranks and service have different
clocks."""
_BYTES_PER_COUNT = 4
_LATENCY_US = 20.0
"""Assumed time of a nearly empty collective between nodes. It was not measured in this project."""
_COMPUTING_US = 55.0
"""Time to compute a stepwise split in a captured graph, without its rounds, for 256 experts on 32 ranks x 9 slots."""
_ROUND_US = 5.75
"""Time of one round of that computation. Measured on an H100: 112, 170 and 285 us in total with 10, 20 and 40 rounds,
of which ``_COMPUTING_US`` is constant."""


def move_price(
    settings: PlannerSettings,
    slots: int,
    bytes_per_expert: int = 0,
    serving_steps: float | None = None,
    moving: MovingCosts = NOTHING_MEASURED,
) -> MovePrice:
    """Return the stated move price, or the cost of moves relative to the time that a lower PAR saves.

    A moved expert's weights occupy the receiving rank's link for bytes / bandwidth, and steps are slower during that
    time. The weights are then copied from staging into place, while the ranks wait for the switch. The saving is a
    fraction of the time that a layer's experts take per step, over all steps that the plan is expected to serve.

    Each figure is the one that the ranks measured, once they have measured it often enough (``cost.moving``). Until
    then it is taken from the settings, or assumed.

    Parameters
    ----------
    settings
        Settings with ``move_price``, ``link_bandwidth`` and ``layer_ms``.
    slots
        S, slots per rank. A rank receives this number of experts if all move.
    bytes_per_expert
        Size of one expert's weights in one layer; 0 if unknown.
    serving_steps
        Steps that the plan is expected to serve; ``None`` if unknown.
    moving
        Costs that the ranks have measured so far.
    """
    if settings.move_price != AUTO:
        return MovePrice(settings.move_price, _STATED, "stated")
    size = bytes_per_expert or ASSUMED_BYTES
    by_link = f"{size / 2**20:.1f} MiB at {settings.link_bandwidth:g} GB/s"
    link_ms = size / settings.link_bandwidth / 1e6
    transfer_ms, transfer_source = _measured_or(moving.expert_seconds, 1e3, link_ms, by_link)
    lost, lost_source = _measured_or(moving.lost_share, 1.0, _ASSUMED_SLOWDOWN)
    copy_ms = slots * size / _COPY_BYTES_PER_SECOND * 1e3
    switch_ms, switch_source = _measured_or(moving.commit_seconds, 1e3, copy_ms + _COMMIT_MS)
    layer_ms = moving.layer_ms
    layer_source = moving.layer_source
    if layer_ms is None:
        layer_ms = settings.layer_ms
        layer_source = "layer_ms"
    steps = serving_steps or _ASSUMED_SERVING_STEPS
    reason = (
        f"{digits(transfer_ms)} ms per expert ({transfer_source}), of which steps lose {lost:.1%} ({lost_source}), "
        f"{digits(switch_ms)} ms per switch ({switch_source}), {digits(layer_ms)} ms per layer and step "
        f"({layer_source}), {steps:,.0f} steps served"
    )
    return MovePrice(
        min((slots * transfer_ms * lost + switch_ms) / (layer_ms * steps), MAX_PRICE),
        _origin(settings, moving),
        reason,
        ms_per_move=transfer_ms * lost,
        ms_per_megabyte=transfer_ms * lost / (bytes_per_expert / 1e6) if bytes_per_expert else None,
        ms_per_switch=switch_ms,
    )


def _origin(settings: PlannerSettings, moving: MovingCosts) -> str:
    """Return the entry of ``MOVE_PRICES`` that describes a price computed from these figures."""
    figures = (moving.expert_seconds, moving.lost_share, moving.commit_seconds)
    measured = [figure is not None for figure in figures]
    if any(measured):
        return _MEASURED if all(measured) else _PARTLY
    return _ASSUMED if settings.is_default("link_bandwidth") else _STATED


def _measured_or(
    measured: float | None, scale: float, default: float, default_source: str = "assumed"
) -> tuple[float, str]:
    """Return a measurement times ``scale``, or a default in the scaled unit; and the source of the value."""
    return (default, default_source) if measured is None else (measured * scale, "measured")


class SwitchLog:
    """The ranks' reports on recent plans, from which the cost of moves is estimated.

    The log starts when the ranks form a group, and step numbers continue from one plan to the next. Reports come from
    other processes and are not trusted: each counts once, and a report is ignored if its duration exceeds the time
    since the plan was offered. Memory is bounded, because the log holds only the current plan and a fixed number of
    earlier ones.
    """

    def __init__(self) -> None:
        self._reports: _PlanReports | None = None
        self._plans: list[SwitchedPlan] = []
        self._steps = NO_STEPS

    def offered(self, plan_id: int, layers: Sequence[LayerPlan], ranks: int, now: float) -> None:
        """Begin to collect reports on a plan that is offered to the ranks, and stop collecting them on the one before.

        ``now`` is in seconds, on the same clock as in ``heard``.
        """
        self._close()
        decided_from = float(self._steps.step_T[-1]) + 1 if self._steps.steps else None
        self._reports = _PlanReports(plan_id, layers, ranks, now, decided_from)

    def heard(self, rank: int, status: PlanStatus, now: float) -> None:
        """Record a rank's report on the newest plan; reports on earlier plans are ignored."""
        if self._reports is not None:
            self._reports.record(rank, status, now)

    def looked_at(self, served: ServedSteps) -> None:
        """Add the newest steps and compare those before and after each plan.

        Call it when a decision begins and no plan is in progress.
        """
        self._close()
        self._steps = self._steps.followed_by(served, _MAX_STEPS)
        self._plans = [self._compared(plan) for plan in self._plans]

    def _compared(self, plan: SwitchedPlan) -> SwitchedPlan:
        """Return the plan with its effect on the steps, unless the previous estimate used more steps."""
        plan = compared(plan, self._plans, self._steps.step_T, self._steps.us_T)
        effect = effect_of(plan, self._plans, self._steps)
        steps_before = 0 if plan.effect is None else plan.effect.steps
        return replace(plan, effect=effect) if effect is not None and effect.steps >= steps_before else plan

    def effects(self) -> list[SwitchEffect]:
        """Return the effects of all plans that have enough timed steps before and after them."""
        return [plan.effect for plan in self._plans if plan.effect is not None]

    def costs(self) -> MovingCosts:
        """Return the costs of moves that have been measured so far."""
        return moving_costs(self._plans)

    def _close(self) -> None:
        """Store the newest plan as far as it was reported, and stop collecting reports on it."""
        switched = None if self._reports is None else self._reports.switched()
        self._reports = None
        if switched is not None:
            self._plans = [*self._plans, switched][-_MAX_PLANS:]


class _PlanReports:
    """The ranks' reports on one plan: step and seconds of each rank's first report, by state and layer."""

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
        # Arrays, because with tuples the reports of a thousand ranks blocked the event loop.
        self._step_KR = np.full((len(self._rows), ranks), np.nan)
        self._seconds_KR = self._step_KR.copy()

    def record(self, rank: int, status: PlanStatus, now: float) -> None:
        """Keep a rank's first report on each state and layer, unless its duration is impossible."""
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
        """Return the layers of the plan that the ranks have switched; ``None`` if the ranks did not accept it."""
        accepted_at = _median(self._step_KR[self._rows[_ACCEPTED]])
        if math.isnan(accepted_at):
            return None
        staged_at = {
            layer: _median(self._step_KR[self._rows[_TRANSFERRED, layer]]) for layer in self._received
        }
        begin = accepted_at
        switches: list[Switch] = []
        # Layers that were staged at the same step belong to one part of the plan.
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
        """Return the switch of a single layer, with the boundary of its commit as ``by_step``."""
        received_R = self._received[layer]
        transferred = self._rows[_TRANSFERRED, layer]
        committed = self._rows[_COMMITTED, layer]
        transfer_R = np.where(received_R > 0, _without_zeros(self._seconds_KR[transferred]), np.nan)
        per_expert = _median(transfer_R / np.maximum(received_R, 1))
        commit = _median(_without_zeros(self._seconds_KR[committed]))
        return Switch(per_expert, _median(transfer_R), commit, math.nan, _median(self._step_KR[committed]))


_ACCEPTED = PlanState.ACCEPTED, -1
"""State and layer of the acceptance, which concerns the whole plan."""
_TRANSFERRED, _COMMITTED = PlanState.TRANSFERRED, PlanState.COMMITTED


def _without_zeros(seconds_R: Float64) -> Float64:
    """Return the durations with 0, which ranks report if they did not measure, replaced by NaN."""
    return np.where(seconds_R > 0, seconds_R, np.nan)


def _median(values_R: Float64) -> float:
    """Return the median of the values that are not NaN; NaN if all are."""
    finite = values_R[~np.isnan(values_R)]
    return float(np.median(finite)) if finite.size else math.nan


@dataclass(frozen=True)
class SplitCost:
    """Assumed cost of a stepwise split in one layer of a step.

    It consists of an exchange of counts, and of a computation whose number of rounds grows with the tokens. It does not
    depend on the gain of the split.

    Parameters
    ----------
    us
        Microseconds.
    """

    us: float

    @classmethod
    def of(
        cls, settings: PlannerSettings, ranks: int, experts: int, choices: float = 0.0
    ) -> SplitCost | None:
        """Return the cost for a host that splits by step, and ``None`` for any other.

        Parameters
        ----------
        settings
            Settings with ``split`` and ``link_bandwidth``.
        ranks
            R, ranks that exchange their counts.
        experts
            E, counts that each rank sends.
        choices
            Experts chosen by all tokens of a step, on all ranks together.
        """
        if settings.split != STEP:
            return None
        received = (ranks - 1) * experts * _BYTES_PER_COUNT
        transfer_us = received / (settings.link_bandwidth * 1e9) * 1e6
        return cls(_LATENCY_US + transfer_us + _COMPUTING_US + _rounds_for(choices) * _ROUND_US)

    def ms_of_step(self, layers: int) -> float:
        """Return the milliseconds of all layers together."""
        return self.us * layers / 1e3

    def __str__(self) -> str:
        return (
            f"{digits(self.us, 4)} us per layer (assumed: an exchange of counts, and computing as on an H100)"
        )


def _rounds_for(choices: float) -> int:
    """Return the rounds that a layer's split takes with ``choices`` on all ranks; see ``docs/research/stepwise.md``."""
    return 22 + math.ceil(20 * (math.sqrt(max(choices / 8192, 1.0)) - 1.0))
