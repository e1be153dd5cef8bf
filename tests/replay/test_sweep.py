"""Many traces under many settings come out as each would alone, wherever they are run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb_service.heat.window import HeatError
from eplb_service.io.named_arrays import ReadAs
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.jobs import TraceFile
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.result import Replay
from eplb_service.replay.runner import jobs_for, replay_file, scene_for
from eplb_service.replay.schedule import Schedule
from eplb_service.replay.sweep import SweepCell, _shares, grid, sweep

RANKS = 4
SETUP = Setup(5, Schedule(16, 16))


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
            jobs = jobs_for(["none", "flashlb"], [SETUP], settings, hindsight=False)
            file = TraceFile(path, ReadAs())
            made.append(SweepCell(file, scene_for(RANKS), tuple(jobs), {"par_threshold": threshold}))
    return made


def figures(result: Replay) -> list[tuple[str, float, int]]:
    return [(policy.label, policy.par_realised, policy.moves) for policy in result.policies]


def test_every_combination_once() -> None:
    assert grid({}) == [{}]
    assert grid({"a": [1, 2], "b": ["x"]}) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]


def test_work_is_shared_out_alike() -> None:
    cells = [replace(cell_of(effort), effort=effort) for effort in (1.0, 5.0, 1.0, 3.0)]
    shares = _shares(cells, 2)
    assert sorted(number for share in shares for number, _ in share) == [0, 1, 2, 3]
    assert sorted(sum(cell.effort for _, cell in share) for share in shares) == [5.0, 5.0]


def cell_of(effort: float) -> SweepCell:
    return SweepCell(TraceFile(Path("absent"), ReadAs()), scene_for(RANKS), (), {}, effort)


@pytest.mark.parametrize("workers", [1, 2])
def test_each_cell_is_what_a_replay_of_its_own_finds(cells: list[SweepCell], workers: int) -> None:
    found = dict(sweep(cells, workers))
    assert found.keys() == set(range(len(cells)))
    for number, cell in enumerate(cells):
        alone = replay_file(cell.file, cell.jobs, cell.scene, workers=1)
        assert figures(found[number]) == figures(alone)
    assert figures(found[0]) != figures(found[2])


def test_ray_finds_the_same(cells: list[SweepCell]) -> None:
    pytest.importorskip("ray", reason="SWEEPS ON RAY ARE NOT TESTED: no ray here")
    here, there = dict(sweep(cells, 1)), dict(sweep(cells, ray="local"))
    assert {number: figures(result) for number, result in there.items()} == {
        number: figures(result) for number, result in here.items()
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trace_that_is_gone_by_then_is_named(cells: list[SweepCell], workers: int) -> None:
    cells[3].file.path.unlink()
    with pytest.raises((HeatError, OSError), match=r"1\.npz"):
        list(sweep(cells, workers))
