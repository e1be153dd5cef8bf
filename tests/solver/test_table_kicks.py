"""A kick turns one spare copy into a copy of another expert; kicks judged through tables never make a layer dearer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_layer, check_log2phy
from eplb_service.solver.candidates import Candidate, with_tables
from eplb_service.solver.packing import Packing
from eplb_service.solver.problem import SOLVED, Deployed, Heat, homes
from eplb_service.solver.table_kicks import kick, kicked_through_tables
from tests.solver.asked import SEARCH
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import PlacedLayer, random_placement
from tests.solver.slow import heat
from tests.solver.slow import tables as slow
from tests.solver.test_packing import assert_sums_hold
from tests.solver.test_tables import KINDS, Sources

SETTINGS = settings(max_examples=60)
SEEDS = st.integers(0, 2**32 - 1)


def kicked(layer: PlacedLayer, seed: int) -> Packing:
    packing = layer.packing()
    nowhere_ER = np.zeros((layer.case.experts, layer.case.ranks), dtype=bool)
    kick(packing, layer.demand, nowhere_ER, np.array([seed], dtype=np.uint64))
    return packing


def possible_kicks(phy2log_RS: np.ndarray, experts: int) -> set[bytes]:
    """Every placement that one spare copy makes by turning into a copy of an expert that its rank lacks."""
    found = set()
    for (r, s), loser in np.ndenumerate(phy2log_RS):
        if (phy2log_RS == loser).sum() > 1:
            for gainer in set(range(experts)) - set(phy2log_RS[r].tolist()):
                after_RS = phy2log_RS.copy()
                after_RS[r, s] = gainer
                found.add(after_RS.tobytes())
    return found


@SETTINGS
@given(cases(most_ranks=6, most_slots=4), SEEDS)
def test_a_kick_makes_one_legal_exchange_or_none(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    packing = kicked(layer, seed)
    if not np.array_equal(packing.phy2log_RS, layer.phy2log_RS):
        assert packing.phy2log_RS.tobytes() in possible_kicks(layer.phy2log_RS, case.experts)
    assert_sums_hold(packing, layer)
    counts_E = np.bincount(packing.phy2log_RS.ravel(), minlength=case.experts)
    np.testing.assert_array_equal(packing.copies_E, counts_E)
    found_RS = np.take_along_axis(packing.share_ER.T, packing.phy2log_RS, axis=1)
    np.testing.assert_allclose(found_RS, heat.even_shares(packing.phy2log_RS), rtol=1e-5)


def test_every_possible_kick_is_made() -> None:
    layer = PlacedLayer(Case(4, 2, np.ones((2, 5))), 1.0, 4)
    found = {kicked(layer, seed).phy2log_RS.tobytes() for seed in range(500)}
    assert found == possible_kicks(layer.phy2log_RS, 5)
    assert len(found) > 10


@pytest.mark.parametrize(("ranks", "slots", "experts"), [(4, 2, 8), (4, 1, 4), (4, 3, 3), (1, 3, 3)])
def test_nothing_is_kicked_where_no_copy_is_spare_or_none_lacks(ranks: int, slots: int, experts: int) -> None:
    layer = PlacedLayer(Case(ranks, slots, np.ones((2, experts))), 1.0, 4)
    for seed in range(20):
        np.testing.assert_array_equal(kicked(layer, seed).phy2log_RS, layer.phy2log_RS)


class Serving:
    """A layer that serves somewhere else than the candidate stands."""

    def __init__(self, case: Case, sources: int, kind: str, seed: int, price: float) -> None:
        given_ = Sources(case, 1.0, sources, kind, seed)
        layer, self.experts = given_.layer, case.experts
        deployed_RS = random_placement(case.ranks, case.slots, case.experts, layer.generator)
        self.layer = layer
        self.heat = Heat(layer.scaled_EN, layer.share_N, layer.demand)
        self.deployed = Deployed(
            deployed_RS,
            slow.fixed_rule(deployed_RS, sources, case.experts).astype(np.int32),
            given_.share_GE,
            homes(deployed_RS, case.experts),
            np.zeros(case.ranks, dtype=np.int32),
            np.zeros(sources, dtype=np.int32),
        )
        self.search = SEARCH._replace(price=price)
        self.candidate = with_tables(layer.phy2log_RS, self.heat, self.deployed, 1.0, SOLVED)

    def kicked(self, rounds: int, seed: int) -> Candidate:
        return kicked_through_tables(self.candidate, self.heat, self.deployed, self.search, rounds, seed)

    def cost(self, candidate: Candidate) -> float:
        return candidate.par + self.search.price * candidate.moves

    def assert_servable(self, candidate: Candidate) -> None:
        """Complete, reachable through its tables, and what it tells of itself is so."""
        check_layer(candidate.phy2log_RS, self.experts)
        for table_E in candidate.log2phy_GE:
            check_log2phy(table_E, candidate.phy2log_RS)
        assert candidate.moves == (candidate.phy2log_RS != self.deployed.phy2log_RS).sum()
        share_GE = self.deployed.share_GE.astype(float)
        par = slow.tables_par(candidate.phy2log_RS, candidate.log2phy_GE, *self.layer.heat, share_GE)
        assert candidate.par == pytest.approx(par, rel=1e-4)


@SETTINGS
@given(
    cases(most_ranks=6, most_slots=3),
    st.integers(1, 6),
    KINDS,
    SEEDS,
    st.integers(0, 3),
    st.sampled_from((0.0, 0.02)),
)
def test_kicks_through_tables_never_make_a_layer_dearer(
    case: Case, sources: int, kind: str, seed: int, rounds: int, price: float
) -> None:
    serving = Serving(case, sources, kind, seed, price)
    found = serving.kicked(rounds, seed)
    serving.assert_servable(found)
    assert serving.cost(found) <= serving.cost(serving.candidate)
    if rounds == 0:
        np.testing.assert_array_equal(found.phy2log_RS, serving.candidate.phy2log_RS)
    again = serving.kicked(rounds, seed)
    np.testing.assert_array_equal(again.phy2log_RS, found.phy2log_RS)
    np.testing.assert_array_equal(again.log2phy_GE, found.log2phy_GE)


@pytest.mark.parametrize("spread", [1e-6, 1.0])
def test_no_kick_takes_back_what_one_before_it_won(spread: float) -> None:
    """Not even where experts are so much alike that the walk goes on from almost anything."""
    for seed in range(5):
        heat_NE = 1 + spread * np.random.default_rng(seed).gamma(1.0, 1.0, (4, 8))
        serving = Serving(Case(5, 3, heat_NE), 3, "uniform", seed, 0.0)
        costs = [serving.cost(serving.kicked(rounds, seed)) for rounds in range(40)]
        assert costs == sorted(costs, reverse=True)


def test_kicks_find_copies_that_suit_few_sources() -> None:
    heat_NE = np.array([[60.0, 50.0, 9.0, 5.0, 3.0, 2.0]])
    won = []
    for seed in range(5):
        serving = Serving(Case(6, 2, heat_NE), 3, "uniform", seed, 0.0)
        won.append(serving.cost(serving.candidate) - serving.cost(serving.kicked(40, 1)))
    assert min(won) >= 0
    assert np.mean(won) > 0.05
