"""A policy's name means the same everywhere, and Python takes functions."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import numpy as np
import pytest

import eplb_service
from eplb_core.planner import policies
from eplb_core.planner.policies import NAMES, PolicyError, external_policy
from eplb_core.planner.settings import PlannerSettings
from eplb_lab.bench.closed_loop import Scenario, compare, entrants_of
from eplb_lab.bench.contest import Contest
from eplb_service import solve
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.replay.policy import Job, ReplayError, Setup

HEAT_TLE = synthetic_heat("static", 48, 2, 8, tokens=256, top_k=2, seed=3)


def swapped(heat_TLE: np.ndarray, phy2log_LRS: np.ndarray) -> np.ndarray:
    return np.roll(phy2log_LRS, 1, axis=1)


def broken(heat_TLE: np.ndarray, phy2log_LRS: np.ndarray) -> np.ndarray:
    raise RuntimeError("out of ideas")


SWAPPED = "tests.planner.test_policies:swapped"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("swapper", SWAPPED, policies.GROUP)

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [entry] if group == policies.GROUP and name in (None, "swapper") else []

    monkeypatch.setattr(policies, "entry_points", entry_points)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("policy", [swapped, SWAPPED, "swapper"])
def test_solve_takes_a_function_by_any_name(policy: object) -> None:
    found = solve(HEAT_TLE, 4, 3, policy=policy)  # type: ignore[arg-type]
    linear = eplb_service.Placement.linear(2, 8, 4, 3)
    np.testing.assert_array_equal(found.phy2log, np.roll(linear.phy2log_LRS, 1, axis=1))
    assert found.moves == np.count_nonzero(found.phy2log != linear.phy2log_LRS)
    # The draws of whole tokens differ from rank to rank.
    assert found.par_after == pytest.approx(found.par_before, rel=1e-3)
    again = solve(HEAT_TLE, 4, 3, policy=policy, placement=found.phy2log)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again.phy2log, np.roll(linear.phy2log_LRS, 2, axis=1))


@pytest.mark.usefixtures("registered")
def test_replay_takes_the_same_names() -> None:
    setup = Setup(3, 16, 16)
    for name in (SWAPPED, "swapper"):
        assert Job.of(name, setup, name, PlannerSettings()).external() is swapped
    with pytest.raises(ReplayError, match=r"unknown policy 'swopper'; choose among .*swapper"):
        Job.of("a", setup, "swopper", PlannerSettings())


def test_solve_takes_every_built_in_policy() -> None:
    for name in NAMES:
        assert solve(HEAT_TLE, 4, 3, policy=name).phy2log.shape == (2, 4, 3)
        assert external_policy(name) is None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("swopper", "unknown policy 'swopper'"),
        ("no.such:thing", "cannot import 'no.such'"),
        ("tests.planner.test_policies:nothing", "has no function 'nothing'"),
        (broken, "policy broken failed .RuntimeError: out of ideas"),
        (lambda heat, placed: placed[:1], "returned no valid placement"),
        (lambda heat, placed: placed * 0, "returned no valid placement .*is in no slot"),
        (7, "policy is 7; give a name or a function"),
    ],
)
def test_a_policy_that_cannot_decide_is_named(policy: object, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        solve(HEAT_TLE, 4, 3, policy=policy)  # type: ignore[arg-type]


def test_bench_runs_a_policy_of_the_users_own() -> None:
    contest = Contest([], "", 60.0, lambda line: None)
    try:
        scenario = Scenario("drawn", HEAT_TLE, ranks=4, slots=3, window=16)
        found = compare(contest, scenario, entrants_of(contest, ["deepseek", SWAPPED]))
    finally:
        contest.close()
    assert found["failures"] == []
    assert list(found["policies"]) == ["left alone", "deepseek (ours)", SWAPPED]
    assert found["policies"][SWAPPED]["moves"][1] > 0


def test_the_package_lists_what_it_offers() -> None:
    assert {"solve", "Solution", "Placement"} <= set(dir(eplb_service))
