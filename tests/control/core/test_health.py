"""The ratio that a service shows is per step, of the loads that the ranks measured."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from eplb_service.control.core.health import mean_par, measured_par


def deployment_of(loads_TLR: np.ndarray) -> SimpleNamespace:
    heat = SimpleNamespace(measured_loads=lambda layer_epochs: loads_TLR)
    return SimpleNamespace(heat=heat, live=SimpleNamespace(layer_epochs=(0,) * loads_TLR.shape[1]))


def test_ratios_are_taken_per_step_and_then_averaged() -> None:
    # Each step has another hottest rank: summed, they would look balanced.
    loads_TLR = np.tile(np.eye(4)[:, None] * 9 + 1, (3, 1, 1))
    assert measured_par(deployment_of(loads_TLR)).tolist() == [pytest.approx(10 / 3.25)]


def test_steps_and_layers_without_tokens_are_in_no_mean() -> None:
    loads_TLR = np.zeros((3, 2, 2))
    loads_TLR[1, 0] = (30, 10)
    par_L = measured_par(deployment_of(loads_TLR))
    assert par_L.tolist() == [1.5, 0.0]
    assert mean_par(par_L) == 1.5


def test_nothing_is_measured_before_the_first_step() -> None:
    assert measured_par(deployment_of(np.zeros((0, 2, 4)))).tolist() == [0.0, 0.0]
    assert measured_par(SimpleNamespace(heat=None, live=None)).size == 0
    assert mean_par(np.zeros(2)) == 0.0
