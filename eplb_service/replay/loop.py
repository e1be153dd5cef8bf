"""Replay one policy: it decides on a window, waits for the weights to arrive, and serves the following steps.

The planner's policies decide through ``planner.session``, as in the service. A plan takes effect part by part as its
weights arrive, starting with the layers that gain most. While weights are in transit, no other decision is made unless
heat changes again, in which case the layers that have not switched yet are dropped from the plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from eplb_core.planner.dealing import default_tables
from eplb_core.planner.decide import plan_from_scratch
from eplb_core.planner.decision import DecisionInputs, check, decide, price_time
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Layout, Outlook, Plan, promise_of_plan
from eplb_core.planner.policies import PolicyError, run_external_policy
from eplb_core.planner.score import sampling_floor, split_loads, split_steps
from eplb_core.planner.session import DecisionSession
from eplb_core.planner.settings import EVEN, STEP
from eplb_core.planner.topology import Topology
from eplb_service.io.trace import Trace
from eplb_service.replay.costs import BUSY_PASSES, STAGING_BYTES, Costs
from eplb_service.replay.moves import arrivals, repeat_layers, sent, switched, tables_differ
from eplb_service.replay.policy import Job, ReplayError
from eplb_service.replay.result import ReplayedDecision
from eplb_service.replay.served import has_step_sources, served_loads, served_us

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
        int32 ``[L, R, S]``, initial placement. It may come from a different balancer (see ``placement.foreign``) and
        have a different number of slots than a setup. ``None`` to place experts in order in each setup's slots.
    """

    topology: Topology
    costs: Costs
    phy2log_LRS: npt.NDArray[np.int32] | None = None

    def placement(self, trace: Trace, slots: int) -> Placement:
        """Return the initial placement after repair. Raises ``PlacementError`` if it does not fit the trace."""
        if self.phy2log_LRS is not None:
            return repaired(checked_foreign(self.phy2log_LRS, trace.experts), trace.experts, slots)
        return Placement.linear(trace.layers, trace.experts, self.topology.ranks, slots)

    def left_alone(self, trace: Trace, slots: int) -> Placement:
        """Return the initial placement unrepaired, or repaired if it does not have ``slots`` slots per rank."""
        if self.phy2log_LRS is None or self.phy2log_LRS.shape[2] != slots:
            return self.placement(trace, slots)
        return as_served(self.phy2log_LRS, trace.experts)


class _Computed(NamedTuple):
    """A decision whose result is not in use yet.

    Parameters
    ----------
    step
        Step before which the decision began.
    ready_at
        Step before which its result is used.
    inputs
        Inputs of the decision.
    plan
        The plan.
    outlook
        Outlook of the decision.
    cost
        CPU time of the decision, expressed as the number of steps whose CPU budget covers it.
    """

    step: int
    ready_at: int
    inputs: DecisionInputs
    plan: Plan
    outlook: Outlook
    cost: float


