"""Ours along a course, by the clock, by the clock looking back, and on change: what was realised, moved and decided."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.decide.heat import Course
from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.replay.jobs import Scene
from eplb_service.replay.policy import ON_CHANGE
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.runner import jobs_for, replay, scene_for
from eplb_service.replay.schedule import Schedule

LOOKED_BACK = 512
"""Steps that a decision by the clock looks at, at most, where it looks at more than an interval: the default."""


@dataclass(frozen=True)
class Row:
    """One policy along a course, without the first window after the first decision: there all place from scratch.

    Parameters
    ----------
    policy
        Its name.
    par
        Realised peak-to-average ratio, mean over layers and steps.
    moves_per_window, decisions
        Slots moved in a window, and decisions in all.
    cpu_seconds
        Of a decision.
    """

    policy: str
    par: float
    moves_per_window: float
    decisions: int
    cpu_seconds: float


def own_rows(course: Course, settings: PlannerSettings, bytes_per_expert: int) -> Iterator[Row]:
    """A row for each policy, on one thread; its CPU is what the replay took beyond one that leaves all alone."""
    by_window, looking_back = (
        Setup(course.slots, Schedule(steps, course.window)) for steps in (course.window, LOOKED_BACK)
    )
    ways = (
        ("none", "none", by_window),
        ("flashlb", "flashlb", by_window),
        (f"flashlb, window {LOOKED_BACK}", "flashlb", looking_back),
        (ON_CHANGE, ON_CHANGE, by_window),
    )
    scene = scene_for(course.ranks)
    if bytes_per_expert:
        ranks_R = np.arange(course.ranks)
        scene = Scene(Topology(np.zeros_like(ranks_R), ranks_R, bytes_per_expert), scene.costs)
    trace, idle = ArrayTrace(course.heat_TLE), 0.0
    for label, name, setup in ways:
        jobs = jobs_for([name], [setup], settings, hindsight=False)
        began = time.process_time()
        (policy,) = replay(trace, jobs, scene).policies
        took = time.process_time() - began
        idle = idle or took
        rows = policy.decisions[1:]
        decisions = sum(row.decisions for row in rows)
        made = decisions + policy.decisions[0].decisions
        yield Row(
            label,
            float(np.average([row.par_realised for row in rows], weights=[row.steps for row in rows])),
            float(np.mean([row.moves for row in rows])),
            0 if name == "none" else decisions,
            0.0 if name == "none" else max(took - idle, 0.0) / max(made, 1),
        )
