"""Pace of decisions: when to decide next, on how many steps, and for how many.

Decisions fall soon after a departure of what is realised from what was promised, seldom where nothing can be won, and
within the CPU that they may take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import Counts
from eplb_service.placement import Float64
from eplb_service.planner.plan import Promise, channels_of

_SHORTEST = 16
"""Steps below which no stretch is looked at, and up to which a departure is recent."""
_LEAST_INTERVAL = 24
"""Least steps between decisions while nothing departs. On drift (``make bench-decide``, ten seeds) half as many realise
2.5 % less in 2.6 times the decisions, and 32 steps 0.7 % more in four fifths."""
_FIRST_AFTER_CHANGE = 4
"""Steps after which a change is decided on first: an older and a newer half of two each."""
_FIRST_STRETCH = 256
"""Steps that a stretch is taken to last until any has ended."""
_STRETCHES_KEPT = 4
"""Newest stretches between changes that say how long the next will last."""

_AS_GOOD = 1.1
"""Part of the least squared error of a forecast up to which a longer stretch is as good."""
_LAYERS_FORECAST = 16
"""Layers, at most, evenly from first to last, whose heat says so."""
_FORECASTS = 4
"""Newest intervals, at most, whose heat says how far to look back: one alone is a matter of chance on bursts."""
_OTHER_HEAT = 4.0
"""How many times the error of a stretch of a few steps that of the best of those before must be for it to be of other
heat: more than bursts and drift make of it, and less than another workload does (``make bench-decide``)."""

_ALLOWANCE = 1.0
"""Standard deviations of a step that are no excess: half the smallest change that is looked for."""
_THRESHOLD = 11.0
"""Standard deviations that a sum must pass; chosen by hand for less than one false alarm in 10,000 steps."""
_LINGERING = 3.0
"""Sum past which a layer's steps teach nothing: what may be a departure must not become what is expected."""
_LEAST_DEVIATION = 0.01
"""Part of its ratio by which any layer scatters at least."""
_MOST_WEIGHT = 32
"""Steps that a promise counts for at most beside those served since."""
_CLIP = 3.0
"""Standard deviations of a step beyond which it teaches no more."""
_LEARNING_STEPS = 16
"""Steps that a promise is learned from where what it was fitted to says nothing of others."""


