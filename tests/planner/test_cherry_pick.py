"""A decision looks into the layers past the threshold that have more than noise to win, worst first, and no others."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.planner.decide import cherry_pick
from eplb_service.planner.settings import PlannerSettings

PARS = st.lists(st.tuples(st.integers(100, 130), st.integers(100, 130)), max_size=10)


@settings(max_examples=150)
@given(PARS, st.integers(100, 120), st.integers(0, 10), st.none() | st.integers(1, 4))
def test_picks_are_those_of_a_plain_reading(
    pars: list[tuple[int, int]], threshold: int, gain: int, most: int | None
) -> None:
    # Half a hundredth apart from every ratio, so that no comparison hangs on rounding.
    wanted = PlannerSettings(
        par_threshold=threshold / 100 + 0.005, min_gain=gain / 100 + 0.005, max_layers=most
    )
    found = cherry_pick(
        np.array([seen / 100 for seen, _ in pars]), np.array([least / 100 for _, least in pars]), wanted
    )
    worth = [layer for layer, (seen, least) in enumerate(pars) if seen > threshold and seen - least > gain]
    by_gain = sorted(worth, key=lambda layer: pars[layer][1] - pars[layer][0])
    gains = [pars[layer][0] - pars[layer][1] for layer in found]
    assert gains == [pars[layer][0] - pars[layer][1] for layer in by_gain[:most]]
    assert set(found.tolist()) <= set(worth)
    assert len(found) == len(set(found.tolist()))


def test_bounds_themselves_do_not_suffice() -> None:
    settings_ = PlannerSettings(par_threshold=1.5, min_gain=0.25)
    par_L, least_L = np.array([1.5, 1.75, 1.75, 2.0]), np.array([1.0, 1.5, 1.0, 1.0])
    assert cherry_pick(par_L, least_L, settings_).tolist() == [3, 2]
