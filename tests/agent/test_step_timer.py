"""A step's time is that since the boundary before it, and not known where that was not the pass before."""

from __future__ import annotations

from worker_agent.step_timer import StepTimer


class Clock:
    """Nanoseconds that the test sets."""

    now = 0

    def __call__(self) -> int:
        return self.now


def test_the_time_between_two_boundaries_is_the_steps_between_them() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    laps = [timer.lap()]
    for clock.now in (2_500_000, 3_000_000, 3_000_100):
        laps.append(timer.lap())
    assert laps == [0, 2500, 500, 1], "no step takes no time: 0 says that it is not known"


def test_neither_a_pause_nor_several_passes_are_taken_for_one_step() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.lap()
    clock.now = 1_000_000
    assert timer.lap(passes=2) == 0
    clock.now = 1_700_000
    assert timer.lap() == 700
    timer.pause()
    clock.now = 60_000_000_000
    assert timer.lap() == 0
    clock.now += 900_000
    assert timer.lap() == 900
