"""Realised PAR, moves and decisions on one scenario, for our policy and its peers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from eplb_core.placement import mean_par
from eplb_core.planner.settings import PlannerSettings
from eplb_lab.bench.closed_loop import Entrant, Scenario, loops
from eplb_lab.bench.contest import OURS, Contest
from eplb_service.io.trace import ArrayTrace
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, replay, scene_for
from eplb_service.replay.policy import Setup

REMEMBERED = 512
"""Maximum number of steps that a decision uses, as in the service's default settings."""


class Delay(NamedTuple):
    """Pace at which plans take effect.

    Parameters
    ----------
    step_ms
        Step time in milliseconds; 0 if plans take effect at once.
    solve_ms
        Milliseconds from the end of a window until its plan reaches the ranks.
    model_layers
        MoE layers of the model.
    """

    step_ms: float = 0.0
    solve_ms: float = 0.0
    model_layers: int = 0

    def __str__(self) -> str:
        if not self.step_ms:
            return "at once"
        return f"at the pace of {self.model_layers} layers, {self.step_ms:g} ms per step"


AT_ONCE = Delay()


@dataclass(frozen=True)
class Row:
    """Results of one policy on a scenario.

    The first windows after the first decision are excluded, because all policies place experts from scratch there.

    Parameters
    ----------
    policy
        Name of the policy, and when its plans take effect.
    par
        Realised peak-to-average ratio, averaged over layers and steps.
    moves_per_window
        Mean number of slots moved per window.
    decisions
        Number of decisions.
    cpu_seconds
        CPU time per decision.
    forecasts
        Number of forecasts (of the gain until the next decision) that could be compared with the realised gain.
    held
        Number of forecasts whose error interval contained the realised gain.
    below_off
        Number of windows whose gain over no balancing was below the cost of moves and switches.
    windows
        Number of windows that were checked for ``below_off``.
    """

    policy: str
    par: float
    moves_per_window: float
    decisions: int
    cpu_seconds: float
    forecasts: int = 0
    held: int = 0
    below_off: int = 0
    windows: int = 0


def own_rows(
    scenario: Scenario,
    settings: PlannerSettings,
    bytes_per_expert: int,
    cpu_ms: float,
    delay: Delay,
    unscored: int = 1,
) -> Iterator[Row]:
    """Yield a row without balancing, a row for our policy if plans take effect at once, and one at the pace ``delay``.

    All replays run on one thread. A policy's CPU time is that of its replay minus that of a replay without balancing.

    Parameters
    ----------
    scenario
        Heat to decide on.
    settings
        Planner settings; the link bandwidth affects the move price.
    bytes_per_expert
        Size of an expert in bytes, which also affects the move price.
    cpu_ms
        CPU time that decisions may take, in milliseconds per step.
    delay
        Pace for the last row, which is omitted if plans take effect at once.
    unscored
        Number of windows after the first decision to exclude from all rows.
    """
    setup = Setup(scenario.slots, REMEMBERED, scenario.window)
    trace = ArrayTrace(scenario.heat_TLE)
    layers = scenario.heat_TLE.shape[1]
    idle = 0.0
    off_par_W = np.zeros(0)
    costs = Costs.of(settings, layers, bytes_per_expert=bytes_per_expert)
    entrants = [("none", "none", costs), (f"{OURS}, {AT_ONCE}", "flashlb", costs)]
    if delay.step_ms:
        paced = replace(costs, **delay._asdict())
        entrants.append((f"{OURS}, {delay}", "flashlb", paced))
    for label, name, charged in entrants:
        jobs = [replace(job, cpu_ms=cpu_ms) for job in jobs_for([name], [setup], settings, hindsight=False)]
        began = time.process_time()
        (policy,) = replay(trace, jobs, scene_for(scenario.ranks, charged)).policies
        cpu_seconds = time.process_time() - began
        idle = idle or cpu_seconds
        par_W = np.array([row.par_realised for row in policy.decisions])
        off_par_W = par_W if name == "none" else off_par_W
        # Cost of each window's moves and switches, as a fraction of its duration with perfectly balanced ranks.
        cost_W = [
            costs.stall_ms(scenario.slots, row.moves_busiest, row.layers_changed)
            / (costs.layer_ms * row.steps * layers)
            for row in policy.decisions
        ]
        rows = policy.decisions[unscored:]
        decisions = sum(row.decisions for row in rows)
        all_decisions = sum(row.decisions for row in policy.decisions)
        yield Row(
            label,
            float(np.average([row.par_realised for row in rows], weights=[row.steps for row in rows])),
            float(np.mean([row.moves for row in rows])),
            0 if name == "none" else decisions,
            0.0 if name == "none" else max(cpu_seconds - idle, 0.0) / max(all_decisions, 1),
            sum(row.forecasts for row in policy.decisions),
            sum(row.forecasts_held for row in policy.decisions),
            int(np.count_nonzero(off_par_W - par_W - cost_W < 0)),
            par_W.size,
        )


def peer_rows(
    scenario: Scenario, contest: Contest, interval: int | None = None, unscored: int = 1
) -> Iterator[Row]:
    """Yield one row per peer, whose placements take effect at once. Skip peers that fail.

    Parameters
    ----------
    scenario
        Heat to decide on.
    contest
        Peers to score.
    interval
        Number of steps between decisions, by default the window length. Each decision uses a full window.
    unscored
        Number of windows after the first decision to exclude, as for our policy.
    """
    label = f", {AT_ONCE}" if interval is None else f", as often as ours, {AT_ONCE}"
    scenario_at_interval = replace(scenario, interval=interval)
    per_window = scenario.window / (interval or scenario.window)
    for row in loops(contest, [scenario_at_interval], [Entrant(name, name) for name in contest.peers]):
        scored = slice(round(unscored * per_window), None)
        moves = row["moves"][scored]
        yield Row(
            f"{row['policy']}{label}",
            float(mean_par(np.array(row["realised"][scored]))),
            float(np.mean(moves)) * per_window,
            len(moves),
            float(np.mean(row["cpu_seconds"][scored])),
        )


def interval_of(scenario: Scenario, ours: Sequence[Row], unscored: int = 1) -> int | None:
    """Return the mean number of steps between our decisions, or ``None`` if it is not below the window length."""
    steps = len(scenario.heat_TLE) - (1 + unscored) * scenario.window
    decisions = float(np.mean([row.decisions for row in ours]))
    interval = round(steps / max(decisions, 1.0))
    return interval if 0 < interval < scenario.window else None


def mean_rows(rows_of_seeds: list[list[Row]]) -> list[tuple[Row, float]]:
    """Return each policy's mean row over the seeds and the standard error of its PAR, which is 0 for one seed."""
    means = []
    for rows in zip(*rows_of_seeds, strict=True):
        par_N = np.array([row.par for row in rows])
        error = float(par_N.std(ddof=1) / np.sqrt(par_N.size)) if par_N.size > 1 else 0.0
        mean = replace(
            rows[0],
            par=float(par_N.mean()),
            moves_per_window=float(np.mean([row.moves_per_window for row in rows])),
            decisions=round(np.mean([row.decisions for row in rows])),
            cpu_seconds=float(np.mean([row.cpu_seconds for row in rows])),
            forecasts=sum(row.forecasts for row in rows),
            held=sum(row.held for row in rows),
            below_off=sum(row.below_off for row in rows),
            windows=sum(row.windows for row in rows),
        )
        means.append((mean, error))
    return means
