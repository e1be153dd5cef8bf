"""One policy along a trace: it decides on a window, waits for its weights, and serves the steps that follow.

While weights are under way no other decision is made, as in the service.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import Counts, Window, widened
from eplb_service.io.trace import Trace
from eplb_service.placement import (
    Float64,
    Int32,
    Placement,
    apply_layers,
    mean_par,
    par,
    step_par,
    with_entries,
)
from eplb_service.planner.dealing import first_tables
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.pace import Pace, looked_back, paying_steps
from eplb_service.planner.plan import Plan, Promise, Serving, gain_over, promise_for
from eplb_service.planner.score import noise_floor, split_loads
from eplb_service.planner.settings import STEP
from eplb_service.planner.topology import Topology
from eplb_service.replay.costs import Costs
from eplb_service.replay.policy import Job, ReplayError
from eplb_service.replay.result import ReplayedDecision
from eplb_service.replay.served import served_loads, served_us

MEMORY = 512
"""Steps that a policy which decides on change remembers at least, as the service does in its default settings."""
_SERVED_AT_ONCE = 64


@dataclass(frozen=True)
class Scene:
    """Ranks, costs and first placement, which all jobs of a replay share.

    ``phy2log_LRS`` is where weights are at the start; ``None`` for experts in order on each setup's slots.
    """

    topology: Topology
    costs: Costs
    phy2log_LRS: npt.NDArray[np.int32] | None = None

    def placement(self, trace: Trace, slots: int) -> Placement:
        """Placement at the start; raises ``PlacementError`` where it does not fit the trace."""
        if self.phy2log_LRS is not None:
            return Placement(self.phy2log_LRS, trace.experts)
        return Placement.linear(trace.layers, trace.experts, self.topology.ranks, slots)


class SlidingHeat:
    """Heat of a trace by stretches of steps, read from front to back: each step once, and no more kept than needed.

    Parameters
    ----------
    trace
        Where it is read from.
    slack
        Steps by which a stretch may begin before the latest beginning so far; what lies further back is forgotten.
    """

    def __init__(self, trace: Trace, slack: int = 0) -> None:
        self._trace = trace
        self._slack = slack
        self._latest = 0
        self._first = 0
        self._kept: Counts | None = None

    def heat(self, first: int, last: int) -> Counts:
        """Steps ``first`` to ``last`` (not included), ``[t, L, E]``."""
        last = min(last, self._trace.steps)
        assert first >= self._first, "steps are forgotten once a later stretch has been read"
        self._latest = max(self._latest, first)
        self._forget(max(0, min(first, self._latest - self._slack)))
        if self._kept is None:
            self._kept = self._trace.heat(self._first, last)
        end = self._first + len(self._kept)
        if last > end:
            self._kept = np.concatenate([self._kept, self._trace.heat(end, last)])
        return self._kept[first - self._first : last - self._first]

    def _forget(self, before: int) -> None:
        if before <= self._first:
            return
        if self._kept is not None:
            kept = self._kept[before - self._first :]
            self._kept = kept if len(kept) else None
        self._first = before


def run_of(job: Job, trace: Trace, heat: SlidingHeat, scene: Scene) -> _PolicyRun:
    """Run of a job along a trace, whose heat others may read along with it."""
    kind = _Baseline if not job.policy else _ChangeRun if job.on_change else _PolicyRun
    return kind(job, trace, heat, scene)


class _PolicyRun:
    """A policy that decides every interval."""

    def __init__(self, job: Job, trace: Trace, heat: SlidingHeat, scene: Scene) -> None:
        placement = scene.placement(trace, job.setup.slots)
        self._job, self._trace, self._heat, self._costs = job, trace, heat, scene.costs
        self._topology = replace(scene.topology, bytes_per_expert=scene.costs.bytes_per_expert)
        self._external = job.external()
        self._moving = scene.costs.moving
        self._serving = Serving(placement, self._first_tables(placement))
        self._coming: tuple[int, Serving] | None = None

    def decide(self, step: int) -> ReplayedDecision:
        """Decide on the window that ends before ``step``, and serve until the next decision."""
        setup, end = self._job.setup, self._end(step)
        self._arrive(step)
        first = max(0, step - setup.window)
        remembered_TLE = self._heat.heat(first, end)
        begin = step - looked_back(remembered_TLE[: step - first], setup.interval)
        heat_TLE = remembered_TLE[begin - first :]
        window = self._window(heat_TLE[: step - begin], step)
        decided = self._none_made(window)
        if self._coming is None:
            decided = self._decided(window, step, paying_steps(step - first, setup.interval))
        late = 0 if self._coming is None else min(max(self._coming[0] - step, 0), end - step)
        served_TLE = heat_TLE[step - begin :]
        loads, us = [], []
        for part, at in ((served_TLE[:late], step), (served_TLE[late:], step + late)):
            self._arrive(at)
            if len(part):
                loads.append(self._loads(part, at))
                us += self._us(part, at)
        return self._realised(replace(decided, step=step, late=late), served_TLE, np.concatenate(loads), us)

    def _end(self, step: int) -> int:
        return min(step + self._job.setup.interval, self._trace.steps)

    def _window(self, heat_TLE: Counts, end: int) -> Window:
        """Heat that ends before step ``end``, with its sources where the trace knows them."""
        if self._trace.facts.ranks != self._topology.ranks:
            return Window(heat_TLE)
        return Window(heat_TLE, self._trace.source(end - len(heat_TLE), end))

    def _arrive(self, step: int) -> None:
        if self._coming is not None and self._coming[0] <= step:
            self._serving, self._coming = self._coming[1], None

    def _first_tables(self, placement: Placement) -> Int32:
        return first_tables(placement, self._job.settings.split, self._job.settings.deal_width)

    def _loads(self, heat_TLE: Counts, first: int) -> Float64:
        return served_loads(self._trace, heat_TLE, first, self._serving, self._job.settings.split)

    def _us(self, heat_TLE: Counts, first: int) -> list[Float64]:
        """The steps' microseconds ``[t, L]`` as the only entry; empty without a cost curve."""
        costs = self._costs
        if costs.curve is None:
            return []
        split = self._job.settings.split
        us_TL = served_us(self._trace, heat_TLE, first, self._serving, split, costs.curve)
        return [us_TL + (costs.split_overhead_us if split == STEP else 0.0)]

    def _realised(
        self, decided: ReplayedDecision, heat_TLE: Counts, loads_TLR: Float64, us: Sequence[Float64]
    ) -> ReplayedDecision:
        """The decision with what was realised in the steps that it served."""
        us_L = mean_par(np.concatenate(us), axis=0) if us else None
        if us_L is not None and not np.isnan(us_L).all():
            # The curve by which steps are charged says what moves may win.
            layer_ms = float(mean_par(us_L)) / 1e3
            self._moving = replace(self._moving, layer_ms=layer_ms, layer_source="by the cost curve")
        return replace(
            decided,
            steps=len(heat_TLE),
            par_realised_L=par(loads_TLR),
            us_realised_L=us_L,
            busy_L=heat_TLE.any(axis=2).sum(axis=0).astype(np.float64),
            loads_LR=loads_TLR.sum(axis=0),
        )

    def _none_made(self, window: Window) -> ReplayedDecision:
        seen = float(mean_par(par(self._seen(window, self._serving))))
        return ReplayedDecision(par_seen=seen, par_planned=seen)

    def _seen(self, window: Window, way: Serving) -> Float64:
        split = self._job.settings.split
        return split_loads(window.heat_TLE, way.placement, way.log2phy_RLE, window.source_RLE, split)

    def _decided(self, window: Window, step: int, serves: float | None) -> ReplayedDecision:
        """A decision on a window, by the planner or an external policy; what it changes is under way."""
        began = time.perf_counter()
        if self._external is None:
            made = self._planned(window, serves)
            seconds = time.perf_counter() - began
            changed, seen, planned = self._serving.changed_by(made), made.par_seen, made.par_planned
        else:
            changed = self._answered(window)
            seconds = time.perf_counter() - began
            seen, planned = (
                float(mean_par(par(self._seen(window, way)))) for way in (self._serving, changed)
            )
        moves_LR = arrivals(self._serving.placement, changed.placement)
        differ_L = (changed.placement.phy2log_LRS != self._serving.placement.phy2log_LRS).any(axis=(1, 2))
        differ_L |= _differ(changed.log2phy_RLE, self._serving.log2phy_RLE)
        busiest = int(moves_LR.sum(axis=0).max())
        if differ_L.any():
            self._coming = step + self._costs.delay_steps(busiest), changed
        return ReplayedDecision(
            layers_changed=int(differ_L.sum()),
            layers_moved=int(moves_LR.any(axis=1).sum()),
            moves=int(moves_LR.sum()),
            moves_busiest=busiest,
            par_seen=seen,
            par_planned=planned,
            seconds=seconds,
        )

    def _planned(self, window: Window, serves: float | None) -> Plan:
        serving, job = self._serving, self._job
        return plan(
            window,
            serving.placement,
            serving.log2phy_RLE,
            self._topology,
            job.settings,
            serves,
            self._moving,
            job.search,
        )

    def _answered(self, window: Window) -> Serving:
        """Answer of an external policy, checked."""
        assert self._external is not None
        name, deployed = self._job.policy, self._serving.placement
        try:
            answer = self._external(widened(window.heat_TLE).copy(), deployed.phy2log_LRS.copy())
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ReplayError(f"policy {name} failed ({message})") from error
        phy2log, log2phy = answer if isinstance(answer, tuple) else (answer, None)
        try:
            placement = Placement(np.asarray(phy2log).reshape(deployed.phy2log_LRS.shape), deployed.experts)
            if log2phy is None:
                return Serving(placement, self._first_tables(placement))
            log2phy_RLE = np.ascontiguousarray(log2phy, dtype=np.int32)
            placement.check_log2phy(log2phy_RLE)
        except (ValueError, TypeError, OverflowError) as error:
            raise ReplayError(f"policy {name} answered no placement ({error})") from error
        return Serving(placement, log2phy_RLE)


