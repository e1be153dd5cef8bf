"""Price of moves and of a stepwise split: measured by the ranks, stated, or assumed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eplb_service.cost.moving import (
    NOTHING_MEASURED,
    MovingCosts,
    Slowdown,
    Switch,
    SwitchedPlan,
    calm_steps,
    moving_costs,
    slowdown_of,
)
from eplb_service.placement import Float64
from eplb_service.planner.settings import AUTO, STEP, PlannerSettings
from eplb_service.wire.agent import PlanState, PlanStatus
from eplb_service.wire.operator import MOVE_PRICES, MovePrice

if TYPE_CHECKING:
    from eplb_service.planner.plan import LayerPlan

MEASURED, PARTLY, STATED, ASSUMED = MOVE_PRICES
"""Origin of a price of moves. ``measured``: transfers, slowed steps and commits are the ranks' own; ``partly
measured``: some of them; ``stated``: somebody wrote the price, or the link's bandwidth, down; ``assumed``: nobody
did."""
MOST = 10.0
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
_SLACK_SECONDS = 1.0
"""By which a rank's clock may seem to run ahead of the service's: its report and the offer travel as well."""
BYTES_PER_COUNT = 4
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
        return MovePrice(settings.move_price, STATED, "stated")
    travel_ms, travel = _travel(settings, bytes_per_expert, moving)
    lost, slowed = _SLOWER_WHILE_MOVING, f"{_SLOWER_WHILE_MOVING:.0%} of it while weights travel (assumed)"
    if moving.lost_share is not None:
        interval = f"95 %: {moving.lost_low:.1%} to {moving.lost_high:.1%}, {moving.plans} plans"
        lost, slowed = (
            moving.lost_share,
            f"{moving.lost_share:.1%} of it while weights travel (measured, {interval})",
        )
    if moving.commit_seconds is None:
        switch_ms = slots * (bytes_per_expert or ASSUMED_BYTES) / _COPY_BYTES_PER_SECOND * 1e3 + _SWITCH_MS
        switch = f"{_SWITCH_MS:g} ms per switch and a copy (assumed)"
    else:
        switch_ms = moving.commit_seconds * 1e3
        switch = f"{switch_ms:.3g} ms per switch (measured, {moving.commits} layers)"
    layer_ms, layer = moving.layer_ms, moving.layer_source
    if layer_ms is None:
        layer_ms, layer = settings.layer_ms, _source(settings, "layer_ms")
    steps = serving_steps or _ASSUMED_SERVING_STEPS
    value = (slots * travel_ms * lost + switch_ms) / (layer_ms * steps)
    served = f"{steps:.0f} steps served" + ("" if serving_steps else " (assumed)")
    reason = (
        f"{travel}, steps lose {slowed}, {switch}, {layer_ms:.3g} ms per layer and step ({layer}), {served}"
    )
    if moving.bounded:
        reason += "; what ranks report is beyond what is believed, and was bounded"
    return MovePrice(
        min(value, MOST),
        _kind(settings, moving),
        reason,
        ms_per_move=travel_ms * lost,
        ms_per_megabyte=travel_ms * lost / (bytes_per_expert / 1e6) if bytes_per_expert else None,
        ms_per_switch=switch_ms,
    )


def _travel(settings: PlannerSettings, size: int, moving: MovingCosts) -> tuple[float, str]:
    """Milliseconds that one expert's weights travel, and the same as text."""
    known = f"{_size_text(size)} per expert" if size else ""
    if moving.expert_seconds is not None:
        ms = moving.expert_seconds * 1e3
        rate = f", {size / moving.expert_seconds / 1e9:.3g} GB/s per rank" if size else ""
        return ms, f"{known or f'{ms:.3g} ms per expert'}{rate} (measured, {moving.transfers} layers)"
    known = known or f"{_size_text(ASSUMED_BYTES)} per expert (assumed)"
    ms = (size or ASSUMED_BYTES) / (settings.link_bandwidth * 1e9) * 1e3
    return ms, f"{known}, {settings.link_bandwidth:g} GB/s per rank ({_source(settings, 'link_bandwidth')})"


