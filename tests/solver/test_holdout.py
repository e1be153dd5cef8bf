"""Old heat fades only where that forecasts better, and the cheapest course on the newer half is recommended."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from eplb_service.solver import holdout as module
from eplb_service.solver.holdout import (
    CLEARLY_BETTER,
    PRICE_LADDER,
    Forecast,
    choose_forecast,
    fading,
    forecast_heat,
    halves_of,
    holdout,
    is_sure,
)
from eplb_service.solver.model import (
    EVEN,
    FRESH,
    KEEP,
    LOCAL,
    RULE,
    SOLVED,
    TABLES,
    Candidate,
    Deployed,
    Layer,
    heat_of,
    homes,
)
from eplb_service.solver.tables.log2phy import fixed_rule, slots_by_expert
from tests.solver import asked
from tests.solver.layers_of import Case, cases, heat_of_kind, shares_of_sources
from tests.solver.placed_layer import random_placement
from tests.solver.slow import forecast as slow
from tests.solver.slow import heat
from tests.solver.slow import tables as slow_tables

SETTINGS = settings(max_examples=60)
SEEDS = st.integers(0, 2**32 - 1)
SEARCH = asked.SEARCH._replace(
    move_price=0.004, tree_groups=2, tree_beam=1, tree_leaves=1, local_search_steps=200
)
SPLITS = st.sampled_from((EVEN, RULE, SOLVED))


def deployment(case: Case, sources: int, seed: int) -> Deployed:
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    table_GE = fixed_rule(*slots_by_expert(phy2log_RS, case.experts), sources)
    share_GE = shares_of_sources(sources, case.experts, "uneven", seed)
    one_node_R, one_node_G = np.zeros(case.ranks, dtype=np.int32), np.zeros(sources, dtype=np.int32)
    home_ER = homes(phy2log_RS, case.experts)
    return Deployed(phy2log_RS, table_GE, share_GE, home_ER, one_node_R, one_node_G)


NEWER = SimpleNamespace(share_N=np.full(2, 0.5))


class Script:
    """Takes the place of the candidates: what each course makes, and what it costs on either half, is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pars: dict, moves: dict) -> None:
        self.pars, self.moves = pars, moves
        self.asked: list[tuple[str, int]] = []
        for name in ("improved", "from_scratch", "with_tables", "peaks_on"):
            monkeypatch.setattr(module, name, getattr(self, name))

    def improved(self, layer, search, price_K):
        assert layer.heat == "older, leaning"
        np.testing.assert_allclose(price_K, search.move_price * PRICE_LADDER)
        return np.array([[[LOCAL, rung]] for rung in range(len(price_K))])

    def from_scratch(self, layer, search):
        assert layer.heat == "older, leaning"
        return Candidate(np.array([[FRESH, 0]]), None, 0.0, 0)

    def with_tables(self, phy2log_RS, layer, params):
        assert layer.heat == "older, leaning"
        kind, rung = phy2log_RS[0].tolist() if phy2log_RS is not layer.deployed.phy2log_RS else (TABLES, 0)
        self.asked.append((kind, rung))
        return Candidate(phy2log_RS, (kind, rung), 0.0, self.moves.get((kind, rung), 0))

    def peaks_on(self, candidate, layer, tables):
        assert layer.heat is NEWER
        par = self.pars[candidate.log2phy_GE if isinstance(candidate.log2phy_GE, tuple) else KEEP]
        return np.full(2, par)


@settings(max_examples=60)
@given(st.data(), SPLITS, st.sampled_from((0, 100)), st.booleans(), st.sampled_from((0.0, 0.01, 0.05)))
def test_the_course_is_the_cheapest_of_all(
    data: st.DataObject, tables: int, steps: int, fresh: bool, min_gain: float
) -> None:
    courses = (
        [(TABLES, 0)]
        + ([(LOCAL, rung) for rung in range(len(PRICE_LADDER))] if steps else [])
        + ([(FRESH, 0)] if fresh else [])
    )
    par = st.integers(100, 140).map(lambda hundredths: hundredths / 100)
    pars = {course: data.draw(par) for course in [KEEP, *courses]}
    moves = {rung: 0 if rung == (TABLES, 0) else data.draw(st.integers(0, 9)) for rung in courses}
    search = SEARCH._replace(tables=tables, local_search_steps=steps)
    deployed = deployment(Case(2, 2, np.ones((4, 3))), 2, 0)
    with pytest.MonkeyPatch.context() as patch:
        script = Script(patch, pars, moves)
        patch.setattr(
            module,
            "forecast_heat",
            lambda heat, forecast, ahead: f"{heat}, leaning" if ahead == 1.0 else None,
        )
        halves = type("Halves", (), {"older": "older", "newer": NEWER})
        found = holdout(halves, Forecast(4.0, 0.1), deployed, search, min_gain, fresh)
    assert script.asked == courses
    costs = [pars[course] + search.move_price * moves[course] for course in courses]
    chosen = slow.recommended(pars[KEEP], costs, min_gain)
    if chosen < 0:
        assert found == (KEEP, search.move_price, 0.0)
    else:
        kind, rung = courses[chosen]
        price = search.move_price * PRICE_LADDER[rung] if kind == LOCAL else search.move_price
        assert found.kind == kind
        assert found.price == pytest.approx(price)


