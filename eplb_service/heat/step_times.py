"""How long the steps of a window took and how many tokens they carried, as the ranks measured it."""

from __future__ import annotations

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
    """What the ranks measured of the steps in the rows of a window.

    Parameters
    ----------
    rows, ranks
        W and R.
    counted_G
        Indices of the ranks whose tokens make up a step's: one of each that see the same tokens.
    """

    def __init__(self, rows: int, ranks: int, counted_G: npt.NDArray[np.integer[Any]]) -> None:
        self._counted_G = counted_G
        self._micros_WR = np.zeros((rows, ranks), dtype=np.uint32)
        self._tokens_WR = np.full((rows, ranks), -1, dtype=np.int64)

    def put(
        self, row: int, micros_R: npt.NDArray[np.integer[Any]], tokens_R: npt.NDArray[np.integer[Any]]
    ) -> None:
        """A step's microseconds on each rank, 0 where not known, and its tokens, -1 where not known."""
        self._micros_WR[row] = micros_R
        self._tokens_WR[row] = tokens_R

    def of(self, rows: npt.NDArray[np.intp], asked_T: npt.NDArray[np.bool_]) -> StepTimes:
        """Those of these rows, in their order; times that are not asked for are left unknown."""
        us_T = np.where(asked_T, _median_of_known(self._micros_WR[rows]), np.nan)
        tokens_TG = self._tokens_WR[rows][:, self._counted_G]
        known_T = (tokens_TG >= 0).all(axis=1)
        return StepTimes(us_T, np.where(known_T, tokens_TG.sum(axis=1), np.nan))


def _median_of_known(micros_TR: npt.NDArray[np.uint32]) -> Float64:
    """Median of each row's values above 0, float64 ``[T]``; NaN where there is none."""
    sorted_TR = np.sort(np.where(micros_TR > 0, micros_TR, np.inf), axis=1)
    known_T = (micros_TR > 0).sum(axis=1)
    row_T = np.arange(len(sorted_TR))
    lower_T = sorted_TR[row_T, np.maximum(known_T - 1, 0) // 2]
    upper_T = sorted_TR[row_T, np.minimum(known_T // 2, micros_TR.shape[1] - 1)]
    return np.where(known_T > 0, (lower_T + upper_T) / 2, np.nan)
