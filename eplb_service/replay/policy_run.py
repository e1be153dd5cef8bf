"""One policy along a trace: it decides on a window, waits for its weights, and serves the steps that follow."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import Counts, Window, widened
from eplb_service.io.trace import Trace
from eplb_service.placement import Float64, Int32, Placement, mean_par, par, with_entries
from eplb_service.planner.dealing import first_tables
from eplb_service.planner.decide import plan
from eplb_service.planner.outlook import Serving
from eplb_service.planner.scoring import split_loads
from eplb_service.planner.stationary import looked_back, paying_steps
from eplb_service.planner.topology import Topology
from eplb_service.replay.costs import Costs
from eplb_service.replay.policy import Policy
from eplb_service.replay.policy_replay import ReplayedDecision
from eplb_service.replay.schedule import ReplayError, Schedule
from eplb_service.replay.served import served_loads, served_us
from eplb_service.replay.sliding_heat import SlidingHeat


@dataclass(frozen=True)
class RunState:
    """A policy between two decisions: what serves, and what is coming from which step on."""

    serving: Serving
    coming: tuple[int, Serving] | None


@dataclass(frozen=True)
class Outcome:
    """What came of one decision."""

    serving: Serving
    layers_changed: int
    layers_moved: int
    moves: int
    moves_busiest: int
    par_seen: float
    par_planned: float
    seconds: float


class PolicyRun:
    """One policy along a trace.

    While weights are under way no other decision is made, as in the service.

    Parameters
    ----------
    trace, heat
        What is served, and its heat, which other runs may read along with this one.
    placement
        Where the weights are at the start, under the engines' fixed tables.
    topology, policy, schedule, costs
        How to decide, when, and how long it takes to matter.
    state
        Where an interrupted run was after its last decision; ``None`` to begin.
    """

    def __init__(
        self,
        trace: Trace,
        heat: SlidingHeat,
        placement: Placement,
        topology: Topology,
        policy: Policy,
        schedule: Schedule,
        costs: Costs,
        state: RunState | None = None,
    ) -> None:
        self.loads_LR: Float64 = np.zeros((placement.layers, placement.ranks))
        self._trace = trace
        self._heat = heat
        self._topology = topology
        self._policy = policy
        state = state or RunState(Serving(placement, self._first_tables(placement)), None)
        self._serving, self._coming = state.serving, state.coming
        self._external = policy.external() if policy.target else None
        self._schedule = schedule
        self._costs = costs

    @property
    def state(self) -> RunState:
        """What serves and what is coming after the last decision."""
        return RunState(self._serving, self._coming)

    def decide(self, step: int) -> ReplayedDecision:
        """Decide on the window that ends before ``step``, and serve until the next decision."""
        end = min(step + self._schedule.interval, self._trace.steps)
        self._arrive(step)
        first = max(0, step - self._schedule.window)
        remembered_TLE = self._heat.heat(first, end)
        begin = step - looked_back(remembered_TLE[: step - first], self._schedule.interval)
        heat_TLE = remembered_TLE[begin - first :]
        window = Window(heat_TLE[: step - begin], self._source(begin, step))
        serves = paying_steps(step - first, self._schedule.interval)
        decided = self._no_decision(window) if self._coming else self._decided(window, serves)
        if self._coming is None and decided.layers_changed:
            self._coming = (step + self._costs.delay_steps(decided.moves_busiest), decided.serving)
        late = 0 if self._coming is None else min(max(self._coming[0] - step, 0), end - step)
        realised_L, us_L = self._serve(heat_TLE[step - begin :], step, step + late)
        return ReplayedDecision(
            step=step,
            steps=end - step,
            late=late,
            layers_changed=decided.layers_changed,
            layers_moved=decided.layers_moved,
            moves=decided.moves,
            moves_busiest=decided.moves_busiest,
            par_seen=decided.par_seen,
            par_planned=decided.par_planned,
            par_realised_L=realised_L,
            seconds=decided.seconds,
            us_realised_L=us_L,
            busy_L=busy_steps(heat_TLE[step - begin :]),
        )

    def _arrive(self, step: int) -> None:
        if self._coming is not None and self._coming[0] <= step:
            self._serving, self._coming = self._coming[1], None

    def _serve(self, heat_TLE: Counts, first: int, switch: int) -> tuple[Float64, Float64 | None]:
        """Score the steps from ``first`` on, those from ``switch`` on under what is coming.

        Returns PAR and, where there is a cost curve, the slowest rank's microseconds, float64 ``[L]`` each.
        """
        last = first + len(heat_TLE)
        parts, us = [], []
        if switch > first:
            parts.append(self._served(heat_TLE[: switch - first], first))
            us += self._served_us(heat_TLE[: switch - first], first)
        self._arrive(switch)
        if switch < last:
            parts.append(self._served(heat_TLE[switch - first :], switch))
            us += self._served_us(heat_TLE[switch - first :], switch)
        loads_TLR = np.concatenate(parts) if len(parts) > 1 else parts[0]
        self.loads_LR = loads_TLR.sum(axis=0)
        return par(loads_TLR), mean_par(np.concatenate(us), axis=0) if us else None

    def _first_tables(self, placement: Placement) -> Int32:
        settings = self._policy.settings
        return first_tables(placement, settings.split, settings.deal_width)

    def _served(self, heat_TLE: Counts, first: int) -> Float64:
        serving = self._serving
        return served_loads(
            self._trace, heat_TLE, first, serving.placement, serving.log2phy_RLE, self._policy.settings.split
        )

    def _served_us(self, heat_TLE: Counts, first: int) -> list[Float64]:
        """The steps' microseconds ``[t, L]`` as the only entry; empty without a cost curve."""
        curve = self._costs.curve
        if curve is None:
            return []
        placement, tables_RLE = self._serving.placement, self._serving.log2phy_RLE
        split = self._policy.settings.split
        overhead_us = self._costs.split_overhead_us
        return [served_us(self._trace, heat_TLE, first, placement, tables_RLE, split, curve, overhead_us)]

    def _seen(self, window: Window, way: Serving) -> Float64:
        split = self._policy.settings.split
        return split_loads(window.heat_TLE, way.placement, way.log2phy_RLE, window.source_RLE, split)

    def _source(self, first: int, last: int) -> Float64 | None:
        if self._trace.facts.ranks != self._topology.ranks:
            return None
        return self._trace.source(first, last)

    def _no_decision(self, window: Window) -> Outcome:
        """No decision: weights of the one before are under way."""
        seen = float(mean_par(par(self._seen(window, self._serving))))
        return Outcome(self._serving, 0, 0, 0, 0, seen, seen, 0.0)

    def _decided(self, window: Window, serves: float | None) -> Outcome:
        serving = self._serving
        began = time.perf_counter()
        if self._external is not None:
            changed = self._ask(window)
            seconds = time.perf_counter() - began
            seen_L, planned_L = (par(self._seen(window, way)) for way in (serving, changed))
            return self._outcome(changed, float(mean_par(seen_L)), float(mean_par(planned_L)), seconds)
        made = plan(
            window, serving.placement, serving.log2phy_RLE, self._topology, self._policy.settings, serves
        )
        seconds = time.perf_counter() - began
        changed = serving.changed_by(made)
        return self._outcome(changed, made.par_seen, made.par_planned, seconds)

    def _ask(self, window: Window) -> Serving:
        """What an external policy answers, checked."""
        assert self._external is not None
        deployed = self._serving.placement
        try:
            answer = self._external(widened(window.heat_TLE).copy(), deployed.phy2log_LRS.copy())
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ReplayError(f"policy {self._policy.name} failed ({message})") from error
        phy2log, log2phy = answer if isinstance(answer, tuple) else (answer, None)
        try:
            placement = Placement(np.asarray(phy2log).reshape(deployed.phy2log_LRS.shape), deployed.experts)
            if log2phy is None:
                return Serving(placement, self._first_tables(placement))
            log2phy_RLE = np.ascontiguousarray(log2phy, dtype=np.int32)
            placement.check_log2phy(log2phy_RLE)
        except (ValueError, TypeError, OverflowError) as error:
            raise ReplayError(f"policy {self._policy.name} answered no placement ({error})") from error
        return Serving(placement, log2phy_RLE)

    def _outcome(self, changed: Serving, seen: float, planned: float, seconds: float) -> Outcome:
        moves_LR = arrivals(self._serving.placement, changed.placement)
        other_slots_L = (changed.placement.phy2log_LRS != self._serving.placement.phy2log_LRS).any(
            axis=(1, 2)
        )
        other_tables_L = _differ(changed.log2phy_RLE, self._serving.log2phy_RLE)
        return Outcome(
            serving=changed,
            layers_changed=int((other_slots_L | other_tables_L).sum()),
            layers_moved=int(moves_LR.any(axis=1).sum()),
            moves=int(moves_LR.sum()),
            moves_busiest=int(moves_LR.sum(axis=0).max()),
            par_seen=seen,
            par_planned=planned,
            seconds=seconds,
        )


