"""By the clock a decision looks back as far as heat is still what it is now, and prices moves by the interval."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.control.core.pacing import Pacing
from eplb_service.control.server.deciding.question import Question, answer
from eplb_service.heat.assembler import RememberedHeat
from eplb_service.heat.sources import SourceSums
from eplb_service.heat.step_times import StepTimes
from eplb_service.placement import Int32
from eplb_service.planner.pace import Pace
from eplb_service.planner.promise import Promise
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from tests.control.fake_group import EXPERTS, LAYERS, RANKS, first_placement, live_of


def heat(steps: int, seed: int) -> Int32:
    generator = np.random.default_rng(seed)
    popularity_LE = generator.dirichlet(np.ones(EXPERTS), LAYERS)
    drawn = [generator.multinomial(4096, row_E, size=steps) for row_E in popularity_LE]
    return np.stack(drawn, axis=1).astype(np.int32)


def asked(heat_TLE: Int32, interval: int | None, pacing: Pacing | None = None) -> Question:
    nothing_T = np.full(len(heat_TLE), np.nan)
    return Question(
        RememberedHeat(tuple(heat_TLE), (LAYERS, EXPERTS), SourceSums(())),
        StepTimes(nothing_T, nothing_T),
        live_of(first_placement()),
        None,
        Topology.flat(RANKS),
        PlannerSettings(threads=1),
        pacing,
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


def departed(before: int) -> Pacing:
    """Of a deployment whose ratio left what was promised, after so many steps and four steps ago."""
    promise = Promise(np.full(LAYERS + 1, 1.2), np.full(LAYERS + 1, 1e-4), np.ones(LAYERS + 1), before)
    pacing = Pacing(Pace(first=before, memory=512)).after_steps(np.full((before, LAYERS), 1.2))
    pacing = pacing.deciding().kept(promise, None).after_steps(np.full((4, LAYERS), 1.8))
    assert pacing.pace.settling
    return pacing


def test_where_ratios_left_what_was_promised_heat_says_whether_that_is_a_change() -> None:
    changed = asked(np.concatenate([heat(100, 0), heat(4, 1)]), None, departed(100))
    assert (changed.looked_at.steps, changed.serving_steps) == (4, 100.0)
    assert not answer(changed)[1].burst
    burst = asked(heat(104, 0), None, departed(100))
    assert (burst.looked_at.steps, burst.serving_steps) == (104, 8.0)
    assert answer(burst)[1].burst
