"""What a search for balance is given where time counts: the experts' time in place of their tokens."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.solver.model import Layer, heat_of
from eplb_service.solver.time.candidates import _demand_in_time, timed
from eplb_service.solver.time.evaluation import split_us, steps_of
from tests.solver.time.test_decision import deployed_of
from tests.solver.time.test_evaluation import CURVE

EXPERTS, RANKS, SLOTS = 12, 4, 5


@pytest.mark.parametrize("unused", [0, 3])
def test_time_is_scaled_to_a_mean_rank_of_one_and_unused_slots_add_none(unused: int) -> None:
    heat_NE = synthetic_heat("drift", 32, 1, EXPERTS, tokens=512, top_k=2)[:, 0].astype(np.float64)
    deployed, steps = deployed_of(EXPERTS, RANKS, SLOTS), steps_of(heat_NE)
    replicas_E = np.ones(EXPERTS, dtype=np.int32)
    replicas_E[: RANKS * SLOTS - EXPERTS - unused] += 1
    layer = timed(Layer(heat_of(heat_NE, RANKS), deployed), steps, CURVE)
    demand, left = _demand_in_time(layer, replicas_E)
    assert left == unused
    assert demand.mean_E.sum() == pytest.approx(RANKS, rel=1e-4)
    us_E = split_us(steps, replicas_E, CURVE) @ steps.weight_N
    assert demand.mean_E[:EXPERTS] == pytest.approx(us_E * RANKS / us_E.sum(), rel=1e-4)
    assert demand.mean_E[EXPERTS:].tolist() == [0.0] * unused
