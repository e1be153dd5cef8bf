"""Price of moves and of a stepwise split: measured by the ranks, stated, or assumed."""

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
"""Origin of a price of moves. ``measured``: transfers, slowed steps and commits are the ranks' own; ``partly
measured``: some of them; ``stated``: somebody wrote the price, or the link's bandwidth, down; ``assumed``: nobody
did."""
MAX_PRICE = 10.0
"""A price at which nothing moves; no higher one is meant."""
# Assumed where neither the ranks nor the settings say; the price then says so.
ASSUMED_BYTES = 16 << 20
"""Bytes of an expert."""
_SLOWER_WHILE_MOVING = 0.2
"""Part of their time that steps lose while weights travel."""
_COPY_BYTES_PER_SECOND = 1e12
"""Rate of a commit's copy within a device."""
_SWITCH_MS = 0.5
"""Milliseconds of a commit, besides that copy."""
_ASSUMED_SERVING_STEPS = 256
"""Steps that a change serves."""
_PLANS_KEPT = 16
"""Newest plans that say what moves cost."""
_STEPS_KEPT = 1024
"""Newest steps that plans are compared by: those of a decision's window and of the one before."""
_SLACK_SECONDS = 1.0
"""By which a rank's clock may seem to run ahead of the service's: its report and the offer travel as well."""
_BYTES_PER_COUNT = 4
_LATENCY_US = 20.0
"""Of a collective that carries next to nothing, between nodes; nobody has measured it here."""
_COMPUTING_US, _ROUND_US = 55.0, 5.75
"""Of the split of 256 experts on 32 ranks x 9 slots in a captured graph, but for its rounds; and of each of these.
Measured on an H100: 112, 170 and 285 with 10, 20 and 40 rounds."""


def move_price(
    settings: PlannerSettings,
    slots: int,
    bytes_per_expert: int = 0,
    serving_steps: float | None = None,
    moving: MovingCosts = NOTHING_MEASURED,
) -> MovePrice:
    """Price that ``settings`` state, or what moves cost beside the time that a lower ratio saves.

    A moved expert's weights take bytes / bandwidth on the link of the rank that receives them; while they travel, steps
    are slower by a part; then they are copied from staging into place, and the ranks wait for the switch. A layer's
    experts take so much time in a step, in proportion to the ratio, for as many steps as the plan is expected to serve.
    Each of these is what the ranks have measured, once they have often enough (``cost.moving``); until then it is what
    the settings state, or assumed.

    Parameters
    ----------
    settings
        With ``move_price``, ``link_bandwidth`` and ``layer_ms``.
    slots
        S, slots of a rank: as many experts it receives where all move.
    bytes_per_expert
        Weights of one expert in one layer; 0 where not known.
    serving_steps
        Steps that the plan is expected to serve; ``None`` where not known.
    moving
        Measurements of the ranks so far.
    """
    if settings.move_price != AUTO:
        return MovePrice(settings.move_price, _STATED, "stated")
    size = bytes_per_expert or ASSUMED_BYTES
    by_link = f"{size / 2**20:.1f} MiB at {settings.link_bandwidth:g} GB/s"
    travel_ms, travel = _known(moving.expert_seconds, 1e3, size / settings.link_bandwidth / 1e6, by_link)
    lost, slowed = _known(moving.lost_share, 1.0, _SLOWER_WHILE_MOVING)
    copy_ms = slots * size / _COPY_BYTES_PER_SECOND * 1e3
    switch_ms, switch = _known(moving.commit_seconds, 1e3, copy_ms + _SWITCH_MS)
    layer_ms, layer = moving.layer_ms, moving.layer_source
    if layer_ms is None:
        layer_ms, layer = settings.layer_ms, "layer_ms"
    steps = serving_steps or _ASSUMED_SERVING_STEPS
    measured = [
        part is not None for part in (moving.expert_seconds, moving.lost_share, moving.commit_seconds)
    ]
    kind = _ASSUMED if settings.is_default("link_bandwidth") else _STATED
    if any(measured):
        kind = _MEASURED if all(measured) else _PARTLY
    reason = (
        f"{digits(travel_ms)} ms per expert ({travel}), of which steps lose {lost:.1%} ({slowed}), "
        f"{digits(switch_ms)} ms per switch ({switch}), {digits(layer_ms)} ms per layer and step ({layer}), "
        f"{steps:,.0f} steps served"
    )
    return MovePrice(
        min((slots * travel_ms * lost + switch_ms) / (layer_ms * steps), MAX_PRICE),
        kind,
        reason,
        ms_per_move=travel_ms * lost,
        ms_per_megabyte=travel_ms * lost / (bytes_per_expert / 1e6) if bytes_per_expert else None,
        ms_per_switch=switch_ms,
    )


