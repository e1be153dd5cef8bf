"""Scheduling of decisions: when to decide next, on which steps, and how long the result is expected to serve.

A deployment decides soon after its realised peak-to-average ratio (PAR) departs from the promised one, rarely while
decisions gain nothing, and on average within its CPU budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Counts
from eplb_core.placement import Float64
from eplb_core.planner.plan import Promise, channels_of

_MIN_LOOKBACK = 16
"""Shortest history, in steps, that a forecast is made from."""
_SETTLING_STEPS = _MIN_LOOKBACK
"""Age up to which a new stretch is settling: decisions come in quick succession and the test is suspended."""
_MIN_INTERVAL = 24
"""Shortest interval between decisions, in steps, once a stretch has settled. On drift (``make bench-decide``, ten
seeds), 12 steps lower the realised PAR by 2.5 % but take 2.6 times the decisions; 32 steps raise it by 0.7 % and save a
fifth of them."""
_FIRST_DECISION_AGE = 4
"""Age at which a new stretch gets its first decision: just enough for two halves of two steps each."""
_DEFAULT_STRETCH_STEPS = 256
"""Expected length of a stretch until the first one has ended."""
_MAX_STRETCHES = 4
"""Number of finished stretches kept; their mean length predicts that of the next."""

_REGRET_TOLERANCE = 1.1
"""A longer look-back is preferred if its error is at most this multiple of the smallest error."""
_MAX_FORECAST_LAYERS = 16
"""Limit on the layers, evenly spaced, that the look-back is chosen on."""
_MAX_FORECASTS = 4
"""Limit on the recent intervals that the look-back is chosen on. A single one is too noisy on bursty heat."""
_CHANGE_ERROR_RATIO = 4.0
"""Heat has changed if older steps forecast a new stretch with at least this multiple of the error that the stretch's
own first half makes. Bursts and drift stay below it and a change of workload exceeds it (``make bench-decide``)."""

_MIN_CHANGE_AGE = 2
"""Age from which on a decision finds a change that raised no alarm."""
_MAX_CHANGE_LAYERS = 4
"""Limit on the layers, evenly spaced, in which a decision looks for a change that raised no alarm."""
_MAX_CHANGE_STEPS = 256
"""Limit on the newest steps in which it does so."""

_CUSUM_ALLOWANCE = 1.0
"""Standard deviations subtracted from every step's excess: half of the smallest shift worth detecting."""
_CUSUM_THRESHOLD = 11.0
"""Sum, in standard deviations, that raises an alarm. Tuned by hand for less than one false alarm in 10,000 steps."""
_CUSUM_FREEZE = 3.0
"""Sum above which a channel stops learning, so that a possible change does not become the new expectation."""
_MIN_RELATIVE_DEVIATION = 0.01
"""Lower bound of a step's standard deviation, as a fraction of the expected PAR."""
_MAX_PROMISE_STEPS = 32
"""Upper bound of a promise's weight, in steps, against the steps served since."""
_CLIP_DEVIATIONS = 3.0
"""Standard deviations at which a step's excess is clipped before the expectation is updated."""
_LEARNING_STEPS = 16
"""Steps during which a channel is learning: its promise is not held out, or it had no tokens when it was made."""
_LEARNING_WEIGHT = 4
"""Weight, in steps, of a promise that is not held out against the steps served since."""
_MIN_LEARNING_DEVIATION = 0.1
"""Lower bound of a step's standard deviation while a channel is learning, as a fraction of the expected PAR. It exceeds
the difference between steps that a placement was fitted to and unseen ones, and is far below a change of workload."""


