"""The local search knows each rank's pressure, and finds the best of all legal swaps and exchanges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.solver.search.evaluation import hottest_of, pressure, smooth_max_of, smooth_peak
from eplb_service.solver.search.exchanges import best_exchange, exchange
from eplb_service.solver.search.neighbourhood import SCRATCH_ROWS, best_swap, swap
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import PlacedLayer
from tests.solver.search.test_construction import assert_sums_hold
from tests.solver.slow import heat, steps

SETTINGS = settings(max_examples=50)
SEEDS = st.integers(0, 2**32 - 1)
Z = st.sampled_from((0.0, 1.0))
BOUND = 1e-3


@SETTINGS
@given(
    st.lists(st.tuples(st.floats(0, 8), st.floats(0, 9)), min_size=1, max_size=9), st.sampled_from((0.0, 1.5))
)
def test_pressures_follow_the_risks(ranks: list[tuple[float, float]], z: float) -> None:
    load_R, variance_R = np.array(ranks, dtype=np.float32).T.copy()
    now = smooth_max_of(load_R, variance_R, z)
    risk_R = load_R.astype(float) + z * np.sqrt(variance_R.astype(float))
    base, span = steps.scale_of(risk_R)
    assert now.peak == pytest.approx(risk_R.max(), rel=1e-6)
    # The 8-norm of R equal ranks lies R**(1/8) times as far above the base.
    assert smooth_peak(now) == pytest.approx(steps.smooth_peak(risk_R), abs=1e-4)
    assert smooth_peak(now) >= risk_R.max() - 1e-5
    if span > 1e-2:
        assert (now.base, 1 / now.scale) == pytest.approx((base, span), rel=1e-3, abs=1e-4)
        wanted_R = [steps.pressure_of(np.array([risk]), base, span) for risk in risk_R]
        np.testing.assert_allclose(now.of_R, wanted_R, atol=4e-3)
        found = pressure(np.float32(risk_R[0] + 1), now.base, now.scale)
        assert found == pytest.approx(steps.pressure_of(risk_R[:1] + 1, base, span), rel=4e-3, abs=4e-3)


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=9))
def test_hottest_is_the_first_of_those_not_stuck(ranks: list[tuple[int, bool]]) -> None:
    load_R = np.array([load for load, _ in ranks], dtype=np.float32)
    now = smooth_max_of(load_R, np.zeros_like(load_R), 1.0)
    stuck_R = np.array([stuck for _, stuck in ranks])
    free = [r for r, (_, stuck) in enumerate(ranks) if not stuck]
    wanted = max(free, key=lambda r: (now.of_R[r], -r), default=-1)
    assert hottest_of(now, stuck_R) == wanted


class Hot:
    """A placed layer, the smooth maximum that a step is judged at, one rank to relieve, and what rounding may hide."""

    def __init__(self, case: Case, z: float, seed: int) -> None:
        self.layer = PlacedLayer(case, z, seed)
        self.assignment = self.layer.assignment()
        self.now = smooth_max_of(self.assignment.load_R, self.assignment.variance_R, z)
        self.rank = (
            int(self.layer.generator.integers(case.ranks)) if seed % 3 == 0 else int(self.now.of_R.argmax())
        )
        _, span = steps.scale_of(self.layer.risks())
        self.blurred = self.layer.rounding / span
        self.home_ER = self.layer.generator.random((case.experts, case.ranks)) < 0.5

    def away(self) -> int:
        return steps.slots_away(self.assignment.phy2log_RS, self.home_ER)

    def tolerance(self, gain: float) -> float:
        """Rounding of a pressure near 1, and of the larger ones that a bad step makes."""
        return 1e-3 + 16 * self.blurred * (1 + abs(gain))


def assert_is_best(
    hot: Hot, gains: dict[tuple[int, int, int], float], step: tuple[int, int, int], won: float
) -> None:
    """The step found is legal, worth what it says, and no other is worth more; none only where none is."""
    best = max(gains.values(), default=0.0)
    if step == (-1, -1, -1):
        assert best <= BOUND + hot.tolerance(best)
        return
    assert step in gains
    assert won > BOUND
    assert won == pytest.approx(gains[step], abs=hot.tolerance(best))
    assert gains[step] >= best - 2 * hot.tolerance(best)


@SETTINGS
@given(cases(most_ranks=6, most_slots=4), Z, SEEDS)
def test_best_swap_is_the_best_of_all(case: Case, z: float, seed: int) -> None:
    hot = Hot(case, z, seed)
    layer, assignment = hot.layer, hot.assignment
    scratch = np.full((SCRATCH_ROWS, case.ranks * case.slots), np.nan, dtype=np.float32)
    *step, won = best_swap(assignment, layer.demand, hot.now, hot.rank, z, BOUND, scratch)
    if hot.blurred < 1e-2:
        gains = steps.swap_gains(layer.phy2log_RS, layer.share_RS, hot.rank, *layer.heat, z)
        assert_is_best(hot, gains, tuple(step), won)
    if step[0] >= 0:
        away = hot.away()
        farther = swap(assignment, layer.demand, hot.home_ER, hot.rank, *step)
        wanted_RS, share_RS = steps.swapped(layer.phy2log_RS, layer.share_RS, hot.rank, step)
        np.testing.assert_array_equal(assignment.phy2log_RS, wanted_RS)
        np.testing.assert_allclose(
            assignment.share_ER[wanted_RS, np.arange(case.ranks)[:, None]], share_RS, rtol=1e-6
        )
        assert farther == hot.away() - away
        assert_sums_hold(assignment, layer)


@SETTINGS
@given(cases(most_ranks=6, most_slots=4), Z, SEEDS)
def test_best_exchange_is_the_best_of_all(case: Case, z: float, seed: int) -> None:
    hot = Hot(case, z, seed)
    layer, assignment = hot.layer, hot.assignment
    *step, won = best_exchange(assignment, layer.demand, hot.now, hot.rank, z, BOUND)
    if hot.blurred < 1e-2:
        # A gainer that takes no more than the bound away by itself is passed over.
        relief = BOUND + hot.tolerance(won)
        gains = steps.exchange_gains(layer.phy2log_RS, hot.rank, *layer.heat, z, relief)
        if step[0] >= 0:
            every = steps.exchange_gains(layer.phy2log_RS, hot.rank, *layer.heat, z)
            gains[tuple(step)] = every[tuple(step)]
        assert_is_best(hot, gains, tuple(step), won)
    if step[0] >= 0:
        away, expert = hot.away(), layer.phy2log_RS[hot.rank, step[0]]
        farther = exchange(assignment, layer.demand, hot.home_ER, expert, step[1], step[2])
        wanted_RS, share_RS = steps.exchanged(layer.phy2log_RS, hot.rank, step)
        np.testing.assert_array_equal(assignment.phy2log_RS, wanted_RS)
        np.testing.assert_array_equal(
            assignment.replicas_E, np.bincount(wanted_RS.ravel(), minlength=case.experts)
        )
        np.testing.assert_allclose(
            assignment.share_ER[wanted_RS, np.arange(case.ranks)[:, None]], share_RS, rtol=1e-5
        )
        assert farther == hot.away() - away
        assert_sums_hold(assignment, layer)


def test_a_swap_helps_two_ranks_that_are_hot_at_different_times() -> None:
    # Ranks 0 and 1 hold what bursts together; the means alone see nothing to gain.
    case = Case(2, 2, np.array([[9.0, 9.0, 1.0, 1.0], [1.0, 1.0, 9.0, 9.0]]))
    layer = PlacedLayer(case, 1.0)
    layer.phy2log_RS = np.array([[0, 1], [2, 3]], dtype=np.int32)
    layer.share_RS = heat.even_shares(layer.phy2log_RS)
    assignment = layer.assignment()
    scratch = np.empty((SCRATCH_ROWS, 4), dtype=np.float32)
    slot, rank, _, won = best_swap(
        assignment,
        layer.demand,
        smooth_max_of(assignment.load_R, assignment.variance_R, 1.0),
        0,
        1.0,
        BOUND,
        scratch,
    )
    assert (slot >= 0, rank) == (True, 1)
    assert won > 0.5