def _differ(one_RLE: Int32, other_RLE: Int32) -> npt.NDArray[np.bool_]:
    """Layers whose tables differ, bool ``[L]``; an external policy may answer tables of another width."""
    one, other = with_entries(one_RLE, 3), with_entries(other_RLE, 3)
    if one.shape != other.shape:
        return np.ones(one.shape[1], dtype=np.bool_)
    differ_L: npt.NDArray[np.bool_] = (one != other).any(axis=(0, 2, 3))
    return differ_L


def busy_steps(heat_TLE: Counts) -> Float64:
    """Steps in which each layer had tokens, float64 ``[L]``."""
    busy_L: Float64 = heat_TLE.any(axis=2).sum(axis=0).astype(np.float64)
    return busy_L


def arrivals(before: Placement, after: Placement) -> npt.NDArray[np.int64]:
    """Experts that each rank must receive, int64 ``[L, R]``: those that it did not hold before."""
    layers, ranks, _ = before.phy2log_LRS.shape
    held_LRE = np.zeros((layers, ranks, before.experts), dtype=bool)
    np.put_along_axis(held_LRE, before.phy2log_LRS.astype(np.int64), True, axis=2)
    kept_LRS = np.take_along_axis(held_LRE, after.phy2log_LRS.astype(np.int64), axis=2)
    arriving: npt.NDArray[np.int64] = (~kept_LRS).sum(axis=2)
    return arriving
