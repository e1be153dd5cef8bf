"""The cheapest recommendation on the newer half is recommended, and only what surely pays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eplb_core.solver import layer as module
from eplb_core.solver.layer import _PRICE_LADDER, _holdout, is_sure
from eplb_core.solver.model import (
    EVEN,
    FRESH,
    KEEP,
    LOCAL,
    RULE,
    SOLVED,
    TABLES,
    Candidate,
    Layer,
    LayerLayout,
    SearchOptions,
    episodes_of,
    with_covariance,
)
from eplb_core.solver.window import Forecast, choose_forecast, halves_of
from tests.solver import asked
from tests.solver.layers_of import Case, cases, shares_of_sources
from tests.solver.placed_layer import deployed_on, random_placement
from tests.solver.slow import forecast as slow
from tests.solver.slow import heat
from tests.solver.slow import tables as slow_tables

SEARCH = asked.SEARCH._replace(tree_leaves=1, local_search_steps=200)
PRICE = 0.004
"""Peak-to-average ratio that one moved slot must win."""
SPLITS = st.sampled_from((EVEN, RULE, SOLVED))


def deployment(case: Case, sources: int, seed: int) -> LayerLayout:
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    return deployed_on(phy2log_RS, shares_of_sources(sources, case.experts, "uneven", seed))


NEWER = np.zeros((3, 2), dtype=np.float32), np.full(2, 0.5)


class Script:
    """Replaces the candidates: the placement of each action, its ratio, and its moves are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pars: dict, moves: dict, least_fresh: float) -> None:
        self.pars, self.moves, self.least_fresh = pars, moves, least_fresh
        self.asked: list[tuple[str, int]] = []
        for name in ("_shortlist_prices", "_least_fresh_cost", "from_scratch", "with_tables", "peaks_on"):
            monkeypatch.setattr(module, name, getattr(self, name.lstrip("_")))

    def shortlist_prices(self, layer, newer, search, slot_price, min_gain):
        assert layer.heat == "older, leaning"
        assert newer is NEWER
        assert slot_price == PRICE
        return [(8 * PRICE, np.array([[LOCAL, 0]])), (64 * PRICE, np.array([[LOCAL, 1]]))]

    def least_fresh_cost(self, layer, newer, search, slot_price):
        assert (layer.heat, slot_price) == ("older, leaning", PRICE)
        assert newer is NEWER
        return self.least_fresh

    def from_scratch(self, layer, search, slot_price):
        assert slot_price == PRICE
        assert layer.heat == "older, leaning"
        return self.with_tables(np.array([[FRESH, 0]]), layer, search)

    def with_tables(self, phy2log_RS, layer, params):
        assert layer.heat == "older, leaning"
        kind, rung = phy2log_RS[0].tolist() if phy2log_RS is not layer.deployed.phy2log_RS else (TABLES, 0)
        self.asked.append((kind, rung))
        return Candidate(phy2log_RS, (kind, rung), 0.0, self.moves.get((kind, rung), 0))

    def peaks_on(self, candidate, scaled_EN, deployed, tables):
        assert scaled_EN is NEWER[0]
        par = self.pars[candidate.log2phy_GE if isinstance(candidate.log2phy_GE, tuple) else KEEP]
        return np.full(2, par)


@settings(max_examples=60)
@given(st.data(), SPLITS, st.sampled_from((0, 100)), st.integers(90, 140), st.sampled_from((0.0, 0.01, 0.05)))
def test_the_recommended_action_has_the_lowest_cost(
    data: st.DataObject, tables: int, steps: int, least: int, min_gain: float
) -> None:
    cheaper = [(TABLES, 0), *([(LOCAL, 0), (LOCAL, 1)] if steps else [])]
    recommendations = [*cheaper, (FRESH, 0)]
    par = st.integers(100, 140).map(lambda hundredths: hundredths / 100)
    pars = {recommendation: data.draw(par) for recommendation in [KEEP, *recommendations]}
    moves = {rung: 0 if rung == (TABLES, 0) else data.draw(st.integers(0, 9)) for rung in recommendations}
    search = SEARCH._replace(tables=tables, local_search_steps=steps)
    deployed = deployment(Case(2, 2, np.ones((4, 3))), 2, 0)
    with pytest.MonkeyPatch.context() as patch:
        # No cost is an odd number of thousandths.
        script = Script(patch, pars, moves, least / 100 + 0.001)
        patch.setattr(
            module,
            "forecast_heat",
            lambda heat, forecast, ahead: f"{heat}, leaning" if ahead == 1.0 else None,
        )
        halves = "older", NEWER
        found = _holdout(*halves, Forecast(4.0, 0.1), deployed, search, PRICE, min_gain)
    costs = [pars[recommendation] + PRICE * moves[recommendation] for recommendation in recommendations]
    chosen = slow.recommended(pars[KEEP], costs[:-1], min_gain)
    if least / 100 + 0.001 < (pars[KEEP] if chosen < 0 else costs[chosen]) - min_gain:
        cheaper, chosen = recommendations, slow.recommended(pars[KEEP], costs, min_gain)
    assert script.asked == cheaper
    if chosen < 0:
        assert found[:3] == (KEEP, PRICE, 0.0)
    else:
        kind, rung = recommendations[chosen]
        assert found[:2] == (kind, (8, 64)[rung] * PRICE if kind == LOCAL else PRICE)


