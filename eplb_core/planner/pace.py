"""Decision schedule: when to decide next, which steps to use, and how long the resulting layout is expected to serve.

A deployment makes a decision soon after its realised peak-to-average ratio (PAR) rises above the promised one. While
decisions gain nothing, they are rare. On average, decisions stay within the deployment's CPU budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Counts
from eplb_core.placement import Float64
from eplb_core.planner.heat_changes import MIN_LOOKBACK, find_change, has_changed, stationary_steps
from eplb_core.planner.plan import Promise, append_mean

_SETTLING_STEPS = MIN_LOOKBACK
"""Maximum age, in steps, at which a new segment is still settling. In a settling segment, decisions follow in quick
succession and the change test is suspended."""
_MIN_INTERVAL = 24
"""Minimum interval between decisions, in steps, once a segment has settled. On drifting heat (``make bench-decide``,
ten seeds), 12 steps lower the realised PAR by 2.5 % but require 2.6 times as many decisions, and 32 steps raise it by
0.7 % but save a fifth of the decisions."""
_FIRST_DECISION_AGE = 4
"""Age, in steps, at which the first decision in a new segment is due. Four steps are just enough for two halves of two
steps each."""
_DEFAULT_SEGMENT_STEPS = 256
"""Expected segment length, in steps, until the first segment has ended."""
_MAX_SEGMENTS = 4
"""Number of finished segments to remember. Their mean length predicts the length of the next one."""

_CUSUM_ALLOWANCE = 1.0
"""Number of standard deviations subtracted from each step's excess: half the smallest shift worth detecting."""
_CUSUM_THRESHOLD = 11.0
"""Sum, in standard deviations, above which an alarm is raised. Tuned by hand for less than one false alarm in 10,000
steps."""
_CUSUM_FREEZE = 3.0
"""Sum, in standard deviations, above which a channel stops learning, so that a possible change does not become the new
expectation."""
_MIN_RELATIVE_DEVIATION = 0.01
"""Lower bound on a step's standard deviation, as a fraction of the expected PAR."""
_MAX_PROMISE_STEPS = 32
"""Maximum weight of a promise, as a number of steps, when it is averaged with the steps served since."""
_CLIP_DEVIATIONS = 3.0
"""Number of standard deviations at which a step's excess is clipped before it updates the expectation."""
_LEARNING_STEPS = 16
"""Number of steps during which a channel learns if its promise was not corrected by a hold-out, or is NaN for lack of
tokens."""
_LEARNING_WEIGHT = 4
"""Weight of a promise that was not corrected by a hold-out, as a number of steps."""
_MIN_LEARNING_DEVIATION = 0.1
"""Lower bound on a step's standard deviation while a channel is learning, as a fraction of the expected PAR. It exceeds
the PAR difference between the steps that a placement was fitted to and later steps, but is far below the effect of a
workload change."""
_RETAINED_INFLATION = 0.9
"""Fraction of the measured excess variance inflation (above 1) that is retained as a lower bound for the next
promise."""