class _ChangeRun(_PolicyRun):
    """A policy that decides as often as ``planner.pace`` says; a row sums up the decisions within an interval."""

    _pace: Pace | None = None
    _promise: Promise | None = None
    _replaced: tuple[Serving, int] | None = None
    """What served before the last decision's change, and since which step it does no more."""

    def decide(self, step: int) -> ReplayedDecision:
        """Serve until the next row of the schedule, and decide on the way."""
        end, first = self._end(step), max(0, step - MEMORY)
        heat_TLE = self._heat.heat(first, end)
        pace = self._pace or Pace(first=step, memory=MEMORY, seen=step)
        made: list[ReplayedDecision] = []
        loads: list[Float64] = []
        us: list[Float64] = []
        at, late = step, 0
        while at < end:
            pace = self._taken_up(pace, at)
            if pace.due and self._coming is None:
                pace, decided = self._paced(pace, at, heat_TLE[max(0, at - first - MEMORY) : at - first])
                made.append(decided)
                pace = self._taken_up(pace, at)
            until = min(end, at + _SERVED_AT_ONCE, end if self._coming is None else self._coming[0])
            loads_TLR = self._loads(heat_TLE[at - first : until - first], at)
            pace, taken = pace.after_steps(step_par(loads_TLR))
            late += taken if self._coming is not None else 0
            loads.append(loads_TLR[:taken])
            us += self._us(heat_TLE[at - first : at - first + taken], at)
            at += taken
        self._pace = pace
        loads_TLR = np.concatenate(loads)
        return self._realised(_summed(step, late, made, loads_TLR), heat_TLE[step - first :], loads_TLR, us)

    def _taken_up(self, pace: Pace, step: int) -> Pace:
        """The pace testing a decision from where it serves."""
        if self._coming is not None and self._coming[0] <= step:
            self._replaced = self._serving, step
            self._arrive(step)
        if self._promise is None or self._coming is not None:
            return pace
        promise, self._promise = self._promise, None
        return pace.serving(promise)

    def _paced(self, pace: Pace, step: int, heat_TLE: Counts) -> tuple[Pace, ReplayedDecision]:
        """Decide on the newest of the steps remembered, which end before ``step``."""
        paid = self._paid(step, heat_TLE)
        pace = pace.weighed(heat_TLE)
        window = self._window(heat_TLE[len(heat_TLE) - pace.window_steps(heat_TLE) :], step)
        self._replaced = None
        decided = self._decided(window, step, pace.serving_steps)
        return pace.after_decision(decided.layers_changed > 0, paid), decided

    def _planned(self, window: Window, serves: float | None) -> Plan:
        made = super()._planned(window, serves)
        self._promise = promise_for(window, self._serving, made, self._job.settings.split)
        return made

    def _paid(self, step: int, heat_TLE: Counts) -> bool | None:
        """True where the last change has won anything on the steps since, as far as they are remembered."""
        if self._replaced is None:
            return None
        before, since = self._replaced
        window = self._window(heat_TLE[len(heat_TLE) - min(step - since, len(heat_TLE)) :], step)
        return gain_over(window, before, self._serving, self._job.settings.split).paid


