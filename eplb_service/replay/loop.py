"""One policy along a trace: it decides on a window, waits for its weights, and serves the steps that follow.

A plan takes effect part by part as its weights arrive, starting with the layers of the largest gain. While weights are
in transit, no other decision is made unless heat changes again. The layers that have not switched are then dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Counts, Window
from eplb_core.placement import (
    Float64,
    Placement,
    apply_layers,
    as_served,
    checked_foreign,
    mean_par,
    par,
    repaired,
    staging_rows,
    step_par,
)
from eplb_core.planner.dealing import first_tables
from eplb_core.planner.decide import plan, plan_afresh
from eplb_core.planner.forecast import NO_FORECASTS
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Layout, Plan, Promise, promise_for
from eplb_core.planner.policies import PolicyError, answer_of
from eplb_core.planner.score import Gain, gain_of, sampling_floor, split_loads, split_steps
from eplb_core.planner.settings import EVEN, STEP
from eplb_core.planner.topology import Topology
from eplb_core.solver.model import Recommendation
from eplb_service.io.trace import Trace
from eplb_service.replay.costs import BUSY_PASSES, STAGING_BYTES, Costs
from eplb_service.replay.moves import arrivals, for_each_layer, sent, switched, tables_differ
from eplb_service.replay.policy import Job, ReplayError
from eplb_service.replay.result import ReplayedDecision
from eplb_service.replay.served import knows_sources, served_loads, served_us

_SERVED_AT_ONCE = 64


@dataclass(frozen=True)
class Scene:
    """Ranks, costs and first placement, which all jobs of a replay share.

    ``phy2log_LRS`` is where weights are at the start, which another balancer may have placed (``placement.foreign``);
    ``None`` for experts in order on each setup's slots.
    """

    topology: Topology
    costs: Costs
    phy2log_LRS: npt.NDArray[np.int32] | None = None

    def placement(self, trace: Trace, slots: int) -> Placement:
        """Return the placement at the start, repaired; raises ``PlacementError`` if it does not fit the trace."""
        if self.phy2log_LRS is not None:
            return repaired(checked_foreign(self.phy2log_LRS, trace.experts), trace.experts, slots)
        return Placement.linear(trace.layers, trace.experts, self.topology.ranks, slots)

    def left_alone(self, trace: Trace, slots: int) -> Placement:
        """Return the placement at the start as it serves, unless it has another number of slots."""
        given_LRS = self.phy2log_LRS
        if given_LRS is None or given_LRS.shape[2] != slots:
            return self.placement(trace, slots)
        return as_served(given_LRS, trace.experts)


def run(job: Job, trace: Trace, scene: Scene) -> Iterator[ReplayedDecision]:
    """Each stretch from one step of the job's schedule to the next, as it is decided on and served.

    The trace is read from front to back, each step once, and no more of it is kept than a decision looks at.
    """
    way, setup = _Run(job, trace, scene), job.setup
    schedule = setup.decisions(trace.steps)
    known_TLE = trace.heat(max(0, schedule[0] - way.memory), schedule[0])
    for step in schedule:
        served_TLE = trace.heat(step, min(step + setup.interval, trace.steps))
        heat_TLE = np.concatenate([known_TLE, served_TLE])
        row = way.serve(heat_TLE, step - len(known_TLE), step)
        yield row if step == schedule[-1] else replace(row, loads_LR=None)
        known_TLE = heat_TLE[-way.memory :]


class _Run:
    """A policy on its way: what serves, what is under way, and when it decides next.

    Ours decides as ``planner.pace`` says, others every interval; the baseline, which has no policy, never.
    """

    def __init__(self, job: Job, trace: Trace, scene: Scene) -> None:
        placement = scene.placement(trace, job.setup.slots)
        self._held_LRS = placement.phy2log_LRS
        if scene.phy2log_LRS is not None:
            given_LRS = scene.phy2log_LRS[:, :, : job.setup.slots]
            self._held_LRS = np.full_like(self._held_LRS, -1)
            self._held_LRS[:, :, : given_LRS.shape[2]] = given_LRS
        """int32 ``[L, R, S]``, the experts that ranks hold before the next decision; -1 for an empty slot."""
        self.memory = job.setup.window
        self._job, self._trace, self._costs = job, trace, scene.costs
        self._split = job.settings.split
        self._topology = replace(scene.topology, bytes_per_expert=scene.costs.bytes_per_expert)
        self._external = job.external()
        self._moving = scene.costs.moving
        self._deployable = placement
        if not job.policy:
            placement = scene.left_alone(trace, job.setup.slots)
        self._serving = self._with_first_tables(placement)
        self._coming: list[tuple[int, Layout]] = []
        """Steps at which further layers begin to serve, with the new placement; empty if no plan is under way."""
        self._before = self._serving
        self._answers_alarm: tuple[int | None, int] | None = None
        first, longest = job.setup.first, job.setup.interval
        self._pace = Pace(first, self.memory, longest, seen=first) if job.on_change else None
        self._promise: Promise | None = None
        self._expected_TL: Float64 = np.zeros((0, trace.layers))
        self._found, self._forecasts = self._serving, NO_FORECASTS
        self._recommendations: Sequence[Recommendation | None] = ()
        self._order: Sequence[int] = ()
        self._replaced: tuple[Layout, int] | None = None
        """What served before the last decision's change, and since which step it does no more."""
        self._ended_at: int | None = None
        """Step at which the last plan ended."""

    def serve(self, heat_TLE: Counts, begin: int, step: int) -> ReplayedDecision:
        """Serve from ``step`` to the end of the heat, which starts at step ``begin``, and decide on the way."""
        at, end, late = step, begin + len(heat_TLE), 0
        made: list[ReplayedDecision] = []
        loads: list[Float64] = []
        us: list[Float64] = []
        while at < end:
            self._take_up(at)
            is_due = at == step if self._pace is None else self._pace.due
            if self._job.policy and is_due and (not self._coming or self._may_replace):
                decided = self._decide(heat_TLE[max(0, at - begin - self.memory) : at - begin], at)
                made += [] if decided is None else [decided]
                self._take_up(at)
            until = min(end, at + _SERVED_AT_ONCE, self._coming[0][0] if self._coming else end)
            served_TLE = heat_TLE[at - begin : until - begin]
            loads_TLR = served_loads(self._trace, served_TLE, at, self._serving, self._split)
            taken = len(served_TLE)
            if self._pace is not None:
                tested_TLR = loads_TLR
                if self._coming:
                    # A change is seen while weights are under way: what counts is the placement that they lead to.
                    planned = self._coming[-1][1]
                    tested_TLR = served_loads(self._trace, served_TLE, at, planned, self._split)
                self._pace, taken = self._pace.after_steps(step_par(tested_TLR))
            loads.append(loads_TLR[:taken])
            us += self._us(served_TLE[:taken], at)
            late += taken if self._coming else 0
            at += taken
        served_TLE = heat_TLE[step - begin :]
        row = replace(_row(step, made, np.concatenate(loads), us), late=late)
        self._learn_layer_ms(row)
        return row if self._job.policy else self._compared(row, served_TLE)

    def _take_up(self, step: int) -> None:
        """Serve the layers whose weights are there by now."""
        while self._coming and self._coming[0][0] <= step:
            before = self._serving
            _, self._serving = self._coming.pop(0)
            self._hold(self._serving, switched(before, self._serving))
            if not self._coming:
                self._replaced = self._before, step
                self._ended_at = step

    def _hold(self, serving: Layout, layers_L: npt.NDArray[np.bool_]) -> None:
        """Record that ranks hold the experts of ``serving`` in the layers of the mask ``layers_L``, bool ``[L]``."""
        self._held_LRS = np.where(layers_L[:, None, None], serving.placement.phy2log_LRS, self._held_LRS)

    @property
    def _may_replace(self) -> bool:
        """True if heat may have changed since the decision whose weights are under way."""
        if self._pace is None or self._pace.alarm is None:
            return False
        return self._pace.settling or self._pace.alarm is not self._answers_alarm

    def _decide(self, heat_TLE: Counts, step: int) -> ReplayedDecision | None:
        """Decide on the newest of the remembered steps, which end before ``step``.

        Return ``None`` if their heat has changed too recently to decide on, or has not changed while weights are under
        way.
        """
        pace = self._pace
        if pace is None:
            return self._decided(self._window(heat_TLE, len(heat_TLE), step), step, None)
        began, paid = time.process_time(), self._paid(heat_TLE, step)
        alarmed = pace.alarm
        pace = pace.weighed(heat_TLE)
        is_answered = not pace.settling or pace.alarm is self._answers_alarm
        if pace.too_recent or (self._coming and is_answered):
            self._pace = pace.postponed() if pace.due else pace
            return None
        if self._coming:
            self._coming.clear()
            self._ended_at = step
        self._answers_alarm = pace.alarm
        dismissed = pace.alarm is not alarmed and not pace.settling
        window = self._window(heat_TLE, pace.window_steps(heat_TLE), step)
        self._replaced = None
        self._recommendations = self._recommendations if pace.follows(paid) else ()
        decided = self._decided(window, step, pace.serving_steps)
        held = self._forecast(window, heat_TLE, step, pace.serving_steps)
        decided = replace(decided, forecasts=int(held is not None), forecasts_held=int(held or False))
        spent_ms = 1e3 * (time.process_time() - began)
        changed = decided.layers_changed > 0
        pace = pace.after_decision(changed, paid).charged(spent_ms / self._job.cpu_ms)
        if self._promise is not None:
            kept = pace.keeping(self._promise, dismissed=dismissed)
            pace = pace.serving(self._promise) if changed else kept
            self._promise = None
        self._pace = pace
        return decided

    def _decided(self, window: Window, step: int, serves: float | None) -> ReplayedDecision:
        """A decision by the planner or an external policy; what it changes is under way."""
        before, began = self._serving, time.perf_counter()
        if self._external is None:
            made = self._planned(window, serves)
            seconds = time.perf_counter() - began
            changed = before.changed_by(made)
            par_seen = made.par_seen
            par_planned = made.par_planned
            if self._has_step_sources:
                # The planner knows only the window's mean sources, so its ratios differ from the steps' own.
                par_seen = _mean_of_layers(self._par_of_steps(before, window, step))
                made = replace(made, par_TL=self._par_of_steps(changed, window, step))
                par_planned = _mean_of_layers(promise_for(made)[1])
            if self._pace is not None:
                self._promise, self._expected_TL = promise_for(made)
        else:
            changed = self._answered(window)
            seconds = time.perf_counter() - began
            par_seen = self._seen(window, before)
            par_planned = self._seen(window, changed)
        moves_LR = arrivals(self._held_LRS, changed.placement.phy2log_LRS)
        switch_L = switched(before, changed)
        self._hold(changed, ~switch_L)
        differ_L = switch_L | tables_differ(changed.log2phy_RLE, before.log2phy_RLE)
        if differ_L.any():
            self._before = before
            self._coming = self._arriving(step, changed, moves_LR, np.flatnonzero(differ_L))
        return ReplayedDecision(
            layers_changed=int(differ_L.sum()),
            layers_moved=int(moves_LR.any(axis=1).sum()),
            moves=int(moves_LR.sum()),
            moves_busiest=int(moves_LR.sum(axis=0).max()),
            par_seen=par_seen,
            par_planned=par_planned,
            seconds=seconds,
        )

    def _arriving(
        self, step: int, changed: Layout, moves_LR: npt.NDArray[np.int64], layers: npt.NDArray[np.int64]
    ) -> list[tuple[int, Layout]]:
        """Return the steps at which each of ``layers`` takes effect, after a decision before ``step``.

        The planner's policies switch layers in the order of gain, external ones in the order of index. All switch at
        the pace of this project's agents. A layer that represents several layers of the model takes effect when the
        middle one of them does. The plan ends at the last step.
        """
        serving = self._serving
        order = [layer for layer in self._order if layer in layers] or layers.tolist()
        each_L = self._costs.layers_each(len(order), len(moves_LR))
        sent_LR = sent(serving.placement, changed.placement, self._topology.nodes_R)
        steps_L = step + self._costs.arrival_steps(
            for_each_layer(moves_LR[order], each_L),
            for_each_layer(sent_LR[order], each_L),
            staging_rows(self._job.setup.slots, self._costs.expert_bytes, STAGING_BYTES),
            soon=self._ended_at is not None and step - self._ended_at < BUSY_PASSES,
        )
        arriving: dict[int, Layout] = {}
        middle_L = np.cumsum(each_L) - (each_L + 1) // 2
        # Tables of another width replace those of all layers at once.
        if changed.log2phy_RLE.shape == serving.log2phy_RLE.shape:
            for layer, at in zip(order, steps_L[middle_L].tolist(), strict=True):
                one = [(layer, changed.placement.phy2log_LRS[layer], changed.log2phy_RLE[:, layer])]
                serving = Layout(*apply_layers(serving.placement, serving.log2phy_RLE, one))
                arriving[at] = serving
        arriving[int(steps_L[-1])] = changed
        return sorted(arriving.items(), key=lambda item: item[0])

    def _planned(self, window: Window, serves: float | None) -> Plan:
        now, job = self._serving, self._job
        made = plan(
            window,
            now.placement,
            now.log2phy_RLE,
            self._topology,
            job.settings,
            serves,
            self._moving,
            job.search,
            self._recommendations,
        )
        if self._pace is not None:
            self._recommendations = made.recommendations
        self._order = [one.layer for one in made.layers]
        return made

    def _answered(self, window: Window) -> Layout:
        """Return the answer of an external policy, checked; slots that it wastes or leaves empty are filled."""
        assert self._external is not None
        try:
            placement, log2phy_RLE = answer_of(
                self._job.policy, self._external, window, self._serving.placement
            )
        except PolicyError as error:
            raise ReplayError(str(error)) from error
        return self._with_first_tables(placement) if log2phy_RLE is None else Layout(placement, log2phy_RLE)

    def _with_first_tables(self, placement: Placement) -> Layout:
        return Layout(placement, first_tables(placement, self._split, self._job.settings.deal_width))

    def _window(self, heat_TLE: Counts, steps: int, end: int) -> Window:
        """The newest steps of heat that ends before step ``end``, with its sources where the trace knows them."""
        newest_TLE = heat_TLE[len(heat_TLE) - steps :]
        if self._trace.facts.ranks != self._topology.ranks:
            return Window(newest_TLE)
        return Window(newest_TLE, self._trace.source(end - steps, end))

    def _seen(self, window: Window, way: Layout) -> float:
        loads_TLR = split_loads(
            window.heat_TLE, way.placement, way.log2phy_RLE, window.source_RLE, self._split
        )
        return float(mean_par(par(loads_TLR)))

    def _paid(self, heat_TLE: Counts, step: int) -> bool | None:
        """True where the last change has won anything on the steps since, as far as they are remembered."""
        if self._replaced is None:
            return None
        before, since = self._replaced
        return self._gain_over(before, heat_TLE, min(step - since, len(heat_TLE)), step).paid

    def _forecast(self, window: Window, heat_TLE: Counts, step: int, serves: float) -> bool | None:
        """Forecast what is won until the next decision; whether the forecast before held, ``None`` without one."""
        since, came = min(self._forecasts.since(step), len(heat_TLE)), None
        if since:
            came = self._gain_over(self._found, heat_TLE, since, step)
        left_TL = self._par_of_steps(self._found, window, step)
        self._forecasts = self._forecasts.next(left_TL, self._expected_TL, serves, step, came)
        return self._forecasts.held

    @property
    def _has_step_sources(self) -> bool:
        """True if each step's tokens are known by source rank and routed by tables."""
        return self._split not in (EVEN, STEP) and knows_sources(self._trace, self._topology.ranks)

    def _par_of_steps(self, way: Layout, window: Window, end: int) -> Float64:
        """Return the PAR per step of a window that ends before ``end``, float64 ``[T, L]``; NaN without tokens."""
        if not self._has_step_sources:
            return way.par_of_steps(window, self._split)
        return step_par(served_loads(self._trace, window.heat_TLE, end - window.steps, way, self._split))

    def _gain_over(self, before: Layout, heat_TLE: Counts, steps: int, end: int) -> Gain:
        """Return the live placement's gain over ``before`` on the newest ``steps`` of heat that ends before ``end``."""
        window = self._window(heat_TLE, steps, end)
        return gain_of(
            self._par_of_steps(before, window, end), self._par_of_steps(self._serving, window, end)
        )

    def _us(self, heat_TLE: Counts, first: int) -> list[Float64]:
        """The steps' microseconds ``[t, L]`` as the only entry; empty without a cost curve."""
        curve, split = self._costs.curve, self._costs.split
        if curve is None:
            return []
        us_TL = served_us(self._trace, heat_TLE, first, self._serving, self._split, curve)
        return [us_TL if split is None else us_TL + split.us]

    def _learn_layer_ms(self, row: ReplayedDecision) -> None:
        """The curve by which steps are charged says what moves may win."""
        if row.us_realised_L is not None and not np.isnan(row.us_realised_L).all():
            layer_ms = float(mean_par(row.us_realised_L)) / 1e3
            self._moving = replace(self._moving, layer_ms=layer_ms, layer_source="by the cost curve")

    def _compared(self, row: ReplayedDecision, heat_TLE: Counts) -> ReplayedDecision:
        """The baseline's row with the noise floor and, where asked for, the best that hindsight finds."""
        now, window = self._serving, self._window(heat_TLE, len(heat_TLE), row.step + len(heat_TLE))
        served = split_steps(heat_TLE, now.placement, now.log2phy_RLE, window.source_RLE, self._split)
        row = replace(row, floor_L=sampling_floor(served))
        if not self._job.hindsight:
            return row
        fitted = plan_afresh(window, self._deployable, self._topology, self._job.settings)
        first = self._with_first_tables(self._deployable)
        best = Layout(*apply_layers(first.placement, first.log2phy_RLE, fitted.changes()))
        loads_TLR = served_loads(self._trace, window.heat_TLE, row.step, best, self._split)
        return replace(row, hindsight_L=par(loads_TLR))


