"""What a placement has won over another on the same steps, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from eplb_service.placement import Float64
from eplb_service.solver.significance import standard_error

CONFIDENCE = 0.95
"""Of the intervals that operators read."""
_PAID_ERRORS = 1.0
"""Standard errors above zero at which a change has paid."""


@dataclass(frozen=True)
class Gain:
    """A mean over steps with its confidence interval, in the unit of what was compared; NaN where nothing was."""

    mean: float
    low: float
    high: float
    error: float

    @property
    def known(self) -> bool:
        """Whether there were steps enough for an interval."""
        return math.isfinite(self.mean) and math.isfinite(self.error)

    @property
    def paid(self) -> bool | None:
        """Whether the mean is above zero by more than its standard error; ``None`` where that is not known."""
        return self.mean > _PAID_ERRORS * self.error if self.known else None


def gain_of(before_TL: Float64, after_TL: Float64, confidence: float = CONFIDENCE) -> Gain:
    """What ``after`` has won over ``before`` on the same steps, in the mean over the layers.

    Steps in a row resemble each other, and the interval is as much wider (``solver.significance``).

    Parameters
    ----------
    before_TL, after_TL
        float64 ``[T, L]``, ratios or times of the same steps; NaN without tokens, which say nothing.
    confidence
        Of the interval.
    """
    won_TL = before_TL - after_TL
    known_TL = ~np.isnan(won_TL)
    counted_T = known_TL.sum(axis=1)
    some_T = counted_T > 0
    won_T = np.where(known_TL, won_TL, 0.0).sum(axis=1)[some_T] / counted_T[some_T]
    if not won_T.size:
        return Gain(math.nan, math.nan, math.nan, math.inf)
    mean, error = float(won_T.mean()), standard_error(won_T)
    reach = NormalDist().inv_cdf(0.5 + confidence / 2) * error
    return Gain(mean, mean - reach, mean + reach, error)
