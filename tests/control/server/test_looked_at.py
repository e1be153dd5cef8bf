"""By the clock a decision looks back as far as heat is still what it is now, and prices moves by the interval."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.control.server.deciding.question import Question
from eplb_service.heat.assembler import RememberedHeat
from eplb_service.heat.sources import SourceSums
from eplb_service.heat.step_times import StepTimes
from eplb_service.placement import Int32
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from tests.control.fake_group import EXPERTS, LAYERS, RANKS, first_placement, live_of


def heat(steps: int, seed: int) -> Int32:
    generator = np.random.default_rng(seed)
    popularity_LE = generator.dirichlet(np.ones(EXPERTS), LAYERS)
    drawn = [generator.multinomial(4096, row_E, size=steps) for row_E in popularity_LE]
    return np.stack(drawn, axis=1).astype(np.int32)


def asked(heat_TLE: Int32, interval: int | None) -> Question:
    nothing_T = np.full(len(heat_TLE), np.nan)
    return Question(
        RememberedHeat(tuple(heat_TLE), (LAYERS, EXPERTS), SourceSums(())),
        StepTimes(nothing_T, nothing_T),
        live_of(first_placement()),
        None,
        Topology.flat(RANKS),
        PlannerSettings(),
        None,
        interval=interval,
    )


@pytest.mark.parametrize(
    ("interval", "least", "serves"), [(None, 200, None), (256, 200, None), (64, 128, 64.0)]
)
def test_still_heat_is_looked_at_beyond_an_interval(
    interval: int | None, least: int, serves: float | None
) -> None:
    question = asked(heat(200, 0), interval)
    assert least <= question.looked_at.steps <= 200
    assert question.serving_steps == serves


def test_heat_from_before_a_change_is_left_out() -> None:
    changed_TLE = np.concatenate([heat(136, 0), heat(64, 1)])
    assert asked(changed_TLE, 64).looked_at.steps <= 64
    assert asked(changed_TLE, 256).looked_at.steps == 200
