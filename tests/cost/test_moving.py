"""What moves cost is estimated from switches and steps, says how sure it is, and no single report moves it far."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from eplb_service.cost import moving
from eplb_service.cost.moving import (
    MOST_LOST,
    NOTHING_MEASURED,
    WIDEST,
    Slowdown,
    Switch,
    SwitchedPlan,
    calm_steps,
    moving_costs,
    slowdown_of,
)
from eplb_service.placement import Float64


def switch(seconds: float = 0.02, commit: float = 0.001, after: int = 10, by: int = 15) -> Switch:
    return Switch(seconds, 2 * seconds, commit, after, by)


def slowdown(lost: float, steps: int = 4) -> Slowdown:
    return Slowdown(lost, steps)


def steps_of(plan: SwitchedPlan, lost: float, noise: float, seed: int = 0) -> tuple[Float64, Float64]:
    """200 steps of 10 ms, those in which a layer's weights travel longer so that ``lost`` of their time is lost."""
    step_T = np.arange(200.0)
    us_T = 10_000.0 * np.exp(noise * np.random.default_rng(seed).standard_normal(200))
    for one in plan.switches:
        us_T[one.after_step + 1 : one.by_step] /= 1 - lost
    return step_T, us_T


# Two layers; each's weights travel in all steps between its boundaries.
PLAN = SwitchedPlan(3, 100, 121, (Switch(0.05, 0.06, 0.001, 100, 106), Switch(0.05, 0.06, 0.001, 110, 116)))


def test_nothing_is_known_of_nothing_or_of_too_little() -> None:
    assert moving_costs([], []) == NOTHING_MEASURED
    few = moving_costs([switch()] * 3, [slowdown(0.1)] * 3)
    assert (few.expert_seconds, few.lost_share, few.commit_seconds) == (None, None, None)
    assert (few.transfers, few.commits, few.plans) == (3, 3, 3)


def test_medians_of_switches_and_the_mean_of_plans_are_the_costs() -> None:
    found = moving_costs(
        [switch(0.02, 0.001), switch(0.03, 0.002), switch(0.02, 0.003), switch(0.02, 0.002)],
        [slowdown(0.1, 4), slowdown(0.12, 4), slowdown(0.11, 8), slowdown(0.1, 4)],
    )
    assert found.expert_seconds == pytest.approx(0.02)
    assert found.commit_seconds == pytest.approx(0.002)
    assert found.lost_share == pytest.approx((0.1 + 0.12 + 2 * 0.11 + 0.1) / 5)
    assert found.lost_low < found.lost_share < found.lost_high
    assert not found.bounded


def test_layers_that_moved_nothing_do_not_count_as_transfers() -> None:
    tables_only = Switch(math.nan, math.nan, 0.001, 10, 12)
    found = moving_costs([tables_only] * 4, [])
    assert (found.transfers, found.expert_seconds) == (0, None)
    assert found.commit_seconds == pytest.approx(0.001)


def test_a_slowdown_that_scatters_too_widely_says_nothing() -> None:
    apart = [slowdown(lost) for lost in (0.0, 0.5, -0.3, 0.4)]
    assert moving_costs([], apart).lost_share is None
    assert moving_costs([], [slowdown(lost) for lost in (0.1, 0.11, 0.09, 0.1)]).lost_share is not None


def test_steps_that_seem_faster_while_weights_travel_lose_nothing() -> None:
    found = moving_costs([], [slowdown(lost) for lost in (-0.01, -0.02, 0.0, -0.01)])
    assert found.lost_share == 0.0
    assert not found.bounded
    assert found.lost_low < 0 <= found.lost_high


@pytest.mark.parametrize("lost", [0.0, 0.05, 0.3])
def test_the_slowdown_of_made_up_steps_is_found(lost: float) -> None:
    found = []
    for seed in range(8):
        step_T, us_T = steps_of(PLAN, lost, 0.05, seed)
        before = calm_steps(step_T[:100], us_T[:100], [])
        one = slowdown_of(PLAN, [], before, step_T, us_T)
        assert one is not None
        assert 6 <= one.steps <= 10
        found.append(one)
    costs = moving_costs([], found)
    assert costs.lost_share is not None
    assert costs.lost_low - 0.01 <= lost <= costs.lost_high + 0.01
    assert costs.lost_share == pytest.approx(lost, abs=0.03)