def _known(
    measured: float | None, scale: float, otherwise: float, source: str = "assumed"
) -> tuple[float, str]:
    """The value that was measured, in the unit that ``scale`` makes of it, or another; and its origin."""
    return (otherwise, source) if measured is None else (measured * scale, "measured")


class SwitchLog:
    """Switch reports since the ranks last formed a group, as the price of moves is estimated from them.

    Step numbers go on from one plan to the next. Reports are another party's word: each counts once, and one that
    claims more time than has passed since its plan was offered is left out. What is kept is bounded by the plan under
    way and a fixed number of those before it.
    """

    def __init__(self) -> None:
        self._reports: _PlanReports | None = None
        self._plans: list[SwitchedPlan] = []
        self._steps = NO_STEPS

    def offered(self, plan_id: int, layers: Sequence[LayerPlan], ranks: int, now: float) -> None:
        """Begin to follow a plan that is on its way to the ranks, ``now`` by the clock that ``heard`` goes by."""
        self._close()
        decided_from = float(self._steps.step_T[-1]) + 1 if self._steps.steps else None
        self._reports = _PlanReports(plan_id, layers, ranks, now, decided_from)

    def heard(self, rank: int, status: PlanStatus, now: float) -> None:
        """Take a rank's report on a plan; only one on the newest plan counts."""
        if self._reports is not None:
            self._reports.heard(rank, status, now)

    def looked_at(self, served: ServedSteps) -> None:
        """Compare the steps before and after each plan. No plan is under way, and a decision begins."""
        self._close()
        self._steps = self._steps.followed_by(served, _STEPS_KEPT)
        self._plans = [self._compared(plan) for plan in self._plans]

    def _compared(self, plan: SwitchedPlan) -> SwitchedPlan:
        plan = compared(plan, self._plans, self._steps.step_T, self._steps.us_T)
        effect = effect_of(plan, self._plans, self._steps)
        known = 0 if plan.effect is None else plan.effect.steps
        return replace(plan, effect=effect) if effect is not None and effect.steps >= known else plan

    def effects(self) -> list[SwitchEffect]:
        """Return what plans changed, as far as steps with known times were served before and after them."""
        return [plan.effect for plan in self._plans if plan.effect is not None]

    def costs(self) -> MovingCosts:
        """Costs of moves as far as they are known by now."""
        return moving_costs(self._plans)

    def _close(self) -> None:
        """The newest plan's reports are all in, or nobody waits for more."""
        switched = None if self._reports is None else self._reports.switched()
        self._reports = None
        if switched is not None:
            self._plans = [*self._plans, switched][-_PLANS_KEPT:]