def run(job: Job, trace: Trace, scene: Scene) -> Iterator[ReplayedDecision]:
    """Run a job over the trace and yield the results of each interval in its schedule.

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
    """State of one policy's run over the trace: the current layout, the plan in progress, and the next decision.

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
        self._deployable = scene.placement(trace, job.setup.slots)
        self._held_LRS = self._held_at_start(scene)
        """int32 ``[L, R, S]``, experts on the ranks before the next decision; -1 for an empty slot."""
        initial = self._deployable if job.policy else scene.left_alone(trace, job.setup.slots)
        self._serving = self._with_default_tables(initial)
        self._initial = self._serving
        self._pending: list[tuple[int, Layout]] = []
        """Steps at which further layers switch, each with the resulting layout; empty if no plan is in progress."""
        self._switched = 0
        """Number of times that layers of the latest plan have switched."""
        self._plan_ended_at: int | None = None
        """Step at which the latest plan ended."""
        first = job.setup.first
        pace = Pace(first, self.memory, job.setup.interval, seen=first) if job.on_change else None
        self._session = DecisionSession(pace)
        """State of the planner's decisions; unused by external policies and the baseline."""
        self._computed: _Computed | None = None
        """Decision in progress."""

    def serve(self, heat_TLE: Counts, begin: int, step: int) -> ReplayedDecision:
        """Serve the steps from ``step`` to the end of the heat, and make the decisions that are due.

        Parameters
        ----------
        heat_TLE
            ``[T, L, E]``, heat of past steps and of the steps to serve.
        begin
            Index in the trace of the first of these steps.
        step
            Index in the trace of the first step to serve.
        """
        end = begin + len(heat_TLE)
        position = step
        late = 0
        decisions: list[ReplayedDecision] = []
        loads: list[Float64] = []
        us: list[Float64] = []
        while position < end:
            self._apply_arrived(position)
            if self._is_due(position, starts_interval=position == step):
                past_TLE = heat_TLE[max(0, position - begin - self.memory) : position - begin]
                decision = self._decide(past_TLE, position)
                if decision is not None:
                    decisions.append(decision)
                self._apply_arrived(position)
            chunk_end = min(end, position + _CHUNK_STEPS)
            if self._pending:
                chunk_end = min(chunk_end, self._pending[0][0])
            if self._computed is not None:
                chunk_end = min(chunk_end, self._computed.ready_at)
            chunk_TLE = heat_TLE[position - begin : chunk_end - begin]
            loads_TLR = served_loads(self._trace, chunk_TLE, position, self._serving, self._split)
            served = self._advance_session(chunk_TLE, position, loads_TLR)
            loads.append(loads_TLR[:served])
            us += self._slowest_us(chunk_TLE[:served], position)
            late += served if self._plan_in_progress else 0
            position += served
        row = replace(_row(step, decisions, np.concatenate(loads), us), late=late)
        return row if self._job.policy else self._compared(row, heat_TLE[step - begin :])

    def _is_due(self, step: int, *, starts_interval: bool) -> bool:
        """Return True if a decision, or a check of the plan in progress, is due before ``step``.

        Policies without a schedule decide at the start of each interval of the setup.
        """
        if not self._job.policy or self._computed is not None:
            return False
        if not self._job.on_change:
            return starts_interval and not self._pending
        if self._pending:
            return self._session.check_is_due(self._switched)
        return self._session.is_due(step, self._job.setup.interval)

    @property
    def _plan_in_progress(self) -> bool:
        """True if layers are going to switch: their weights are in transit, or their plan has not taken effect yet."""
        return bool(self._pending or (self._computed is not None and self._computed.plan.layers))

    def _advance_session(self, chunk_TLE: Counts, first: int, loads_TLR: Float64) -> int:
        """Test the steps of a chunk for a change in heat, and return the number of steps to serve before a decision."""
        if not self._job.on_change:
            return len(chunk_TLE)
        if self._pending:
            # While weights are in transit, test for a change in heat under the plan's final layout.
            planned = self._pending[-1][1]
            loads_TLR = served_loads(self._trace, chunk_TLE, first, planned, self._split)
        self._session, served = self._session.after_steps(step_par(loads_TLR))
        return served

    def _apply_arrived(self, step: int) -> None:
        """Use a decision whose result is ready before ``step``, and switch the layers whose weights have arrived."""
        if self._computed is not None and self._computed.ready_at <= step:
            computed = self._computed
            self._computed = None
            self._start_plan(computed)
        while self._pending and self._pending[0][0] <= step:
            before = self._serving
            _, self._serving = self._pending.pop(0)
            self._switched += 1
            self._hold(self._serving, switched(before, self._serving))
            if not self._pending:
                self._session = self._session.after_plan(done=True)
                self._plan_ended_at = step

    def _hold(self, layout: Layout, layers_L: npt.NDArray[np.bool_]) -> None:
        """Record that the ranks now have the experts of ``layout`` in the masked layers, ``layers_L``, bool ``[L]``."""
        self._held_LRS = np.where(layers_L[:, None, None], layout.placement.phy2log_LRS, self._held_LRS)

    def _held_at_start(self, scene: Scene) -> npt.NDArray[np.int32]:
        """Return the experts that are initially on the ranks, int32 ``[L, R, S]``; -1 for an empty slot."""
        held_LRS = self._deployable.phy2log_LRS
        if scene.phy2log_LRS is None:
            return held_LRS
        foreign_LRS = scene.phy2log_LRS[:, :, : self._job.setup.slots]
        held_LRS = np.full_like(held_LRS, -1)
        held_LRS[:, :, : foreign_LRS.shape[2]] = foreign_LRS
        return held_LRS

    def _decide(self, heat_TLE: Counts, step: int) -> ReplayedDecision | None:
        """Make a decision from the steps in memory, the last of which is just before ``step``.

        Return ``None`` if heat has changed too recently for a decision, or if weights are in transit and heat has not
        changed.
        """
        window = self._window(heat_TLE, step)
        if self._external is not None:
            return self._decide_externally(window, step)
        if self._pending and not self._calls_off(window, step):
            return None
        self._session = self._session.begin_decision(step)
        inputs = self._inputs(window)
        began = time.perf_counter()
        cpu_began = time.process_time()
        made, outlook = decide(inputs)
        seconds = time.perf_counter() - began
        cost = self._steps_paying(cpu_began)
        self._computed = _Computed(step, step + self._costs.solve_steps, inputs, made, outlook, cost)
        if outlook.too_recent:
            return None
        changed = self._serving.changed_by(made)
        held = outlook.forecasts.held
        par_seen = made.par_seen
        par_planned = made.par_planned
        if self._has_step_sources:
            # The planner knows only the window's mean source heat, so its PAR differs from the PAR of the individual
            # steps.
            used = inputs.decision_window
            par_seen = _mean_of_layers(self._par_of_steps(self._serving, used, step))
            made = replace(made, par_TL=self._par_of_steps(changed, used, step))
            par_planned = _mean_of_layers(promise_of_plan(made)[1])
        return replace(
            self._decision_row(changed, seconds, par_seen, par_planned),
            forecasts=int(held is not None),
            forecasts_held=int(held or False),
        )

    def _decide_externally(self, window: Window, step: int) -> ReplayedDecision:
        """Run an external policy on the window that ends before ``step``, and start its plan."""
        before = self._serving
        began = time.perf_counter()
        changed = self._run_external(window)
        seconds = time.perf_counter() - began
        par_seen = self._par_of_window(window, before)
        row = self._decision_row(changed, seconds, par_seen, self._par_of_window(window, changed))
        self._transfer(changed, step, ())
        return row

    def _calls_off(self, window: Window, step: int) -> bool:
        """If the plan in progress is stale, drop its layers that have not switched.

        Return True if the plan was stale and a decision can be made now, which the CPU budget may not allow.
        """
        self._session = self._session.begin_check()
        outlook = check(self._inputs(window))
        self._session, is_stale = self._session.after_check(outlook)
        if not is_stale:
            return False
        self._pending.clear()
        self._plan_ended_at = step
        self._session = self._session.after_plan(done=False, called_off_unswitched=not self._switched)
        return self._session.is_due(step, self._job.setup.interval)

    def _start_plan(self, computed: _Computed) -> None:
        """Record a decision in the session, and start transferring the layers of its plan."""
        made = computed.plan
        changed = self._serving.changed_by(made)
        self._session = self._session.after_decision(
            computed.outlook, computed.cost, changed=bool(made.layers)
        )
        if self._session.time_price_is_due and not computed.outlook.too_recent:
            cpu_began = time.process_time()
            price = price_time(computed.inputs)
            if price is not None:
                self._session = self._session.with_time_price(price, self._steps_paying(cpu_began))
        layers = [change.layer for change in made.layers]
        if not self._transfer(changed, computed.step, layers) and layers:
            self._session = self._session.after_plan(done=True)

    def _steps_paying(self, cpu_began: float) -> float:
        """Return the CPU time since ``cpu_began``, expressed as the number of steps whose CPU budget covers it."""
        return 1e3 * (time.process_time() - cpu_began) / self._job.cpu_ms

    def _inputs(self, window: Window) -> DecisionInputs:
        """Return the inputs of a decision on a window of all steps in memory."""
        return DecisionInputs(
            window,
            self._serving,
            self._initial,
            self._topology,
            self._job.settings,
            self._session,
            self._costs.moving,
            search=self._job.search,
        )

    def _decision_row(
        self, changed: Layout, seconds: float, par_seen: float, par_planned: float
    ) -> ReplayedDecision:
        """Return the row for one decision that changes the current layout to ``changed``."""
        before = self._serving
        moves_LR = arrivals(self._held_LRS, changed.placement.phy2log_LRS)
        differ_L = switched(before, changed) | tables_differ(before.log2phy_RLE, changed.log2phy_RLE)
        return ReplayedDecision(
            layers_changed=int(differ_L.sum()),
            layers_moved=int(moves_LR.any(axis=1).sum()),
            moves=int(moves_LR.sum()),
            moves_busiest=int(moves_LR.sum(axis=0).max()),
            par_seen=par_seen,
            par_planned=par_planned,
            seconds=seconds,
        )

    def _transfer(self, changed: Layout, step: int, layers_by_gain: Sequence[int]) -> bool:
        """Start a plan, decided just before ``step``, that changes the current layout to ``changed``.

        Return False if no layer has to switch. ``layers_by_gain`` lists the layers in switching order.
        """
        before = self._serving
        moves_LR = arrivals(self._held_LRS, changed.placement.phy2log_LRS)
        switch_L = switched(before, changed)
        self._hold(changed, ~switch_L)
        differ_L = switch_L | tables_differ(before.log2phy_RLE, changed.log2phy_RLE)
        if differ_L.any():
            layers = np.flatnonzero(differ_L).tolist()
            order = [layer for layer in layers_by_gain if layer in layers] or layers
            self._switched = 0
            self._pending = self._arriving(step, changed, moves_LR, order)
        return bool(self._pending)

    def _arriving(
        self, step: int, changed: Layout, moves_LR: npt.NDArray[np.int64], order: Sequence[int]
    ) -> list[tuple[int, Layout]]:
        """Return the steps at which a plan's layers take effect, each with the resulting layout.

        The planner's policies switch layers in order of gain, and external policies in layer order. All of them switch
        at the speed of this project's agents. A trace layer that represents several model layers takes effect when the
        middle one of them does. The plan ends at the last returned step.

        Parameters
        ----------
        step
            First step after the decision.
        changed
            Layout after the plan.
        moves_LR
            int64 ``[L, R]``, number of experts that each rank receives.
        order
            Layers that change, in switching order.
        """
        serving = self._serving
        each_L = self._costs.layers_each(len(order), len(moves_LR))
        sent_LR = sent(serving.placement, changed.placement, self._topology.nodes_R)
        steps_L = step + self._costs.arrival_steps(
            repeat_layers(moves_LR[order], each_L),
            repeat_layers(sent_LR[order], each_L),
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

    def _run_external(self, window: Window) -> Layout:
        """Return the layout of an external policy, with default tables if the policy returns none."""
        assert self._external is not None
        try:
            placement, log2phy_RLE = run_external_policy(
                self._job.policy, self._external, window, self._serving.placement
            )
        except PolicyError as error:
            raise ReplayError(str(error)) from error
        return self._with_default_tables(placement) if log2phy_RLE is None else Layout(placement, log2phy_RLE)

    def _with_default_tables(self, placement: Placement) -> Layout:
        """Return a placement with its default tables."""
        return Layout(placement, default_tables(placement, self._split, self._job.settings.deal_width))

    def _window(self, heat_TLE: Counts, end: int) -> Window:
        """Return a window of heat that ends before step ``end``, with source heat if recorded."""
        if self._trace.facts.ranks != self._topology.ranks:
            return Window(heat_TLE)
        return Window(heat_TLE, self._trace.source(end - len(heat_TLE), end))

    def _par_of_window(self, window: Window, layout: Layout) -> float:
        """Return the mean PAR of a window's steps under a layout."""
        loads_TLR = split_loads(
            window.heat_TLE, layout.placement, layout.log2phy_RLE, window.source_RLE, self._split
        )
        return float(mean_par(par(loads_TLR)))

    @property
    def _has_step_sources(self) -> bool:
        """True if each step's tokens are recorded by source rank and routed by tables."""
        return self._split not in (EVEN, STEP) and has_step_sources(self._trace, self._topology.ranks)

    def _par_of_steps(self, layout: Layout, window: Window, end: int) -> Float64:
        """Return the PAR of each step of a window that ends before ``end``, ``[T, L]``; NaN if there are no tokens."""
        if not self._has_step_sources:
            return layout.par_of_steps(window, self._split)
        loads_TLR = served_loads(self._trace, window.heat_TLE, end - window.steps, layout, self._split)
        return step_par(loads_TLR)

    def _slowest_us(self, heat_TLE: Counts, first: int) -> list[Float64]:
        """Return a list with the slowest ranks' times in microseconds, ``[t, L]``; empty if there is no cost curve."""
        curve = self._costs.curve
        if curve is None:
            return []
        us_TL = served_us(self._trace, heat_TLE, first, self._serving, self._split, curve)
        split_cost = self._costs.split
        return [us_TL if split_cost is None else us_TL + split_cost.us]

    def _compared(self, row: ReplayedDecision, heat_TLE: Counts) -> ReplayedDecision:
        """Return the baseline's row with the noise floor and, if requested, the PAR of a hindsight placement."""
        serving = self._serving
        window = self._window(heat_TLE, row.step + len(heat_TLE))
        served = split_steps(heat_TLE, serving.placement, serving.log2phy_RLE, window.source_RLE, self._split)
        row = replace(row, floor_L=sampling_floor(served))
        if not self._job.hindsight:
            return row
        fitted = plan_from_scratch(window, self._deployable, self._topology, self._job.settings)
        best = self._with_default_tables(self._deployable).changed_by(fitted)
        loads_TLR = served_loads(self._trace, window.heat_TLE, row.step, best, self._split)
        return replace(row, hindsight_L=par(loads_TLR))


def _mean_of_layers(par_TL: Float64) -> float:
    """Return each layer's mean PAR per step, averaged over the layers."""
    return float(mean_par(mean_par(par_TL, axis=0)))


def _row(
    step: int, decisions: Sequence[ReplayedDecision], loads_TLR: Float64, us: Sequence[Float64]
) -> ReplayedDecision:
    """Combine the decisions in an interval and the outcome of its steps into one row.

    If there was no decision, ``par_seen`` and ``par_planned`` equal the realised PAR.

    Parameters
    ----------
    step
        First step of the interval.
    decisions
        Decisions in the interval.
    loads_TLR
        float64 ``[T, L, R]``, tokens of each rank in the served steps.
    us
        Times of the slowest ranks in microseconds, one array ``[t, L]`` per chunk of steps; empty if there is no cost
        curve.
    """
    par_TL = step_par(loads_TLR)
    par_L = mean_par(par_TL, axis=0)
    realised = float(mean_par(par_L))
    us_TL = np.concatenate(us) if us else None
    return ReplayedDecision(
        step=step,
        steps=len(loads_TLR),
        par_seen=decisions[0].par_seen if decisions else realised,
        par_planned=decisions[-1].par_planned if decisions else realised,
        decisions=len(decisions),
        par_realised_L=par_L,
        us_realised_L=None if us_TL is None else mean_par(us_TL, axis=0),
        par_T=mean_par(par_TL, axis=1),
        us_T=None if us_TL is None else np.nansum(us_TL, axis=1),
        busy_L=loads_TLR.any(axis=2).sum(axis=0).astype(np.float64),
        loads_LR=loads_TLR.sum(axis=0),
        **{name: sum(getattr(decision, name) for decision in decisions) for name in _SUMMED},
    )