def test_both_sides_of_a_plan_count_alike_where_it_made_steps_faster() -> None:
    step_T, us_T = steps_of(PLAN, 0.0, 0.0)
    us_T[PLAN.end_step :] *= 0.8
    before = calm_steps(step_T[:100], us_T[:100], [])
    both = slowdown_of(PLAN, [], before, step_T, us_T)
    after = slowdown_of(PLAN, [], None, step_T, us_T)
    assert both is not None
    assert after is not None
    assert both.lost_share == pytest.approx(0.1)
    assert after.lost_share == pytest.approx(0.2)


def test_only_the_steps_that_a_transfer_took_are_taken_for_its_own() -> None:
    # 25 ms of 10 ms steps: the last three before boundary 116; votes go on before them.
    plan = SwitchedPlan(1, 100, 121, (Switch(0.01, 0.025, 0.001, 100, 116),))
    step_T, us_T = np.arange(200.0), np.full(200, 10_000.0)
    us_T[113:116] = 20_000.0
    found = slowdown_of(plan, [], None, step_T, us_T)
    assert found is not None
    assert found == (0.5, 2)


def test_waits_for_requests_and_unknown_times_are_no_measure() -> None:
    step_T, us_T = steps_of(PLAN, 0.1, 0.0)
    us_T[103] = 5e6
    us_T[130:140] = np.nan
    found = slowdown_of(PLAN, [], None, step_T, us_T)
    assert found is not None
    assert found.lost_share == pytest.approx(0.1)
    assert slowdown_of(PLAN, [], None, step_T, np.full(200, np.nan)) is None
    assert calm_steps(step_T, np.full(200, np.nan), []) is None


def test_other_plans_steps_are_not_calm() -> None:
    step_T, us_T = np.arange(200.0), np.full(200, 10_000.0)
    us_T[121:] = 30_000.0
    other = SwitchedPlan(4, 121, 200, ())
    assert slowdown_of(PLAN, [other], None, step_T, us_T) is None
    calm = calm_steps(step_T, us_T, [PLAN, other])
    assert calm == 10_000.0


@pytest.mark.parametrize("freedom", [3, 4, 7, 15, 63])
def test_the_expansion_of_students_t_is_close(freedom: int) -> None:
    assert moving._student(freedom) == pytest.approx(student.ppf(0.975, freedom), rel=0.04)


_ANY = st.floats(allow_nan=True, allow_infinity=False, width=64)
_SWITCHES = st.lists(
    st.builds(
        Switch,
        st.floats(0, 1e7) | st.just(math.nan),
        st.floats(0, 1e7) | st.just(math.nan),
        st.floats(0, 1e7) | st.just(math.nan),
        st.integers(0, 1 << 40),
        st.integers(0, 1 << 40),
    ),
    max_size=8,
)


@given(
    _SWITCHES,
    st.lists(st.tuples(st.floats(1e-3, 1e12), st.floats(1e-3, 1e12), st.integers(1, 64)), max_size=8),
)
def test_whatever_is_reported_costs_are_bounded(
    switches: list[Switch], samples: list[tuple[float, float, int]]
) -> None:
    costs = moving_costs(switches, [Slowdown(1 - calm / us, steps) for us, calm, steps in samples])
    assert costs.expert_seconds is None or 1e-6 <= costs.expert_seconds <= 60
    assert costs.commit_seconds is None or 0 <= costs.commit_seconds <= 10
    if costs.lost_share is not None:
        assert 0 <= costs.lost_share <= MOST_LOST
        assert costs.lost_high - costs.lost_low <= 2 * WIDEST + 1e-9


@given(st.floats(1e-3, 1.0), st.floats(0, 1e7), st.integers(4, 12))
def test_one_switch_in_many_does_not_move_a_median_beyond_the_others(
    honest: float, wild: float, others: int
) -> None:
    costs = moving_costs([switch(honest)] * others + [switch(wild)], [])
    assert costs.expert_seconds == pytest.approx(honest)
