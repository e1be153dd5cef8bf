"""Whoever does the work, the result is the same, and a worker's death or a bad trace ends in one line."""

import os
import signal
import sys
import types

import numpy as np
import pytest

from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.heat.window import HeatError
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.native.writer import TraceWriter
from eplb_service.io.trace import TraceFacts
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.jobs import TraceFile
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.runner import jobs_for, replay_file, scene_for
from eplb_service.replay.schedule import ReplayError, Schedule

SETUPS = [Setup(5, Schedule(30, interval)) for interval in (20, 30)]


@pytest.fixture
def file(tmp_path):
    heat_TLE = synthetic_heat("drift", 120, layers=3, experts=16, tokens=256, top_k=2, seed=5)
    with TraceWriter(tmp_path / "a.zarr", TraceFacts(), 3, 16) as writer:
        writer.append(heat_TLE)
    return TraceFile(tmp_path / "a.zarr", ReadAs())


def reported(replay):
    rows = [
        [
            (d.step, d.steps, d.late, d.moves, d.par_seen, d.par_planned, *d.par_realised_L)
            for d in policy.decisions
        ]
        for policy in replay.policies
    ]
    marks = [np.stack([y.left_alone_DL, y.floor_DL, y.hindsight_DL]).tolist() for y in replay.baselines]
    return (
        [policy.label for policy in replay.policies],
        rows,
        marks,
        [p.loads_LR.tolist() for p in replay.policies],
    )


def dies(heat_TLE, phy2log_LRS):
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_find_what_one_process_finds(file):
    jobs = jobs_for(["none", "flashlb"], SETUPS, PlannerSettings())
    alone = replay_file(file, jobs, scene_for(4), workers=1)
    assert reported(alone) == reported(replay_file(file, jobs, scene_for(4), workers=2))


def test_ray_finds_what_one_process_finds(file):
    pytest.importorskip("ray", reason="SWEEPS ON RAY ARE NOT TESTED: no ray here")
    jobs = jobs_for(["none", "flashlb"], SETUPS[:1], PlannerSettings())
    alone = replay_file(file, jobs, scene_for(4), workers=1)
    assert reported(alone) == reported(replay_file(file, jobs, scene_for(4), ray="local"))


def test_without_ray_its_option_says_how_to_get_it(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ReplayError, match=r"pip install 'eplb-service\[ray\]'"):
        replay_file(file, jobs_for(["none"], SETUPS, PlannerSettings()), scene_for(4), ray="local")


def test_a_worker_that_is_killed_is_reported(file):
    jobs = jobs_for([f"{__name__}:dies", "none"], SETUPS[:1], PlannerSettings(), hindsight=False)
    with pytest.raises(ReplayError, match=r"ended unexpectedly \(exit code -9"):
        replay_file(file, jobs, scene_for(4), workers=2)


def test_ctrl_c_ends_the_workers_and_keeps_what_they_share(file):
    def stop(label, done):
        calls.append(label)
        if {"baseline", "flashlb"} <= set(calls):
            raise KeyboardInterrupt

    calls = []
    jobs = jobs_for(["flashlb"], SETUPS[:1], PlannerSettings())
    result = replay_file(file, jobs, scene_for(4), workers=2, on_progress=stop)
    assert result.interrupted
    assert len(result.policies[0].decisions) == len(result.baselines[0].floor_DL) >= 1


def test_a_trace_damaged_further_on_is_named(file):
    next((file.path / "heat" / "c").iterdir()).joinpath("0", "0").write_bytes(b"")
    jobs = jobs_for(["none"], SETUPS, PlannerSettings(), hindsight=False)
    with pytest.raises(HeatError, match=r"a\.zarr: heat/c/0/0/0 is"):
        replay_file(file, jobs, scene_for(4), workers=1)
    with pytest.raises(HeatError, match=r"a\.zarr: heat/c/0/0/0 is"):
        replay_file(file, jobs, scene_for(4), workers=2)


def test_a_missing_cluster_is_reported_at_once(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    jobs = jobs_for(["none"], SETUPS, PlannerSettings())
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:many"):
        with pytest.raises(ReplayError, match=f"no Ray cluster at {address}"):
            replay_file(file, jobs, scene_for(4), ray=address)
