"""Many ranks send long reports, heat that most drop is shed, and a count that stops is noticed while ranks step."""

from __future__ import annotations

import pytest

from eplb_core.wire.agent import MAX_BLOCKS
from eplb_service.control.core.flow import Limits, Shedding, Stall


@pytest.mark.parametrize(
    ("ranks", "window", "steps"),
    [
        *((8, 256, 16), (80, 256, 16), (81, 256, 32), (160, 256, 32), (161, 256, 64), (4096, 256, 64)),
        *((4096, 8, 16), (4096, 127, 16), (4096, 128, 32), (4096, 4096, 64)),
    ],
)
def test_many_ranks_send_long_reports_of_at_most_a_fourth_of_a_window(
    ranks: int, window: int, steps: int
) -> None:
    limits = Limits(4096, 256, 60.0, interval=window)
    assert limits.steps_per_report(ranks) == Limits(window, 256, 60.0).steps_per_report(ranks) == steps


def test_a_number_that_was_set_stays_and_changes_are_decided_on_by_short_reports() -> None:
    assert {Limits(512, 64, 60.0, report_steps=8).steps_per_report(ranks) for ranks in (1, 4096)} == {8}


RANKS = 8
_SHED_LOOK = 20.0


class Scene:
    """A deployment that is looked at every twenty seconds."""

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


def test_what_most_ranks_drop_is_no_more_asked_for_until_it_has_long_been_calm() -> None:
    scene = Scene()
    assert [scene.look(*range(RANKS)) for _ in range(5)] == [2, 4, 8, MAX_BLOCKS, MAX_BLOCKS]
    assert scene.look(times=14) == MAX_BLOCKS
    assert scene.look(0, times=20) == MAX_BLOCKS, "a few ranks still drop heat"
    assert scene.look(times=15) == MAX_BLOCKS // 2
    assert scene.look(times=45) == 1


def test_a_few_ranks_or_one_that_has_just_come_are_no_reason_nor_is_a_look_too_soon() -> None:
    scene = Scene()
    assert scene.look(*range(RANKS // 2), times=20) == 1
    for rank in range(RANKS, 4 * RANKS):
        scene.dropped[rank] = 1000
    assert scene.look(times=2) == 1
    for rank in scene.dropped:
        scene.shedding = scene.shedding.joined(rank)
    assert scene.look(*scene.dropped) == 1, "all were cut off, and are back"
    all_drop = dict.fromkeys(range(RANKS), 99_999)
    assert scene.shedding.after(scene.now + _SHED_LOOK / 2, all_drop) is scene.shedding


def test_a_stall_lasts_until_the_count_grows_or_cannot_or_the_ranks_begin_again() -> None:
    stall = Stall().after(5.0, 100, 7).after(8.0, 130, 7)
    assert (stall.seconds, stall.steps) == (3.0, 30)
    for step, count in ((130, 8), (130, None), (90, 7)):
        assert stall.after(9.0, step, count) == Stall(count, 9.0, step)
