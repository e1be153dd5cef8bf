"""Heartbeats fill silence and bring news; where heat goes out and nothing is new, few are said."""

from __future__ import annotations

from eplb_service.wire.status import Heartbeat
from worker_agent.heartbeats import Heartbeats

INTERVAL = 2.0


class Rank:
    """Looks every two seconds whether to say a heartbeat."""

    def __init__(self) -> None:
        self.now = 100.0
        self.heartbeats = Heartbeats(self.now)
        self.step = 0

    def looks(self, times: int = 1, *, heat: bool, error: str = "", epoch: int = 0) -> list[bool]:
        said = []
        for _ in range(times):
            assert self.heartbeats.left(self.now) == 0
            self.step += 40
            if heat:
                self.heartbeats.said_other()
            beat = Heartbeat(step=self.step, epoch=epoch, digest=epoch, error=error)
            said.append(self.heartbeats.look(self.now, beat, INTERVAL))
            assert self.heartbeats.left(self.now) == INTERVAL
            self.now += INTERVAL
        return said


def test_a_silent_rank_says_every_one() -> None:
    assert Rank().looks(6, heat=False) == [True] * 6


def test_of_five_beside_heat_one_is_said_and_the_first() -> None:
    assert Rank().looks(12, heat=True) == [True, *([False] * 4 + [True]) * 2, False]


def test_news_are_said_at_once() -> None:
    rank = Rank()
    rank.looks(2, heat=True)
    assert rank.looks(2, heat=True, error="out of memory") == [True, False]
    assert rank.looks(2, heat=True) == [True, False], "that it is well again is news too"
    assert rank.looks(2, heat=True, epoch=1) == [True, False]


def test_a_rank_whose_heat_stops_is_heard_at_the_next_look_but_one() -> None:
    rank = Rank()
    assert rank.looks(3, heat=True) == [True, False, False]
    assert rank.looks(4, heat=False) == [False, True, True, True]


def test_reports_that_take_longer_than_an_interval_are_heat_too() -> None:
    rank = Rank()
    said = [rank.looks(heat=bool(number % 2))[0] for number in range(12)]
    assert said == [True, *([False] * 4 + [True]) * 2, False]
