"""Whoever does the work, the result is the same, and a worker's death or a bad trace ends in one line."""

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
    """All that was found, but for how long it took."""
    return [
        (found.label, repr(replace(one, seconds=0.0)))
        for found in (*replay.policies, *replay.baselines)
        for one in found.decisions
    ]


def dies(heat_TLE, phy2log_LRS):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("elsewhere", [{"workers": 2}, {"ray": "local"}], ids=["processes", "ray"])
def test_others_find_what_one_process_finds(file, elsewhere):
    if "ray" in elsewhere:
        pytest.importorskip("ray", reason="SWEEPS ON RAY ARE NOT TESTED: no ray here")
    jobs = jobs_for(["none", "flashlb"], SETUPS, PlannerSettings())
    alone = replay_file(file, jobs, scene_for(4), workers=1)
    assert reported(alone) == reported(replay_file(file, jobs, scene_for(4), **elsewhere))


def test_without_ray_its_option_says_how_to_get_it(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ReplayError, match=r"pip install 'ray>=2.30'"):
        replay_file(file, jobs_for(["none"], SETUPS, PlannerSettings()), scene_for(4), ray="local")


def test_a_worker_that_is_killed_is_reported(file):
    jobs = jobs_for([f"{__name__}:dies", "none"], SETUPS[:1], PlannerSettings(), hindsight=False)
    with pytest.raises(ReplayError, match="ended unexpectedly"):
        replay_file(file, jobs, scene_for(4), workers=2)


def test_work_that_is_given_up_ends_its_processes():
    others = set(multiprocessing.active_children())
    work = completed(time.sleep, [(0.0,), (600.0,)], workers=2)
    assert next(work) == (0, None)
    work.close()
    assert set(multiprocessing.active_children()) <= others


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


@pytest.fixture
def cells(tmp_path: Path) -> list[SweepCell]:
    """Two traces by two thresholds."""
    made = []
    for number in range(2):
        rng = np.random.default_rng(number)
        path = tmp_path / f"{number}.npz"
        np.savez(path, heat=rng.poisson(rng.lognormal(2, 1, (1, 2, 16)), (64, 2, 16)))
        for threshold in (1.02, 1.5):
            settings = PlannerSettings(par_threshold=threshold)
            jobs = jobs_for(["none", "flashlb"], [Setup(5, 16, 16)], settings, hindsight=False)
            file = TraceFile(path, ReadAs())
            made.append(SweepCell(file, scene_for(4), tuple(jobs), {"par_threshold": threshold}))
    return made


def figures(result: Replay) -> list[tuple[str, float, int]]:
    return [(policy.label, policy.par_realised, policy.moves) for policy in result.policies]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_cell_is_what_a_replay_of_its_own_finds(cells: list[SweepCell], workers: int) -> None:
    found = dict(sweep(cells, workers))
    assert found.keys() == set(range(len(cells)))
    for number, cell in enumerate(cells):
        alone = replay_file(cell.file, cell.jobs, cell.scene, workers=1)
        assert figures(found[number]) == figures(alone)
    assert figures(found[0]) != figures(found[2])