@dataclass(frozen=True)
class Pace:
    """Schedule of a deployment that decides when its heat changes (immutable).

    Results do not depend on how many steps arrive together.

    The steps served are divided into *stretches* of similar heat:

    - An alarm starts a new stretch. Decisions follow when it is 4, 8 and 16 steps old and use only its own steps.
    - If its heat turns out to be the same as before, the alarm was due to a burst or to drift. The previous stretch is
      resumed and the next decision follows after the minimum interval (``dismissed``).
    - A decision also looks for a change that raised no alarm. If it finds one, it starts a new stretch in the same way
      and uses only the steps since (``weighed``). A decision that falls due within the first four steps of a possible
      change waits until that change is four steps old.
    - In a settled stretch, the interval doubles if a decision changes nothing or if the previous change did not gain
      more than its standard error. It halves if the decision changes something and the previous change did gain more.
    - Moves must pay for themselves before the next decision or, while a stretch is settling, within the mean length of
      past stretches (``serving_steps``).
    - A decision is postponed until enough steps have passed to pay for the CPU time of all earlier ones (``charged``).

    Alarms come from a one-sided CUSUM test on every layer and on the mean over the layers. The test sums how far the
    realised PAR of each step exceeds the expected one, less an allowance of one standard deviation, and resets the sum
    to zero whenever it turns negative. A sum above the threshold raises an alarm, and the change is dated to the step
    at which that sum was last zero. The test is self-starting: the expectation begins as the promise and is then
    updated from the steps served, so a slightly optimistic promise raises no alarm. The standard deviation is inflated
    by the correlation between neighbouring steps.

    Parameters
    ----------
    first
        Steps before the first decision.
    memory
        Maximum number of steps that a decision looks back on.
    longest
        Longest interval between two decisions, in steps.
    seen
        Steps served so far.
    due_at
        Value of ``seen`` at which the next decision is due; ``None`` before the first one.
    changed_at
        Value of ``seen`` at which the current stretch began.
    interval
        Steps between decisions while the heat does not change. Bounds are applied when it is used.
    paid_at
        Value of ``seen`` at which the CPU time of all decisions so far is paid off.
    stretches
        Lengths of the most recent finished stretches, in steps.
    expected
        Expected PAR of a step, learned from the promise and from the steps since; ``None`` while there is no promise.
    sum_C
        float64 ``[L + 1]``, CUSUM of each layer and of the mean, in standard deviations.
    since_C
        int64 ``[L + 1]``, steps since each sum was last zero.
    weight_C
        int64 ``[L + 1]``, steps that each expected mean is worth against the next step.
    learning_C
        int64 ``[L + 1]``, steps for which the test of a channel remains coarse, because little is known of its mean.
    inflation_C
        float64 ``[L + 1]``, variance inflation due to correlated steps, as in ``Promise``.
    alarm
        The alarm that began the current stretch: the layer (``None`` for the mean over the layers) and the steps since
        the change. ``None`` in the first stretch.
    calm
        State just before that alarm, to which ``dismissed`` returns.

    References
    ----------
    E. Page, *Continuous Inspection Schemes*, 1954.
    D. Hawkins, *Self-Starting Cusum Charts for Location and Scale*, 1987.

    Examples
    --------
    With ``first=64`` and ``longest=512``, and as long as no decision changes anything, decisions are due at steps 64,
    88, 136, 232, 424, 808 and 1,320: the interval doubles from 24 to 512. Suppose an alarm at step 1,402 dates a change
    to step 1,400. Decisions are then due at steps 1,404, 1,408 and 1,416, each on the steps since 1,400. The next one
    is due at step 1,440, after the minimum interval of 24.
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
    weight_C: npt.NDArray[np.int64] | None = None
    learning_C: npt.NDArray[np.int64] | None = None
    inflation_C: Float64 | None = None
    alarm: tuple[int | None, int] | None = None
    calm: Pace | None = None

    @property
    def due(self) -> bool:
        """True if a decision is due."""
        return self.seen >= (self.first if self.due_at is None else self.due_at) and not self._doubtful

    @property
    def stretch(self) -> int:
        """Age of the current stretch, in steps."""
        return self.seen - self.changed_at

    @property
    def settling(self) -> bool:
        """True if an alarm began the current stretch at most 16 steps ago."""
        return self.alarm is not None and self.stretch <= _SETTLING_STEPS

    @property
    def too_recent(self) -> bool:
        """True if the current stretch began at a change too recent to decide on."""
        return self.alarm is not None and self.stretch < _FIRST_DECISION_AGE

    @property
    def serving_steps(self) -> float:
        """Number of steps that a plan made now is expected to serve."""
        if self.due_at is not None and not self.settling:
            return float(self._clamp_interval(self.interval))
        lengths = self.stretches or (_DEFAULT_STRETCH_STEPS,)
        return max(sum(lengths) / len(lengths), float(self.stretch))

    def follows(self, paid: bool | None) -> bool:
        """Return True if the previous decision's hold-out results may be reused.

        They may not be reused while a stretch is settling, or if the previous change has not paid off.
        """
        return not self.settling and paid is not False

    def window_steps(self, heat_TLE: Counts) -> int:
        """Return the number of recent steps to decide on; ``heat_TLE``, ``[T, L, E]``, holds all remembered steps."""
        longest = min(self.stretch, self.memory, len(heat_TLE))
        if self.due_at is None or longest < 2 * _MIN_LOOKBACK:
            return max(longest, 1)
        horizon = min(self._clamp_interval(self.interval), longest // 4)
        return _stationary_steps(heat_TLE[len(heat_TLE) - longest :], horizon)

    def weighed(self, heat_TLE: Counts) -> Pace:
        """Return the state to decide from, after checking all remembered heat, ``[T, L, E]``, for changes.

        If the test was suspended, or its sums leave the question open, heat may have changed without an alarm. A new
        stretch then starts at that change, and no decision is due until it is four steps old. An alarm whose heat has
        not changed is dismissed.
        """
        tested = self.expected is not None and not self.settling
        if tested and self.sum_C is not None and self.sum_C.max() <= _CUSUM_FREEZE:
            return self
        # The change that began this stretch is looked for as well, or steps next to it would be mistaken for another.
        age = _find_change(heat_TLE, self.stretch + _FIRST_DECISION_AGE)
        if age is not None and age < self.stretch - (0 if self.settling else _FIRST_DECISION_AGE):
            return self.begun_at(self.seen - age)
        confirmed = not self.settling or age is not None or _has_changed(heat_TLE, self.stretch)
        return self if confirmed else self.dismissed()

    def postponed(self) -> Pace:
        """Postpone the decision that is due by a few steps."""
        return self._schedule(self.seen + _FIRST_DECISION_AGE)

    def hastened(self) -> Pace:
        """Make the next decision due now, or as soon as the CPU budget allows."""
        return self._schedule(self.seen)

    def begun_at(self, step: int) -> Pace:
        """Start a new stretch at a change of heat that ``weighed`` has found, at this value of ``seen``.

        If the stretch is settling and the change is close to its start, it is the alarm's change, dated better.
        """
        if self.settling and step - self.changed_at < _FIRST_DECISION_AGE:
            return replace(self, changed_at=step)._schedule(step + _FIRST_DECISION_AGE)
        return self._start_stretch((None, self.seen - step))

    def dismissed(self) -> Pace:
        """Dismiss the latest alarm: resume the previous stretch, with the minimum interval and the sums reset."""
        if self.calm is None:
            return self
        return replace(
            self.calm,
            seen=self.seen,
            due_at=self.due_at,
            interval=0,
            paid_at=self.paid_at,
            expected=self.expected,
            weight_C=self.weight_C,
            learning_C=self.learning_C,
            inflation_C=self.inflation_C,
        )._reset_sums()

    def after_steps(self, par_TL: Float64) -> tuple[Pace, int]:
        """Process served steps, stopping early once a decision is due or an alarm is raised.

        Call it again with the remaining steps.

        Parameters
        ----------
        par_TL
            float64 ``[T, L]``, realised PAR; NaN if a layer had no tokens or did not yet serve the decided placement.

        Returns
        -------
        tuple of Pace and int
            The new state and the number of steps processed.
        """
        state = self
        for processed, par_C in enumerate(channels_of(par_TL), start=1):
            state = replace(state, seen=state.seen + 1)
            # While a stretch is settling, decisions are scheduled anyway and placements do not last: learn nothing.
            if state.expected is not None and not state.settling:
                state = state._observe(par_C)
                if alarm := state._find_alarm():
                    return state._start_stretch(alarm), processed
            if state.due:
                return state, processed
        return state, len(par_TL)

    def deferred(self) -> Pace:
        """Begin a decision. The next one is due one interval later, unless the result reschedules it."""
        return replace(self, due_at=self.seen + self._clamp_interval(self.interval))

    def after_decision(self, changed: bool, paid: bool | None) -> Pace:
        """Record a decision and schedule the next one.

        Parameters
        ----------
        changed
            True if any layer will change. The test is then suspended until the change serves (see ``serving``).
        paid
            True if the previous change has gained more than its standard error since it began to serve, False if it has
            not, and ``None`` if there was no change or its gain is unknown.
        """
        state = replace(self, expected=None) if changed else self
        if self.alarm is not None and self.stretch < _SETTLING_STEPS:
            return state._schedule(self.changed_at + 2 * max(self.stretch, 1))
        factor = 2.0 if not changed or paid is False else 0.5 if paid else 1.0
        interval = self._clamp_interval(int(factor * self.interval))
        return replace(state, interval=interval)._schedule(self.seen + interval)

    def charged(self, cost: float) -> Pace:
        """Charge CPU time, measured in the number of steps whose CPU budget pays for it.

        Unused budget is saved up, but only that of the last ``longest`` steps.
        """
        earliest = float(self.seen - self.longest)
        state = replace(self, paid_at=max(self.paid_at, earliest) + cost)
        return state if self.due_at is None else state._schedule(self.due_at)

    def serving(self, promise: Promise) -> Pace:
        """Restart the test against a new promise.

        The variance inflation measured so far is not discarded: nine tenths of its excess over 1 is a lower bound of
        the new one.
        """
        inflation_C = promise.inflation_C
        if self.inflation_C is not None:
            inflation_C = np.maximum(inflation_C, 1.0 + 0.9 * (self.inflation_C - 1.0))
        expected = replace(promise, inflation_C=inflation_C, steps=min(promise.steps, _MAX_PROMISE_STEPS))
        unknown_C = (
            np.isnan(promise.mean_C) if promise.held_out else np.ones(promise.mean_C.size, dtype=np.bool_)
        )
        return replace(
            self,
            expected=expected,
            weight_C=np.where(unknown_C, min(_LEARNING_WEIGHT, expected.steps), expected.steps),
            learning_C=np.where(unknown_C, _LEARNING_STEPS, 0),
            inflation_C=inflation_C,
        )._reset_sums()

    @property
    def _doubtful(self) -> bool:
        """True if a change may have begun too recently to decide on."""
        if self.sum_C is None or self.since_C is None or self.expected is None or self.settling:
            return False
        return bool(((self.sum_C > _CUSUM_FREEZE) & (self.since_C < _FIRST_DECISION_AGE)).any())

    def keeping(self, promise: Promise, *, dismissed: bool = False) -> Pace:
        """Go on after a decision that keeps every layer, and whose window gives ``promise``.

        In a settled stretch, the steps served under this placement estimate the mean better than the promise. The
        promise ignores how the source ranks' shares vary between steps, and anything outside its window. The expected
        mean is therefore kept. If the latest alarm was dismissed, the mean was too low and is learned from scratch with
        a coarse test. The same holds while a stretch is settling.

        The variance and its inflation are the larger of those learned and those of the window. The test clips large
        excesses and does not learn while its sums are high, so what it learns leaves out most of each burst.
        """
        if self.expected is None or dismissed or self.settling:
            return self.serving(replace(promise, held_out=promise.held_out and self.expected is None))
        variance_C = np.fmax(self.expected.variance_C, promise.variance_C)
        inflation_C = np.maximum(self.expected.inflation_C, promise.inflation_C)
        expected = replace(self.expected, variance_C=variance_C, inflation_C=inflation_C)
        return replace(self, expected=expected, inflation_C=inflation_C)

    def _clamp_interval(self, interval: int) -> int:
        """Return the interval within its bounds; ``longest`` takes precedence over the minimum."""
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
        known_C = ~np.isnan(par_C)
        # A layer that had no tokens when the promise was made starts from its first step with tokens.
        mean_C = np.where(np.isnan(expected.mean_C), par_C, expected.mean_C)
        weight_C = np.where(np.isnan(expected.mean_C), 0, self.weight_C)
        excess_C = np.where(known_C, par_C - mean_C, 0.0)
        min_relative_C = np.where(self.learning_C > 0, _MIN_LEARNING_DEVIATION, _MIN_RELATIVE_DEVIATION)
        min_deviation_C = min_relative_C * np.nan_to_num(mean_C, nan=1.0)
        step_variance_C = np.maximum(expected.variance_C, min_deviation_C**2)
        # The factor 1 + 1/n accounts for the error of a mean that is itself estimated from n steps (Hawkins, 1987).
        deviation_C = np.sqrt(step_variance_C * expected.inflation_C * (1.0 + 1.0 / np.maximum(weight_C, 1)))
        sum_C = np.maximum(
            0.0, self.sum_C + np.where(known_C, excess_C / deviation_C - _CUSUM_ALLOWANCE, 0.0)
        )
        update_C = np.clip(excess_C, -_CLIP_DEVIATIONS * deviation_C, _CLIP_DEVIATIONS * deviation_C)
        weight_C = weight_C + known_C
        rate_C = np.where(known_C & (sum_C <= _CUSUM_FREEZE), 1.0 / np.maximum(weight_C, 1), 0.0)
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
            learning_C=np.maximum(self.learning_C - known_C, 0),
        )

    def _find_alarm(self) -> tuple[int | None, int] | None:
        """Return the channel with the largest sum and the age of the change, or ``None`` below the threshold."""
        assert self.sum_C is not None
        assert self.since_C is not None
        worst = int(self.sum_C.argmax())
        if self.sum_C[worst] <= _CUSUM_THRESHOLD:
            return None
        # A single channel may have been above zero before the change, so date it by the median of those in alarm.
        age = int(np.median(self.since_C[self.sum_C > _CUSUM_THRESHOLD]))
        return (worst if worst < self.sum_C.size - 1 else None), age

    def _start_stretch(self, alarm: tuple[int | None, int]) -> Pace:
        _, age = alarm
        changed_at = self.seen - age
        return replace(
            self,
            changed_at=changed_at,
            interval=0,
            stretches=(*self.stretches, changed_at - self.changed_at)[-_MAX_STRETCHES:],
            alarm=alarm,
            calm=replace(self, calm=None),
        )._schedule(changed_at + _FIRST_DECISION_AGE)


def _stationary_steps(heat_TLE: Counts, horizon: int) -> int:
    """Return the number of recent steps over which the heat can be treated as stationary, at most T.

    The choice is a backtest. Up to four recent intervals of ``horizon`` steps are each forecast from the steps before
    them, with look-backs of 16, 32, 64, ... steps. The forecast is each expert's mean token share. Its squared error is
    divided by the smallest one for the same interval. Of the look-backs whose summed error is within 10 % of the best,
    the longest wins, because it also estimates best how the experts' loads vary together.

    Examples
    --------
    Take 300 steps whose heat changed 60 steps ago, and a horizon of 16. Between the change and the newest interval lie
    44 steps, but before the next two intervals only 28 and 12. Over all intervals a look-back of 16 therefore forecasts
    best. The result is 16 + 16 = 32 steps.
    """
    steps = len(heat_TLE)
    history = steps - horizon
    if horizon < 1 or history < _MIN_LOOKBACK:
        return steps
    lookbacks = _lookbacks(history)
    intervals = min(_MAX_FORECASTS, max(history // (2 * horizon), 1))
    # Positions count back from the newest step: an interval ends, going back, where its history begins.
    starts = [horizon * number for number in range(1, 1 + intervals)]
    stops = {min(start + lookback, steps) for start in starts for lookback in lookbacks}
    layer_K = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, _MAX_FORECAST_LAYERS).astype(np.int64))
    cumulative = _cumulative_shares(heat_TLE[:, layer_K], (0, *starts, *stops))
    regret_K = np.zeros(len(lookbacks))
    for start in starts:
        history_stops = [min(start + lookback, steps) for lookback in lookbacks]
        error_K = _forecast_errors(cumulative, (start - horizon, start), start, history_stops)
        regret_K += error_K / max(error_K.min(), 1e-30)
    return horizon + int(np.array(lookbacks)[regret_K <= _REGRET_TOLERANCE * regret_K.min()].max())


def _has_changed(heat_TLE: Counts, recent: int) -> bool:
    """Return True if the heat of the last ``recent`` steps differs from that of the steps before them.

    The newer half of the recent steps is forecast twice: from their older half, and from the steps before with
    look-backs of 16, 32, 64, ... steps. The heat has changed if even the best of the latter has four times the error of
    the former. Bursts are forecast about as well by every look-back, and drift by the shortest. If there is nothing to
    compare, the heat counts as changed.
    """
    steps = len(heat_TLE)
    half = recent // 2
    if half < 1 or recent >= steps:
        return True
    history_stops = [recent + lookback for lookback in _lookbacks(steps - recent)]
    cumulative = _cumulative_shares(heat_TLE, (0, half, recent, *history_stops))
    own_error = _forecast_errors(cumulative, (0, half), half, [recent])[0]
    history_error = _forecast_errors(cumulative, (0, half), recent, history_stops).min()
    return bool(history_error >= _CHANGE_ERROR_RATIO * own_error)


def _find_change(heat_TLE: Counts, longest: int) -> int | None:
    """Return the age, in steps, of the clearest change of heat within the newest ``longest`` steps, or ``None``.

    For every age from two steps on, the newer half of the steps since is forecast from their older half and, as a
    rival, from each block of up to 16 steps before them. The heat has changed if even the best block has
    ``_CHANGE_ERROR_RATIO`` times the error of the older half, and if the steps just before and after that age differ as
    much. Heat that returns to an earlier state is therefore no change: the earlier steps say what to expect of both
    states. The error of the older half counts at least as much as independent steps would make it, because with few
    experts it may be small by chance, and at least as much as blocks 16 steps apart differ in the history, because
    bursty heat never returns to quite the same state.
    """
    heat_TLE = heat_TLE[-_MAX_CHANGE_STEPS:]
    steps = len(heat_TLE)
    age_A = _change_ages(min(longest, steps - _FIRST_DECISION_AGE))
    if not age_A.size:
        return None
    sums_TX, noise = _summed_shares(heat_TLE)

    def mean_of(newer_B: npt.NDArray[np.int64], older_B: npt.NDArray[np.int64]) -> Float64:
        """Return the mean shares between two positions, counted back from the newest step, ``[B, X]``."""
        mean_BX: Float64 = (sums_TX[steps - newer_B] - sums_TX[steps - older_B]) / (older_B - newer_B)[
            :, None
        ]
        return mean_BX

    half_A = age_A // 2
    newer_AX = mean_of(np.zeros_like(age_A), half_A)
    own_A = ((newer_AX - mean_of(half_A, age_A)) ** 2).sum(axis=1)
    start_B = np.arange(_MIN_CHANGE_AGE, steps - _FIRST_DECISION_AGE + 1, _MIN_CHANGE_AGE)
    stop_B = np.minimum(start_B + _MIN_LOOKBACK, steps)
    block_BX = mean_of(start_B, stop_B)
    lag = _MIN_LOOKBACK // _MIN_CHANGE_AGE
    # Only pairs of whole blocks count.
    pairs = max(np.count_nonzero(stop_B - start_B == _MIN_LOOKBACK) - lag, 0)
    apart_P = ((block_BX[lag : lag + pairs] - block_BX[:pairs]) ** 2).sum(axis=1)
    for index, first in enumerate(np.searchsorted(start_B, age_A)):
        if first < pairs:
            own_A[index] = max(own_A[index], float(np.median(apart_P[first:])))
    rival_AB = (newer_AX**2).sum(axis=1)[:, None] - 2.0 * newer_AX @ block_BX.T + (block_BX**2).sum(axis=1)
    chance_AB = noise * (1.0 / half_A[:, None] + 1.0 / np.minimum(half_A[:, None], stop_B - start_B))
    rival_AB /= np.maximum(np.maximum(own_A[:, None], chance_AB), 1e-30)
    rival_AB[start_B < age_A[:, None]] = np.inf
    after_A = np.minimum(_MIN_LOOKBACK, age_A)
    before_A = np.minimum(after_A, steps - age_A)
    jump_A = ((mean_of(age_A - after_A, age_A) - mean_of(age_A, age_A + before_A)) ** 2).sum(axis=1)
    jump_A /= np.maximum(np.maximum(own_A, noise * (1.0 / before_A + 1.0 / after_A)), 1e-30)
    ratio_A = np.minimum(rival_AB.min(axis=1), jump_A)
    clearest = int(ratio_A.argmax())
    return int(age_A[clearest]) if ratio_A[clearest] >= _CHANGE_ERROR_RATIO else None


def _change_ages(longest: int) -> npt.NDArray[np.int64]:
    """Return the ages at which to look for a change: every step up to 31, then each about an eighth longer."""
    ages = []
    age = _MIN_CHANGE_AGE
    while age <= longest:
        ages.append(age)
        age += max(1, age // 32 * 4)
    return np.array(ages, dtype=np.int64)


def _summed_shares(heat_TLE: Counts) -> tuple[Float64, float]:
    """Return the experts' token shares summed from the oldest step on, and how much those of one step scatter.

    The shares of each of a few layers are divided by the norm of their mean, so that all layers count equally.

    Returns
    -------
    sums_TX : Float64
        float64 ``[T + 1, K * E]``; the first row is zero.
    noise : float
        Sum over all experts of the variance of a step's shares, from the differences between neighbouring steps.
    """
    layer_K = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, _MAX_CHANGE_LAYERS).astype(np.int64))
    share_TKE = heat_TLE[:, layer_K].astype(np.float64)
    share_TKE /= np.maximum(share_TKE.sum(axis=2, keepdims=True), 1.0)
    share_TKE /= np.maximum(np.linalg.norm(share_TKE.mean(axis=0), axis=1)[:, None], 1e-30)
    share_TX = share_TKE.reshape(len(heat_TLE), -1)
    noise = (
        0.5 * float(((share_TX[1:] - share_TX[:-1]) ** 2).sum(axis=1).mean()) if len(share_TX) > 1 else 0.0
    )
    sums_TX = np.zeros((len(share_TX) + 1, share_TX.shape[1]))
    np.cumsum(share_TX, axis=0, out=sums_TX[1:])
    return sums_TX, noise


def _lookbacks(longest: int) -> list[int]:
    """Return the look-backs to try: 16 steps, doubled while below ``longest``, and ``longest`` itself.

    Examples
    --------
    >>> _lookbacks(100)
    [16, 32, 64, 100]
    """
    lengths = (_MIN_LOOKBACK << power for power in range(longest.bit_length()))
    return [*(length for length in lengths if length < longest), longest]


def _forecast_errors(
    cumulative: Mapping[int, Float64], target: tuple[int, int], start: int, stops: Sequence[int]
) -> Float64:
    """Return the relative squared error of forecasting a target interval from each of several histories.

    All positions count back from the newest step.

    Parameters
    ----------
    cumulative
        Token shares as returned by ``_cumulative_shares``; must include all positions below.
    target
        Newer and older end of the interval to forecast.
    start, stops
        Newer end of all histories, and the older end of each.

    Returns
    -------
    Float64
        float64 ``[K]``, mean over the layers, one value per history.
    """
    newer, older = target
    actual_LE = (cumulative[older] - cumulative[newer]) / (older - newer)
    norm_L = np.maximum((actual_LE**2).sum(axis=1), 1e-30)
    errors = []
    for stop in stops:
        forecast_LE = (cumulative[stop] - cumulative[start]) / (stop - start)
        errors.append((((forecast_LE - actual_LE) ** 2).sum(axis=1) / norm_L).mean())
    return np.array(errors)


def _cumulative_shares(heat_TLE: Counts, lengths: Sequence[int]) -> dict[int, Float64]:
    """Return each expert's token share, summed over the newest ``n`` steps, for each ``n`` in ``lengths``.

    The sum between two of these positions is then a difference and needs no further pass over the heat.

    Returns
    -------
    dict of int to Float64
        float64 ``[L, E]`` for each length.
    """
    steps = len(heat_TLE)
    inverse_TL = 1.0 / np.maximum(heat_TLE.sum(axis=2, dtype=np.float64), 1.0)
    total_LE = np.zeros(heat_TLE.shape[1:])
    sums: dict[int, Float64] = {}
    summed = 0
    for length in sorted({*lengths}):
        added = slice(steps - length, steps - summed)
        total_LE = total_LE + np.einsum("tle,tl->le", heat_TLE[added], inverse_TL[added])
        sums[length] = total_LE
        summed = length
    return sums
