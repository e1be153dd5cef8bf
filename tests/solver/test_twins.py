"""Each kernel finds what its slow twin finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.heat.window import Window
from eplb_service.solver.episodes import sum_episodes
from eplb_service.solver.exchanges import best_exchange, exchange
from eplb_service.solver.objective import demand_of, mean_of_max, normalise
from eplb_service.solver.order import descending
from eplb_service.solver.packing import even_shares, packing_of
from eplb_service.solver.pressure import pressures
from eplb_service.solver.replicas import hand_out
from eplb_service.solver.swaps import SCRATCH_ROWS, best_swap, swap
from eplb_service.solver.tables import fixed_rule, slot_shares, slots_by_expert, tables_par
from eplb_service.solver.tree_search import place, tree_search
from tests.solver.layers_of import Case, cases
from tests.solver.slow import twins

SETTINGS = settings(deadline=None, max_examples=60)


class Layer:
    """A case, placed greedily, with everything that kernels take."""

    def __init__(self, case: Case, z: float = 1.0) -> None:
        self.case, self.z = case, z
        self.weight_N = np.linspace(1, 2, len(case.heat_NE))
        self.scaled_EN, self.share_N = normalise(case.heat_NE, self.weight_N, case.ranks)
        self.demand = demand_of(self.scaled_EN, self.share_N)
        counts_KE, _ = tree_search(self.demand, case.ranks, case.slots, z, 0, 0, 0, 1)
        self.packing = place(counts_KE[0], self.demand, case.ranks, case.slots, z)
        self.phy2log_RS = self.packing.phy2log_RS

    def risks(self, phy2log_RS: np.ndarray, share_RS: np.ndarray) -> np.ndarray:
        return twins.rank_risks(phy2log_RS, share_RS, self.scaled_EN.astype(float), self.share_N, self.z)


@SETTINGS
@given(cases())
def test_heat_is_normalised(case: Case) -> None:
    weight_N = np.linspace(1, 2, len(case.heat_NE))
    found, wanted = (
        normalise(case.heat_NE, weight_N, case.ranks),
        twins.normalise(case.heat_NE, weight_N, case.ranks),
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@SETTINGS
@given(cases())
def test_running_loads_are_those_of_the_placement(case: Case) -> None:
    layer = Layer(case)
    share_RS = twins.even_shares(layer.phy2log_RS)
    np.testing.assert_allclose(even_shares(layer.phy2log_RS, case.experts), share_RS, rtol=1e-6)
    risk_R = layer.packing.load_R + layer.z * np.sqrt(np.maximum(layer.packing.variance_R, 0))
    np.testing.assert_allclose(risk_R, layer.risks(layer.phy2log_RS, share_RS), rtol=5e-3, atol=5e-3)
    found = mean_of_max(layer.scaled_EN, layer.share_N, layer.phy2log_RS, share_RS.astype(np.float32))
    wanted = twins.mean_of_max(layer.scaled_EN, layer.share_N, layer.phy2log_RS, share_RS)
    assert found == pytest.approx(wanted, rel=1e-4)


@SETTINGS
@given(cases())
def test_pressures_follow_the_risks(case: Case) -> None:
    layer = Layer(case)
    now = pressures(layer.packing, layer.z)
    risk_R = layer.packing.load_R + layer.z * np.sqrt(np.maximum(layer.packing.variance_R, 0))
    wanted_R, base, _ = twins.pressures(risk_R.astype(float))
    if risk_R.max() - base > 1e-3:
        np.testing.assert_allclose(now.of_R, wanted_R, atol=1e-2)


@SETTINGS
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(0, 20), st.integers(1, 6))
def test_copies_are_handed_to_the_hottest(heat: list[int], budget: int, ranks: int) -> None:
    # Distinct heat: among equals the twins may differ in rounding.
    heat_E = (np.array(heat) + np.linspace(0.1, 0.9, len(heat))).astype(np.float32)
    copies_E = np.ones(len(heat), dtype=np.int32)
    left = hand_out(copies_E, heat_E, budget, ranks)
    wanted_E, wanted_left = twins.hand_out(
        np.ones(len(heat), dtype=np.int32), heat_E.astype(float), budget, ranks
    )
    assert left == wanted_left
    assert copies_E.sum() == wanted_E.sum()
    assert (heat_E / copies_E).max() == pytest.approx((heat_E / wanted_E).max())


@SETTINGS
@given(st.lists(st.floats(0, 9, width=32), max_size=40))
def test_descending_is_a_stable_sort(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    np.testing.assert_array_equal(descending(array), np.argsort(-array, kind="stable"))


@SETTINGS
@given(cases(most_ranks=6, most_slots=4))
def test_best_swap_is_the_best_of_all(case: Case) -> None:
    layer = Layer(case)
    now = pressures(layer.packing, layer.z)
    hot = int(now.of_R.argmax())
    scratch = np.empty((SCRATCH_ROWS, case.ranks * case.slots), dtype=np.float32)
    slot, rank, other, won = best_swap(layer.packing, layer.demand, now, hot, layer.z, 1e-3, scratch)
    share_RS = twins.even_shares(layer.phy2log_RS)
    span = 1 / now.scale
    before = twins.pressure_of(layer.risks(layer.phy2log_RS, share_RS), now.base, span)
    best = 0.0
    for mine, theirs, place_there in twins.legal_swaps(layer.phy2log_RS, hot):
        swapped_RS, swapped_share_RS = layer.phy2log_RS.copy(), share_RS.copy()
        for array in (swapped_RS, swapped_share_RS):
            array[hot, mine], array[theirs, place_there] = array[theirs, place_there], array[hot, mine]
        after = twins.pressure_of(layer.risks(swapped_RS, swapped_share_RS), now.base, span)
        best = max(best, before - after)
    if span > 1e-2:
        assert won == pytest.approx(best, abs=0.05)
    if slot >= 0:
        assert (slot, rank, other) in set(twins.legal_swaps(layer.phy2log_RS, hot))
        home_ER = layer.packing.holds_ER.copy()
        assert swap(layer.packing, layer.demand, home_ER, hot, slot, rank, other) == 2


@SETTINGS
@given(cases(most_ranks=6, most_slots=4))
def test_best_exchange_is_the_best_of_all(case: Case) -> None:
    layer = Layer(case)
    now = pressures(layer.packing, layer.z)
    hot = int(now.of_R.argmax())
    slot, rank, other, won = best_exchange(layer.packing, layer.demand, now, hot, layer.z, 1e-3)
    span = 1 / now.scale
    share_RS = twins.even_shares(layer.phy2log_RS)
    before = twins.pressure_of(layer.risks(layer.phy2log_RS, share_RS), now.base, span)
    best = 0.0
    for mine, theirs, place_there in twins.legal_exchanges(layer.phy2log_RS, hot):
        changed_RS = layer.phy2log_RS.copy()
        changed_RS[theirs, place_there] = layer.phy2log_RS[hot, mine]
        after = twins.pressure_of(layer.risks(changed_RS, twins.even_shares(changed_RS)), now.base, span)
        best = max(best, before - after)
    if span > 1e-2 and best > 2e-3:
        assert won == pytest.approx(best, abs=0.05)
    if slot >= 0:
        expert = layer.phy2log_RS[hot, slot]
        assert exchange(layer.packing, layer.demand, layer.packing.holds_ER.copy(), expert, rank, other) == 1
        rebuilt = packing_of(layer.phy2log_RS, even_shares(layer.phy2log_RS, case.experts), layer.demand)
        np.testing.assert_allclose(layer.packing.load_R, rebuilt.load_R, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(layer.packing.holds_ER, rebuilt.holds_ER)


@SETTINGS
@given(cases(), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_tables_split_the_tokens(case: Case, sources: int, seed: int) -> None:
    layer = Layer(case)
    share_GE = np.random.default_rng(seed).dirichlet(np.ones(sources), case.experts).T.astype(np.float32)
    share_GE = np.ascontiguousarray(share_GE)
    first_E1, slot_P = slots_by_expert(layer.phy2log_RS, case.experts)
    table_GE = fixed_rule(first_E1, slot_P, sources)
    share_P = np.zeros(case.ranks * case.slots)
    for source in range(sources):
        for expert in range(case.experts):
            holders = np.flatnonzero(layer.phy2log_RS.ravel() == expert)
            assert table_GE[source, expert] == holders[source % len(holders)]
            share_P[table_GE[source, expert]] += share_GE[source, expert]
    share_RS = share_P.reshape(layer.phy2log_RS.shape)
    np.testing.assert_allclose(slot_shares(layer.phy2log_RS, table_GE, share_GE), share_RS, atol=1e-5)
    found = tables_par(layer.phy2log_RS, table_GE, layer.scaled_EN, layer.share_N, share_GE)
    wanted = twins.mean_of_max(layer.scaled_EN, layer.share_N, layer.phy2log_RS, share_RS)
    assert found == pytest.approx(wanted, rel=1e-4)


@SETTINGS
@given(st.integers(1, 12), st.integers(1, 12))
def test_episodes_are_those_of_the_window(steps: int, episodes: int) -> None:
    heat_TLE = np.random.default_rng(steps).integers(0, 9, (steps, 2, 3))
    wanted_NLE = Window(heat_TLE).episodes(episodes)
    np.testing.assert_array_equal(sum_episodes(heat_TLE, min(episodes, steps)), wanted_NLE)