def _size_text(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size:,} bytes"


def _kind(settings: PlannerSettings, moving: MovingCosts) -> str:
    parts = [part is not None for part in (moving.expert_seconds, moving.lost_share, moving.commit_seconds)]
    if any(parts):
        return MEASURED if all(parts) else PARTLY
    return ASSUMED if settings.is_default("link_bandwidth") else STATED


def _source(settings: PlannerSettings, name: str) -> str:
    return f"assumed: {name}" if settings.is_default(name) else f"stated: {name}"


class SwitchLog:
    """Switch reports since the ranks last formed a group, as the price of moves is estimated from them.

    Step numbers go on from one plan to the next. Reports are another party's word: each counts once, and one that
    claims more time than has passed since its plan was offered is left out, and counted in ``left_out``. What is kept
    is bounded by the plan under way and a fixed number of those before it.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._reports: _PlanReports | None = None
        self._plans: deque[SwitchedPlan] = deque(maxlen=_PLANS_KEPT)
        self._before: dict[int, float | None] = {}
        self._slowdowns: dict[int, Slowdown] = {}
        self._calm_us: float | None = None

    def offered(self, plan_id: int, layers: Sequence[LayerPlan], ranks: int, now: float) -> None:
        """A plan is on its way to the ranks, ``now`` by the clock that ``heard`` goes by."""
        self._close()
        self._reports = _PlanReports(plan_id, layers, ranks, now)
        self._before[plan_id] = self._calm_us

    def heard(self, rank: int, status: PlanStatus, now: float) -> None:
        """A rank has reported on a plan; only on the newest does it count."""
        if self._reports is not None and self._reports.plan_id == status.plan_id:
            self.left_out += not self._reports.heard(rank, status, now)

    def looked_at(self, step_T: Float64, us_T: Float64) -> None:
        """Steps were served, and no plan is under way.

        Parameters
        ----------
        step_T, us_T
            float64 ``[T]``, their numbers in order and wall time in microseconds; NaN where not known.
        """
        self._close()
        plans = list(self._plans)
        for plan in plans:
            others = [other for other in plans if other is not plan]
            found = slowdown_of(plan, others, self._before.get(plan.plan_id), step_T, us_T)
            known = self._slowdowns.get(plan.plan_id)
            # As steps leave the window, less is seen of a plan than was seen before.
            if found is not None and (known is None or found.steps >= known.steps):
                self._slowdowns[plan.plan_id] = found
        self._calm_us = calm_steps(step_T, us_T, plans) or self._calm_us

    def costs(self) -> MovingCosts:
        """Costs of moves as far as they are known by now."""
        switches = [switch for plan in self._plans for switch in plan.switches]
        return moving_costs(switches, list(self._slowdowns.values()))

    def _close(self) -> None:
        """The newest plan's reports are all in, or nobody waits for more."""
        reports, self._reports = self._reports, None
        switched = None if reports is None else reports.switched()
        if switched is not None:
            self._plans.append(switched)
        kept = {plan.plan_id for plan in self._plans}
        self._before = {plan_id: us for plan_id, us in self._before.items() if plan_id in kept}
        self._slowdowns = {plan_id: found for plan_id, found in self._slowdowns.items() if plan_id in kept}


