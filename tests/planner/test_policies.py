"""All commands resolve policy names in the same way, and the Python API also accepts functions."""

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


class Counting:
    """A policy that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, heat_TLE: np.ndarray, phy2log_LRS: np.ndarray) -> np.ndarray:
        self.calls += 1
        return np.roll(phy2log_LRS, self.calls, axis=1)


class Unready:
    def __init__(self) -> None:
        raise RuntimeError("no sources")


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
def test_solve_accepts_a_function_and_every_form_of_its_name(policy: object) -> None:
    solution = solve(HEAT_TLE, 4, 3, policy=policy)  # type: ignore[arg-type]
    linear = eplb_service.Placement.linear(2, 8, 4, 3)
    np.testing.assert_array_equal(solution.phy2log, np.roll(linear.phy2log_LRS, 1, axis=1))
    assert solution.moves == np.count_nonzero(solution.phy2log != linear.phy2log_LRS)
    # Whole tokens are sampled separately for each rank.
    assert solution.par_after == pytest.approx(solution.par_before, rel=1e-3)
    again = solve(HEAT_TLE, 4, 3, policy=policy, placement=solution.phy2log)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again.phy2log, np.roll(linear.phy2log_LRS, 2, axis=1))


@pytest.mark.usefixtures("registered")
def test_replay_accepts_the_same_policy_names_as_solve() -> None:
    setup = Setup(3, 16, 16)
    for name in (SWAPPED, "swapper"):
        assert Job.of(name, setup, name, PlannerSettings()).external() is swapped
    with pytest.raises(ReplayError, match=r"unknown policy 'swopper'; choose one of .*swapper"):
        Job.of("a", setup, "swopper", PlannerSettings())


def test_each_job_gets_its_own_instance_of_a_policy_class() -> None:
    name = "tests.planner.test_policies:Counting"
    one, other = (external_policy(name) for _ in range(2))
    assert one is not None
    placed = one(HEAT_TLE, np.arange(4)[None, :, None])
    assert placed.ravel().tolist() == [3, 0, 1, 2]
    assert (one.calls, other.calls) == (1, 0)  # type: ignore[attr-defined, union-attr]


def test_solve_accepts_every_built_in_policy() -> None:
    for name in NAMES:
        assert solve(HEAT_TLE, 4, 3, policy=name).phy2log.shape == (2, 4, 3)
        assert external_policy(name) is None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("swopper", "unknown policy 'swopper'"),
        ("no.such:thing", "cannot import 'no.such'"),
        ("tests.planner.test_policies:nothing", "has no function 'nothing'"),
        ("tests.planner.test_policies:Unready", "Unready cannot start .RuntimeError: no sources"),
        (broken, "policy broken failed .RuntimeError: out of ideas"),
        (lambda heat, placed: placed[:1], "returned an invalid placement"),
        (lambda heat, placed: placed * 0, "returned an invalid placement .*has no slot"),
        (7, "policy is 7; it must be a name or a function"),
    ],
)
def test_the_error_names_the_failed_policy(policy: object, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        solve(HEAT_TLE, 4, 3, policy=policy)  # type: ignore[arg-type]


def test_bench_runs_a_users_policy() -> None:
    contest = Contest([], "", 60.0, lambda line: None)
    try:
        scenario = Scenario("drawn", HEAT_TLE, ranks=4, slots=3, window=16)
        figures = compare(contest, scenario, entrants_of(contest, ["deepseek", SWAPPED]))
    finally:
        contest.close()
    assert figures["failures"] == []
    assert list(figures["policies"]) == ["left alone", "deepseek (ours)", SWAPPED]
    assert figures["policies"][SWAPPED]["moves"][1] > 0


def test_the_package_lists_its_public_names() -> None:
    assert {"solve", "Solution", "Placement"} <= set(dir(eplb_service))
