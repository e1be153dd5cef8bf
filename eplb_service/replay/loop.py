"""Replay one policy: it decides on a window, waits for the weights to arrive, and serves the following steps.

A plan takes effect part by part as its weights arrive, starting with the layers that gain most. While weights are in
transit, no other decision is made unless heat changes again, in which case the layers that have not switched yet are
dropped from the plan.
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

_CHUNK_STEPS = 64
"""Maximum number of steps that are served at a time."""
_SUMMED = (
    "layers_changed",
    "layers_moved",
    "moves",
    "moves_busiest",
    "seconds",
    "forecasts",
    "forecasts_held",
)
"""Fields of ``ReplayedDecision`` that are summed over the decisions in an interval."""


@dataclass(frozen=True)
class Scene:
    """Ranks, costs and initial placement, which all jobs of a replay share.

    Parameters
    ----------
    topology
        Nodes and token groups of the ranks.
    costs
        Costs of steps and switches.
    phy2log_LRS
        int32 ``[L, R, S]``, placement at the start, which may come from a different balancer (see
        ``placement.foreign``) and may have a different number of slots. ``None`` to place experts in order in each
        setup's slots.
    """

    topology: Topology
    costs: Costs
    phy2log_LRS: npt.NDArray[np.int32] | None = None

    def placement(self, trace: Trace, slots: int) -> Placement:
        """Return the placement at the start after repair. Raises ``PlacementError`` if it does not fit the trace."""
        if self.phy2log_LRS is not None:
            return repaired(checked_foreign(self.phy2log_LRS, trace.experts), trace.experts, slots)
        return Placement.linear(trace.layers, trace.experts, self.topology.ranks, slots)

    def left_alone(self, trace: Trace, slots: int) -> Placement:
        """Return the placement at the start without repair, or the repaired one if its number of slots differs."""
        if self.phy2log_LRS is None or self.phy2log_LRS.shape[2] != slots:
            return self.placement(trace, slots)
        return as_served(self.phy2log_LRS, trace.experts)


def run(job: Job, trace: Trace, scene: Scene) -> Iterator[ReplayedDecision]:
    """Run a job along the trace and yield the results of each interval of its schedule.

    Each step of the trace is read once, in order. Only the steps that a decision may use are kept in memory.
    """
    policy_run = _Run(job, trace, scene)
    schedule = job.setup.decisions(trace.steps)
    past_TLE = trace.heat(max(0, schedule[0] - policy_run.memory), schedule[0])
    for step in schedule:
        served_TLE = trace.heat(step, min(step + job.setup.interval, trace.steps))
        heat_TLE = np.concatenate([past_TLE, served_TLE])
        row = policy_run.serve(heat_TLE, step - len(past_TLE), step)
        yield row if step == schedule[-1] else replace(row, loads_LR=None)
        past_TLE = heat_TLE[-policy_run.memory :]


class _Run:
    """State of one policy along the trace: the current layout, the plan in progress, and the next decision.

    flashlb and its ablations decide when ``planner.pace`` schedules a decision. Other policies decide at every
    interval, and the baseline, which has no policy, never does.
    """

    def __init__(self, job: Job, trace: Trace, scene: Scene) -> None:
        self.memory = job.setup.window
        """Number of past steps that decisions may use."""
        self._job = job
        self._trace = trace
        self._costs = scene.costs
        self._split = job.settings.split
        self._topology = replace(scene.topology, bytes_per_expert=scene.costs.bytes_per_expert)
        self._external = job.external()
        self._moving = scene.costs.moving
        self._deployable = scene.placement(trace, job.setup.slots)
        self._held_LRS = self._held_at_start(scene)
        """int32 ``[L, R, S]``, experts on the ranks before the next decision; -1 for an empty slot."""
        initial = self._deployable if job.policy else scene.left_alone(trace, job.setup.slots)
        self._serving = self._with_first_tables(initial)
        self._initial = self._serving
        self._pending: list[tuple[int, Layout]] = []
        """Steps at which further layers switch, each with the layout from then on; empty if no plan is in progress."""
        self._plan_base = self._serving
        """Layout before the latest plan."""
        self._plan_alarm: tuple[int | None, int] | None = None
        """Alarm that triggered the latest plan."""
        self._plan_ended_at: int | None = None
        """Step at which the latest plan ended."""
        self._replaced: tuple[Layout, int] | None = None
        """Layout before the last change, and the step at which the change was complete."""
        first = job.setup.first
        self._pace = Pace(first, self.memory, job.setup.interval, seen=first) if job.on_change else None
        self._promise: Promise | None = None
        self._expected_TL: Float64 = np.zeros((0, trace.layers))
        self._forecasts = NO_FORECASTS
        self._recommendations: Sequence[Recommendation | None] = ()
        self._layers_by_gain: Sequence[int] = ()

    def serve(self, heat_TLE: Counts, begin: int, step: int) -> ReplayedDecision:
        """Serve the steps from ``step`` to the end of the heat, and make the decisions that are due.

        Parameters
        ----------
        heat_TLE
            ``[T, L, E]``, past and served steps.
        begin
            Number of the first of these steps in the trace.
        step
            Number of the first step to serve.
        """
        end = begin + len(heat_TLE)
        position = step
        late = 0
        decisions: list[ReplayedDecision] = []
        loads: list[Float64] = []
        us: list[Float64] = []
        while position < end:
            self._apply_arrived(position)
            is_due = position == step if self._pace is None else self._pace.due
            if self._job.policy and is_due and (not self._pending or self._may_replace):
                decision = self._decide(
                    heat_TLE[max(0, position - begin - self.memory) : position - begin], position
                )
                if decision is not None:
                    decisions.append(decision)
                self._apply_arrived(position)
            chunk_end = min(end, position + _CHUNK_STEPS)
            if self._pending:
                chunk_end = min(chunk_end, self._pending[0][0])
            chunk_TLE = heat_TLE[position - begin : chunk_end - begin]
            loads_TLR = served_loads(self._trace, chunk_TLE, position, self._serving, self._split)
            served = self._advance_pace(chunk_TLE, position, loads_TLR)
            loads.append(loads_TLR[:served])
            us += self._slowest_us(chunk_TLE[:served], position)
            late += served if self._pending else 0
            position += served
        row = replace(_row(step, decisions, np.concatenate(loads), us), late=late)
        self._learn_layer_ms(row)
        return row if self._job.policy else self._compared(row, heat_TLE[step - begin :])

    def _advance_pace(self, chunk_TLE: Counts, first: int, loads_TLR: Float64) -> int:
        """Test the steps of a chunk for a change of heat, and return the number of steps to serve before a decision."""
        if self._pace is None:
            return len(chunk_TLE)
        if self._pending:
            # While weights are in transit, test for a change of heat under the layout that the plan leads to.
            planned = self._pending[-1][1]
            loads_TLR = served_loads(self._trace, chunk_TLE, first, planned, self._split)
        self._pace, served = self._pace.after_steps(step_par(loads_TLR))
        return served

    def _apply_arrived(self, step: int) -> None:
        """Switch the layers whose weights have arrived before ``step``."""
        while self._pending and self._pending[0][0] <= step:
            before = self._serving
            _, self._serving = self._pending.pop(0)
            self._hold(self._serving, switched(before, self._serving))
            if not self._pending:
                self._replaced = self._plan_base, step
                self._plan_ended_at = step

    def _hold(self, layout: Layout, layers_L: npt.NDArray[np.bool_]) -> None:
        """Record that the ranks now have the experts of ``layout`` in the masked layers, ``layers_L``, bool ``[L]``."""
        self._held_LRS = np.where(layers_L[:, None, None], layout.placement.phy2log_LRS, self._held_LRS)

    def _held_at_start(self, scene: Scene) -> npt.NDArray[np.int32]:
        """Return the experts on the ranks at the start, int32 ``[L, R, S]``; -1 for an empty slot."""
        held_LRS = self._deployable.phy2log_LRS
        if scene.phy2log_LRS is None:
            return held_LRS
        foreign_LRS = scene.phy2log_LRS[:, :, : self._job.setup.slots]
        held_LRS = np.full_like(held_LRS, -1)
        held_LRS[:, :, : foreign_LRS.shape[2]] = foreign_LRS
        return held_LRS

    @property
    def _may_replace(self) -> bool:
        """True if heat may have changed since the decision whose weights are in transit."""
        if self._pace is None or self._pace.alarm is None:
            return False
        return self._pace.settling or self._pace.alarm is not self._plan_alarm

    def _decide(self, heat_TLE: Counts, step: int) -> ReplayedDecision | None:
        """Decide on the newest remembered steps, the last of which is just before ``step``.

        Return ``None`` if their heat has changed too recently to decide on, or has not changed while weights are in
        transit.
        """
        pace = self._pace
        if pace is None:
            return self._decide_on(self._window(heat_TLE, len(heat_TLE), step), step, None)
        began = time.process_time()
        paid = self._paid(heat_TLE, step)
        alarm = pace.alarm
        pace = pace.weighed(heat_TLE)
        is_handled = not pace.settling or pace.alarm is self._plan_alarm
        if pace.too_recent or (self._pending and is_handled):
            self._pace = pace.postponed() if pace.due else pace
            return None
        if self._pending:
            self._pending.clear()
            self._plan_ended_at = step
        self._plan_alarm = pace.alarm
        dismissed = pace.alarm is not alarm and not pace.settling
        window = self._window(heat_TLE, pace.window_steps(heat_TLE), step)
        self._replaced = None
        if not pace.follows(paid):
            self._recommendations = ()
        decision = self._decide_on(window, step, pace.serving_steps)
        held = self._update_forecasts(window, heat_TLE, step, pace.serving_steps)
        decision = replace(decision, forecasts=int(held is not None), forecasts_held=int(held or False))
        spent_ms = 1e3 * (time.process_time() - began)
        changed = decision.layers_changed > 0
        pace = pace.after_decision(changed, paid).charged(spent_ms / self._job.cpu_ms)
        if self._promise is not None:
            kept = pace.keeping(self._promise, dismissed=dismissed)
            pace = pace.serving(self._promise) if changed else kept
            self._promise = None
        self._pace = pace
        return decision

    def _decide_on(self, window: Window, step: int, serving_steps: float | None) -> ReplayedDecision:
        """Decide on a window that ends before ``step``, using the planner or an external policy, and start the plan.

        ``serving_steps`` is the number of steps that the result is expected to serve; ``None`` to use the window's
        length.
        """
        before = self._serving
        began = time.perf_counter()
        if self._external is None:
            made = self._run_planner(window, serving_steps)
            seconds = time.perf_counter() - began
            changed = before.changed_by(made)
            par_seen = made.par_seen
            par_planned = made.par_planned
            if self._has_step_sources:
                # The planner knows only the window's mean source heat, so its PAR differs from the PAR of the
                # individual steps.
                par_seen = _mean_of_layers(self._par_of_steps(before, window, step))
                made = replace(made, par_TL=self._par_of_steps(changed, window, step))
                par_planned = _mean_of_layers(promise_for(made)[1])
            if self._pace is not None:
                self._promise, self._expected_TL = promise_for(made)
        else:
            changed = self._run_external(window)
            seconds = time.perf_counter() - began
            par_seen = self._par_of_window(window, before)
            par_planned = self._par_of_window(window, changed)
        moves_LR = arrivals(self._held_LRS, changed.placement.phy2log_LRS)
        switch_L = switched(before, changed)
        self._hold(changed, ~switch_L)
        differ_L = switch_L | tables_differ(before.log2phy_RLE, changed.log2phy_RLE)
        if differ_L.any():
            self._plan_base = before
            self._pending = self._arriving(step, changed, moves_LR, np.flatnonzero(differ_L))
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
        """Return the steps at which a plan's layers take effect, each with the layout from then on.

        The planner's policies switch layers in order of gain, and external policies in layer order. All of them switch
        as fast as this project's agents do. A layer that represents several model layers takes effect when the middle
        one of them does. The plan ends at the last returned step.

        Parameters
        ----------
        step
            First step after the decision.
        changed
            Layout after the plan.
        moves_LR
            int64 ``[L, R]``, number of experts that each rank receives.
        layers
            Indices of the layers that change.
        """
        serving = self._serving
        order = [layer for layer in self._layers_by_gain if layer in layers] or layers.tolist()
        each_L = self._costs.layers_each(len(order), len(moves_LR))
        sent_LR = sent(serving.placement, changed.placement, self._topology.nodes_R)
        steps_L = step + self._costs.arrival_steps(
            for_each_layer(moves_LR[order], each_L),
            for_each_layer(sent_LR[order], each_L),
            staging_rows(self._job.setup.slots, self._costs.expert_bytes, STAGING_BYTES),
            soon=self._plan_ended_at is not None and step - self._plan_ended_at < BUSY_PASSES,
        )
        layout_at_step: dict[int, Layout] = {}
        middle_L = np.cumsum(each_L) - (each_L + 1) // 2
        # Tables with a different number of entries replace the tables of all layers at once.
        if changed.log2phy_RLE.shape == serving.log2phy_RLE.shape:
            for layer, arrival_step in zip(order, steps_L[middle_L].tolist(), strict=True):
                change = (layer, changed.placement.phy2log_LRS[layer], changed.log2phy_RLE[:, layer])
                serving = Layout(*apply_layers(serving.placement, serving.log2phy_RLE, [change]))
                layout_at_step[arrival_step] = serving
        layout_at_step[int(steps_L[-1])] = changed
        return sorted(layout_at_step.items(), key=lambda item: item[0])

    def _run_planner(self, window: Window, serving_steps: float | None) -> Plan:
        made = plan(
            window,
            self._serving.placement,
            self._serving.log2phy_RLE,
            self._topology,
            self._job.settings,
            serving_steps,
            self._moving,
            self._job.search,
            self._recommendations,
        )
        if self._pace is not None:
            self._recommendations = made.recommendations
        self._layers_by_gain = [layer_plan.layer for layer_plan in made.layers]
        return made

    def _run_external(self, window: Window) -> Layout:
        """Return the layout of an external policy, with default tables if it returns none."""
        assert self._external is not None
        try:
            placement, log2phy_RLE = answer_of(
                self._job.policy, self._external, window, self._serving.placement
            )
        except PolicyError as error:
            raise ReplayError(str(error)) from error
        return self._with_first_tables(placement) if log2phy_RLE is None else Layout(placement, log2phy_RLE)

    def _with_first_tables(self, placement: Placement) -> Layout:
        """Return a placement with its default tables."""
        return Layout(placement, first_tables(placement, self._split, self._job.settings.deal_width))

    def _window(self, heat_TLE: Counts, steps: int, end: int) -> Window:
        """Return the last ``steps`` steps of heat that ends before step ``end``, with source heat if recorded."""
        newest_TLE = heat_TLE[len(heat_TLE) - steps :]
        if self._trace.facts.ranks != self._topology.ranks:
            return Window(newest_TLE)
        return Window(newest_TLE, self._trace.source(end - steps, end))

    def _par_of_window(self, window: Window, layout: Layout) -> float:
        """Return the mean PAR of a window's steps under a layout."""
        loads_TLR = split_loads(
            window.heat_TLE, layout.placement, layout.log2phy_RLE, window.source_RLE, self._split
        )
        return float(mean_par(par(loads_TLR)))

    def _paid(self, heat_TLE: Counts, step: int) -> bool | None:
        """Return True if the last change has paid off since it took effect, judged on the remembered steps.

        Return ``None`` if there was no change, or if too few steps have followed it.
        """
        if self._replaced is None:
            return None
        before, since = self._replaced
        return self._gain_over(before, heat_TLE, min(step - since, len(heat_TLE)), step).paid

    def _update_forecasts(
        self, window: Window, heat_TLE: Counts, step: int, serving_steps: float
    ) -> bool | None:
        """Compare the last forecast with the observed gain over the initial layout, then make the next forecast.

        Return True if the observed gain was within the forecast's interval, and ``None`` if there was nothing to
        compare.
        """
        since = min(self._forecasts.since(step), len(heat_TLE))
        observed = self._gain_over(self._initial, heat_TLE, since, step) if since else None
        initial_TL = self._par_of_steps(self._initial, window, step)
        self._forecasts = self._forecasts.next(initial_TL, self._expected_TL, serving_steps, step, observed)
        return self._forecasts.held

    @property
    def _has_step_sources(self) -> bool:
        """True if each step's tokens are recorded by source rank and routed by tables."""
        return self._split not in (EVEN, STEP) and knows_sources(self._trace, self._topology.ranks)

    def _par_of_steps(self, layout: Layout, window: Window, end: int) -> Float64:
        """Return the PAR of each step of a window that ends before ``end``, float64 ``[T, L]``; NaN without tokens."""
        if not self._has_step_sources:
            return layout.par_of_steps(window, self._split)
        loads_TLR = served_loads(self._trace, window.heat_TLE, end - window.steps, layout, self._split)
        return step_par(loads_TLR)

    def _gain_over(self, before: Layout, heat_TLE: Counts, steps: int, end: int) -> Gain:
        """Return the gain of the current layout over ``before`` on the last ``steps`` steps before ``end``."""
        window = self._window(heat_TLE, steps, end)
        return gain_of(
            self._par_of_steps(before, window, end), self._par_of_steps(self._serving, window, end)
        )

    def _slowest_us(self, heat_TLE: Counts, first: int) -> list[Float64]:
        """Return a list with the microseconds of the slowest ranks, ``[t, L]``; empty without a cost curve."""
        curve = self._costs.curve
        if curve is None:
            return []
        us_TL = served_us(self._trace, heat_TLE, first, self._serving, self._split, curve)
        split_cost = self._costs.split
        return [us_TL if split_cost is None else us_TL + split_cost.us]

    def _learn_layer_ms(self, row: ReplayedDecision) -> None:
        """Base the next move price on the expert time of the served steps, if a cost curve provides it."""
        if row.us_realised_L is not None and not np.isnan(row.us_realised_L).all():
            layer_ms = float(mean_par(row.us_realised_L)) / 1e3
            self._moving = replace(self._moving, layer_ms=layer_ms, layer_source="by the cost curve")

    def _compared(self, row: ReplayedDecision, heat_TLE: Counts) -> ReplayedDecision:
        """Return the baseline's row with the noise floor and, if requested, the PAR of a hindsight placement."""
        serving = self._serving
        window = self._window(heat_TLE, len(heat_TLE), row.step + len(heat_TLE))
        served = split_steps(heat_TLE, serving.placement, serving.log2phy_RLE, window.source_RLE, self._split)
        row = replace(row, floor_L=sampling_floor(served))
        if not self._job.hindsight:
            return row
        fitted = plan_afresh(window, self._deployable, self._topology, self._job.settings)
        best = self._with_first_tables(self._deployable).changed_by(fitted)
        loads_TLR = served_loads(self._trace, window.heat_TLE, row.step, best, self._split)
        return replace(row, hindsight_L=par(loads_TLR))