@settings(max_examples=60)
@given(cases(most_ranks=6, most_slots=4), SPLITS, st.integers(0, 2**32 - 1), st.sampled_from((0.0, 0.02)))
def test_what_is_recommended_would_have_paid(case: Case, tables: int, seed: int, min_gain: float) -> None:
    assume(len(case.heat_NE) >= 4)
    deployed = deployment(case, case.ranks, seed)
    seen = episodes_of(case.heat_NE, case.ranks)
    halves = halves_of(seen)
    forecast = choose_forecast(seen, np.array([np.inf, 1.0]))
    search = SEARCH._replace(tables=tables)
    recommendation = _holdout(*halves, forecast, deployed, search, PRICE, min_gain)
    again = _holdout(*halves, forecast, deployed, search, PRICE, min_gain)
    assert recommendation[:3] == again[:3]
    np.testing.assert_array_equal(recommendation[3].phy2log_RS, again[3].phy2log_RS)
    if recommendation[0] == KEEP:
        return
    # Whatever was fitted to the older half is priced on the newer one, by every episode and source.
    older = Layer(module.forecast_heat(halves[0], forecast, 1.0), deployed)
    if recommendation[0] == TABLES:
        found_RS = deployed.phy2log_RS
    elif recommendation[0] == LOCAL:
        found_RS = module.improved(older, search, np.array([recommendation[1]]), 1)[0]
    else:
        found_RS = None
        found = module.from_scratch(older, search, PRICE)
    if found_RS is not None:
        found = module.with_tables(found_RS, older, search)
    newer = [part.astype(float) for part in halves[1]]

    def par(phy2log_RS: np.ndarray, table_GE: np.ndarray) -> float:
        if tables == EVEN:
            return heat.mean_of_max(*newer, phy2log_RS, heat.even_shares(phy2log_RS))
        return slow_tables.tables_par(phy2log_RS, table_GE, *newer, deployed.share_GE.astype(float))

    cost = par(found.phy2log_RS, found.log2phy_GE) + PRICE * found.moves
    if recommendation[0] != LOCAL:
        # A walk for one price may part from a walk for all three.
        assert cost < par(deployed.phy2log_RS, deployed.log2phy_GE) - min_gain + 1e-5
    assert found.moves == np.count_nonzero(found.phy2log_RS != deployed.phy2log_RS)


@settings(max_examples=60)
@given(cases(most_ranks=6, most_slots=4), SPLITS, st.integers(0, 2**32 - 1), st.sampled_from((0.0, 0.02)))
def test_the_prices_tried_do_best_on_newer_heat_and_move_least(
    case: Case, tables: int, seed: int, min_gain: float
) -> None:
    assume(len(case.heat_NE) >= 4)
    deployed = deployment(case, case.ranks, seed)
    older, newer = halves_of(episodes_of(case.heat_NE, case.ranks))
    fit, search = Layer(with_covariance(*older), deployed), SEARCH._replace(tables=tables)
    plain = [part.astype(float) for part in newer]

    def cost(phy2log_RS: np.ndarray) -> float:
        rows = zip(deployed.phy2log_RS.tolist(), phy2log_RS.tolist(), strict=True)
        moves = sum(len({*now} - {*was}) for was, now in rows)
        return heat.mean_of_max(*plain, phy2log_RS, heat.even_shares(phy2log_RS)) + PRICE * moves

    price_K = PRICE * _PRICE_LADDER
    found = dict(zip(price_K.tolist(), module.improved(fit, search, price_K, 1), strict=True))
    won = {price: cost(deployed.phy2log_RS) - cost(one_RS) for price, one_RS in found.items()}
    tried = module._shortlist_prices(fit, newer, search, PRICE, min_gain)
    assert all(
        won[price] > min_gain - 1e-5 and np.array_equal(found[price], one_RS) for price, one_RS in tried
    )
    assert not tried or won[tried[0][0]] == pytest.approx(max(won.values()), abs=1e-5)
    assert tried or max(won.values()) <= min_gain + 1e-5
    dearest = max((price for price in won if won[price] > min_gain + 1e-5), default=0.0)
    assert not dearest or any(
        price > dearest or np.array_equal(found[dearest], one) for price, one in tried[:2]
    )