def _mean_of_layers(par_TL: Float64) -> float:
    """Return the mean of the layers' mean PAR per step."""
    return float(mean_par(mean_par(par_TL, axis=0)))


def _row(
    step: int, made: Sequence[ReplayedDecision], loads_TLR: Float64, us: Sequence[Float64]
) -> ReplayedDecision:
    """Decisions of some steps and their outcome; without any, the ratio seen and planned is the one realised.

    ``us`` are microseconds ``[t, L]`` of the steps, in parts; empty without a cost curve.
    """
    par_L = par(loads_TLR)
    realised = float(mean_par(par_L))
    counted = ["layers_changed", "layers_moved", "moves", "moves_busiest", "seconds"]
    counted += ["forecasts", "forecasts_held"]
    return ReplayedDecision(
        step=step,
        steps=len(loads_TLR),
        par_seen=made[0].par_seen if made else realised,
        par_planned=made[-1].par_planned if made else realised,
        decisions=len(made),
        par_realised_L=par_L,
        us_realised_L=mean_par(np.concatenate(us), axis=0) if us else None,
        busy_L=loads_TLR.any(axis=2).sum(axis=0).astype(np.float64),
        loads_LR=loads_TLR.sum(axis=0),
        **{name: sum(getattr(one, name) for one in made) for name in counted},
    )
