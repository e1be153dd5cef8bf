"""Forecasts of what a placement wins until the next decision, and how far the last ones were from what came."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_core.placement import Float64
from eplb_core.planner.score import Gain, gain_of

_MISSES_KEPT = 20
"""Newest forecasts whose errors say how far what comes may be from the next."""


@dataclass(frozen=True)
class Forecasts:
    """The newest forecast of a gain, and the errors of those before (immutable).

    An interval that follows from the steps of a window knows nothing of changes that are not in it. It therefore
    reaches at least as far as the newest forecasts missed what came, as adaptive conformal inference does.

    Parameters
    ----------
    gain, seen
        The newest forecast, ``None`` where there is none or its window said nothing, and the steps that had been seen
        by then.
    misses
        Distances of what came from the means of the newest forecasts, in the unit of the gain.
    held
        Whether what came lay in the interval of the forecast before; ``None`` where that is not known.

    References
    ----------
    I. Gibbs and E. Candes, *Adaptive Conformal Inference Under Distribution Shift*, 2021.
    """

    gain: Gain | None = None
    seen: int = 0
    misses: tuple[float, ...] = ()
    held: bool | None = None

    def since(self, seen: int) -> int:
        """Steps since the newest forecast that can be held against it."""
        return 0 if self.gain is None else max(seen - self.seen, 0)

    def next(
        self, before_TL: Float64, after_TL: Float64, ahead: float | None, seen: int, came: Gain | None
    ) -> Forecasts:
        """Make the next forecast, given what came of the newest.

        Parameters
        ----------
        before_TL, after_TL, ahead
            As for ``gain_of``.
        seen
            Steps seen by now.
        came
            Gain in the steps ``since`` the newest forecast; ``None`` where there are none.
        """
        misses, held, last = self.misses, None, self.gain
        if came is not None and came.known and last is not None:
            held = last.low <= came.mean <= last.high
            misses = (*misses, abs(came.mean - last.mean))[-_MISSES_KEPT:]
        gain = gain_of(before_TL, after_TL, ahead, misses)
        return Forecasts(gain if gain.known else None, seen, misses, held)


NO_FORECASTS = Forecasts()
"""None was made yet."""
