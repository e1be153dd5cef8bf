"""The independent pieces of a replay: one policy, or one baseline, along the whole trace."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.io.trace import Trace
from eplb_service.placement import Float64, Placement
from eplb_service.planner.settings import TABLES, PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.replay.baseline import Baseline, BaselineRow
from eplb_service.replay.change_run import ChangeRun
from eplb_service.replay.costs import Costs
from eplb_service.replay.policy import Policy
from eplb_service.replay.policy_replay import ReplayedDecision, Setup
from eplb_service.replay.policy_run import PolicyRun, RunState
from eplb_service.replay.schedule import MEMORY
from eplb_service.replay.sliding_heat import SlidingHeat


@dataclass(frozen=True)
class TraceFile:
    """A trace by its place, for processes that must each open it."""

    path: Path
    read_as: ReadAs

    def open(self) -> Trace:
        """The trace; raises ``HeatError``."""
        return open_trace(self.path, self.read_as)


@dataclass(frozen=True)
class Scene:
    """What all jobs of a replay share.

    ``phy2log_LRS`` is where weights are at the start; ``None`` for experts in order on each setup's slots.
    """

    topology: Topology
    costs: Costs
    phy2log_LRS: npt.NDArray[np.int32] | None = None

    def placement(self, trace: Trace, setup: Setup) -> Placement:
        """Where weights are at the start; raises ``PlacementError`` where it does not fit the trace."""
        if self.phy2log_LRS is not None:
            return Placement(self.phy2log_LRS, trace.experts)
        return Placement.linear(trace.layers, trace.experts, self.topology.ranks, setup.slots)


@dataclass(frozen=True)
class Job:
    """One policy along the trace, or, without a policy, the baseline of a setup.

    ``hindsight`` are the settings that a baseline fits with; ``None`` for no hindsight. ``split`` is how the host
    splits tokens over replicas, as the policy's settings say, and ``deal_width`` the entries of its tables if it deals.
    """

    label: str
    setup: Setup
    policy: Policy | None
    hindsight: PlannerSettings | None = None
    split: str = TABLES
    deal_width: int = 1


@dataclass(frozen=True)
class JobProgress:
    """What a job has found with its latest decision.

    ``loads_LR`` are the ranks' tokens since, ``state`` is where a policy can go on from.
    """

    made: ReplayedDecision | BaselineRow
    loads_LR: Float64
    state: RunState | None = None


@dataclass(frozen=True)
class ResumePoint:
    """What a job has done already: so many decisions, the last of which left it in ``state``."""

    decisions: int = 0
    state: RunState | None = None


class Ledger:
    """What the jobs of a replay have found so far: all that results are made of, and all that is needed to go on.

    Parameters
    ----------
    jobs
        Those that are run.
    reported
        What an interrupted run has found of each; ``None`` to begin.
    """

    def __init__(self, jobs: Sequence[Job], reported: Sequence[list[JobProgress]] | None = None) -> None:
        self.jobs = tuple(jobs)
        self.reported = [list(done) for done in reported] if reported is not None else [[] for _ in jobs]

    @property
    def decisions(self) -> int:
        """Decisions of all jobs together."""
        return sum(map(len, self.reported))

    def add(self, number: int, progress: JobProgress) -> None:
        """Job ``number`` has made its next decision; where it stood before is of no use any more."""
        reported = self.reported[number]
        reported.append(progress)
        if len(reported) > 1:
            reported[-2] = replace(reported[-2], state=None)

    def done(self) -> list[ResumePoint]:
        """From where each job goes on."""
        return [
            ResumePoint(len(reported), reported[-1].state) if reported else ResumePoint()
            for reported in self.reported
        ]


def run(
    jobs: Sequence[Job], trace: Trace, scene: Scene, done: Sequence[ResumePoint] | None = None
) -> Iterator[tuple[int, JobProgress]]:
    """Make the decisions of all jobs in the order of the steps before which they fall, so that the trace is read once.

    Yields each job's number and progress, a job's own in order. Raises what the planner, the trace or a policy raise.
    """
    begun = done or [ResumePoint()] * len(jobs)
    heat = SlidingHeat(trace, slack=max(map(_steps_looked_back, jobs), default=0))
    ways = [_decisions(job, trace, heat, scene, so_far) for job, so_far in zip(jobs, begun, strict=True)]
    steps = [_steps_left(job, trace, so_far) for job, so_far in zip(jobs, begun, strict=True)]
    due = [(left[0], number) for number, left in enumerate(steps) if left]
    heapq.heapify(due)
    while due:
        step, number = due[0]
        yield number, next(ways[number])
        following = step + jobs[number].setup.schedule.interval
        if following in steps[number]:
            heapq.heapreplace(due, (following, number))
        else:
            heapq.heappop(due)


def run_file(
    jobs: Sequence[Job], file: TraceFile, scene: Scene, done: Sequence[ResumePoint]
) -> Iterator[tuple[int, JobProgress]]:
    """``run`` on a trace that is opened first; errors name its path."""
    trace = file.open()
    with naming(file.path):
        yield from run(jobs, trace, scene, done)


def _steps_looked_back(job: Job) -> int:
    remembers = job.policy is not None and job.policy.on_change
    return max(job.setup.schedule.window, MEMORY if remembers else 0)


def _steps_left(job: Job, trace: Trace, done: ResumePoint) -> range:
    return job.setup.schedule.decisions(trace.steps)[done.decisions :]


def _decisions(
    job: Job, trace: Trace, heat: SlidingHeat, scene: Scene, done: ResumePoint
) -> Iterator[JobProgress]:
    """One job's decisions, each made when it is asked for."""
    placement = scene.placement(trace, job.setup)
    schedule = job.setup.schedule
    if job.policy is None:
        baseline = Baseline(
            trace,
            heat,
            placement,
            scene.topology,
            schedule,
            job.hindsight,
            job.split,
            job.deal_width,
            scene.costs,
        )
        for step in _steps_left(job, trace, done):
            mark = baseline.measure(step)
            yield JobProgress(mark, baseline.loads_LR)
        return
    kind = ChangeRun if job.policy.on_change else PolicyRun
    policy_run = kind(trace, heat, placement, scene.topology, job.policy, schedule, scene.costs, done.state)
    for step in _steps_left(job, trace, done):
        decision = policy_run.decide(step)
        yield JobProgress(decision, policy_run.loads_LR, policy_run.state)
