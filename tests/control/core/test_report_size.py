"""Reports are long where many ranks step fast, and never so long that what the service knows of the ranks is old."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.control.core.report_size import FEWEST_STEPS, MOST_STEPS, ReportSize
from eplb_service.control.core.watches import Watches
from eplb_service.wire.heat import HeatReport, StepPhase
from tests.control.core.story import Story

_LOOK = 20.0


class Model:
    """A group whose ranks make steps at a rate, looked at every twenty seconds."""

    def __init__(self, ranks: int, size: ReportSize | None = None) -> None:
        self.ranks = ranks
        self.now, self.step = 100.0, 0
        self.size = (size or ReportSize.up_to(256)).after(self.now, ranks, 0)

    def steps(self, per_second: float, looks: int = 1) -> int:
        for _ in range(looks):
            self.now += _LOOK
            self.step += round(_LOOK * per_second)
            self.size = self.size.after(self.now, self.ranks, self.step)
        return self.size.steps


@pytest.mark.parametrize(
    ("ranks", "per_second", "steps"),
    [
        (8, 20, 16),
        (64, 20, 16),
        (128, 20, 32),
        (256, 20, 64),
        (1024, 20, 64),
        (1024, 500, 64),
        (256, 10, 32),  # 64 steps would be more than 5 s old.
        (1024, 5, 16),
        (1024, 0.2, 16),
    ],
)
def test_long_reports_of_many_ranks_that_step_fast(ranks: int, per_second: float, steps: int) -> None:
    model = Model(ranks)
    assert model.size.steps == FEWEST_STEPS
    assert model.steps(per_second) == steps
    assert {model.steps(per_second * noise) for noise in (0.9, 1.1, 0.95, 1.0) if per_second > 12.8} <= {
        steps
    }
    if steps > FEWEST_STEPS:
        assert steps / per_second <= 5


def test_a_model_that_slows_down_reports_as_often_again_and_one_at_rest_keeps_its_size() -> None:
    model = Model(256)
    assert model.steps(20) == 64
    assert model.steps(0, looks=3) == 64
    assert model.steps(10) == 64, "6.4 s are no reason yet"
    assert model.steps(5) == 32
    assert model.steps(1) == 16
    assert model.steps(20) == 64


def test_ranks_that_start_again_are_looked_at_from_scratch() -> None:
    model = Model(256)
    model.steps(20)
    model.step = 5
    model.size = model.size.after(model.now + _LOOK, 256, 5)
    assert (model.size.steps, model.size.step) == (64, 5)


@pytest.mark.parametrize(("window", "most"), [(8, 16), (64, 16), (127, 16), (128, 32), (256, 64), (4096, 64)])
def test_no_report_is_longer_than_a_fourth_of_what_decisions_look_at(window: int, most: int) -> None:
    assert Model(4096, ReportSize.up_to(window)).steps(200) == most <= MOST_STEPS


def test_a_number_that_was_set_stays() -> None:
    for steps in (1, 8, 16, 200):
        model = Model(4096, ReportSize.fixed(steps))
        assert {model.steps(per_second) for per_second in (200, 0.1)} == {steps}


def test_reports_that_grow_with_their_steps_stay_short() -> None:
    phases, by_step = np.full(1, StepPhase.DECODE, dtype=np.uint8), np.ones((1, 1, 2), dtype=np.int32)
    model = Model(1024)
    model.size = model.size.after_report(HeatReport(0, (0,), None, phases, by_step))
    assert model.steps(20) == 16
    summed = HeatReport(0, (0,), by_step, phases, source_sums_LE=by_step[0])
    model.size = model.size.after_report(summed)
    assert model.steps(20) == 64
    model.size = model.size.after_report(HeatReport(0, (0,), None, phases, by_step))
    assert model.steps(20) == 16


def test_another_forming_of_the_group_begins_with_short_reports() -> None:
    story = Story()
    story.joins()
    story.deployment.watches = Watches(report_size=ReportSize(64, most=64))
    story.leaves()
    story.joins(group_id="second")
    assert story.deployment.watches.report_size == story.deployment.limits.report_size
