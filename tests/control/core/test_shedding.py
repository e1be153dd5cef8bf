"""Heat is shed only where most ranks drop it again and again, and is asked for again once they have long been calm."""

from __future__ import annotations

from eplb_service.control.core.shedding import Shedding
from eplb_service.wire.reporting import MOST_BLOCKS

RANKS = 8
_LOOK = 10.0


class Scene:
    """A deployment that is looked at every ten seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dropped = dict.fromkeys(range(RANKS), 0)
        self.shedding = Shedding().after(self.now, self.dropped)

    def look(self, *dropping: int, times: int = 1) -> int:
        for _ in range(times):
            self.now += _LOOK
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
    assert scene.shedding.after(scene.now + _LOOK / 2, dropped) is scene.shedding
