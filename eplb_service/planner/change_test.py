"""Whether what is realised has left what was promised: a sequential test on every layer, and on their mean.

Each step's excess of the realised ratio over what is expected of it is summed while the sum is positive (CUSUM), less
an allowance of one standard deviation; a sum past the threshold is an alarm, and the change began where the sum was
last zero. What is expected begins as the promise and is then learned from the steps served (self-starting), so that a
promise a little too good raises no alarm. The deviation of a step is widened where neighbouring steps resemble each
other. ``docs/solver.md`` has the rate of false alarms and the delay, measured.

References
----------
E. Page, *Continuous Inspection Schemes*, 1954.
D. Hawkins, *Self-Starting Cusum Charts for Location and Scale*, 1987.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from eplb_service.placement import Float64
from eplb_service.planner.promise import Promise, channels_of

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


class Alarm(NamedTuple):
    """A departure that lasts: of which layer, ``None`` for the mean of all, and for how many steps already."""

    layer: int | None
    steps: int


@dataclass(frozen=True)
class ChangeTest:
    """The test as it is after some steps; a value.

    Parameters
    ----------
    mean_C, variance_C
        float64 ``[L + 1]``, what is expected of a step, of each layer and of their mean.
    inflation_C
        As in ``Promise``.
    weight
        Steps that the expectation counts for.
    sum_C
        float64 ``[L + 1]``, the excess summed, in standard deviations.
    since_C
        int64 ``[L + 1]``, steps since each sum was last zero.
    learning
        Steps still to be learned from before anything can be an alarm.
    """

    mean_C: Float64
    variance_C: Float64
    inflation_C: Float64
    weight: int
    sum_C: Float64
    since_C: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    learning: int = 0

    @classmethod
    def of(cls, promise: Promise, inflation_C: Float64 | None = None) -> ChangeTest:
        """Begin at a promise; ``inflation_C`` is what is known of steps before it, of which some is kept."""
        widened_C = promise.inflation_C
        if inflation_C is not None:
            widened_C = np.maximum(widened_C, 1.0 + 0.9 * (inflation_C - 1.0))
        channels = promise.mean_C.size
        return cls(
            promise.mean_C,
            promise.variance_C,
            widened_C,
            min(promise.steps, _MOST_WEIGHT),
            np.zeros(channels),
            np.zeros(channels, dtype=np.int64),
            0 if promise.held_out else _LEARNING_STEPS,
        )

    def after(self, par_TL: Float64) -> tuple[ChangeTest, int, Alarm | None]:
        """The test after steps with these ratios, up to the first alarm; how many those are, and the alarm.

        Parameters
        ----------
        par_TL
            float64 ``[T, L]``, realised; NaN for a layer without tokens, of which the step then says nothing.
        """
        test = self
        for step, par_C in enumerate(channels_of(par_TL)):
            test = test._after_step(par_C)
            alarm = test._alarm()
            if alarm is not None:
                return test, step + 1, alarm
        return test, len(par_TL), None

    def calmed(self) -> ChangeTest:
        """The same without what it has summed up: that was no change."""
        return replace(self, sum_C=np.zeros_like(self.sum_C), since_C=np.zeros_like(self.since_C))

    def _after_step(self, par_C: Float64) -> ChangeTest:
        # A layer that had no tokens when the promise was made begins with its first step.
        mean_C = np.where(np.isnan(self.mean_C), par_C, self.mean_C)
        known_C = ~np.isnan(par_C)
        excess_C = np.where(known_C, par_C - mean_C, 0.0)
        step_variance_C = np.maximum(
            self.variance_C, (_LEAST_DEVIATION * np.nan_to_num(mean_C, nan=1.0)) ** 2
        )
        deviation_C = np.sqrt(step_variance_C * self.inflation_C * (1.0 + 1.0 / max(self.weight, 1)))
        sum_C, since_C = self.sum_C, self.since_C
        if self.learning == 0:
            sum_C = np.maximum(0.0, sum_C + np.where(known_C, excess_C / deviation_C - _ALLOWANCE, 0.0))
            since_C = np.where(sum_C > 0, since_C + 1, 0)
        # While learning, the steps served take the place of the promise; later, none teaches more than a clipped one.
        taught_C, weight = excess_C, _LEARNING_STEPS - self.learning + 1
        if self.learning == 0:
            taught_C, weight = np.clip(excess_C, -_CLIP * deviation_C, _CLIP * deviation_C), self.weight + 1
        rate_C = np.where(known_C & (sum_C <= _LINGERING), 1.0 / weight, 0.0)
        return replace(
            self,
            mean_C=mean_C + rate_C * taught_C,
            variance_C=self.variance_C + rate_C * (taught_C**2 * (1.0 - rate_C) - self.variance_C),
            weight=weight,
            sum_C=sum_C,
            since_C=since_C,
            learning=max(0, self.learning - 1),
        )

    def _alarm(self) -> Alarm | None:
        worst = int(self.sum_C.argmax())
        if self.sum_C[worst] <= _THRESHOLD:
            return None
        # A single sum may have lingered above zero before; where several have passed, the middle one says when.
        since = int(np.median(self.since_C[self.sum_C > _THRESHOLD]))
        return Alarm(worst if worst < self.sum_C.size - 1 else None, since)
