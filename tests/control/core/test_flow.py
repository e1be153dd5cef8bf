"""Many fast ranks send long reports, heat that most drop is shed, and who is ahead waits, though not for ever."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.control.core.flow import (
    FEWEST_STEPS,
    HELD_SECONDS,
    MOST_HELD_SECONDS,
    MOST_STEPS,
    NOWHERE,
    Patience,
    ReportSize,
    Shedding,
)
from eplb_service.wire.agent import MOST_BLOCKS
from eplb_service.wire.heat import HeatReport, StepPhase
from tests.control.core.story import Story

_SIZE_LOOK = 20.0


class Model:
    """A group whose ranks make steps at a rate, looked at every twenty seconds."""

    def __init__(self, ranks: int, size: ReportSize | None = None) -> None:
        self.ranks = ranks
        self.now, self.step = 100.0, 0
        self.size = (size or ReportSize.up_to(256)).after(self.now, ranks, 0)

    def steps(self, per_second: float, looks: int = 1) -> int:
        for _ in range(looks):
            self.now += _SIZE_LOOK
            self.step += round(_SIZE_LOOK * per_second)
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
    story.deployment.report_size = ReportSize(64, most=64)
    story.leaves()
    story.joins(group_id="second")
    assert story.deployment.report_size == story.deployment.limits.report_size


RANKS = 8
_SHED_LOOK = 10.0


class Scene:
    """A deployment that is looked at every ten seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dropped = dict.fromkeys(range(RANKS), 0)
        self.shedding = Shedding().after(self.now, self.dropped)

    def look(self, *dropping: int, times: int = 1) -> int:
        for _ in range(times):
            self.now += _SHED_LOOK
            for rank in dropping:
                self.dropped[rank] += 16
            self.shedding = self.shedding.after(self.now, self.dropped)
        return self.shedding.one_in


def test_what_most_ranks_drop_again_and_again_is_no_more_asked_for() -> None:
    scene = Scene()
    assert [scene.look(*range(RANKS)) for _ in range(8)] == [1, 2, 2, 4, 4, 8, 8, MOST_BLOCKS]


def test_a_few_ranks_or_a_single_time_are_no_reason() -> None:
    scene = Scene()
    assert scene.look(*range(RANKS // 2), times=20) == 1
    for _ in range(5):
        assert scene.look(*range(RANKS)) == 1, "as after a time in which the service was away"
        assert scene.look() == 1


def test_a_rank_that_has_just_come_does_not_count() -> None:
    scene = Scene()
    for rank in range(RANKS, 4 * RANKS):
        scene.dropped[rank] = 1000
    assert scene.look() == 1
    assert scene.look() == 1


def test_calm_brings_it_back_and_what_was_too_early_takes_longer_the_next_time() -> None:
    scene = Scene()
    scene.look(*range(RANKS), times=2)
    first = 0
    while scene.look() > 1:
        first += 1
    scene.look(*range(RANKS), times=2)
    second = 0
    while scene.look() > 1:
        second += 1
    assert first >= 6
    assert second > 1.5 * first


def test_a_look_too_soon_changes_nothing() -> None:
    scene = Scene()
    dropped = dict.fromkeys(range(RANKS), 99)
    assert scene.shedding.after(scene.now + _SHED_LOOK / 2, dropped) is scene.shedding


def test_a_rank_in_step_is_not_held_back() -> None:
    assert not Patience().after(5.0, None).holds(5.0)


def test_a_rank_ahead_is_held_back_until_patience_runs_out_or_the_others_are_there() -> None:
    held = Patience().after(5.0, 100)
    assert held.holds(5.0)
    assert held.after(5.5, 100).holds(5.5)
    assert not held.after(5.5, None).holds(5.5)
    assert not held.after(5.0 + HELD_SECONDS, 100).holds(5.0 + HELD_SECONDS)


def test_it_waits_longer_for_ranks_that_get_on_but_not_for_ever() -> None:
    held, now = Patience().after(0.0, NOWHERE), 0.0
    while now + HELD_SECONDS / 2 < MOST_HELD_SECONDS:
        now += HELD_SECONDS / 2
        held = held.after(now, int(now))
        assert held.holds(now)
    assert not held.after(MOST_HELD_SECONDS, 1000).holds(MOST_HELD_SECONDS)


def test_one_that_has_waited_in_vain_waits_no_more_until_it_is_in_step() -> None:
    spent = Patience().after(0.0, 7).after(10 * HELD_SECONDS, 7)
    assert not spent.after(11 * HELD_SECONDS, 7).holds(11 * HELD_SECONDS)
    # A rank that was given up gets a little further: too late for what it is waited for.
    assert not spent.after(11 * HELD_SECONDS, 8).holds(11 * HELD_SECONDS)
    assert spent.after(12.0, None).after(13.0, 8).holds(13.0)