@settings(max_examples=60)
@given(cases(most_ranks=6, most_slots=4), SPLITS, st.integers(0, 2**32 - 1), st.sampled_from((0.0, 0.02)))
def test_what_is_recommended_would_have_paid(case: Case, tables: int, seed: int, min_gain: float) -> None:
    assume(len(case.heat_NE) >= 4)
    deployed = deployment(case, case.ranks, seed)
    halves = halves_of(case.heat_NE, case.ranks)
    forecast = choose_forecast(halves, np.array([np.inf, 1.0]))
    search = SEARCH._replace(tables=tables)
    course = holdout(halves, forecast, deployed, search, min_gain, True)
    again = holdout(halves, forecast, deployed, search, min_gain, True)
    assert course == again
    if course.kind == KEEP:
        return
    # Whatever was fitted to the older half is priced on the newer one, by every episode and source.
    older = Layer(module.forecast_heat(halves.older, forecast, 1.0), deployed)
    if course.kind == TABLES:
        found_RS = deployed.phy2log_RS
    elif course.kind == LOCAL:
        found_RS = module.improved(older, search, np.array([course.price]))[0]
    else:
        found_RS = module.from_scratch(older, search).phy2log_RS
    found = module.with_tables(found_RS, older, search)
    newer = halves.newer.scaled_EN.astype(float), halves.newer.share_N.astype(float)

    def par(phy2log_RS: np.ndarray, table_GE: np.ndarray) -> float:
        if tables == EVEN:
            return heat.mean_of_max(*newer, phy2log_RS, heat.even_shares(phy2log_RS))
        return slow_tables.tables_par(phy2log_RS, table_GE, *newer, deployed.share_GE.astype(float))

    cost = par(found.phy2log_RS, found.log2phy_GE) + search.move_price * found.moves
    if course.kind != LOCAL:
        # A walk for one price may part from a walk for all three.
        assert cost < par(deployed.phy2log_RS, deployed.log2phy_GE) - min_gain + 1e-5
    assert found.moves == np.count_nonzero(found.phy2log_RS != deployed.phy2log_RS)


def test_fresh_is_tried_only_where_it_may_pay() -> None:
    case = Case(4, 3, np.random.default_rng(3).gamma(0.3, 100, 9) * np.ones((6, 1)))
    deployed = deployment(case, 4, 3)
    halves = halves_of(case.heat_NE, 4)
    free = SEARCH._replace(move_price=0.0)
    kinds = {
        fresh: holdout(
            halves, Forecast(np.inf, 0.0), deployed, free._replace(local_search_steps=0), 0.0, fresh
        ).kind
        for fresh in (True, False)
    }
    assert kinds == {True: FRESH, False: TABLES}


HALF_LIVES = st.lists(st.sampled_from((math.inf, 16.0, 4.0, 1.0, 0.3)), min_size=1, max_size=4, unique=True)
RANKS = 4