@dataclass(frozen=True)
class Pace:
    """State of a deployment that is decided for on change (immutable).

    A departure of what is realised from what was promised begins a new stretch: decisions fall when it is 4, 8 and 16
    steps long, and look at its steps alone. Where its heat is no other than before, that was a burst or drift: nothing
    begins, and heat is looked at again soon. Later the interval is doubled where a decision changed nothing, or
    what the one before changed did not win beyond its error, and halved where it did. What moves cost is spread over
    the steps until the next decision; after a departure, over as many as such stretches have lasted. A decision waits
    until steps have paid for the CPU of those before it.

    Departures are found by a sequential test on every layer, and on their mean. Each step's excess of the realised
    ratio over what is expected of it is summed while the sum is positive (CUSUM), less an allowance of one standard
    deviation; a sum past the threshold is an alarm, and the change began where the sum was last zero. What is expected
    begins as the promise and is then learned from the steps served (self-starting), so that a promise a little too good
    raises no alarm. The deviation of a step is widened where neighbouring steps resemble each other.

    Parameters
    ----------
    first, memory, longest
        Steps before the first decision, steps that a decision looks back at most, and between two decisions at most.
    seen
        Steps so far.
    due_at
        Steps after which a decision is due; ``None`` until the first.
    changed_at
        Steps before the present stretch.
    interval
        Steps from one decision to the next, while nothing departs, kept within bounds.
    paid_at
        Steps after which all decisions so far are paid for.
    stretches
        Lengths of the newest stretches, in steps.
    expected
        Ratios expected of a step, and the steps that they count for; ``None`` while nothing has been promised.
    sum_C, since_C
        float64 ``[L + 1]`` the excess summed, in standard deviations, and int64 steps since each sum was last zero.
    learning
        Steps still to be learned from before anything can be an alarm.
    inflation_C
        float64 ``[L + 1]``, how much neighbouring steps have been found to resemble each other (``Promise``).
    alarm
        The departure that began the present stretch: its layer, ``None`` for the mean of all, and for how many steps it
        had lasted already; ``None`` for the first stretch.
    calm
        State before that departure.

    References
    ----------
    E. Page, *Continuous Inspection Schemes*, 1954.
    D. Hawkins, *Self-Starting Cusum Charts for Location and Scale*, 1987.
    """

    first: int
    memory: int
    longest: int
    seen: int = 0
    due_at: int | None = None
    changed_at: int = 0
    interval: int = 0
    paid_at: float = 0.0
    stretches: tuple[int, ...] = ()
    expected: Promise | None = None
    sum_C: Float64 | None = None
    since_C: npt.NDArray[np.int64] | None = None
    learning: int = 0
    inflation_C: Float64 | None = None
    alarm: tuple[int | None, int] | None = None
    calm: Pace | None = None

    @property
    def due(self) -> bool:
        """True when it is time to decide."""
        return self.seen >= (self.first if self.due_at is None else self.due_at)

    @property
    def stretch(self) -> int:
        """Steps since the latest departure."""
        return self.seen - self.changed_at

    @property
    def settling(self) -> bool:
        """True while a departure is too recent for anything but deciding on the steps since."""
        return self.alarm is not None and self.stretch <= _SHORTEST

    @property
    def serving_steps(self) -> float:
        """Steps that a plan made now is expected to serve."""
        if self.due_at is not None and not self.settling:
            return float(self._within_bounds(self.interval))
        lasted = self.stretches or (_FIRST_STRETCH,)
        return max(sum(lasted) / len(lasted), float(self.stretch))

    def window_steps(self, heat_TLE: Counts) -> int:
        """Number of newest steps to decide on; ``heat_TLE`` holds those that are remembered, ``[T, L, E]``."""
        longest = min(self.stretch, self.memory, len(heat_TLE))
        if self.due_at is None or longest < 2 * _SHORTEST:
            return max(longest, 1)
        ahead = min(self._within_bounds(self.interval), longest // 4)
        return _stationary_steps(heat_TLE[len(heat_TLE) - longest :], ahead)

    def weighed(self, heat_TLE: Counts) -> Pace:
        """State to decide by, given all heat that is remembered, ``[T, L, E]``: a burst does not count as a change."""
        return self if not self.settling or _has_changed(heat_TLE, self.stretch) else self.dismissed()

    def dismissed(self) -> Pace:
        """The latest departure was a burst: what was known before still holds, and is looked at again soon."""
        if self.calm is None:
            return self
        after = replace(self.calm, seen=self.seen, due_at=self.due_at, interval=0, paid_at=self.paid_at)
        after = replace(after, expected=self.expected, learning=self.learning, inflation_C=self.inflation_C)
        return after._reset()

    def after_steps(self, par_TL: Float64) -> tuple[Pace, int]:
        """Steps were served, with these ratios; up to the first at which a decision is due, and how many those are.

        Parameters
        ----------
        par_TL
            float64 ``[T, L]``; NaN where a layer had no tokens, or did not yet serve what was decided.
        """
        left = None if self.due_at is None else max(self.due_at - self.seen, 1)
        part_TL = par_TL[:left]
        # Steps of a recent departure are decided on anyway; what they teach is of a placement that will not last.
        if self.expected is None or self.settling:
            return replace(self, seen=self.seen + len(part_TL)), len(part_TL)
        after = self
        for taken, par_C in enumerate(channels_of(part_TL), start=1):
            after = after._after_step(par_C)
            if alarm := after._alarm():
                return replace(after, seen=self.seen + taken)._departed(alarm), taken
        return replace(after, seen=self.seen + len(part_TL)), len(part_TL)

    def deferred(self) -> Pace:
        """A decision is being made: none is due before its result, or the next interval where it has none."""
        return replace(self, due_at=self.seen + self._within_bounds(self.interval))

    def after_decision(self, changed: bool, paid: bool | None) -> Pace:
        """A decision was made.

        Parameters
        ----------
        changed
            Whether any layer will change; then nothing is tested until it serves (``serving``).
        paid
            Whether what the change before it won, on the steps since, is above its error; ``None`` where none was.
        """
        after = replace(self, expected=None) if changed else self
        if self.alarm is not None and self.stretch < _SHORTEST:
            return after._due_at(self.changed_at + 2 * max(self.stretch, 1))
        factor = 2.0 if not changed or paid is False else 0.5 if paid else 1.0
        interval = self._within_bounds(int(factor * self.interval))
        return replace(after, interval=interval)._due_at(self.seen + interval)

    def charged(self, cost: float) -> Pace:
        """CPU was taken that so many steps pay for; those of the longest interval at most can have paid in advance."""
        after = replace(self, paid_at=max(self.paid_at, float(self.seen - self.longest)) + cost)
        return after if self.due_at is None else after._due_at(self.due_at)

    def _within_bounds(self, interval: int) -> int:
        return max(min(interval, self.longest), min(_LEAST_INTERVAL, self.longest))

    def _due_at(self, step: int) -> Pace:
        """State in which the next decision is due at that step, or once all before it are paid for."""
        return replace(self, due_at=max(step, self.seen, math.ceil(self.paid_at)))

    def serving(self, promise: Promise) -> Pace:
        """Start testing against this promise; of what is known of steps before it some is kept."""
        inflation_C = promise.inflation_C
        if self.inflation_C is not None:
            inflation_C = np.maximum(inflation_C, 1.0 + 0.9 * (self.inflation_C - 1.0))
        expected = replace(promise, inflation_C=inflation_C, steps=min(promise.steps, _MOST_WEIGHT))
        learning = 0 if promise.held_out else _LEARNING_STEPS
        return replace(self, expected=expected, learning=learning, inflation_C=inflation_C)._reset()

    def _reset(self) -> Pace:
        """State with nothing summed up."""
        if self.expected is None:
            return self
        channels = self.expected.mean_C.size
        return replace(self, sum_C=np.zeros(channels), since_C=np.zeros(channels, dtype=np.int64))

    def _after_step(self, par_C: Float64) -> Pace:
        expected = self.expected
        assert expected is not None
        # A layer that had no tokens when the promise was made begins with its first step.
        mean_C = np.where(np.isnan(expected.mean_C), par_C, expected.mean_C)
        known_C = ~np.isnan(par_C)
        excess_C = np.where(known_C, par_C - mean_C, 0.0)
        step_variance_C = np.maximum(
            expected.variance_C, (_LEAST_DEVIATION * np.nan_to_num(mean_C, nan=1.0)) ** 2
        )
        deviation_C = np.sqrt(step_variance_C * expected.inflation_C * (1.0 + 1.0 / max(expected.steps, 1)))
        sum_C, since_C = self.sum_C, self.since_C
        assert sum_C is not None
        assert since_C is not None
        # While learning, the steps served take the place of the promise; later, none teaches more than a clipped one.
        taught_C, weight = excess_C, _LEARNING_STEPS - self.learning + 1
        if self.learning == 0:
            sum_C = np.maximum(0.0, sum_C + np.where(known_C, excess_C / deviation_C - _ALLOWANCE, 0.0))
            since_C = np.where(sum_C > 0, since_C + 1, 0)
            taught_C = np.clip(excess_C, -_CLIP * deviation_C, _CLIP * deviation_C)
            weight = expected.steps + 1
        rate_C = np.where(known_C & (sum_C <= _LINGERING), 1.0 / weight, 0.0)
        learned = replace(
            expected,
            mean_C=mean_C + rate_C * taught_C,
            variance_C=expected.variance_C + rate_C * (taught_C**2 * (1.0 - rate_C) - expected.variance_C),
            steps=weight,
        )
        learning = max(0, self.learning - 1)
        return replace(self, expected=learned, sum_C=sum_C, since_C=since_C, learning=learning)

    def _alarm(self) -> tuple[int | None, int] | None:
        assert self.sum_C is not None
        assert self.since_C is not None
        worst = int(self.sum_C.argmax())
        if self.sum_C[worst] <= _THRESHOLD:
            return None
        # A single sum may have lingered above zero before; where several have passed, the middle one says when.
        since = int(np.median(self.since_C[self.sum_C > _THRESHOLD]))
        return (worst if worst < self.sum_C.size - 1 else None), since

    def _departed(self, alarm: tuple[int | None, int]) -> Pace:
        changed_at = self.seen - alarm[1]
        return replace(
            self,
            changed_at=changed_at,
            interval=0,
            stretches=(*self.stretches, changed_at - self.changed_at)[-_STRETCHES_KEPT:],
            alarm=alarm,
            calm=replace(self, calm=None),
        )._due_at(changed_at + _FIRST_AFTER_CHANGE)


def _stationary_steps(heat_TLE: Counts, ahead: int) -> int:
    """The longest stretch of newest steps that forecasts as well as any: its length, at most T.

    In each of the newest stretches of ``ahead`` steps each expert's part of the tokens is forecast by its mean over the
    steps before, 16 and twice as many each time. Longer ones are preferred: they know more of how experts move
    together. Their squared error, as a multiple of each stretch's least, may be a little above the least in the mean.
    """
    steps, before = len(heat_TLE), len(heat_TLE) - ahead
    if ahead < 1 or before < _SHORTEST:
        return steps
    lengths = _doubled(before)
    starts = [ahead * number for number in range(1, 1 + min(_FORECASTS, max(before // (2 * ahead), 1)))]
    ends = {min(start + length, steps) for start in starts for length in lengths}
    some_K = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, _LAYERS_FORECAST).astype(np.int64))
    newest_LE = _summed_parts(heat_TLE[:, some_K], (0, *starts, *ends))
    regret_K = np.zeros(len(lengths))
    for start in starts:
        stops = [min(start + length, steps) for length in lengths]
        error_K = _errors(newest_LE, start - ahead, start, start, stops)
        regret_K += error_K / max(error_K.min(), 1e-30)
    return ahead + int(np.array(lengths)[regret_K <= _AS_GOOD * regret_K.min()].max())


def _has_changed(heat_TLE: Counts, since: int) -> bool:
    """Return whether the newest ``since`` steps are of other heat than those before.

    Their newer half is forecast by their older half and by steps before, 16 and twice as many each time: bursts
    resemble all of those, drift the newest. True where there is nothing to compare.
    """
    steps, ahead = len(heat_TLE), since // 2
    if ahead < 1 or since >= steps:
        return True
    ends = [since + length for length in _doubled(steps - since)]
    newest_LE = _summed_parts(heat_TLE, (0, ahead, since, *ends))
    by_stretch = _errors(newest_LE, 0, ahead, ahead, [since])
    return bool(_errors(newest_LE, 0, ahead, since, ends).min() >= _OTHER_HEAT * by_stretch[0])


def _doubled(most: int) -> list[int]:
    """Lengths of stretches that are tried: 16 steps, twice as many, and so on, and all."""
    lengths = (_SHORTEST << power for power in range(most.bit_length()))
    return [*(length for length in lengths if length < most), most]


def _errors(newest_LE: Mapping[int, Float64], newer: int, older: int, begin: int, ends: list[int]) -> Float64:
    """Squared errors ``[K]`` of forecasts of steps ``newer`` to ``older``, counted back, by ``begin`` to each end."""
    came_LE = (newest_LE[older] - newest_LE[newer]) / (older - newer)
    size_L = np.maximum((came_LE**2).sum(axis=1), 1e-30)
    missed = ((newest_LE[end] - newest_LE[begin]) / (end - begin) - came_LE for end in ends)
    return np.array([((missed_LE**2).sum(axis=1) / size_L).mean() for missed_LE in missed])


def _summed_parts(heat_TLE: Counts, lengths: Sequence[int]) -> dict[int, Float64]:
    """Each expert's part of the tokens, summed over so many newest steps, float64 ``[L, E]``."""
    steps, newest = len(heat_TLE), 0
    inverse_TL = 1.0 / np.maximum(heat_TLE.sum(axis=2, dtype=np.float64), 1.0)
    sums: dict[int, Float64] = {}
    total_LE = np.zeros(heat_TLE.shape[1:])
    for length in sorted({*lengths}):
        part = slice(steps - length, steps - newest)
        total_LE = total_LE + np.einsum("tle,tl->le", heat_TLE[part], inverse_TL[part])
        sums[length], newest = total_LE, length
    return sums