def test_annealing_is_left_out_where_either_half_does_not_keep_what_the_other_gave() -> None:
    kept = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        # Of the two one is noise alone; in the other two kinds of heat take turns.
        share_2E = generator.dirichlet(np.full(40, 3.0), 2) if seed % 2 else np.full((2, 40), 1 / 40)
        tokens = 30_000 if seed % 2 else 300
        heat_NE = generator.multinomial(tokens, share_2E[np.arange(16) % 2]).astype(float)
        seen, deployed = episodes_of(heat_NE, 24), deployment(Case(24, 2, heat_NE), 24, seed)
        tried = SEARCH._replace(tree_leaves=0, annealing_tries=8000, tables=EVEN)
        lasts = module.without_vain_annealing(seen, deployed, tried).annealing_tries == 8000
        halves, cooler = halves_of(seen), []
        for fit, held_out in (halves, halves[::-1]):
            layer, ratios = Layer(with_covariance(*fit), deployed), []
            for tries in (0, 1000):
                placed_RS = module.from_scratch(layer, tried._replace(annealing_tries=tries), 0.0).phy2log_RS
                ratios.append(heat.mean_of_max(*held_out, placed_RS, heat.even_shares(placed_RS)))
            cooler.append(ratios[1] < ratios[0] - 1e-5)
        assert lasts == all(cooler)
        kept += [lasts]
        plain = tried._replace(annealing_tries=8000 * lasts, options=SearchOptions(holdout=False))
        mine_RS, plain_RS = (
            module.solve_layer(heat_NE, deployed, one, np.array([np.inf]), 0.0, True).found.phy2log_RS
            for one in (tried, plain)
        )
        np.testing.assert_array_equal(mine_RS, plain_RS)
    assert sum(kept[1::2]) >= 4
    assert sum(kept[::2]) <= 2


def test_a_recommendation_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heat_NE = np.random.default_rng(4).gamma(0.3, 100, 9) * np.ones((8, 1))
    seen = heat_NE, deployment(Case(4, 3, heat_NE), 4, 3), SEARCH._replace(move_price=0.01)
    first = module.solve_layer(*seen, np.array([np.inf]), 0.0, False)
    monkeypatch.setattr(module, "_holdout", None)
    second = module.solve_layer(*seen, np.array([np.inf]), 0.0, False, first.recommendation)
    assert (first.taken, second.taken, second.recommendation) == (LOCAL, LOCAL, None)
    np.testing.assert_array_equal(first.found.phy2log_RS, second.found.phy2log_RS)
    assert first.optimism == second.optimism


def test_what_a_change_won_must_be_above_its_price_by_its_error() -> None:
    share_N = np.array([0.25, 0.25, 0.0, 0.25, 0.25], dtype=np.float32)
    gain_N = np.array([0.3, 0.1, -9.0, 0.3, 0.1], dtype=np.float32)
    error = np.std([0.3, 0.1, 0.3, 0.1], ddof=1) / 2
    for spent in (0.2 - 1.5 * error, 0.2 - 0.5 * error, 0.2 + error):
        assert is_sure(gain_N, share_N, spent, 0.0)
        assert is_sure(gain_N, share_N, spent, 1.0) == (spent < 0.2 - error)
    assert not is_sure(gain_N, np.zeros(5, dtype=np.float32), -1.0, 1.0)


def test_a_gain_within_its_error_moves_nothing() -> None:
    generator = np.random.default_rng(4)
    case = Case(4, 3, generator.gamma(0.3, 100, (8, 9)))
    deployed = deployment(case, 4, 3)
    halves = halves_of(episodes_of(case.heat_NE, 4))
    sure, taken = (
        _holdout(*halves, Forecast(np.inf, 0.0), deployed, search, 0.0, 0.0)
        for search in (SEARCH._replace(options=SearchOptions(sureness=one)) for one in (50.0, 0.0))
    )
    assert sure[0] == KEEP
    assert taken[0] != KEEP
    assert taken[2] >= 0.0
