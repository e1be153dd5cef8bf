"""When to decide next, on how many steps, and for how many: soon after a change, seldom where nothing can be won.

A departure of what is realised from what was promised (``change_test``) begins a new stretch: decisions fall when it is
4, 8 and 16 steps long, and look at its steps alone. Where its heat turns out to be no other than before, that was a
burst: nothing begins, and heat is looked at again soon. Later the interval is doubled where a decision changed nothing,
or what the one before changed did not win beyond its error, and halved where it did; each decision looks back as far
as heat is still what it is now (``stationary``). What moves cost is spread over the steps until the next decision;
after a departure, over as many as such stretches have lasted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from eplb_service.heat.window import Counts
from eplb_service.placement import Float64
from eplb_service.planner.change_test import Alarm, ChangeTest
from eplb_service.planner.promise import Promise
from eplb_service.planner.stationary import SHORTEST, has_changed, stationary_steps

FIRST_AFTER_CHANGE = 4
"""Steps after which a change is decided on first: an older and a newer half of two each."""
_SHORTEST_INTERVAL = SHORTEST
_LONGEST_INTERVAL = 512
"""Steps between decisions that change nothing, at most; ``make bench-decide`` was run with these."""
_LEAST_AHEAD = 8
"""Steps that heat is forecast over at least, where the window has four times as many."""
_FIRST_STRETCH = 256
"""Steps that a stretch is taken to last until any has ended."""
_STRETCHES_KEPT = 4
"""Newest stretches between changes that say how long the next will last."""


@dataclass(frozen=True)
class Pace:
    """Where a deployment is between two decisions; a value.

    Parameters
    ----------
    first
        Steps before the first decision.
    memory
        Steps that a decision looks back at most.
    seen
        Steps so far.
    due_at
        Steps after which a decision is due; ``None`` until the first.
    changed_at
        Steps before the present stretch.
    interval
        Steps from one decision to the next, while nothing departs.
    stretches
        How long the newest stretches have lasted, in steps.
    test
        What looks for a departure; ``None`` while nothing has been promised.
    inflation_C
        float64 ``[L + 1]``, how much neighbouring steps have been found to resemble each other (``Promise``).
    alarm
        The departure that began the present stretch; ``None`` for the first.
    calm
        What this was before that departure.
    """

    first: int
    memory: int
    seen: int = 0
    due_at: int | None = None
    changed_at: int = 0
    interval: int = _SHORTEST_INTERVAL
    stretches: tuple[int, ...] = ()
    test: ChangeTest | None = None
    inflation_C: Float64 | None = None
    alarm: Alarm | None = None
    calm: Pace | None = None

    @property
    def due(self) -> bool:
        """Whether it is time to decide."""
        return self.seen >= (self.first if self.due_at is None else self.due_at)

    @property
    def stretch(self) -> int:
        """Steps since the latest departure."""
        return self.seen - self.changed_at

    @property
    def settling(self) -> bool:
        """Whether a departure is too recent for anything but deciding on the steps since."""
        return self.alarm is not None and self.stretch <= _SHORTEST_INTERVAL

    @property
    def serving_steps(self) -> float:
        """Steps that a plan made now is expected to serve."""
        if self.due_at is not None and not self.settling:
            return float(self.interval)
        lasted = self.stretches or (_FIRST_STRETCH,)
        return max(sum(lasted) / len(lasted), float(self.stretch))

    def window_steps(self, heat_TLE: Counts) -> int:
        """How many of the newest steps to decide on; ``heat_TLE`` holds those that are remembered, ``[T, L, E]``."""
        longest = min(self.stretch, self.memory, len(heat_TLE))
        if self.due_at is None or longest < 2 * SHORTEST:
            return max(longest, 1)
        ahead = min(max(self.interval, _LEAST_AHEAD), longest // 4)
        return stationary_steps(heat_TLE[len(heat_TLE) - longest :], ahead)

    def weighed(self, heat_TLE: Counts) -> Pace:
        """What to decide by, given all heat that is remembered, ``[T, L, E]``: a burst does not count as a change."""
        if not self.settling or has_changed(heat_TLE, self.stretch):
            return self
        return self.dismissed()

    def dismissed(self) -> Pace:
        """The latest departure was a burst: what was known before still holds, and is looked at again soon."""
        if self.calm is None:
            return self
        test = self.test and self.test.calmed()
        # The next interval is at least the shortest, since it doubles where the decision changes nothing.
        return replace(
            self.calm,
            seen=self.seen,
            due_at=self.due_at,
            interval=_SHORTEST_INTERVAL // 2,
            test=test,
            inflation_C=self.inflation_C,
        )

    def after_steps(self, par_TL: Float64) -> tuple[Pace, int]:
        """Steps were served, with these ratios; up to the first at which a decision is due, and how many those are.

        Parameters
        ----------
        par_TL
            float64 ``[T, L]``; NaN where a layer had no tokens, or did not yet serve what was decided.
        """
        left = None if self.due_at is None else max(self.due_at - self.seen, 1)
        part_TL = par_TL[:left]
        test, taken, alarm = self.test, len(part_TL), None
        if test is not None:
            before = test
            test, taken, alarm = test.after(part_TL)
            if self.settling:
                # Its steps are decided on anyway; what they teach is of a placement that will not last.
                test, taken, alarm = before, len(part_TL), None
        after = replace(self, seen=self.seen + taken, test=test)
        return (after if alarm is None else after._departed(alarm)), taken

    def deferred(self) -> Pace:
        """A decision is being made: none is due before its result, or the next interval where it has none."""
        return replace(self, due_at=self.seen + self.interval)

    def after_decision(self, changed: bool, paid: bool | None) -> Pace:
        """A decision was made.

        Parameters
        ----------
        changed
            Whether any layer will change; then nothing is tested until it serves (``serving``).
        paid
            Whether what the change before it won, on the steps since, is above its error; ``None`` where none was.
        """
        if self.alarm is not None and self.stretch < _SHORTEST_INTERVAL:
            return replace(
                self, due_at=self.changed_at + 2 * max(self.stretch, 1), test=None if changed else self.test
            )
        interval = self.interval
        if not changed or paid is False:
            interval = min(2 * interval, _LONGEST_INTERVAL)
        elif paid:
            interval = max(interval // 2, _SHORTEST_INTERVAL)
        return replace(
            self, due_at=self.seen + interval, interval=interval, test=None if changed else self.test
        )

    def serving(self, promise: Promise) -> Pace:
        """What was promised serves from now on."""
        test = ChangeTest.of(promise, self.inflation_C)
        return replace(self, test=test, inflation_C=test.inflation_C)

    def _departed(self, alarm: Alarm) -> Pace:
        changed_at = self.seen - alarm.steps
        return replace(
            self,
            changed_at=changed_at,
            due_at=max(self.seen, changed_at + FIRST_AFTER_CHANGE),
            interval=_SHORTEST_INTERVAL,
            stretches=(*self.stretches, changed_at - self.changed_at)[-_STRETCHES_KEPT:],
            alarm=alarm,
            calm=replace(self, calm=None),
        )
