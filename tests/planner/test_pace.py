"""Decisions come soon after a change, look at the steps since it, and grow seldom where nothing can be won."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_service.planner.pace import Pace
from eplb_service.planner.plan import Promise
from tests.planner.drawn import still_heat

PROMISE = Promise(np.full(3, 1.2), np.full(3, 1e-4), np.ones(3), 64)
CALM, WORSE = 1.2, 1.6


def steps(count: int, par: float = CALM) -> np.ndarray:
    return np.full((count, 2), par)


def served(pace: Pace, count: int, par: float = CALM) -> Pace:
    """So many steps, or fewer where a decision is due before."""
    return pace.after_steps(steps(count, par))[0]


@pytest.fixture
def calm() -> Pace:
    """A deployment after its first decision, on 64 steps, that changed nothing."""
    pace = served(Pace(first=64, memory=512, longest=512), 64)
    assert pace.due
    return pace.after_decision(changed=False, paid=None).serving(PROMISE)


def heat(count: int, seed: int = 0) -> np.ndarray:
    return still_heat(count, 2, 8, 4096, seed)


def test_the_first_decision_falls_after_the_steps_asked_for_and_looks_at_all_of_them() -> None:
    pace = served(Pace(first=64, memory=512, longest=512), 63)
    assert not pace.due
    pace = served(pace, 1)
    assert pace.due
    assert pace.window_steps(heat(64)) == 64
    assert pace.serving_steps == 256


def test_intervals_double_while_nothing_changes(calm: Pace) -> None:
    lengths = []
    for _ in range(6):
        pace, taken = calm.after_steps(steps(1000))
        assert pace.due
        lengths.append(taken)
        calm = pace.after_decision(changed=False, paid=None).serving(PROMISE)
    assert lengths == [24, 48, 96, 192, 384, 512]


@pytest.mark.parametrize("longest", [8, 48])
def test_the_interval_asked_for_is_the_longest(longest: int) -> None:
    pace, lengths = served(Pace(first=longest, memory=512, longest=longest), longest), []
    for _ in range(3):
        decided = pace.after_decision(changed=False, paid=None).serving(PROMISE)
        pace, taken = decided.after_steps(steps(1000))
        lengths.append(taken)
    assert lengths == [min(24, longest), longest, longest]


def test_intervals_shrink_where_changes_pay_and_grow_where_they_do_not(calm: Pace) -> None:
    calm = calm.after_decision(changed=False, paid=None)
    assert calm.interval == 48
    shorter = calm.after_decision(changed=True, paid=True)
    assert shorter.interval == 24
    assert shorter.after_decision(changed=True, paid=True).interval == 24
    assert calm.after_decision(changed=True, paid=None).interval == 48
    assert calm.after_decision(changed=True, paid=False).interval == 96
    assert calm.after_decision(changed=False, paid=True).interval == 96


def test_a_decision_that_took_much_cpu_puts_the_next_one_off(calm: Pace) -> None:
    # 640 steps have paid in advance by now, 512 of them count.
    calm = replace(calm, seen=640).after_decision(changed=True, paid=True)
    assert calm.charged(100).due_at == calm.due_at
    twice = calm.charged(300).charged(300.5)
    assert twice.due_at == calm.seen + 89
    # Nor does a departure hurry it.
    departed = twice.serving(PROMISE).after_steps(steps(12, WORSE))[0]
    assert departed.alarm is not None
    assert departed.due_at == twice.due_at
    assert departed.dismissed().paid_at == twice.paid_at


def test_on_average_decisions_take_no_more_cpu_than_their_steps_pay_for() -> None:
    pace, spent = Pace(first=0, memory=512, longest=256), 0.0
    while pace.seen < 20_000:
        # Each wins, as on drifting heat, and takes what 90 steps pay for.
        pace = pace.after_decision(changed=True, paid=True).charged(90.0)
        spent += 90.0
        pace, _ = pace.after_steps(steps(1000))
    assert spent <= pace.seen + 256 + 90
    assert spent >= 0.9 * pace.seen


def test_after_a_departure_decisions_fall_at_4_8_and_16_steps_of_it(calm: Pace) -> None:
    calm, _ = calm.after_steps(steps(20))
    pace, taken = calm.after_steps(steps(12, WORSE))
    assert pace.alarm is not None
    assert pace.stretch == taken == 1
    assert not pace.due
    found = []
    for _ in range(3):
        pace, _ = pace.after_steps(steps(20, WORSE))
        assert pace.due
        found.append((pace.stretch, pace.window_steps(heat(512)), pace.serving_steps))
        pace = pace.after_decision(changed=True, paid=None).serving(PROMISE)
    # The stretch before lasted 84 steps, and so this one is expected to.
    assert found == [(4, 4, 84.0), (8, 8, 84.0), (16, 16, 84.0)]
    assert pace.due_at == pace.seen + 24


def test_a_burst_begins_nothing_and_is_looked_at_again_soon(calm: Pace) -> None:
    calm, _ = calm.after_steps(steps(20))
    pace, _ = calm.after_steps(steps(1, WORSE))
    assert pace.settling
    assert (calm.follows(None), calm.follows(False), pace.follows(True)) == (True, False, False)
    pace = served(pace, 3, WORSE)
    still, other = heat(100), np.concatenate([heat(96), heat(4, seed=1)])
    assert pace.weighed(other) is pace
    assert calm.weighed(other) is calm.dismissed() is calm
    weighed = pace.weighed(still)
    assert (weighed.alarm, weighed.changed_at, weighed.seen) == (None, 0, pace.seen)
    assert weighed.window_steps(still[:88]) == 88
    decided = weighed.after_decision(changed=False, paid=None)
    assert decided.due_at == pace.seen + 24
    # What it summed up is forgotten: as many steps as before are an alarm again.
    assert decided.after_steps(steps(1))[0].alarm is None


def test_what_serves_while_a_change_is_being_decided_on_raises_no_alarm(calm: Pace) -> None:
    pace, _ = calm.after_steps(steps(12, WORSE))
    alarm = pace.alarm
    pace, taken = pace.after_steps(steps(2, 3.0))
    assert (pace.alarm, taken) == (alarm, 2)


def test_nothing_is_tested_between_a_decision_and_what_it_changed(calm: Pace) -> None:
    pace = calm.after_decision(changed=True, paid=None)
    pace, taken = pace.after_steps(steps(20, WORSE))
    assert (pace.expected, pace.alarm, taken) == (None, None, 20)
    pace, _ = pace.serving(PROMISE).after_steps(steps(5, WORSE))
    assert pace.alarm is not None


def test_a_decision_that_is_being_made_is_not_due_again(calm: Pace) -> None:
    pace, _ = calm.after_steps(steps(24))
    assert pace.due
    assert not pace.deferred().due


def test_a_decision_looks_back_as_far_as_heat_is_the_same(calm: Pace) -> None:
    pace = served(served(calm, 24).after_decision(changed=False, paid=None), 48)
    still = heat(160)
    assert pace.window_steps(still) == 136
    jumped = np.concatenate([heat(110), heat(50, seed=1)])
    assert pace.window_steps(jumped) <= 64
    assert pace.window_steps(still[:40]) == 40
