"""One policy along a trace that decides when what is realised departs from what was promised, not by the clock."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from eplb_service.heat.window import Counts, Window
from eplb_service.placement import Float64, mean_par, par, step_par
from eplb_service.planner.decide import plan
from eplb_service.planner.outlook import Serving, gain_over, promise_for
from eplb_service.planner.pace import Pace
from eplb_service.planner.promise import Promise
from eplb_service.replay.policy_replay import ReplayedDecision
from eplb_service.replay.policy_run import Outcome, PolicyRun, busy_steps
from eplb_service.replay.schedule import MEMORY

_SERVED_AT_ONCE = 64


class ChangeRun(PolicyRun):
    """As ``PolicyRun``, but decides as often as ``planner.pace`` says; ``decide`` sums up what fell in its steps."""

    _pace: Pace | None = None
    _promise: Promise | None = None
    _replaced: tuple[Serving, int] | None = None
    """What served before the last decision's change, and since which step it does no more."""

    def decide(self, step: int) -> ReplayedDecision:
        """Serve until the next row of the schedule, and decide on the way."""
        end = min(step + self._schedule.interval, self._trace.steps)
        first = max(0, step - MEMORY)
        heat_TLE = self._heat.heat(first, end)
        pace = self._pace or Pace(first=step, memory=MEMORY, seen=step)
        made: list[Outcome] = []
        loads: list[Float64] = []
        us: list[Float64] = []
        at, late = step, 0
        while at < end:
            pace = self._taken_up(pace, at)
            if pace.due and self._coming is None:
                pace, outcome = self._decision(pace, at, heat_TLE[max(0, at - first - MEMORY) : at - first])
                made.append(outcome)
                pace = self._taken_up(pace, at)
            until = min(end, at + _SERVED_AT_ONCE, end if self._coming is None else self._coming[0])
            loads_TLR = self._served(heat_TLE[at - first : until - first], at)
            pace, taken = pace.after_steps(step_par(loads_TLR))
            late += taken if self._coming is not None else 0
            loads.append(loads_TLR[:taken])
            us += self._served_us(heat_TLE[at - first : at - first + taken], at)
            at += taken
        self._pace = pace
        loads_TLR = np.concatenate(loads)
        self.loads_LR = loads_TLR.sum(axis=0)
        row = _row(step, late, made, par(loads_TLR), busy_steps(heat_TLE[step - first :]), end - step)
        return replace(row, us_realised_L=mean_par(np.concatenate(us), axis=0) if us else None)

    def _taken_up(self, pace: Pace, step: int) -> Pace:
        """What was decided is tested from where it serves."""
        if self._coming is not None and self._coming[0] <= step:
            self._replaced = self._serving, step
            self._arrive(step)
        if self._promise is None or self._coming is not None:
            return pace
        promise, self._promise = self._promise, None
        return pace.serving(promise)

    def _decision(self, pace: Pace, step: int, heat_TLE: Counts) -> tuple[Pace, Outcome]:
        """Decide on the newest of the steps remembered, which end before ``step``."""
        serving, settings = self._serving, self._policy.settings
        paid = self._paid(step, heat_TLE)
        began = time.perf_counter()
        pace = pace.weighed(heat_TLE)
        steps = pace.window_steps(heat_TLE)
        window = Window(heat_TLE[len(heat_TLE) - steps :], self._source(step - steps, step))
        made = plan(
            window, serving.placement, serving.log2phy_RLE, self._topology, settings, pace.serving_steps
        )
        seconds = time.perf_counter() - began
        changed = serving.changed_by(made)
        self._promise = promise_for(window, serving, made, settings.split)
        self._replaced = None
        outcome = self._outcome(changed, made.par_seen, made.par_planned, seconds)
        if made.layers:
            self._coming = step + self._costs.delay_steps(outcome.moves_busiest), changed
        return pace.after_decision(bool(made.layers), paid), outcome

    def _paid(self, step: int, heat_TLE: Counts) -> bool | None:
        """Whether the last decision's change has won anything on the steps since, as far as they are remembered."""
        if self._replaced is None:
            return None
        before, since = self._replaced
        steps = min(step - since, len(heat_TLE))
        window = Window(heat_TLE[len(heat_TLE) - steps :], self._source(step - steps, step))
        return gain_over(window, before, self._serving, self._policy.settings.split).paid


def _row(
    step: int, late: int, made: list[Outcome], realised_L: Float64, busy_L: Float64, steps: int
) -> ReplayedDecision:
    """What was decided in some steps, summed up; where nothing was, what was seen and planned is what was realised."""
    realised = float(mean_par(realised_L))
    return ReplayedDecision(
        step=step,
        steps=steps,
        late=late,
        layers_changed=sum(outcome.layers_changed for outcome in made),
        layers_moved=sum(outcome.layers_moved for outcome in made),
        moves=sum(outcome.moves for outcome in made),
        moves_busiest=sum(outcome.moves_busiest for outcome in made),
        par_seen=made[0].par_seen if made else realised,
        par_planned=made[-1].par_planned if made else realised,
        par_realised_L=realised_L,
        seconds=sum(outcome.seconds for outcome in made),
        decisions=len(made),
        busy_L=busy_L,
    )