@dataclass(frozen=True)
class Pace:
    """Decision schedule of a deployment, driven by changes in its heat (immutable).

    Results do not depend on how the served steps are batched.

    The served steps are divided into *segments* of similar heat:

    - An alarm starts a new segment. Decisions are due when it is 4, 8 and 16 steps old and use only its own steps.
    - If the segment's heat turns out to be the same as before, the alarm was caused by a burst or by drift. The
      previous segment is resumed, and the next decision is due after the minimum interval (``dismissed``).
    - A decision also looks for a change that did not raise an alarm. If it finds one, it starts a new segment in the
      same way and uses only the steps since the change (``weighed``). A decision that falls due within the first four
      steps of a possible change is delayed until the change is four steps old.
    - In a settled segment, the interval doubles if a decision changes nothing, or if the previous change gained no more
      than its standard error. It halves if the decision changes something and the previous change did gain more.
    - Moves must pay off before the next decision or, while a segment is settling, within the mean length of past
      segments (``serving_steps``).
    - A decision is postponed until enough steps have passed to pay for the CPU time of all earlier decisions
      (``charged``).

    Alarms come from a one-sided CUSUM test on every *channel*: each layer's PAR, and the mean PAR over the layers. For
    each step, the test adds the amount by which the realised PAR exceeds the expected PAR, minus an allowance of one
    standard deviation. It resets the sum to zero whenever it becomes negative. A sum above the threshold raises an
    alarm, and the change is dated to the step at which the sum was last zero. The test is self-starting: the
    expectation is initially the promise and is then updated from the served steps, so a slightly optimistic promise
    does not raise an alarm. The standard deviation is inflated to account for the correlation between consecutive
    steps.

    Parameters
    ----------
    first
        Number of steps before the first decision.
    memory
        Maximum look-back of a decision, in steps.
    longest
        Maximum interval between decisions, in steps.
    seen
        Number of steps served so far.
    due_at
        Value of ``seen`` at which the next decision is due; ``None`` before the first decision.
    changed_at
        Value of ``seen`` at which the current segment began.
    interval
        Number of steps between decisions while the heat does not change, before it is clamped to its bounds.
    paid_at
        Value of ``seen`` at which the CPU time of all decisions so far is paid off.
    has_decided
        True once the first decision has been made.
    segment_lengths
        Lengths of the most recent finished segments, in steps.
    expected
        Expected PAR of a step, learned from the promise and the steps served since; ``None`` if there is no promise.
    sum_C
        float64 ``[L + 1]``, CUSUM of each layer and of the mean, in standard deviations.
    since_C
        int64 ``[L + 1]``, number of steps since each sum was last zero.
    weight_C
        int64 ``[L + 1]``, weight of each expected mean, in steps, when it is averaged with the next step.
    learning_C
        int64 ``[L + 1]``, number of steps for which each channel's test remains coarse because its mean is uncertain.
    inflation_C
        float64 ``[L + 1]``, variance inflation due to correlated steps, as in ``Promise``.
    alarm
        The alarm that started the current segment: the layer (``None`` for the mean over the layers) and the number of
        steps since the change. ``None`` in the first segment.
    before_alarm
        State just before that alarm, restored by ``dismissed``.

    References
    ----------
    E. Page, *Continuous Inspection Schemes*, 1954.
    D. Hawkins, *Self-Starting Cusum Charts for Location and Scale*, 1987.

    Examples
    --------
    As long as no decision changes anything, the interval doubles from 24 steps to ``longest``:

    >>> pace = Pace(first=64, memory=512, longest=512)
    >>> decided_at = []
    >>> for _ in range(7):
    ...     pace, _ = pace.after_steps(np.full((1000, 2), 1.2))
    ...     decided_at.append(pace.seen)
    ...     pace = pace.after_decision(changed=False, paid=None)
    >>> decided_at
    [64, 88, 136, 232, 424, 808, 1320]

    Suppose an alarm at step 1,402 dates a change to step 1,400. Decisions are then due at steps 1,404, 1,408 and 1,416,
    each using the steps since 1,400. The next one is due at step 1,440, after the minimum interval of 24 steps.
    """

    first: int
    memory: int
    longest: int
    seen: int = 0
    due_at: int | None = None
    changed_at: int = 0
    interval: int = 0
    paid_at: float = 0.0
    has_decided: bool = False
    segment_lengths: tuple[int, ...] = ()
    expected: Promise | None = None
    sum_C: Float64 | None = None
    since_C: npt.NDArray[np.int64] | None = None
    weight_C: npt.NDArray[np.int64] | None = None
    learning_C: npt.NDArray[np.int64] | None = None
    inflation_C: Float64 | None = None
    alarm: tuple[int | None, int] | None = None
    before_alarm: Pace | None = None

    @property
    def due(self) -> bool:
        """True if a decision is due."""
        due_at = self.first if self.due_at is None else self.due_at
        return self.seen >= due_at and not self._may_have_just_changed

    @property
    def segment_age(self) -> int:
        """Age of the current segment, in steps."""
        return self.seen - self.changed_at

    @property
    def settling(self) -> bool:
        """True if an alarm started the current segment at most 16 steps ago."""
        return self.alarm is not None and self.segment_age <= _SETTLING_STEPS

    @property
    def too_recent(self) -> bool:
        """True if the change that started the current segment is too recent for a decision."""
        return self.alarm is not None and self.segment_age < _FIRST_DECISION_AGE

    @property
    def serving_steps(self) -> float:
        """Number of steps that a plan made now is expected to serve."""
        if self.has_decided and not self.settling:
            return float(self._clamp_interval(self.interval))
        lengths = self.segment_lengths or (_DEFAULT_SEGMENT_STEPS,)
        return max(sum(lengths) / len(lengths), float(self.segment_age))

    @property
    def _may_have_just_changed(self) -> bool:
        """True if there may have been a change that is too recent for a decision."""
        if self.sum_C is None or self.since_C is None or self.expected is None or self.settling:
            return False
        return bool(((self.sum_C > _CUSUM_FREEZE) & (self.since_C < _FIRST_DECISION_AGE)).any())

    def follows(self, paid: bool | None) -> bool:
        """Return True if the next decision may follow the previous one's recommendations.

        It must not do so while a segment is settling, or if the previous change has not paid off.
        """
        return not self.settling and paid is not False

    def window_steps(self, heat_TLE: Counts) -> int:
        """Return the number of recent steps for a decision, given the heat of all remembered steps, ``[T, L, E]``."""
        longest = min(self.segment_age, self.memory, len(heat_TLE))
        if not self.has_decided or longest < 2 * MIN_LOOKBACK:
            return max(longest, 1)
        horizon = min(self._clamp_interval(self.interval), longest // 4)
        return stationary_steps(heat_TLE[len(heat_TLE) - longest :], horizon)

    def weighed(self, heat_TLE: Counts) -> Pace:
        """Check all remembered heat, ``[T, L, E]``, for changes, and return the state to base a decision on.

        Heat may have changed without an alarm while the test was suspended, or while a sum was elevated but below the
        threshold. In that case, a new segment starts at the change, and no decision is due until it is four steps old.
        If an alarm turns out to be false because the heat has not changed, it is dismissed.
        """
        tested = self.expected is not None and not self.settling
        if tested and self.sum_C is not None and self.sum_C.max() <= _CUSUM_FREEZE:
            return self
        # Include the change that started this segment, so that nearby steps are not mistaken for a second change.
        age = find_change(heat_TLE, self.segment_age + _FIRST_DECISION_AGE)
        if age is not None and age < self.segment_age - (0 if self.settling else _FIRST_DECISION_AGE):
            return self.begun_at(self.seen - age)
        confirmed = not self.settling or age is not None or has_changed(heat_TLE, self.segment_age)
        return self if confirmed else self.dismissed()

    def postponed(self) -> Pace:
        """Postpone the due decision by a few steps."""
        return self._schedule(self.seen + _FIRST_DECISION_AGE)

    def hastened(self) -> Pace:
        """Make the next decision due now, or as soon as the CPU budget allows."""
        return self._schedule(self.seen)

    def begun_at(self, step: int) -> Pace:
        """Start a new segment at a change in heat that ``weighed`` found.

        While a segment is settling, a change close to its start is the one that raised the alarm. In that case, the
        start of the segment is corrected instead. ``step`` is the value of ``seen`` at the change.
        """
        if self.settling and step - self.changed_at < _FIRST_DECISION_AGE:
            return replace(self, changed_at=step)._schedule(step + _FIRST_DECISION_AGE)
        return self._start_segment((None, self.seen - step))

    def dismissed(self) -> Pace:
        """Dismiss the latest alarm: resume the previous segment with the minimum interval, and reset the sums."""
        if self.before_alarm is None:
            return self
        return replace(
            self.before_alarm,
            seen=self.seen,
            due_at=self.due_at,
            interval=0,
            paid_at=self.paid_at,
            has_decided=self.has_decided,
            expected=self.expected,
            weight_C=self.weight_C,
            learning_C=self.learning_C,
            inflation_C=self.inflation_C,
        )._reset_sums()

    def after_steps(self, par_TL: Float64) -> tuple[Pace, int]:
        """Process served steps, stopping as soon as a decision is due or an alarm is raised.

        The caller passes the remaining steps in another call.

        Parameters
        ----------
        par_TL
            float64 ``[T, L]``, realised PAR; NaN if a layer had no tokens or was not yet serving its new placement.

        Returns
        -------
        tuple of Pace and int
            The new state and the number of steps processed.
        """
        state = self
        for processed, par_C in enumerate(append_mean(par_TL), start=1):
            state = replace(state, seen=state.seen + 1)
            # While a segment is settling, decisions are scheduled anyway and placements do not last, so there is no
            # point in learning from these steps.
            if state.expected is not None and not state.settling:
                state = state._observe(par_C)
                if alarm := state._find_alarm():
                    return state._start_segment(alarm), processed
            if state.due:
                return state, processed
        return state, len(par_TL)

    def deferred(self) -> Pace:
        """Record that a decision has begun; the next one is due an interval later unless the result reschedules it."""
        return replace(self, due_at=self.seen + self._clamp_interval(self.interval))

    def after_decision(self, changed: bool, paid: bool | None) -> Pace:
        """Record a decision and schedule the next one.

        Parameters
        ----------
        changed
            True if any layer will change. The test is then suspended until the new layout is served (see ``serving``).
        paid
            True if the gain of the previous change has exceeded its standard error, False if it has not, and ``None``
            if there was no change or its gain is unknown.
        """
        state = replace(self, has_decided=True, expected=None if changed else self.expected)
        if self.alarm is not None and self.segment_age < _SETTLING_STEPS:
            return state._schedule(self.changed_at + 2 * max(self.segment_age, 1))
        interval = self._clamp_interval(int(_interval_factor(changed, paid) * self.interval))
        return replace(state, interval=interval)._schedule(self.seen + interval)

    def charged(self, cost: float) -> Pace:
        """Charge CPU time, expressed as the number of steps whose CPU budget pays for it.

        Unused budget accumulates over at most the last ``longest`` steps.
        """
        earliest = float(self.seen - self.longest)
        state = replace(self, paid_at=max(self.paid_at, earliest) + cost)
        return state if self.due_at is None else state._schedule(self.due_at)

    def serving(self, promise: Promise) -> Pace:
        """Restart the test against a new promise.

        The variance inflation measured so far is not discarded. Nine tenths of its excess above 1 is retained as a
        lower bound on the new value.
        """
        inflation_C = promise.inflation_C
        if self.inflation_C is not None:
            min_inflation_C = 1.0 + _RETAINED_INFLATION * (self.inflation_C - 1.0)
            inflation_C = np.maximum(inflation_C, min_inflation_C)
        expected = replace(promise, inflation_C=inflation_C, steps=min(promise.steps, _MAX_PROMISE_STEPS))
        is_learning_C = np.ones(promise.mean_C.size, dtype=np.bool_)
        if promise.held_out:
            is_learning_C = np.isnan(promise.mean_C)
        return replace(
            self,
            expected=expected,
            weight_C=np.where(is_learning_C, min(_LEARNING_WEIGHT, expected.steps), expected.steps),
            learning_C=np.where(is_learning_C, _LEARNING_STEPS, 0),
            inflation_C=inflation_C,
        )._reset_sums()

    def keeping(self, promise: Promise, *, dismissed: bool = False) -> Pace:
        """Continue after a decision that keeps every layer; ``promise`` is computed from its window.

        In a settled segment, the steps served under this placement estimate the mean better than the promise does. The
        promise ignores everything outside its window, and the variation of the source ranks' shares between steps. The
        expected mean is therefore kept. If the latest alarm was dismissed, the mean was too low, so it is learned from
        scratch with a coarse test. The same applies while a segment is settling.

        For the variance and its inflation, the larger of the learned value and the window's value is used. The test
        clips large excesses and does not learn while its sums are high, so the learned values omit most of each burst.
        """
        if self.expected is None or dismissed or self.settling:
            return self.serving(replace(promise, held_out=promise.held_out and self.expected is None))
        variance_C = np.fmax(self.expected.variance_C, promise.variance_C)
        inflation_C = np.maximum(self.expected.inflation_C, promise.inflation_C)
        expected = replace(self.expected, variance_C=variance_C, inflation_C=inflation_C)
        return replace(self, expected=expected, inflation_C=inflation_C)

    def _clamp_interval(self, interval: int) -> int:
        """Clamp the interval to its bounds; ``longest`` takes precedence over the minimum."""
        return max(min(interval, self.longest), min(_MIN_INTERVAL, self.longest))

    def _schedule(self, step: int) -> Pace:
        """Return the state with the next decision due at ``step``, or later if the CPU budget requires it."""
        return replace(self, due_at=max(step, self.seen, math.ceil(self.paid_at)))

    def _reset_sums(self) -> Pace:
        if self.expected is None:
            return self
        channels = self.expected.mean_C.size
        return replace(self, sum_C=np.zeros(channels), since_C=np.zeros(channels, dtype=np.int64))

    def _observe(self, par_C: Float64) -> Pace:
        """Add one step to the sums, then update the expected mean and variance from it."""
        expected = self.expected
        assert expected is not None
        assert self.sum_C is not None
        assert self.since_C is not None
        assert self.weight_C is not None
        assert self.learning_C is not None
        has_tokens_C = ~np.isnan(par_C)
        # If the promise has no value for a layer, the layer's first step with tokens is its expected mean.
        mean_C = np.where(np.isnan(expected.mean_C), par_C, expected.mean_C)
        weight_C = np.where(np.isnan(expected.mean_C), 0, self.weight_C)
        excess_C = np.where(has_tokens_C, par_C - mean_C, 0.0)
        min_relative_C = np.where(self.learning_C > 0, _MIN_LEARNING_DEVIATION, _MIN_RELATIVE_DEVIATION)
        min_deviation_C = min_relative_C * np.nan_to_num(mean_C, nan=1.0)
        step_variance_C = np.maximum(expected.variance_C, min_deviation_C**2)
        # The factor 1 + 1/n accounts for the error of a mean that is itself estimated from n steps (Hawkins, 1987).
        deviation_C = np.sqrt(step_variance_C * expected.inflation_C * (1.0 + 1.0 / np.maximum(weight_C, 1)))
        sum_C = np.maximum(
            0.0, self.sum_C + np.where(has_tokens_C, excess_C / deviation_C - _CUSUM_ALLOWANCE, 0.0)
        )
        update_C = np.clip(excess_C, -_CLIP_DEVIATIONS * deviation_C, _CLIP_DEVIATIONS * deviation_C)
        weight_C = weight_C + has_tokens_C
        rate_C = np.where(has_tokens_C & (sum_C <= _CUSUM_FREEZE), 1.0 / np.maximum(weight_C, 1), 0.0)
        learned = replace(
            expected,
            mean_C=mean_C + rate_C * update_C,
            variance_C=expected.variance_C + rate_C * (update_C**2 * (1.0 - rate_C) - expected.variance_C),
        )
        return replace(
            self,
            expected=learned,
            sum_C=sum_C,
            since_C=np.where(sum_C > 0, self.since_C + 1, 0),
            weight_C=weight_C,
            learning_C=np.maximum(self.learning_C - has_tokens_C, 0),
        )

    def _find_alarm(self) -> tuple[int | None, int] | None:
        """Return the layer with the largest sum and the age of the change, or ``None`` if no sum is high enough.

        The layer is ``None`` if the largest sum is that of the mean over the layers.
        """
        assert self.sum_C is not None
        assert self.since_C is not None
        channel = int(self.sum_C.argmax())
        if self.sum_C[channel] <= _CUSUM_THRESHOLD:
            return None
        # A single sum may have been positive even before the change, so use the median over all channels that raise the
        # alarm.
        age = int(np.median(self.since_C[self.sum_C > _CUSUM_THRESHOLD]))
        return (channel if channel < self.sum_C.size - 1 else None), age

    def _start_segment(self, alarm: tuple[int | None, int]) -> Pace:
        _, age = alarm
        changed_at = self.seen - age
        return replace(
            self,
            changed_at=changed_at,
            interval=0,
            segment_lengths=(*self.segment_lengths, changed_at - self.changed_at)[-_MAX_SEGMENTS:],
            alarm=alarm,
            before_alarm=replace(self, before_alarm=None),
        )._schedule(changed_at + _FIRST_DECISION_AGE)


def _interval_factor(changed: bool, paid: bool | None) -> float:
    """Return the factor by which to multiply the interval after a decision; see ``after_decision``."""
    if not changed or paid is False:
        return 2.0
    return 0.5 if paid else 1.0