class _PlanReports:
    """Reports of ranks on one plan: step and seconds of the first of each rank, by state and layer."""

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
        # Of a thousand ranks so many reports come that tuples of them held the event loop.
        self._step_KR = np.full((len(self._rows), ranks), np.nan)
        self._seconds_KR = self._step_KR.copy()

    def heard(self, rank: int, status: PlanStatus, now: float) -> None:
        """Keep a report of the plan that can be true."""
        if status.plan_id != self._plan_id or rank >= self._step_KR.shape[1]:
            return
        row = self._rows.get(_ACCEPTED if status.state is _ACCEPTED[0] else (status.state, status.layer))
        taken = {_TRANSFERRED: status.transfer_seconds, _COMMITTED: status.commit_seconds}
        seconds = taken.get(status.state, 0.0)
        can_be = 0 <= seconds <= now - self._offered_at + _SLACK_SECONDS
        if row is not None and can_be and math.isnan(self._step_KR[row, rank]):
            self._step_KR[row, rank], self._seconds_KR[row, rank] = status.step, seconds

    def switched(self) -> SwitchedPlan | None:
        """The plan as its ranks switched it, as far as they did; ``None`` where they did not take it."""
        first = began = _median(self._step_KR[self._rows[_ACCEPTED]])
        if math.isnan(first):
            return None
        staged_at = {
            layer: _median(self._step_KR[self._rows[_TRANSFERRED, layer]]) for layer in self._received
        }
        switches: list[Switch] = []
        # Layers that were staged at the same step were transferred together.
        for step, part in groupby(self._received, key=staged_at.__getitem__):
            if math.isnan(step):
                break
            layers = [self._layer_switch(layer) for layer in part]
            travelled = float(np.nansum([layer.transfer_seconds for layer in layers]))
            switches += [
                replace(layer, transfer_seconds=travelled, after_step=began, by_step=step) for layer in layers
            ]
            done_at = layers[-1].by_step
            began = step if math.isnan(done_at) else done_at
        return SwitchedPlan(first, began + 1, tuple(switches), decided_from=self._decided_from)

    def _layer_switch(self, layer: int) -> Switch:
        """Return the switch of one layer by itself; ``by_step`` is the boundary at which it switched."""
        received_R = self._received[layer]
        staged = self._rows[_TRANSFERRED, layer]
        done = self._rows[_COMMITTED, layer]
        # A duration of 0 means that it was not measured.
        moved_R = np.where(received_R > 0, _measured(self._seconds_KR[staged]), np.nan)
        each = _median(moved_R / np.maximum(received_R, 1))
        commit = _median(_measured(self._seconds_KR[done]))
        return Switch(each, _median(moved_R), commit, math.nan, _median(self._step_KR[done]))


_ACCEPTED = PlanState.ACCEPTED, -1
"""Of no layer: of the whole plan."""
_TRANSFERRED, _COMMITTED = PlanState.TRANSFERRED, PlanState.COMMITTED


def _measured(seconds_R: Float64) -> Float64:
    return np.where(seconds_R > 0, seconds_R, np.nan)


def _median(values_R: Float64) -> float:
    """Median of those that are known; NaN of none."""
    known = values_R[~np.isnan(values_R)]
    return float(np.median(known)) if known.size else math.nan


@dataclass(frozen=True)
class SplitCost:
    """Cost of a stepwise split in one layer of a step, whatever it wins: ``us`` microseconds, assumed.

    They are those of an exchange of counts, and of its computing in a number of rounds that grows with the tokens.
    """

    us: float

    @classmethod
    def of(
        cls, settings: PlannerSettings, ranks: int, experts: int, choices: float = 0.0
    ) -> SplitCost | None:
        """Cost for a host that splits by step, in steps of so many choices of all ranks; ``None`` for any other."""
        if settings.split != STEP:
            return None
        received = (ranks - 1) * experts * _BYTES_PER_COUNT
        travel_us = received / (settings.link_bandwidth * 1e9) * 1e6
        return cls(_LATENCY_US + travel_us + _COMPUTING_US + _rounds_for(choices) * _ROUND_US)

    def ms_of_step(self, layers: int) -> float:
        """Milliseconds of all layers together."""
        return self.us * layers / 1e3

    def __str__(self) -> str:
        return (
            f"{digits(self.us, 4)} us per layer (assumed: an exchange of counts, and computing as on an H100)"
        )


def _rounds_for(choices: float) -> int:
    """Rounds that the layer takes in a step with so many choices of all ranks; ``docs/research/stepwise.md``."""
    return 22 + math.ceil(20 * (math.sqrt(max(choices / 8192, 1.0)) - 1.0))
