"""One timed run in a process of its own, reported as JSON: ``python -m benchmarks.replay.one_run WAY TRACE``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.replay.plain_loop import plain_loop
from eplb_service.io.named_arrays import ReadAs
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.jobs import TraceFile
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.result import Replay
from eplb_service.replay.runner import jobs_for, replay_file, scene_for
from eplb_service.replay.schedule import Schedule
from eplb_service.solver import engine
from eplb_service.solver.warmup import warm_up

RANKS, SLOTS, STEPS = 32, 9, 256
POLICIES = ("none", "deepseek", "flashlb")


def replayed(file: TraceFile, workers: int) -> dict[str, float]:
    """The same by `eplb replay`."""
    jobs = jobs_for(POLICIES, [Setup(SLOTS, Schedule(STEPS, STEPS))], PlannerSettings())
    found = replay_file(file, jobs, scene_for(RANKS), workers=workers)
    pars = {policy.label: policy.par_realised for policy in found.policies}
    return pars | {"hindsight": _fitted(found)}


def _fitted(found: Replay) -> float:
    [baseline] = found.baselines
    assert baseline.hindsight_DL is not None
    steps_D = [decision.steps for decision in found.policies[0].decisions]
    return float(np.average(baseline.hindsight_DL.mean(axis=1), weights=steps_D))


class SolverClock:
    """Measures the time spent in the solver by whoever calls it in this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._solve_many = engine.solve_many
        for module in list(sys.modules.values()):
            if getattr(module, "solve_many", None) is self._solve_many:
                vars(module)["solve_many"] = self

    def __call__(self, *arguments: object, **named: object) -> object:
        began = time.perf_counter()
        try:
            return self._solve_many(*arguments, **named)
        finally:
            self.seconds += time.perf_counter() - began


def main() -> None:
    way, file = sys.argv[1], TraceFile(Path(sys.argv[2]), ReadAs())
    warm_up(1)
    clock = SolverClock()
    began, cpu = time.perf_counter(), time.process_time()
    found = (
        plain_loop(file.open(), RANKS, SLOTS, STEPS, POLICIES) if way == "plain" else replayed(file, int(way))
    )
    reported = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "solver_seconds": clock.seconds,
        "par": found,
    }
    print(json.dumps(reported))


if __name__ == "__main__":
    main()