def _summed(step: int, late: int, made: Sequence[ReplayedDecision], loads_TLR: Float64) -> ReplayedDecision:
    """Decisions of some steps, summed up; where there are none, what is seen and planned is what is realised."""
    realised = float(mean_par(par(loads_TLR)))
    counted = ("layers_changed", "layers_moved", "moves", "moves_busiest", "seconds")
    return ReplayedDecision(
        step=step,
        late=late,
        par_seen=made[0].par_seen if made else realised,
        par_planned=made[-1].par_planned if made else realised,
        decisions=len(made),
        **{name: sum(getattr(one, name) for one in made) for name in counted},
    )


class _Baseline(_PolicyRun):
    """Nothing done on the stretches that policies serve, with the noise floor and the best that hindsight finds."""

    def decide(self, step: int) -> ReplayedDecision:
        """Measure the steps from ``step`` to the next decision."""
        end = self._end(step)
        window = self._window(self._heat.heat(step, end), end)
        heat_TLE, loads_TLR = window.heat_TLE, self._loads(window.heat_TLE, step)
        realised = self._realised(ReplayedDecision(step=step), heat_TLE, loads_TLR, self._us(heat_TLE, step))
        floor_L = noise_floor(heat_TLE.sum(axis=2), self._topology.ranks)
        return replace(realised, floor_L=floor_L, hindsight_L=self._hindsight(window, step))

    def _hindsight(self, window: Window, step: int) -> Float64 | None:
        if not self._job.hindsight:
            return None
        placement, tables_RLE = self._serving.placement, self._serving.log2phy_RLE
        fitted = plan_afresh(window, placement, self._topology, self._job.settings)
        best = Serving(*apply_layers(placement, tables_RLE, fitted.changes()))
        split = self._job.settings.split
        return par(served_loads(self._trace, window.heat_TLE, step, best, split))


def arrivals(before: Placement, after: Placement) -> npt.NDArray[np.int64]:
    """Experts that each rank must receive, int64 ``[L, R]``: those that it did not hold before."""
    layers, ranks, _ = before.phy2log_LRS.shape
    held_LRE = np.zeros((layers, ranks, before.experts), dtype=bool)
    np.put_along_axis(held_LRE, before.phy2log_LRS.astype(np.int64), True, axis=2)
    kept_LRS = np.take_along_axis(held_LRE, after.phy2log_LRS.astype(np.int64), axis=2)
    arriving: npt.NDArray[np.int64] = (~kept_LRS).sum(axis=2)
    return arriving


def _differ(one_RLE: Int32, other_RLE: Int32) -> npt.NDArray[np.bool_]:
    """Layers whose tables differ, bool ``[L]``; an external policy may answer tables of another width."""
    one, other = with_entries(one_RLE, 3), with_entries(other_RLE, 3)
    if one.shape != other.shape:
        return np.ones(one.shape[1], dtype=np.bool_)
    differ_L: npt.NDArray[np.bool_] = (one != other).any(axis=(0, 2, 3))
    return differ_L
