"""A check of an assignment's running sums."""

from __future__ import annotations

import numpy as np

from eplb_core.solver.construction import Assignment
from tests.solver.placed_layer import PlacedLayer


def assert_sums_hold(assignment: Assignment, layer: PlacedLayer) -> None:
    """Check that an assignment's running sums equal the sums over its slots, shares and episodes."""
    ranks = layer.case.ranks
    experts = layer.case.experts
    scaled_EN, share_N = layer.heat
    holds_ER = np.zeros((experts, ranks), dtype=bool)
    series_RN = np.zeros((ranks, len(share_N)))
    for r in range(ranks):
        for expert in assignment.phy2log_RS[r, : assignment.filled_R[r]]:
            holds_ER[expert, r] = True
            series_RN[r] += assignment.share_ER[expert, r].astype(float) * scaled_EN[expert]
    np.testing.assert_array_equal(assignment.holds_ER, holds_ER)
    assert (assignment.share_ER[~holds_ER] == 0).all()
    mean_R = series_RN @ share_N
    centred_EN = scaled_EN - (scaled_EN @ share_N)[:, None]
    centred_RN = series_RN - mean_R[:, None]
    scale = max(ranks, 1)
    np.testing.assert_allclose(assignment.load_R, mean_R, rtol=1e-5, atol=1e-5 * scale)
    np.testing.assert_allclose(
        assignment.variance_R, centred_RN**2 @ share_N, rtol=1e-4, atol=1e-5 * scale**2
    )
    cross_RE = (centred_RN * share_N) @ centred_EN.T
    np.testing.assert_allclose(assignment.cross_RE, cross_RE, rtol=1e-4, atol=1e-5 * scale**2)
