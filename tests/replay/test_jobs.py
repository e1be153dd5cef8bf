"""Results do not depend on the number of workers, and a lost worker or a bad trace is reported in one line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb_core.heat.window import HeatError
from eplb_core.planner.settings import PlannerSettings
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.native import TraceWriter
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.io.trace import TraceFacts
from eplb_service.replay.jobs import TraceFile, completed, jobs_for, replay_file, scene_for
from eplb_service.replay.policy import ReplayError, Setup
from eplb_service.replay.result import Replay
from eplb_service.replay.sweep import SweepCell, sweep

SETUPS = [Setup(5, 30, interval) for interval in (20, 30)]


@pytest.fixture
def file(tmp_path):
    heat_TLE = synthetic_heat("drift", 120, layers=3, experts=16, tokens=256, top_k=2, seed=5)
    with TraceWriter(tmp_path / "a.zarr", TraceFacts(), 3, 16) as writer:
        writer.append(heat_TLE)
    return TraceFile(tmp_path / "a.zarr", ReadAs())


def reported(replay):
    """Return all decisions without their durations."""
    return [
        (policy.label, repr(replace(decision, seconds=0.0)))
        for policy in (*replay.policies, *replay.baselines)
        for decision in policy.decisions
    ]


def dies(heat_TLE, phy2log_LRS):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("executors", [{"workers": 2}, {"ray": "local"}], ids=["processes", "ray"])
def test_workers_return_the_same_result_as_a_single_process(file, executors):
    if "ray" in executors:
        pytest.importorskip("ray", reason="SWEEPS ON RAY ARE NOT TESTED: ray is not installed")
    jobs = jobs_for(["none", "flashlb"], SETUPS, PlannerSettings())
    single_process = replay_file(file, jobs, scene_for(4), workers=1)
    assert reported(single_process) == reported(replay_file(file, jobs, scene_for(4), **executors))


def test_a_missing_ray_is_reported_with_the_installation_command(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ReplayError, match=r"pip install 'ray>=2.30'"):
        replay_file(file, jobs_for(["none"], SETUPS, PlannerSettings()), scene_for(4), ray="local")


def test_a_worker_that_is_killed_is_reported(file):
    jobs = jobs_for([f"{__name__}:dies", "none"], SETUPS[:1], PlannerSettings(), hindsight=False)
    with pytest.raises(ReplayError, match="exited unexpectedly"):
        replay_file(file, jobs, scene_for(4), workers=2)


def test_closing_the_iterator_terminates_the_worker_processes():
    children = set(multiprocessing.active_children())
    work = completed(time.sleep, [(0.0,), (600.0,)], workers=2)
    assert next(work) == (0, None)
    work.close()
    assert set(multiprocessing.active_children()) <= children


def test_damage_in_a_later_step_is_reported_with_the_name_of_the_trace(file):
    next((file.path / "heat" / "c").iterdir()).joinpath("0", "0").write_bytes(b"")
    jobs = jobs_for(["none"], SETUPS, PlannerSettings(), hindsight=False)
    with pytest.raises(HeatError, match=r"a\.zarr: heat/c/0/0/0 is"):
        replay_file(file, jobs, scene_for(4), workers=1)
    with pytest.raises(HeatError, match=r"a\.zarr: heat/c/0/0/0 is"):
        replay_file(file, jobs, scene_for(4), workers=2)


def test_a_missing_cluster_is_reported(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    jobs = jobs_for(["none"], SETUPS, PlannerSettings())
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:many"):
        with pytest.raises(ReplayError, match=f"no Ray cluster at {address}"):
            replay_file(file, jobs, scene_for(4), ray=address)


@pytest.fixture
def cells(tmp_path: Path) -> list[SweepCell]:
    """Return the sweep cells for two traces and two thresholds."""
    cells_of_traces = []
    for number in range(2):
        rng = np.random.default_rng(number)
        path = tmp_path / f"{number}.npz"
        np.savez(path, heat=rng.poisson(rng.lognormal(2, 1, (1, 2, 16)), (64, 2, 16)))
        for threshold in (1.02, 1.5):
            settings = PlannerSettings(par_threshold=threshold)
            jobs = jobs_for(["none", "flashlb"], [Setup(5, 16, 16)], settings, hindsight=False)
            file = TraceFile(path, ReadAs())
            cells_of_traces.append(SweepCell(file, scene_for(4), tuple(jobs), {"par_threshold": threshold}))
    return cells_of_traces


def figures(result: Replay) -> list[tuple[str, float, int]]:
    return [(policy.label, policy.par_realised, policy.moves) for policy in result.policies]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_cell_equals_a_separate_replay(cells: list[SweepCell], workers: int) -> None:
    results = dict(sweep(cells, workers))
    assert results.keys() == set(range(len(cells)))
    for number, cell in enumerate(cells):
        single_process = replay_file(cell.file, cell.jobs, cell.scene, workers=1)
        assert figures(results[number]) == figures(single_process)
    assert figures(results[0]) != figures(results[2])
