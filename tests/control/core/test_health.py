"""The ratio that a service shows is per step, of the loads that the ranks measured."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from eplb_service.control.core.health import mean_measured_par, measured_par, rank_loads
from eplb_service.heat.assembler import HeatAssembler
from eplb_service.placement import default_log2phy
from eplb_service.wire.heat import HeatReport, StepPhase


def deployment_of(loads_TLR: np.ndarray) -> SimpleNamespace:
    """One expert and one slot per rank, so that what a slot receives is what its rank does."""
    steps, layers, ranks = loads_TLR.shape
    heat = HeatAssembler(ranks, layers, ranks, 1, window_steps=max(1, steps), pending_steps=8)
    slots_R1 = np.arange(ranks, dtype=np.int32)[:, None]
    for layer in range(layers):
        heat.placements.place(layer, 0, slots_R1, default_log2phy(slots_R1, ranks))
    phase_T = np.full(steps, StepPhase.DECODE, dtype=np.uint8)
    for rank in range(ranks if steps else 0):
        counts_TLS = loads_TLR[:, :, rank : rank + 1].astype(np.int32)
        heat.add(rank, HeatReport(0, (0,) * layers, counts_TLS, phase_T))
    return SimpleNamespace(heat=heat, live=SimpleNamespace(layer_epochs=(0,) * layers))


def test_ratios_are_taken_per_step_and_then_averaged() -> None:
    # Each step has another hottest rank: summed, they would look balanced.
    loads_TLR = np.tile(np.eye(4)[:, None] * 9 + 1, (3, 1, 1))
    assert measured_par(deployment_of(loads_TLR)).tolist() == [pytest.approx(10 / 3.25)]


def test_steps_and_layers_without_tokens_are_in_no_mean() -> None:
    loads_TLR = np.zeros((3, 2, 2))
    loads_TLR[1, 0] = (30, 10)
    par_L = measured_par(deployment_of(loads_TLR))
    assert par_L.tolist() == [1.5, 0.0]
    assert mean_measured_par(par_L) == 1.5


def test_nothing_is_measured_before_the_first_step() -> None:
    assert measured_par(deployment_of(np.zeros((0, 2, 4)))).tolist() == [0.0, 0.0]
    assert measured_par(SimpleNamespace(heat=None, live=None)).size == 0
    assert mean_measured_par(np.zeros(2)) == 0.0


def test_loads_of_ranks_are_over_the_mean_of_their_layer_and_of_the_newest_steps() -> None:
    loads_TLR = np.zeros((3, 2, 4))
    loads_TLR[0, 0] = (100, 0, 0, 0)
    loads_TLR[1:, 0] = (1, 2, 3, 2)
    steps, loads_LR = rank_loads(deployment_of(loads_TLR), newest=2)
    assert steps == 2
    np.testing.assert_allclose(loads_LR, [[0.5, 1.0, 1.5, 1.0], [0, 0, 0, 0]])
    assert rank_loads(SimpleNamespace(heat=None, live=None), newest=2)[0] == 0
