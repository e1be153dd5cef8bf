"""Forecasts of the current layout's gain until the next decision, and the errors of earlier forecasts."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_core.placement import Float64
from eplb_core.planner.score import Gain, gain_of

_MAX_MISSES = 20
"""Number of recent forecasts whose errors bound the next interval."""


@dataclass(frozen=True)
class Forecasts:
    """The newest forecast of a gain, and the errors of the ones before (immutable).

    An interval computed from a window cannot allow for changes that come after the window. It therefore extends at
    least as far as the largest recent error, as in adaptive conformal inference.

    Parameters
    ----------
    gain
        The newest forecast; ``None`` if there is none, or if its window had too few steps.
    seen
        Steps served before the newest forecast was made.
    misses
        Distances between recent forecasts and the gains observed later, in the unit of the gain.
    held
        True if the gain observed after the previous forecast was in its interval; ``None`` if that is unknown.

    References
    ----------
    I. Gibbs and E. Candes, *Adaptive Conformal Inference Under Distribution Shift*, 2021.
    """

    gain: Gain | None = None
    seen: int = 0
    misses: tuple[float, ...] = ()
    held: bool | None = None

    def since(self, seen: int) -> int:
        """Return the number of steps since the newest forecast; 0 if there is no forecast to compare them with."""
        return 0 if self.gain is None else max(seen - self.seen, 0)

    def next(
        self, before_TL: Float64, after_TL: Float64, horizon: float | None, seen: int, actual: Gain | None
    ) -> Forecasts:
        """Compare the newest forecast with the observed gain, and make the next one.

        Parameters
        ----------
        before_TL, after_TL, horizon
            As for ``gain_of``.
        seen
            Steps served so far.
        actual
            Gain observed in the steps since the newest forecast; ``None`` if there are no such steps.
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