class _PlanReports:
    """Reports of ranks on one plan; each of its layers (M) and ranks (R) has one of each, the first."""

    def __init__(self, plan_id: int, layers: Sequence[LayerPlan], ranks: int, now: float) -> None:
        self.plan_id, self._offered_at = plan_id, now
        self._index = {plan.layer: index for index, plan in enumerate(layers)}
        received = [np.bincount(plan.moves_M5[:, 2], minlength=ranks)[:ranks] for plan in layers]
        self._received_MR = np.reshape(received, (len(layers), ranks))
        self._accepted_R = np.full(ranks, np.nan)
        # Seconds of each layer's transfer and commit on each rank, and the steps at which they were done.
        self._seconds, self._done_at = (
            {state: np.full((len(layers), ranks), np.nan) for state in _SWITCHED} for _ in range(2)
        )

    def heard(self, rank: int, status: PlanStatus, now: float) -> bool:
        """Keep a report, and return whether it can be; one that says nothing of durations always can."""
        if status.state is PlanState.ACCEPTED:
            _keep_first(self._accepted_R, rank, status.step)
        index = self._index.get(status.layer)
        if index is None or status.state not in _SWITCHED:
            return True
        seconds = getattr(status, _SWITCHED[status.state])
        if not 0 <= seconds <= now - self._offered_at + _SLACK_SECONDS:
            return False
        _keep_first(self._done_at[status.state][index], rank, status.step)
        # A duration of 0 is one that was not measured.
        _keep_first(self._seconds[status.state][index], rank, seconds or math.nan)
        return True

    def switched(self) -> SwitchedPlan | None:
        """The plan as its ranks switched it, as far as they did; ``None`` where they did not take it."""
        first = began = _median(self._accepted_R)
        if math.isnan(first):
            return None
        staged, done = PlanState.TRANSFERRED, PlanState.COMMITTED
        switches = []
        for index, received_R in enumerate(self._received_MR):
            staged_at, done_at = (_median(self._done_at[state][index]) for state in (staged, done))
            if math.isnan(staged_at):
                break
            seconds_R = np.where(received_R > 0, self._seconds[staged][index], np.nan)
            each_R = seconds_R / np.maximum(received_R, 1)
            commit = _median(self._seconds[done][index])
            switches.append(Switch(_median(each_R), _median(seconds_R), commit, int(began), int(staged_at)))
            began = staged_at if math.isnan(done_at) else done_at
        return SwitchedPlan(self.plan_id, int(first), int(began) + 1, tuple(switches))


_SWITCHED = {PlanState.TRANSFERRED: "transfer_seconds", PlanState.COMMITTED: "commit_seconds"}
"""States of a layer's switch that a rank reports with a duration, and its field."""


def _keep_first(values_R: Float64, rank: int, value: float) -> None:
    """Keep the first value of a rank that the plan was made for."""
    if rank < len(values_R) and math.isnan(values_R[rank]):
        values_R[rank] = value


def _median(values_K: Float64) -> float:
    """Median of the values that are known; NaN where none is."""
    known_K = values_K[np.isfinite(values_K)]
    return float(np.median(known_K)) if known_K.size else math.nan


@dataclass(frozen=True)
class SplitCost:
    """Cost of a stepwise split in one layer of a step, whatever it wins: an exchange of counts, and its computing.

    Parameters
    ----------
    us
        Microseconds, assumed.
    bytes
        Counts that each rank receives from all others; none where every rank has all tokens anyway (all-gather).
    rounds
        Rounds of the computing, of which the microseconds grow.
    """

    us: float
    bytes: int
    rounds: int

    @classmethod
    def of(
        cls, settings: PlannerSettings, ranks: int, experts: int, choices: float = 0.0
    ) -> SplitCost | None:
        """Cost for a host that splits by step, in steps of so many choices of all ranks; ``None`` for any other."""
        if settings.split != STEP:
            return None
        received = (ranks - 1) * experts * BYTES_PER_COUNT
        travel_us = received / (settings.link_bandwidth * 1e9) * 1e6
        rounds = _rounds_for(choices)
        return cls(_LATENCY_US + travel_us + _COMPUTING_US + rounds * _ROUND_US, received, rounds)

    def ms_of_step(self, layers: int) -> float:
        """Milliseconds of all layers together."""
        return self.us * layers / 1e3

    def __str__(self) -> str:
        return (
            f"{self.us:.4g} us per layer (assumed: {_LATENCY_US:g} us for a collective, {self.bytes:,} bytes of counts "
            f"to each rank at link_bandwidth, {_COMPUTING_US + self.rounds * _ROUND_US:g} us of computing in "
            f"{self.rounds} rounds, as on an H100)"
        )


def _rounds_for(choices: float) -> int:
    """Rounds that the layer takes in a step with so many choices of all ranks; ``docs/research/stepwise.md``."""
    return 22 + math.ceil(20 * (math.sqrt(max(choices / 8192, 1.0)) - 1.0))
