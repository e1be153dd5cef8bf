"""Tests of trace statistics: only steps with tokens count, and undefined figures are NaN."""

import numpy as np
import pytest

from eplb_service.io.trace import ArrayTrace
from eplb_service.io.trace_statistics import statistics

HEAT_TLE = np.random.default_rng(0).integers(1, 9, (60, 2, 8))


@pytest.mark.parametrize("window", [7, 20, 200])
def test_steps_without_tokens_do_not_change_the_par(window):
    dense = statistics(ArrayTrace(HEAT_TLE), window, ranks=4)
    with_gaps = np.zeros((150, 2, 8), dtype=int)
    with_gaps[np.sort(np.random.default_rng(1).choice(150, 60, replace=False))] = HEAT_TLE
    gappy = statistics(ArrayTrace(with_gaps), window, ranks=4)
    assert gappy.par_L == pytest.approx(dense.par_L)
    loads_TLR = HEAT_TLE.reshape(60, 2, 4, 2).sum(axis=3)
    assert dense.par_L == pytest.approx((loads_TLR.max(axis=2) / loads_TLR.mean(axis=2)).mean(axis=0))


def test_the_par_of_a_layer_without_tokens_is_nan():
    heat_TLE = HEAT_TLE.copy()
    heat_TLE[:, 1] = 0
    figures = statistics(ArrayTrace(heat_TLE), 20, ranks=4)
    assert figures.par_L[0] > 1
    assert np.isnan(figures.par_L[1])


def test_drift_requires_two_complete_windows():
    assert statistics(ArrayTrace(HEAT_TLE), 30).drift_L is not None
    short = statistics(ArrayTrace(HEAT_TLE), 31)
    assert (short.drift_L, short.drift_noise_L) == (None, None)
