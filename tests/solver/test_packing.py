"""However a packing came about, its running sums are those of its slots and shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.solver.packing import (
    Packing,
    clear,
    copies_of,
    empty_packing,
    even_shares,
    hottest_rank,
    put,
    replace,
    shift_load,
)
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import PlacedLayer

SETTINGS = settings(max_examples=60)
SEEDS = st.integers(0, 2**32 - 1)


def assert_sums_hold(packing: Packing, layer: PlacedLayer) -> None:
    """All that a packing keeps, against its slots and shares and whole episodes."""
    ranks, experts = layer.case.ranks, layer.case.experts
    scaled_EN, share_N = layer.heat
    holds_ER = np.zeros((experts, ranks), dtype=bool)
    series_RN = np.zeros((ranks, len(share_N)))
    for r in range(ranks):
        for expert in packing.phy2log_RS[r, : packing.filled_R[r]]:
            holds_ER[expert, r] = True
            series_RN[r] += packing.share_ER[expert, r].astype(float) * scaled_EN[expert]
    np.testing.assert_array_equal(packing.holds_ER, holds_ER)
    assert (packing.share_ER[~holds_ER] == 0).all()
    mean_R = series_RN @ share_N
    centred_EN = scaled_EN - (scaled_EN @ share_N)[:, None]
    centred_RN = series_RN - mean_R[:, None]
    scale = max(ranks, 1)
    np.testing.assert_allclose(packing.load_R, mean_R, rtol=1e-5, atol=1e-5 * scale)
    np.testing.assert_allclose(packing.variance_R, centred_RN**2 @ share_N, rtol=1e-4, atol=1e-5 * scale**2)
    cross_RE = (centred_RN * share_N) @ centred_EN.T
    np.testing.assert_allclose(packing.cross_RE, cross_RE, rtol=1e-4, atol=1e-5 * scale**2)


@SETTINGS
@given(cases(), SEEDS)
def test_a_placement_put_together_keeps_its_sums(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    share_RS = even_shares(layer.phy2log_RS, case.experts)
    np.testing.assert_allclose(share_RS, layer.share_RS, rtol=1e-6)
    packing = layer.packing()
    assert_sums_hold(packing, layer)
    np.testing.assert_array_equal(packing.phy2log_RS, layer.phy2log_RS)
    counts_E = np.bincount(layer.phy2log_RS.ravel(), minlength=case.experts)
    np.testing.assert_array_equal(packing.copies_E, counts_E)
    np.testing.assert_array_equal(copies_of(layer.phy2log_RS, case.experts), counts_E)
    rank, found = hottest_rank(packing, layer.z)
    risk_R = layer.risks()
    assert found == pytest.approx(risk_R.max(), abs=layer.rounding)
    assert risk_R[rank] == pytest.approx(risk_R.max(), abs=layer.rounding)


@SETTINGS
@given(cases(most_ranks=5, most_slots=4), SEEDS, st.integers(1, 30))
def test_any_changes_keep_the_sums(case: Case, seed: int, changes: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    packing = layer.packing()
    for _ in range(changes):
        rank, slot = layer.generator.integers(case.ranks), layer.generator.integers(case.slots)
        held = set(packing.phy2log_RS[rank].tolist())
        absent = sorted(set(range(case.experts)) - held)
        if absent and layer.generator.random() < 0.6:
            come = int(layer.generator.choice(absent))
            replace(packing, layer.demand, rank, slot, come, layer.generator.random())
            assert packing.phy2log_RS[rank, slot] == come
        else:
            expert = packing.phy2log_RS[rank, slot]
            before = packing.share_ER[expert, rank]
            shift_load(packing, layer.demand, expert, rank, 0.25)
            assert packing.share_ER[expert, rank] == pytest.approx(before + 0.25)
    assert_sums_hold(packing, layer)


@SETTINGS
@given(cases(most_ranks=5, most_slots=4), SEEDS)
def test_slots_fill_in_order_and_a_cleared_expert_leaves_nothing(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    packing = empty_packing(copies_of(layer.phy2log_RS, case.experts), case.ranks, case.slots)
    assert (packing.phy2log_RS == -1).all()
    for r, row in enumerate(layer.phy2log_RS):
        for filled, expert in enumerate(row):
            put(packing, layer.demand, expert, r, 0.5)
            assert packing.filled_R[r] == filled + 1
    np.testing.assert_array_equal(packing.phy2log_RS, layer.phy2log_RS)
    gone = packing.phy2log_RS[-1, -1]
    clear(packing, layer.demand, case.ranks - 1, case.slots - 1)
    packing.filled_R[-1] -= 1
    assert packing.share_ER[gone, -1] == 0
    assert_sums_hold(packing, layer)
