"""Annealing leaves a placement that can be served, tells its true ratio, and is never worse than where it began."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_layer
from eplb_service.solver.annealing import _pass_loads, _peak_after, _swap_loads, anneal
from eplb_service.solver.packing import copies_of, even_shares
from eplb_service.solver.problem import homes
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import PlacedLayer
from tests.solver.slow import heat as slow_heat

SETTINGS = settings(deadline=None, max_examples=60)


def true_ratio(layer: PlacedLayer, phy2log_RS: np.ndarray) -> float:
    share_RS = even_shares(phy2log_RS, layer.case.experts)
    return slow_heat.mean_of_max(layer.scaled_EN, layer.share_N, phy2log_RS, share_RS)


@SETTINGS
@given(cases(), st.integers(0, 2**31), st.sampled_from((0, 1, 50, 400)))
def test_never_worse_and_told_truly(case: Case, seed: int, tries: int) -> None:
    layer = PlacedLayer(case, 1.0)
    before_RS = layer.phy2log_RS.copy()
    found_RS, ratio = anneal(before_RS, layer.scaled_EN, layer.share_N, tries, seed)
    check_layer(found_RS, case.experts)
    np.testing.assert_array_equal(before_RS, layer.phy2log_RS, "the placement given is left alone")
    assert ratio == pytest.approx(true_ratio(layer, found_RS), rel=1e-4)
    assert ratio <= true_ratio(layer, before_RS) * (1 + 1e-5)
    again_RS, _ = anneal(before_RS, layer.scaled_EN, layer.share_N, tries, seed)
    np.testing.assert_array_equal(found_RS, again_RS)


@SETTINGS
@given(cases(), st.data())
def test_a_try_is_judged_by_what_it_would_make(case: Case, data: st.DataObject) -> None:
    layer = PlacedLayer(case, 1.0)
    placed_RS = layer.phy2log_RS
    rank = data.draw(st.integers(0, case.ranks - 1))
    other = data.draw(st.integers(0, case.ranks - 1))
    slot, place = (data.draw(st.integers(0, case.slots - 1)) for _ in range(2))
    mine, theirs = int(placed_RS[rank, slot]), int(placed_RS[other, place])
    if rank == other or mine in placed_RS[other]:
        return
    copies_E, holds_ER = copies_of(placed_RS, case.experts), homes(placed_RS, case.experts)
    load_RN = slow_heat.rank_series(placed_RS, even_shares(placed_RS, case.experts), layer.scaled_EN).astype(
        np.float32
    )
    changed_RN, touched_R = np.full_like(load_RN, np.nan), np.zeros(case.ranks, dtype=bool)
    after_RS = placed_RS.copy()
    after_RS[other, place] = mine
    if theirs not in placed_RS[rank] and data.draw(st.booleans()):
        after_RS[rank, slot] = theirs
        _swap_loads(load_RN, changed_RN, layer.scaled_EN, copies_E, rank, mine, other, theirs)
        touched_R[[rank, other]] = True
    elif copies_E[theirs] > 1:
        _pass_loads(load_RN, changed_RN, touched_R, layer.scaled_EN, copies_E, holds_ER, other, theirs, mine)
    else:
        return
    if layer.share_N.sum() > 0:
        found = _peak_after(load_RN, changed_RN, touched_R, layer.share_N, np.inf)
        assert found == pytest.approx(true_ratio(layer, after_RS), rel=1e-4)


def test_it_finds_the_best_of_a_layer_that_search_alone_does_not() -> None:
    generator = np.random.default_rng(2)
    case = Case(16, 2, generator.gamma(0.5, 100, (8, 16)))
    layer = PlacedLayer(case, 1.0)
    start = true_ratio(layer, layer.phy2log_RS)
    _, few = anneal(layer.phy2log_RS, layer.scaled_EN, layer.share_N, 100, 1)
    _, many = anneal(layer.phy2log_RS, layer.scaled_EN, layer.share_N, 20_000, 1)
    assert many <= few <= start * (1 + 1e-6)
    assert many < start - 0.02
