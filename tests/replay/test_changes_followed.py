"""The replay follows a workload change at any step, regardless of how many steps are scored at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.heat.window import Counts, checked_heat
from eplb_core.planner.pace import Pace
from eplb_core.planner.session import DecisionSession
from eplb_core.planner.settings import PlannerSettings
from eplb_service.io.trace import ArrayTrace
from eplb_service.replay import loop
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, scene_for
from eplb_service.replay.policy import Setup

LAYERS = 3
EXPERTS = 96
RANKS = 16
SLOTS = 9
CHOICES = 8192
FIRST = 64
"""Number of steps before the first decision."""


def workloads(*lengths: int, seed: int) -> Counts:
    """Draw steps from one workload after another. Each one's expert popularities are drawn from gamma(0.35)."""
    generator = np.random.default_rng(seed)
    segments = []
    for length in lengths:
        popularity_LE = generator.gamma(0.35, size=(LAYERS, EXPERTS))
        popularity_LE /= popularity_LE.sum(axis=1, keepdims=True)
        rows = [generator.multinomial(CHOICES, popularity_E, size=length) for popularity_E in popularity_LE]
        segments.append(np.stack(rows, axis=1))
    return checked_heat(np.concatenate(segments).astype(np.int32))


def replayed(
    heat_TLE: Counts, at_a_time: int = 64, first: int = FIRST, costs: Costs | None = None
) -> tuple[np.ndarray, list[int]]:
    """Return each step's PAR, averaged over layers, and, for each decision, the step that follows it."""
    (_, job) = jobs_for(["flashlb"], [Setup(SLOTS, 512, first)], PlannerSettings(threads=1), hindsight=False)
    decided: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_CHUNK_STEPS", at_a_time)
        run = loop._Run(job, ArrayTrace(heat_TLE), scene_for(RANKS, costs))
        run._session = DecisionSession(Pace(first, 512, 512, seen=first))
        decide = run._decide

        def counting_decide(known_TLE: Counts, step: int) -> loop.ReplayedDecision | None:
            row = decide(known_TLE, step)
            if row is not None:
                decided.append(step)
            return row

        patch.setattr(run, "_decide", counting_decide)
        if at_a_time == 1:
            rows = (run.serve(heat_TLE[: step + 1], 0, step) for step in range(first, len(heat_TLE)))
        else:
            rows = iter([run.serve(heat_TLE, 0, first)])
        par_T = [row.par_realised for row in rows]
    return np.array(par_T), decided


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 6, 8, 11, 14, 15, 16, 17, 20, 23, 24, 25, 32, 47, 64])
def test_a_change_is_followed_within_20_steps_of_any_step_after_the_first_switch(after: int) -> None:
    par_T, _ = replayed(workloads(FIRST + after, 60, seed=after), at_a_time=1)
    assert (par_T[after + 20 :] < 1.3).all()


@pytest.mark.parametrize("after", [1, 5, 9, 13, 17, 24, 40])
def test_a_change_is_followed_within_20_steps_of_any_later_switch(after: int) -> None:
    # The second workload begins 100 steps after the first decision. Its first plan takes effect about 4 steps later.
    par_T, _ = replayed(workloads(FIRST + 100, 4 + after, 60, seed=after), at_a_time=1)
    assert (par_T[104 + after + 20 :] < 1.3).all()


@pytest.mark.parametrize("new", [1, 3, 4, 10, 30, 60])
def test_a_first_window_with_two_workloads_leads_to_a_placement_for_the_newer_one(new: int) -> None:
    par_T, _ = replayed(workloads(FIRST - new, new + 60, seed=new), at_a_time=1)
    assert (par_T[max(20 - new, 0) :] < 1.3).all()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_decisions_are_made_at_the_same_steps_for_any_scoring_batch_size(
    seed: int, lengths: list[int]
) -> None:
    heat_TLE = workloads(FIRST, *lengths, seed=seed)
    _, one_by_one = replayed(heat_TLE, 1)
    assert replayed(heat_TLE, 16)[1] == one_by_one
    assert replayed(heat_TLE, 64)[1] == one_by_one


@pytest.mark.parametrize("second", [2, 5, 9, 12, 16])
def test_a_pending_plan_is_replaced_if_the_heat_changes_again(second: int) -> None:
    late = Costs(step_ms=50, solve_ms=0)
    # Plans end after 14 to 22 steps. The third workload begins while the plan for the second is pending.
    heat_TLE = workloads(FIRST + 60, second, 70, seed=second)
    par_T, decided = replayed(heat_TLE, at_a_time=1, costs=late)
    assert (par_T[60 + second + 16 + 20 :] < 1.3).all()
    under_way = [step for step in decided if step - FIRST - 60 - second in range(4, 14)]
    assert under_way


def test_a_pending_plan_is_kept_while_the_heat_stays_the_same() -> None:
    # A plan ends 16 steps after its decision, or 22 if no plan was pending in the 64 steps before.
    late = Costs(step_ms=50, solve_ms=400)
    par_T, decided = replayed(workloads(FIRST + 60, 70, seed=3), at_a_time=1, costs=late)
    assert (par_T[60 + 16 + 20 :] < 1.3).all()
    assert sum(60 <= step - FIRST < 60 + 20 for step in decided) == 1


def test_a_replacement_plan_starts_from_the_experts_on_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = loop._Run._transfer

    def checking(run: loop._Run, *arguments: Any) -> Any:
        np.testing.assert_array_equal(run._held_LRS, run._serving.placement.phy2log_LRS)
        return transfer(run, *arguments)

    monkeypatch.setattr(loop._Run, "_transfer", checking)
    heat_TLE = workloads(FIRST + 60, 5, 70, seed=5)
    _, decided = replayed(heat_TLE, at_a_time=16, costs=Costs(step_ms=50, solve_ms=0))
    assert any(later - earlier < 14 for earlier, later in pairwise(decided)), "no plan was replaced"
