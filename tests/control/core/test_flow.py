"""Report lengths for large groups, shedding of heat that most ranks drop, and detection of stalled counters."""

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
def test_large_groups_send_longer_reports_of_at_most_a_quarter_of_the_window(
    ranks: int, window: int, steps: int
) -> None:
    limits = Limits(4096, 256, 60.0, interval=window)
    assert limits.steps_per_report(ranks) == Limits(window, 256, 60.0).steps_per_report(ranks) == steps


def test_a_configured_report_length_applies_to_groups_of_any_size() -> None:
    assert {Limits(512, 64, 60.0, report_steps=8).steps_per_report(ranks) for ranks in (1, 4096)} == {8}


RANKS = 8
_CHECK_SECONDS = 20.0


class Scene:
    """A deployment whose dropped steps are checked every 20 seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dropped = dict.fromkeys(range(RANKS), 0)
        self.shedding = Shedding().after(self.now, self.dropped)

    def check(self, *dropping: int, times: int = 1) -> int:
        for _ in range(times):
            self.now += _CHECK_SECONDS
            for rank in dropping:
                self.dropped[rank] += 16
            self.shedding = self.shedding.after(self.now, self.dropped)
        return self.shedding.one_in


def test_shedding_increases_while_most_ranks_drop_heat_and_decreases_after_a_calm_period() -> None:
    scene = Scene()
    assert [scene.check(*range(RANKS)) for _ in range(5)] == [2, 4, 8, MAX_BLOCKS, MAX_BLOCKS]
    assert scene.check(times=14) == MAX_BLOCKS
    assert scene.check(0, times=20) == MAX_BLOCKS, "a few ranks still drop heat"
    assert scene.check(times=15) == MAX_BLOCKS // 2
    assert scene.check(times=45) == 1


def test_no_heat_is_shed_before_the_next_check_or_if_only_a_few_or_only_new_ranks_drop_heat() -> None:
    scene = Scene()
    assert scene.check(*range(RANKS // 2), times=20) == 1
    for rank in range(RANKS, 4 * RANKS):
        scene.dropped[rank] = 1000
    assert scene.check(times=2) == 1
    for rank in scene.dropped:
        scene.shedding = scene.shedding.joined(rank)
    assert scene.check(*scene.dropped) == 1, "all ranks have just reconnected"
    all_drop = dict.fromkeys(range(RANKS), 99_999)
    assert scene.shedding.after(scene.now + _CHECK_SECONDS / 2, all_drop) is scene.shedding


def test_a_stall_ends_if_the_counter_changes_or_cannot_grow_or_if_the_ranks_restart() -> None:
    stall = Stall().after(5.0, 100, 7).after(8.0, 130, 7)
    assert (stall.seconds, stall.steps) == (3.0, 30)
    for step, count in ((130, 8), (130, None), (90, 7)):
        assert stall.after(9.0, step, count) == Stall(count, 9.0, step)
