"""What moves cost is estimated from switches and steps, only where that is sure, and no single report moves it far."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtrit

from eplb_core.cost.moving import (
    MAX_LOST,
    NOTHING_MEASURED,
    Switch,
    SwitchedPlan,
    compared,
    moving_costs,
    student_t_975,
)
from eplb_core.placement import Float64

# Two layers; each's weights travel in all steps between its boundaries.
PLAN = SwitchedPlan(100, 121, (Switch(0.05, 0.06, 0.001, 100, 106), Switch(0.05, 0.06, 0.001, 110, 116)))


def switched(*seconds: float, commit: float = 0.001) -> SwitchedPlan:
    return SwitchedPlan(0, 1, tuple(Switch(each, 2 * each, commit, 0, 1) for each in seconds))


def slowed(*lost: float, steps: int = 4) -> list[SwitchedPlan]:
    return [SwitchedPlan(0, 1, (), share, steps) for share in lost]


def steps_of(plan: SwitchedPlan, lost: float, noise: float, seed: int = 0) -> tuple[Float64, Float64]:
    """200 steps of 10 ms, those in which a layer's weights travel longer so that ``lost`` of their time is lost."""
    us_T = 10_000.0 * np.exp(noise * np.random.default_rng(seed).standard_normal(200))
    for one in plan.switches:
        us_T[one.after_step + 1 : one.by_step] /= 1 - lost
    return np.arange(200.0), us_T


def test_nothing_is_known_of_nothing_or_of_too_little() -> None:
    assert moving_costs([]) == NOTHING_MEASURED
    assert moving_costs([switched(0.02)] * 3 + slowed(0.1, 0.1, 0.1)) == NOTHING_MEASURED


def test_medians_of_switches_and_the_mean_of_plans_are_the_costs() -> None:
    plans = [switched(0.02, 0.03, commit=0.001), switched(0.02, 0.02, commit=0.003), *slowed(0.1, 0.12, 0.1)]
    found = moving_costs([*plans, *slowed(0.11, steps=8)])
    assert found.expert_seconds == pytest.approx(0.02)
    assert found.commit_seconds == pytest.approx(0.002)
    assert found.lost_share == pytest.approx((0.1 + 0.12 + 2 * 0.11 + 0.1) / 5)


@pytest.mark.parametrize(
    ("lost", "known"),
    [((0.0, 0.5, -0.3, 0.4), None), ((0.1, 0.11, 0.09, 0.1), 0.1), ((-0.01, -0.02, 0.0, -0.01), 0.0)],
)
def test_a_slowdown_counts_where_plans_agree_and_is_no_gain(
    lost: tuple[float, ...], known: float | None
) -> None:
    assert moving_costs(slowed(*lost)).lost_share == pytest.approx(known)


@pytest.mark.parametrize("lost", [0.0, 0.05, 0.3])
def test_the_slowdown_of_made_up_steps_is_found(lost: float) -> None:
    found = [compared(PLAN, [PLAN], *steps_of(PLAN, lost, 0.05, seed)) for seed in range(8)]
    assert all(6 <= plan.lost_steps <= 10 for plan in found)
    assert moving_costs(found).lost_share == pytest.approx(lost, abs=0.03)


def test_both_sides_of_a_plan_count_alike_where_it_made_steps_faster() -> None:
    step_T, us_T = steps_of(PLAN, 0.0, 0.0)
    us_T[121:] *= 0.8
    assert compared(PLAN, [PLAN], step_T, us_T).lost_share == pytest.approx(0.1)


def test_only_the_steps_that_a_transfer_took_are_taken_for_its_own() -> None:
    # 25 ms of 10 ms steps: the last ones before boundary 116; votes go on before them.
    plan = SwitchedPlan(100, 121, (Switch(0.01, 0.025, 0.001, 100, 116),))
    step_T, us_T = np.arange(200.0), np.full(200, 10_000.0)
    us_T[113:116] = 20_000.0
    found = compared(plan, [plan], step_T, us_T)
    assert (found.lost_share, found.lost_steps) == (0.5, 2)


def test_waits_unknown_times_and_other_plans_are_no_measure() -> None:
    step_T, us_T = steps_of(PLAN, 0.1, 0.0)
    us_T[103] = 5e6
    us_T[130:140] = np.nan
    us_T[140:190] = 30_000.0
    other = SwitchedPlan(140, 190, ())
    found = compared(PLAN, [PLAN, other], step_T, us_T)
    assert found.lost_share == pytest.approx(0.1)
    for unknown_T in (np.full(200, np.nan), np.where((step_T < 100) | (step_T >= 121), np.nan, us_T)):
        assert compared(PLAN, [PLAN], step_T, unknown_T) is PLAN


def test_less_that_is_seen_later_replaces_nothing() -> None:
    found = compared(PLAN, [PLAN], *steps_of(PLAN, 0.1, 0.0))
    step_T, us_T = steps_of(PLAN, 0.3, 0.0)
    assert compared(found, [found], step_T[110:], us_T[110:]) is found


_SECONDS = st.floats(0, 1e7) | st.just(math.nan)
_SWITCHES = st.builds(Switch, _SECONDS, _SECONDS, _SECONDS, st.integers(0, 1 << 40), st.integers(0, 1 << 40))


@given(
    st.lists(_SWITCHES, max_size=8), st.lists(st.tuples(st.floats(-1e12, 1), st.integers(1, 64)), max_size=8)
)
def test_whatever_is_reported_costs_are_bounded(
    switches: list[Switch], seen: list[tuple[float, int]]
) -> None:
    plans = [SwitchedPlan(0, 1, (), lost, steps) for lost, steps in seen]
    costs = moving_costs([SwitchedPlan(0, 1, tuple(switches)), *plans])
    assert costs.expert_seconds is None or 1e-6 <= costs.expert_seconds <= 60
    assert costs.commit_seconds is None or 0 <= costs.commit_seconds <= 10
    assert costs.lost_share is None or 0 <= costs.lost_share <= MAX_LOST


@given(st.floats(1e-3, 1.0), st.floats(0, 1e7), st.integers(4, 12))
def test_one_switch_in_many_does_not_move_a_median_beyond_the_others(
    honest: float, wild: float, others: int
) -> None:
    costs = moving_costs([switched(*[honest] * others, wild)])
    assert costs.expert_seconds == pytest.approx(honest)


@pytest.mark.parametrize("freedom", [3, 4, 7, 30, 1000])
def test_the_quantile_of_student_s_t_is_scipy_s(freedom):
    assert student_t_975(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=2e-3)
