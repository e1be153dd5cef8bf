"""The hold-out recommends the candidate that is cheapest on the held-out half, and only if its gain is significant."""

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
from tests.solver import solved_layers
from tests.solver.layers_of import Case, cases, shares_of_sources
from tests.solver.placed_layer import deployed_on, random_placement
from tests.solver.slow import forecast as slow
from tests.solver.slow import heat
from tests.solver.slow import tables as slow_tables

SEARCH = solved_layers.SEARCH._replace(tree_leaves=1, local_search_steps=200)
PRICE = 0.004
"""Reduction of the PAR that one moved slot must bring."""
SPLITS = st.sampled_from((EVEN, RULE, SOLVED))


def deployment(case: Case, sources: int, seed: int) -> LayerLayout:
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    return deployed_on(phy2log_RS, shares_of_sources(sources, case.experts, "uneven", seed))


NEWER = np.zeros((3, 2), dtype=np.float32), np.full(2, 0.5)


class Script:
    """Stub for the candidate functions, with a fixed ratio and move count per action."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pars: dict, moves: dict, least_fresh: float) -> None:
        self.pars = pars
        self.moves = moves
        self.least_fresh = least_fresh
        self.calls: list[tuple[str, int]] = []
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
        self.calls.append((kind, rung))
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
        # Costs are even multiples of 0.001, so they never tie with this bound.
        script = Script(patch, pars, moves, least / 100 + 0.001)
        patch.setattr(
            module,
            "forecast_heat",
            lambda heat, forecast, ahead: f"{heat}, leaning" if ahead == 1.0 else None,
        )
        halves = "older", NEWER
        result = _holdout(*halves, Forecast(4.0, 0.1), deployed, search, PRICE, min_gain)
    costs = [pars[recommendation] + PRICE * moves[recommendation] for recommendation in recommendations]
    chosen = slow.recommended(pars[KEEP], costs[:-1], min_gain)
    if least / 100 + 0.001 < (pars[KEEP] if chosen < 0 else costs[chosen]) - min_gain:
        cheaper = recommendations
        chosen = slow.recommended(pars[KEEP], costs, min_gain)
    assert script.calls == cheaper
    if chosen < 0:
        assert result[:3] == (KEEP, PRICE, 0.0)
    else:
        kind, rung = recommendations[chosen]
        assert result[:2] == (kind, (8, 64)[rung] * PRICE if kind == LOCAL else PRICE)


@settings(max_examples=60)
@given(cases(most_ranks=6, most_slots=4), SPLITS, st.integers(0, 2**32 - 1), st.sampled_from((0.0, 0.02)))
def test_recommendations_pay_off_on_the_held_out_half(
    case: Case, tables: int, seed: int, min_gain: float
) -> None:
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
    # Candidates are fitted to the training half and priced on the held-out half, over all episodes and sources.
    older = Layer(module.forecast_heat(halves[0], forecast, 1.0), deployed)
    if recommendation[0] == TABLES:
        candidate_RS = deployed.phy2log_RS
    elif recommendation[0] == LOCAL:
        candidate_RS = module.improved(older, search, np.array([recommendation[1]]), 1)[0]
    else:
        candidate_RS = None
        candidate = module.from_scratch(older, search, PRICE)
    if candidate_RS is not None:
        candidate = module.with_tables(candidate_RS, older, search)
    newer = [array.astype(float) for array in halves[1]]

    def par(phy2log_RS: np.ndarray, table_GE: np.ndarray) -> float:
        if tables == EVEN:
            return heat.mean_of_max(*newer, phy2log_RS, heat.even_shares(phy2log_RS))
        return slow_tables.tables_par(phy2log_RS, table_GE, *newer, deployed.share_GE.astype(float))

    cost = par(candidate.phy2log_RS, candidate.log2phy_GE) + PRICE * candidate.moves
    if recommendation[0] != LOCAL:
        # A search for one price may diverge from a search for all three prices.
        assert cost < par(deployed.phy2log_RS, deployed.log2phy_GE) - min_gain + 1e-5
    assert candidate.moves == np.count_nonzero(candidate.phy2log_RS != deployed.phy2log_RS)


@settings(max_examples=60)
@given(cases(most_ranks=6, most_slots=4), SPLITS, st.integers(0, 2**32 - 1), st.sampled_from((0.0, 0.02)))
def test_shortlisted_prices_gain_most_on_the_held_out_half_with_the_fewest_moves(
    case: Case, tables: int, seed: int, min_gain: float
) -> None:
    assume(len(case.heat_NE) >= 4)
    deployed = deployment(case, case.ranks, seed)
    older, newer = halves_of(episodes_of(case.heat_NE, case.ranks))
    fit = Layer(with_covariance(*older), deployed)
    search = SEARCH._replace(tables=tables)
    newer_float64 = [array.astype(float) for array in newer]

    def cost(phy2log_RS: np.ndarray) -> float:
        rows = zip(deployed.phy2log_RS.tolist(), phy2log_RS.tolist(), strict=True)
        moves = sum(len({*after_S} - {*before_S}) for before_S, after_S in rows)
        return heat.mean_of_max(*newer_float64, phy2log_RS, heat.even_shares(phy2log_RS)) + PRICE * moves

    price_K = PRICE * _PRICE_LADDER
    placements = dict(zip(price_K.tolist(), module.improved(fit, search, price_K, 1), strict=True))
    gains = {
        price: cost(deployed.phy2log_RS) - cost(candidate_RS) for price, candidate_RS in placements.items()
    }
    shortlist = module._shortlist_prices(fit, newer, search, PRICE, min_gain)
    assert all(
        gains[price] > min_gain - 1e-5 and np.array_equal(placements[price], candidate_RS)
        for price, candidate_RS in shortlist
    )
    assert not shortlist or gains[shortlist[0][0]] == pytest.approx(max(gains.values()), abs=1e-5)
    assert shortlist or max(gains.values()) <= min_gain + 1e-5
    dearest = max((price for price in gains if gains[price] > min_gain + 1e-5), default=0.0)
    assert not dearest or any(
        price > dearest or np.array_equal(placements[dearest], candidate_RS)
        for price, candidate_RS in shortlist[:2]
    )


def test_annealing_is_skipped_if_its_gain_does_not_carry_over_between_halves() -> None:
    kept = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        # Even seeds produce only noise. Odd seeds alternate between two kinds of heat.
        share_2E = generator.dirichlet(np.full(40, 3.0), 2) if seed % 2 else np.full((2, 40), 1 / 40)
        tokens = 30_000 if seed % 2 else 300
        heat_NE = generator.multinomial(tokens, share_2E[np.arange(16) % 2]).astype(float)
        seen = episodes_of(heat_NE, 24)
        deployed = deployment(Case(24, 2, heat_NE), 24, seed)
        annealing = SEARCH._replace(tree_leaves=0, annealing_tries=8000, tables=EVEN)
        persists = module.without_vain_annealing(seen, deployed, annealing).annealing_tries == 8000
        halves = halves_of(seen)
        cooler = []
        for fit, held_out in (halves, halves[::-1]):
            layer = Layer(with_covariance(*fit), deployed)
            ratios = []
            for tries in (0, 1000):
                placed_RS = module.from_scratch(
                    layer, annealing._replace(annealing_tries=tries), 0.0
                ).phy2log_RS
                ratios.append(heat.mean_of_max(*held_out, placed_RS, heat.even_shares(placed_RS)))
            cooler.append(ratios[1] < ratios[0] - 1e-5)
        assert persists == all(cooler)
        kept += [persists]
        without_holdout = annealing._replace(
            annealing_tries=8000 * persists, options=SearchOptions(holdout=False)
        )
        annealed_RS, expected_RS = (
            module.solve_layer(heat_NE, deployed, chosen, np.array([np.inf]), 0.0, True).candidate.phy2log_RS
            for chosen in (annealing, without_holdout)
        )
        np.testing.assert_array_equal(annealed_RS, expected_RS)
    assert sum(kept[1::2]) >= 4
    assert sum(kept[::2]) <= 2


def test_a_recommendation_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heat_NE = np.random.default_rng(4).gamma(0.3, 100, 9) * np.ones((8, 1))
    seen = heat_NE, deployment(Case(4, 3, heat_NE), 4, 3), SEARCH._replace(move_price=0.01)
    first = module.solve_layer(*seen, np.array([np.inf]), 0.0, False)
    monkeypatch.setattr(module, "_holdout", None)
    second = module.solve_layer(*seen, np.array([np.inf]), 0.0, False, first.recommendation)
    assert (first.taken, second.taken, second.recommendation) == (LOCAL, LOCAL, None)
    np.testing.assert_array_equal(first.candidate.phy2log_RS, second.candidate.phy2log_RS)
    assert first.optimism == second.optimism


def test_a_gain_must_exceed_its_price_by_its_standard_error() -> None:
    share_N = np.array([0.25, 0.25, 0.0, 0.25, 0.25], dtype=np.float32)
    gain_N = np.array([0.3, 0.1, -9.0, 0.3, 0.1], dtype=np.float32)
    error = np.std([0.3, 0.1, 0.3, 0.1], ddof=1) / 2
    for price in (0.2 - 1.5 * error, 0.2 - 0.5 * error, 0.2 + error):
        assert is_sure(gain_N, share_N, price, 0.0)
        assert is_sure(gain_N, share_N, price, 1.0) == (price < 0.2 - error)
    assert not is_sure(gain_N, np.zeros(5, dtype=np.float32), -1.0, 1.0)


def test_a_gain_within_its_error_moves_no_expert() -> None:
    generator = np.random.default_rng(4)
    case = Case(4, 3, generator.gamma(0.3, 100, (8, 9)))
    deployed = deployment(case, 4, 3)
    halves = halves_of(episodes_of(case.heat_NE, 4))
    strict, lenient = (
        _holdout(*halves, Forecast(np.inf, 0.0), deployed, search, 0.0, 0.0)
        for search in (SEARCH._replace(options=SearchOptions(sureness=sureness)) for sureness in (50.0, 0.0))
    )
    assert strict[0] == KEEP
    assert lenient[0] != KEEP
    assert lenient[2] >= 0.0
