"""The independent pieces of a replay: one policy, or one yardstick, along the whole trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Placement
from eplb_service.planner.scoring import Float64
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.replay.costs import Costs
from eplb_service.replay.hindsight import Mark, Yardman
from eplb_service.replay.policy import Policy
from eplb_service.replay.result import Decision, Setup
from eplb_service.replay.walk import Walk
from eplb_service.traces.arrays import ReadAs
from eplb_service.traces.open import naming, open_trace
from eplb_service.traces.trace import Trace


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

    ``phy2log_LRS`` is where weights stand at the start; ``None`` for experts in order on each setup's slots.
    """

    topology: Topology
    costs: Costs
    phy2log_LRS: npt.NDArray[np.int32] | None = None

    def placement(self, trace: Trace, setup: Setup) -> Placement:
        """Where weights stand at the start; raises ``PlacementError`` where it does not fit the trace."""
        if self.phy2log_LRS is not None:
            return Placement(self.phy2log_LRS, trace.experts)
        return Placement.linear(trace.layers, trace.experts, self.topology.ranks, setup.slots)


@dataclass(frozen=True)
class Job:
    """One policy along the trace, or, without a policy, the yardstick of a setup.

    ``hindsight`` are the settings that a yardstick fits with; ``None`` for no hindsight.
    """

    label: str
    setup: Setup
    policy: Policy | None
    hindsight: PlannerSettings | None = None


@dataclass(frozen=True)
class Progress:
    """What a job tells after each decision; ``loads_LR`` are the ranks' tokens since."""

    made: Decision | Mark
    loads_LR: Float64


def run(job: Job, trace: Trace, scene: Scene) -> Iterator[Progress]:
    """Make a job's decisions one after the other; raises what the planner, the trace or the policy raise."""
    placement = scene.placement(trace, job.setup)
    schedule = job.setup.schedule
    if job.policy is None:
        yardman = Yardman(trace, placement, scene.topology, schedule, job.hindsight)
        for step in schedule.decisions(trace.steps):
            mark = yardman.measure(step)
            yield Progress(mark, yardman.loads_LR)
        return
    walk = Walk(trace, placement, scene.topology, job.policy, schedule, scene.costs)
    for step in schedule.decisions(trace.steps):
        decision = walk.decide(step)
        yield Progress(decision, walk.loads_LR)


def run_file(job: Job, file: TraceFile, scene: Scene) -> Iterator[Progress]:
    """``run`` on a trace that is opened first; what is wrong with it is told with its path."""
    trace = file.open()
    with naming(file.path):
        yield from run(job, trace, scene)
