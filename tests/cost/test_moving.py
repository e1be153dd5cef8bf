"""Move costs are estimated from switches and steps, if the data suffice. Single outliers change little."""

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

# Two layers. Each one's transfer takes all the steps between its two boundaries.
PLAN = SwitchedPlan(100, 121, (Switch(0.05, 0.06, 0.001, 100, 106), Switch(0.05, 0.06, 0.001, 110, 116)))


def switched(*seconds: float, commit: float = 0.001) -> SwitchedPlan:
    return SwitchedPlan(0, 1, tuple(Switch(expert, 2 * expert, commit, 0, 1) for expert in seconds))


def slowed(*lost: float, steps: int = 4) -> list[SwitchedPlan]:
    return [SwitchedPlan(0, 1, (), share, steps) for share in lost]


def steps_of(plan: SwitchedPlan, lost: float, noise: float, seed: int = 0) -> tuple[Float64, Float64]:
    """Return 200 steps of 10 ms; steps during a transfer are longer, so that they lose the fraction ``lost``."""
    us_T = 10_000.0 * np.exp(noise * np.random.default_rng(seed).standard_normal(200))
    for switch in plan.switches:
        us_T[switch.after_step + 1 : switch.by_step] /= 1 - lost
    return np.arange(200.0), us_T


def test_too_few_measurements_give_no_estimate() -> None:
    assert moving_costs([]) == NOTHING_MEASURED
    assert moving_costs([switched(0.02)] * 3 + slowed(0.1, 0.1, 0.1)) == NOTHING_MEASURED


def test_costs_are_medians_of_switches_and_means_of_plans() -> None:
    plans = [switched(0.02, 0.03, commit=0.001), switched(0.02, 0.02, commit=0.003), *slowed(0.1, 0.12, 0.1)]
    measured = moving_costs([*plans, *slowed(0.11, steps=8)])
    assert measured.expert_seconds == pytest.approx(0.02)
    assert measured.commit_seconds == pytest.approx(0.002)
    assert measured.lost_share == pytest.approx((0.1 + 0.12 + 2 * 0.11 + 0.1) / 5)


@pytest.mark.parametrize(
    ("lost", "expected"),
    [((0.0, 0.5, -0.3, 0.4), None), ((0.1, 0.11, 0.09, 0.1), 0.1), ((-0.01, -0.02, 0.0, -0.01), 0.0)],
)
def test_a_slowdown_counts_only_if_plans_agree_and_is_never_negative(
    lost: tuple[float, ...], expected: float | None
) -> None:
    assert moving_costs(slowed(*lost)).lost_share == pytest.approx(expected)


@pytest.mark.parametrize("lost", [0.0, 0.05, 0.3])
def test_the_slowdown_of_simulated_steps_is_recovered(lost: float) -> None:
    measured = [compared(PLAN, [PLAN], *steps_of(PLAN, lost, 0.05, seed)) for seed in range(8)]
    assert all(6 <= plan.lost_steps <= 10 for plan in measured)
    assert moving_costs(measured).lost_share == pytest.approx(lost, abs=0.03)


def test_steps_before_and_after_a_plan_have_equal_weight() -> None:
    step_T, us_T = steps_of(PLAN, 0.0, 0.0)
    us_T[121:] *= 0.8
    assert compared(PLAN, [PLAN], step_T, us_T).lost_share == pytest.approx(0.1)


def test_only_the_steps_during_the_transfer_are_attributed_to_it() -> None:
    # A transfer of 25 ms at 10 ms per step covers the last steps before boundary 116. The steps before those are
    # for voting.
    plan = SwitchedPlan(100, 121, (Switch(0.01, 0.025, 0.001, 100, 116),))
    step_T = np.arange(200.0)
    us_T = np.full(200, 10_000.0)
    us_T[113:116] = 20_000.0
    measured = compared(plan, [plan], step_T, us_T)
    assert (measured.lost_share, measured.lost_steps) == (0.5, 2)


def test_idle_waits_unknown_times_and_other_plans_are_excluded() -> None:
    step_T, us_T = steps_of(PLAN, 0.1, 0.0)
    us_T[103] = 5e6
    us_T[130:140] = np.nan
    us_T[140:190] = 30_000.0
    other_plan = SwitchedPlan(140, 190, ())
    measured = compared(PLAN, [PLAN, other_plan], step_T, us_T)
    assert measured.lost_share == pytest.approx(0.1)
    for unknown_T in (np.full(200, np.nan), np.where((step_T < 100) | (step_T >= 121), np.nan, us_T)):
        assert compared(PLAN, [PLAN], step_T, unknown_T) is PLAN


def test_a_measurement_on_fewer_steps_does_not_replace_an_earlier_one() -> None:
    measured = compared(PLAN, [PLAN], *steps_of(PLAN, 0.1, 0.0))
    step_T, us_T = steps_of(PLAN, 0.3, 0.0)
    assert compared(measured, [measured], step_T[110:], us_T[110:]) is measured


_SECONDS = st.floats(0, 1e7) | st.just(math.nan)
_SWITCHES = st.builds(Switch, _SECONDS, _SECONDS, _SECONDS, st.integers(0, 1 << 40), st.integers(0, 1 << 40))


@given(
    st.lists(_SWITCHES, max_size=8), st.lists(st.tuples(st.floats(-1e12, 1), st.integers(1, 64)), max_size=8)
)
def test_costs_are_bounded_for_any_report(switches: list[Switch], losses: list[tuple[float, int]]) -> None:
    plans = [SwitchedPlan(0, 1, (), lost, steps) for lost, steps in losses]
    costs = moving_costs([SwitchedPlan(0, 1, tuple(switches)), *plans])
    assert costs.expert_seconds is None or 1e-6 <= costs.expert_seconds <= 60
    assert costs.commit_seconds is None or 0 <= costs.commit_seconds <= 10
    assert costs.lost_share is None or 0 <= costs.lost_share <= MAX_LOST


@given(st.floats(1e-3, 1.0), st.floats(0, 1e7), st.integers(4, 12))
def test_one_outlier_does_not_move_the_median(typical: float, wild: float, typical_switches: int) -> None:
    costs = moving_costs([switched(*[typical] * typical_switches, wild)])
    assert costs.expert_seconds == pytest.approx(typical)


@pytest.mark.parametrize("freedom", [3, 4, 7, 30, 1000])
def test_the_quantile_of_students_t_matches_scipy(freedom):
    assert student_t_975(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=2e-3)
