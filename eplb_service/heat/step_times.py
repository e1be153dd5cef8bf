"""How long the steps of a window took and how many tokens they carried, as the ranks measured it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Float64

_PAUSE = 8.0
"""Medians from which on a step's time is taken for a wait for requests."""


@dataclass(frozen=True)
class StepTimes:
    """Of T steps in order.

    Parameters
    ----------
    us_T
        float64 ``[T]``, microseconds of wall time, the median over the ranks that measured it; NaN where none did.
    tokens_T
        float64 ``[T]``, tokens of all ranks, each counted once; NaN where a rank did not report its own.
    """

    us_T: Float64
    tokens_T: Float64

    @property
    def served_T(self) -> npt.NDArray[np.bool_]:
        """Steps whose time is known and no wait for requests, bool ``[T]``: at most eight times the median."""
        known_T = np.isfinite(self.us_T)
        if not known_T.any():
            return known_T
        served_T: npt.NDArray[np.bool_] = known_T & (
            np.nan_to_num(self.us_T, nan=np.inf) <= _PAUSE * np.median(self.us_T[known_T])
        )
        return served_T

    @property
    def mean_us(self) -> float | None:
        """Mean over those steps, in microseconds; ``None`` where there is none."""
        served_T = self.served_T
        return float(self.us_T[served_T].mean()) if served_T.any() else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens of those steps; ``None`` where not all are known."""
        tokens = self.tokens_T[self.served_T]
        return float(tokens.mean()) if tokens.size and np.isfinite(tokens).all() else None

    def newest(self, steps: int) -> StepTimes:
        """Those of the newest steps."""
        first = len(self.us_T) - steps
        return StepTimes(self.us_T[first:], self.tokens_T[first:])


class StepTimesRing:
    """What the ranks measured of the steps in the rows of a window, put together as they come in.

    A decision asks for all rows at once, on the event loop: medians over many ranks are not left for then.

    Parameters
    ----------
    rows
        W.
    counted_G
        Indices of the ranks whose tokens make up a step's: one of each that see the same tokens.
    """

    def __init__(self, rows: int, counted_G: npt.NDArray[np.integer[Any]]) -> None:
        self._counted_G = counted_G
        self._us_W = np.full(rows, np.nan)
        self._tokens_W = np.full(rows, np.nan)

    def put(
        self, row: int, micros_R: npt.NDArray[np.integer[Any]], tokens_R: npt.NDArray[np.integer[Any]]
    ) -> None:
        """A step's microseconds on each rank, 0 where not known, and its tokens, -1 where not known."""
        tokens_G = tokens_R[self._counted_G]
        self._us_W[row] = _median_of_known(micros_R)
        self._tokens_W[row] = tokens_G.sum() if (tokens_G >= 0).all() else np.nan

    def of(self, rows: npt.NDArray[np.intp], asked_T: npt.NDArray[np.bool_]) -> StepTimes:
        """Those of these rows, in their order; times that are not asked for are left unknown."""
        return StepTimes(np.where(asked_T, self._us_W[rows], np.nan), self._tokens_W[rows])


def _median_of_known(micros_R: npt.NDArray[np.integer[Any]]) -> float:
    """Median of the values above 0; NaN where there is none."""
    known = micros_R[micros_R > 0]
    return float(np.median(known)) if known.size else math.nan
