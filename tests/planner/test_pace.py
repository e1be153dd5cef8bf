"""Decisions follow a change promptly, use the steps since the change, and become rare if nothing can be gained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Promise
from tests.planner.drawn import still_heat

PROMISE = Promise(np.full(3, 1.2), np.full(3, 1e-4), np.ones(3), 64)
CALM = 1.2
WORSE = 1.6


def steps(count: int, par: float = CALM) -> np.ndarray:
    return np.full((count, 2), par)


def advanced(pace: Pace, count: int, par: float = CALM) -> Pace:
    """Advance the pace by up to ``count`` steps, stopping when a decision is due."""
    return pace.after_steps(steps(count, par))[0]


@pytest.fixture
def calm() -> Pace:
    """Return the pace after a first decision, on 64 steps, that changed nothing."""
    pace = advanced(Pace(first=64, memory=512, longest=512), 64)
    assert pace.due
    return pace.after_decision(changed=False, paid=None).serving(PROMISE)


def heat(count: int, seed: int = 0) -> np.ndarray:
    return still_heat(count, 2, 8, 4096, seed)


def test_the_first_decision_is_due_after_the_first_window_and_uses_all_of_it() -> None:
    pace = advanced(Pace(first=64, memory=512, longest=512), 63)
    assert not pace.due
    pace = advanced(pace, 1)
    assert pace.due
    assert pace.window_steps(heat(64)) == 64
    assert pace.serving_steps == 256


def test_intervals_double_until_the_maximum_while_nothing_changes(calm: Pace) -> None:
    lengths = []
    for _ in range(6):
        pace, step_count = calm.after_steps(steps(1000))
        assert pace.due
        lengths.append(step_count)
        calm = pace.after_decision(changed=False, paid=None).serving(PROMISE)
    assert lengths == [24, 48, 96, 192, 384, 512]


@pytest.mark.parametrize("longest", [8, 48])
def test_intervals_never_exceed_the_longest_interval(longest: int) -> None:
    pace = advanced(Pace(first=longest, memory=512, longest=longest), longest)
    lengths = []
    for _ in range(3):
        decided = pace.after_decision(changed=False, paid=None).serving(PROMISE)
        pace, step_count = decided.after_steps(steps(1000))
        lengths.append(step_count)
    assert lengths == [min(24, longest), longest, longest]


def test_intervals_shrink_if_changes_pay_off_and_grow_otherwise(calm: Pace) -> None:
    calm = calm.after_decision(changed=False, paid=None)
    assert calm.interval == 48
    shorter = calm.after_decision(changed=True, paid=True)
    assert shorter.interval == 24
    assert shorter.after_decision(changed=True, paid=True).interval == 24
    assert calm.after_decision(changed=True, paid=None).interval == 48
    assert calm.after_decision(changed=True, paid=False).interval == 96
    assert calm.after_decision(changed=False, paid=True).interval == 96


def test_an_expensive_decision_delays_the_next_one(calm: Pace) -> None:
    # CPU budget has accrued over 640 steps, of which only 512 count.
    calm = replace(calm, seen=640).after_decision(changed=True, paid=True)
    assert calm.charged(100).due_at == calm.due_at
    twice = calm.charged(300).charged(300.5)
    assert twice.due_at == calm.seen + 89
    # A departure from the promise does not bring the decision forward.
    departed = twice.serving(PROMISE).after_steps(steps(12, WORSE))[0]
    assert departed.alarm is not None
    assert departed.due_at == twice.due_at
    assert departed.dismissed().paid_at == twice.paid_at


def test_decisions_stay_within_the_cpu_budget_of_their_steps_on_average() -> None:
    pace = Pace(first=0, memory=512, longest=256)
    spent = 0.0
    while pace.seen < 20_000:
        # Every decision brings a gain, as under drifting heat, and uses the CPU budget of 90 steps.
        pace = pace.after_decision(changed=True, paid=True).charged(90.0)
        spent += 90.0
        pace, _ = pace.after_steps(steps(1000))
    assert spent <= pace.seen + 256 + 90
    assert spent >= 0.9 * pace.seen


def test_decisions_follow_4_8_and_16_steps_after_a_change(calm: Pace) -> None:
    calm, _ = calm.after_steps(steps(20))
    pace, step_count = calm.after_steps(steps(12, WORSE))
    assert pace.alarm is not None
    assert pace.segment_age == step_count == 1
    assert not pace.due
    windows = []
    for _ in range(3):
        pace, _ = pace.after_steps(steps(20, WORSE))
        assert pace.due
        windows.append((pace.segment_age, pace.window_steps(heat(512)), pace.serving_steps))
        pace = pace.after_decision(changed=True, paid=None).serving(PROMISE)
    # The previous segment lasted 84 steps, so the same length is expected of this one.
    assert windows == [(4, 4, 84.0), (8, 8, 84.0), (16, 16, 84.0)]
    assert pace.due_at == pace.seen + 24


def test_a_burst_starts_no_segment_and_the_next_decision_follows_soon(calm: Pace) -> None:
    calm, _ = calm.after_steps(steps(20))
    pace, _ = calm.after_steps(steps(1, WORSE))
    assert pace.settling
    assert (calm.follows(None), calm.follows(False), pace.follows(True)) == (True, False, False)
    pace = advanced(pace, 3, WORSE)
    still = heat(100)
    changed = np.concatenate([heat(96), heat(4, seed=1)])
    assert pace.weighed(changed) is pace
    assert calm.weighed(still) is calm.dismissed() is calm
    weighed = pace.weighed(still)
    assert (weighed.alarm, weighed.changed_at, weighed.seen) == (None, 0, pace.seen)
    assert weighed.window_steps(still[:88]) == 88
    decided = weighed.after_decision(changed=False, paid=None)
    assert decided.due_at == pace.seen + 24
    # The test's sum was reset, so one step does not raise an alarm.
    assert decided.after_steps(steps(1))[0].alarm is None


def test_no_second_alarm_is_raised_before_the_decision_on_a_change(calm: Pace) -> None:
    pace, _ = calm.after_steps(steps(12, WORSE))
    alarm = pace.alarm
    pace, step_count = pace.after_steps(steps(2, 3.0))
    assert (pace.alarm, step_count) == (alarm, 2)


def test_no_step_is_tested_between_a_decision_and_its_commit(calm: Pace) -> None:
    pace = calm.after_decision(changed=True, paid=None)
    pace, step_count = pace.after_steps(steps(20, WORSE))
    assert (pace.expected, pace.alarm, step_count) == (None, None, 20)
    pace, _ = pace.serving(PROMISE).after_steps(steps(5, WORSE))
    assert pace.alarm is not None


def test_a_running_decision_is_not_due_again(calm: Pace) -> None:
    pace, _ = calm.after_steps(steps(24))
    assert pace.due
    assert not pace.deferred().due


def test_a_decision_looks_back_over_unchanged_heat(calm: Pace) -> None:
    pace = advanced(advanced(calm, 24).after_decision(changed=False, paid=None), 48)
    still = heat(160)
    assert pace.window_steps(still) == 136
    jumped = np.concatenate([heat(110), heat(50, seed=1)])
    assert pace.window_steps(jumped) <= 64
    assert pace.window_steps(still[:40]) == 40


def schedule(par_TL: np.ndarray, batch: int, held_out: bool) -> list[tuple[int, str]]:
    """Return the steps of all alarms and decisions when ``batch`` steps arrive at a time and decisions cost nothing."""
    pace = Pace(first=16, memory=512, longest=128)
    events = []
    for begin in range(0, len(par_TL), batch):
        remaining_TL = par_TL[begin : begin + batch]
        while len(remaining_TL):
            alarm = pace.alarm
            pace, step_count = pace.after_steps(remaining_TL)
            remaining_TL = remaining_TL[step_count:]
            if pace.alarm is not alarm:
                events.append((pace.seen, f"alarm of {pace.alarm}"))
            if pace.due:
                events.append((pace.seen, f"decision on {pace.segment_age} steps"))
                mean = par_TL[max(0, pace.seen - 8) : pace.seen].mean()
                promise = Promise(np.full(3, mean), np.full(3, 1e-3), np.ones(3), 8, held_out)
                pace = pace.after_decision(changed=pace.settling, paid=None).serving(promise)
    return events


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 90), min_size=1, max_size=6), st.booleans())
def test_alarms_and_decisions_do_not_depend_on_the_batch_size(
    seed: int, lengths: list[int], held_out: bool
) -> None:
    generator = np.random.default_rng(seed)
    levels = 1.1 + generator.exponential(0.3, len(lengths))
    par_TL = np.repeat(levels, lengths)[:, None] + 0.03 * generator.normal(size=(sum(lengths), 2))
    one_by_one = schedule(par_TL, 1, held_out)
    assert schedule(par_TL, 16, held_out) == one_by_one
    assert schedule(par_TL, 64, held_out) == one_by_one


def test_a_segment_is_tested_again_from_its_seventeenth_step(calm: Pace) -> None:
    pace, _ = calm.after_steps(steps(12, WORSE))
    for _ in range(3):
        pace, _ = pace.after_steps(steps(64, WORSE))
        pace = pace.after_decision(changed=True, paid=None).serving(PROMISE)
    assert (pace.segment_age, pace.settling) == (16, True)
    # All steps of the next interval arrive at once, and the change test still detects the second change.
    pace, step_count = pace.after_steps(np.concatenate([steps(2), steps(22, WORSE)]))
    assert pace.alarm is not None
    assert step_count <= 5


@pytest.mark.parametrize("old_steps", [0, 1, 2, 4, 8, 14, 30])
def test_a_change_soon_after_a_promise_without_a_hold_out_raises_an_alarm(old_steps: int) -> None:
    promise = Promise(np.full(3, 1.05), np.full(3, 1e-3), np.ones(3), 64, held_out=False)
    pace = Pace(first=64, memory=512, longest=512, seen=64, due_at=1 << 40).serving(promise)
    generator = np.random.default_rng(old_steps)
    # New steps are slightly worse than those that the placement was fitted to. This does not count as a change.
    par_TL = 1.15 + 0.03 * generator.normal(size=(old_steps + 20, 2))
    assert pace.after_steps(par_TL)[0].alarm is None
    par_TL[old_steps:] += 0.6
    pace, step_count = pace.after_steps(par_TL)
    assert pace.alarm is not None
    assert old_steps < step_count <= old_steps + 6


def test_the_first_tokens_of_a_layer_raise_no_alarm(calm: Pace) -> None:
    idle = Promise(np.array([1.2, np.nan, 1.2]), np.array([1e-4, 0.0, 1e-4]), np.ones(3), 64)
    generator = np.random.default_rng(0)
    par_TL = np.column_stack([np.full(100, 1.2), 1.2 + 0.04 * generator.normal(size=100)])
    pace, _ = replace(calm, due_at=1 << 40).serving(idle).after_steps(par_TL)
    assert pace.alarm is None


def test_a_decision_waits_until_a_possible_change_is_four_steps_old(calm: Pace) -> None:
    pace, _ = calm.after_steps(np.concatenate([steps(23), steps(1, 1.2 + 0.05)]))
    assert pace.alarm is None
    assert pace.seen >= pace.due_at
    assert not pace.due
    # The change lasted a single step. A decision becomes due once the test's sum falls back or the change is old
    # enough.
    pace, step_count = pace.after_steps(steps(20))
    assert pace.due
    assert step_count <= 3


@pytest.mark.parametrize("age", [4, 5, 9, 16, 30, 60])
def test_a_decision_detects_a_silent_change_and_uses_the_steps_after_it(age: int) -> None:
    changed = np.concatenate([heat(100 - age), heat(age, seed=1)])
    pace = advanced(Pace(first=100, memory=512, longest=512), 100)
    weighed = pace.weighed(changed)
    assert weighed.due
    assert abs(weighed.window_steps(changed) - age) <= max(1, age // 8)
    assert pace.weighed(heat(100)) is pace


def test_alternating_workloads_do_not_count_as_a_change_once_both_were_observed() -> None:
    first = heat(40)
    second = heat(40, seed=1)
    turns = np.concatenate([first, second, first, second[:20]])
    pace = advanced(Pace(first=140, memory=512, longest=512), 140)
    assert pace.weighed(turns) is pace
