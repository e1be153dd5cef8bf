"""Forecast the current layout's gain until the next decision, and track the errors of earlier forecasts."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_core.placement import Float64
from eplb_core.planner.score import Gain, gain_of

_MAX_MISSES = 20
"""Number of recent forecasts whose errors determine the minimum width of the next interval."""


@dataclass(frozen=True)
class Forecasts:
    """The latest gain forecast and the errors of earlier ones (immutable).

    An interval computed from a window cannot account for changes after the window. It therefore extends at least as far
    as the largest recent error, similar to adaptive conformal inference.

    Parameters
    ----------
    gain
        The latest forecast; ``None`` if there is none, or if its window had too few steps.
    seen
        Number of steps served before the latest forecast was made.
    misses
        Absolute errors of recent forecasts, in the same unit as the gain.
    held
        True if the gain observed after the previous forecast was within its interval; ``None`` if unknown.

    References
    ----------
    I. Gibbs and E. Candes, *Adaptive Conformal Inference Under Distribution Shift*, 2021.
    """

    gain: Gain | None = None
    seen: int = 0
    misses: tuple[float, ...] = ()
    held: bool | None = None

    def since(self, seen: int) -> int:
        """Return the number of steps since the latest forecast, or 0 if there is no forecast."""
        return 0 if self.gain is None else max(seen - self.seen, 0)

    def next(
        self, before_TL: Float64, after_TL: Float64, horizon: float | None, seen: int, actual: Gain | None
    ) -> Forecasts:
        """Compare the latest forecast with the observed gain, then make a new forecast and return the updated state.

        Parameters
        ----------
        before_TL, after_TL, horizon
            As for ``gain_of``.
        seen
            Number of steps served so far.
        actual
            Gain observed since the latest forecast; ``None`` if no steps have been served since.
        """
        misses = self.misses
        held = None
        if actual is not None and actual.known and self.gain is not None:
            held = self.gain.low <= actual.mean <= self.gain.high
            misses = (*misses, abs(actual.mean - self.gain.mean))[-_MAX_MISSES:]
        gain = gain_of(before_TL, after_TL, horizon, misses)
        return Forecasts(gain if gain.known else None, seen, misses, held)


NO_FORECASTS = Forecasts()
"""State before the first forecast."""