def drifting(episodes: int, experts: int, seed: int) -> np.ndarray:
    """Heat that walks, jumps or stays, with some episodes empty."""
    generator = np.random.default_rng(seed)
    heat_NE = heat_of_kind("skewed", episodes, experts, generator)
    if seed % 3 == 0:
        heat_NE[episodes // 3 :] = heat_of_kind("skewed", episodes - episodes // 3, experts, generator)
    if seed % 3 == 1:
        heat_NE *= np.exp(np.cumsum(generator.normal(0, 0.5, heat_NE.shape), axis=0))
    heat_NE[generator.random(episodes) < 0.2] = 0
    return heat_NE


def as_floats(of_heat) -> tuple[np.ndarray, np.ndarray]:
    return of_heat.scaled_EN.astype(float), of_heat.share_N.astype(float)


@SETTINGS
@given(st.integers(1, 40), st.sampled_from((math.inf, 16.0, 1.0, 0.3)))
def test_weights_halve_every_half_life(episodes: int, half_life: float) -> None:
    np.testing.assert_allclose(fading(episodes, half_life), slow.fading(episodes, half_life), rtol=1e-12)


@SETTINGS
@example(4, 4, 5804429, [1.0, math.inf])
@given(st.integers(4, 12), st.integers(1, 6), SEEDS, HALF_LIVES)
def test_the_half_life_is_the_one_that_forecast_best(
    episodes: int, experts: int, seed: int, half_lives: list[float]
) -> None:
    heat_NE = drifting(episodes, experts, seed)
    halves = halves_of(heat_NE, RANKS)
    for half, part_NE in zip(halves, (heat_NE[: episodes // 2], heat_NE[episodes // 2 :]), strict=True):
        wanted = heat.normalise(part_NE, np.ones(len(part_NE)), RANKS)
        for one, other in zip(as_floats(half), wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    found = choose_forecast(halves, np.array(half_lives))
    errors = slow.squared_errors(*map(as_floats, halves), half_lives)
    if found.half_life == half_lives[0]:
        assert found.wander == 0
        silent = not halves.newer.demand.mean_E.any()
        assert silent or min(errors) >= 0.999 * CLEARLY_BETTER * errors[0] - 1e-9
        return
    chosen = half_lives.index(found.half_life)
    assert errors[chosen] <= 1.001 * min(errors) + 1e-9
    assert errors[chosen] <= 1.001 * CLEARLY_BETTER * errors[0] + 1e-9
    newer_E = halves.newer.scaled_EN @ halves.newer.share_N
    assert found.wander * (newer_E**2).sum() == pytest.approx(errors[chosen], rel=1e-3, abs=1e-6)


@SETTINGS
@given(
    st.integers(1, 8),
    st.integers(1, 5),
    SEEDS,
    st.sampled_from((math.inf, 4.0, 0.5)),
    st.sampled_from((0.5, 2.0)),
)
def test_leaning_heat_follows_its_newest_episodes(
    episodes: int, experts: int, seed: int, half_life: float, ahead: float
) -> None:
    seen = heat_of(drifting(episodes, experts, seed), RANKS)
    found = forecast_heat(seen, Forecast(half_life, 0.3), ahead)
    scaled_EN, share_N = as_floats(seen)
    np.testing.assert_array_equal(found.scaled_EN, seen.scaled_EN)
    if math.isinf(half_life) or share_N.sum() == 0:
        assert found is seen
        return
    mean_E = slow.faded_mean(scaled_EN, share_N, half_life)
    np.testing.assert_allclose(found.demand.mean_E, mean_E, rtol=1e-5, atol=1e-6)
    assert found.share_N.sum() == pytest.approx(1.0, rel=1e-5)
    wanted_EE = seen.demand.gram_EE + np.diag(ahead * 0.3 * mean_E**2)
    np.testing.assert_allclose(found.demand.gram_EE, wanted_EE, rtol=1e-4, atol=1e-5)


def test_stationary_heat_does_not_fade_and_a_jump_does() -> None:
    generator = np.random.default_rng(0)
    steady_NE = generator.multinomial(4000, generator.dirichlet(np.ones(12)), 16).astype(float)
    half_life_H = np.array([math.inf, 4.0, 1.0])
    assert choose_forecast(halves_of(steady_NE, RANKS), half_life_H).half_life == math.inf
    jumping_NE = steady_NE.copy()
    jumping_NE[:6] = steady_NE[:6, ::-1]
    assert choose_forecast(halves_of(jumping_NE, RANKS), half_life_H).half_life == 1.0


def test_what_a_change_won_must_be_above_its_price_by_its_error() -> None:
    share_N = np.array([0.25, 0.25, 0.0, 0.25, 0.25], dtype=np.float32)
    gain_N = np.array([0.3, 0.1, -9.0, 0.3, 0.1], dtype=np.float32)
    error = np.std([0.3, 0.1, 0.3, 0.1], ddof=1) / 2
    for spent in (0.2 - 1.5 * error, 0.2 - 0.5 * error, 0.2 + error):
        assert is_sure(gain_N, share_N, spent, 0.0)
        assert is_sure(gain_N, share_N, spent, 1.0) == (spent < 0.2 - error)
    assert not is_sure(gain_N, np.zeros(5, dtype=np.float32), -1.0, 1.0)


def test_a_gain_within_its_error_moves_nothing() -> None:
    generator = np.random.default_rng(1)
    case = Case(4, 3, generator.gamma(0.3, 100, (8, 9)))
    deployed = deployment(case, 4, 3)
    halves = halves_of(case.heat_NE, 4)
    free = SEARCH._replace(move_price=0.0, local_search_steps=50)
    sure = holdout(halves, Forecast(np.inf, 0.0), deployed, free._replace(sureness=50.0), 0.0, True)
    taken = holdout(halves, Forecast(np.inf, 0.0), deployed, free._replace(sureness=0.0), 0.0, True)
    assert sure.kind == KEEP
    assert taken.kind != KEEP
    assert taken.optimism >= 0.0