def _mean_of_layers(par_TL: Float64) -> float:
    """Return the mean over the layers of each layer's mean PAR per step."""
    return float(mean_par(mean_par(par_TL, axis=0)))


def _row(
    step: int, decisions: Sequence[ReplayedDecision], loads_TLR: Float64, us: Sequence[Float64]
) -> ReplayedDecision:
    """Combine the decisions in an interval and the outcome of its steps in one row.

    Without a decision, the seen and the planned PAR equal the realised PAR.

    Parameters
    ----------
    step
        First step of the interval.
    decisions
        Decisions in the interval.
    loads_TLR
        float64 ``[T, L, R]``, tokens of each rank in the served steps.
    us
        Microseconds ``[t, L]`` of the steps, in chunks; empty without a cost curve.
    """
    par_L = par(loads_TLR)
    realised = float(mean_par(par_L))
    return ReplayedDecision(
        step=step,
        steps=len(loads_TLR),
        par_seen=decisions[0].par_seen if decisions else realised,
        par_planned=decisions[-1].par_planned if decisions else realised,
        decisions=len(decisions),
        par_realised_L=par_L,
        us_realised_L=mean_par(np.concatenate(us), axis=0) if us else None,
        busy_L=loads_TLR.any(axis=2).sum(axis=0).astype(np.float64),
        loads_LR=loads_TLR.sum(axis=0),
        **{name: sum(getattr(decision, name) for decision in decisions) for name in _SUMMED},
    )
