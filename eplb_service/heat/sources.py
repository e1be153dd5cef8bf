"""Sources and times of a window's steps: tokens by source rank, wall time and tokens by step; in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_service.cost.moving import served_steps
from eplb_service.placement import Float64
from eplb_service.wire.heat import HeatReport

_BUCKETS_PER_WINDOW = 4
SOURCE_BUCKETS = _BUCKETS_PER_WINDOW + 1
"""Buckets kept: a window, and the one that fills."""

RankSums: TypeAlias = npt.NDArray[np.float32]
"""One rank's tokens by expert over a bucket, ``[L, E]``; replaced as it grows, never written to."""


@dataclass(frozen=True)
class StepTimes:
    """Times and tokens of T steps in order, float64 ``[T]``.

    ``us_T`` are microseconds of wall time, the median over the ranks that measured it, NaN where none did; ``tokens_T``
    tokens of all ranks, each counted once, NaN where a rank did not report its own.
    """

    us_T: Float64
    tokens_T: Float64

    @property
    def served_T(self) -> npt.NDArray[np.bool_]:
        """Steps whose time is known and no wait for requests, bool ``[T]``: at most eight times the median."""
        return served_steps(self.us_T)

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
        """Return the newest steps' own."""
        first = len(self.us_T) - steps
        return StepTimes(self.us_T[first:], self.tokens_T[first:])


class StepTimesRing:
    """Times and tokens of the steps in the ``rows`` of a window, put together as they come in.

    A decision asks for all rows at once, on the event loop: medians over many ranks are not left for then.
    ``counted_G`` are the ranks whose tokens make up a step's: one of each that see the same tokens.
    """

    def __init__(self, rows: int, counted_G: npt.NDArray[np.integer[Any]]) -> None:
        self._counted_G = counted_G
        self._us_W = np.full(rows, np.nan)
        self._tokens_W = np.full(rows, np.nan)

    def put(
        self, row: int, micros_R: npt.NDArray[np.integer[Any]], tokens_R: npt.NDArray[np.integer[Any]]
    ) -> None:
        """Take a step's microseconds on each rank, 0 where not known, and its tokens, -1 where not known."""
        tokens_G = tokens_R[self._counted_G]
        known = micros_R[micros_R > 0]
        self._us_W[row] = float(np.median(known)) if known.size else math.nan
        self._tokens_W[row] = tokens_G.sum() if (tokens_G >= 0).all() else np.nan

    def of(self, rows: npt.NDArray[np.intp], asked_T: npt.NDArray[np.bool_]) -> StepTimes:
        """Return these rows' own, in their order; times that are not asked for are left unknown."""
        return StepTimes(np.where(asked_T, self._us_W[rows], np.nan), self._tokens_W[rows])


class SourceHeat:
    """Tokens of each source rank by logical expert over the newest ``window_steps`` or a little more.

    Steps fall into buckets of a quarter of a window; a bucket for which the ranks have reported different numbers of
    steps is left out rather than guessed.
    """

    def __init__(self, ranks: int, window_steps: int) -> None:
        self._ranks = ranks
        self._bucket_steps = -(-window_steps // _BUCKETS_PER_WINDOW)
        self._buckets: dict[int, _Bucket] = {}

    def add(self, rank: int, report: HeatReport) -> None:
        """Add what one rank's own tokens chose, where it reports that.

        Sums over a report are all of the bucket of its first step: ranks cut their reports at the same steps, so that
        this is the same for all of them.
        """
        if report.source_sums_LE is not None:
            number = report.first_step // self._bucket_steps
            self._add(rank, number, report.steps, report.source_sums_LE)
        counts_TLE, taken = report.source_counts_TLE, 0
        while counts_TLE is not None and taken < len(counts_TLE):
            number, offset = divmod(report.first_step + taken, self._bucket_steps)
            part_TLE = counts_TLE[taken : taken + self._bucket_steps - offset]
            self._add(rank, number, len(part_TLE), part_TLE.sum(axis=0, dtype=np.int64))
            taken += len(part_TLE)

    def clear(self) -> None:
        """Forget everything: the steps that it was counted for were none."""
        self._buckets.clear()

    def buckets(self) -> tuple[tuple[RankSums, ...], ...]:
        """Sums of all ranks, in order of rank, for each stretch of steps that they have reported alike."""
        return tuple(sums for bucket in self._buckets.values() if (sums := bucket.fair()))

    def _add(self, rank: int, number: int, steps: int, sums_LE: npt.NDArray[np.integer[Any]]) -> None:
        if number not in self._buckets:
            if self._buckets and number < min(self._buckets):
                return
            self._buckets[number] = _Bucket(self._ranks)
            while len(self._buckets) > SOURCE_BUCKETS:
                del self._buckets[min(self._buckets)]
        if number in self._buckets:
            self._buckets[number].add(rank, steps, sums_LE)


class _Bucket:
    """Sums over a fixed stretch of steps."""

    def __init__(self, ranks: int) -> None:
        self._sums_R: list[RankSums | None] = [None] * ranks
        self._steps_R = np.zeros(ranks, dtype=np.int64)

    def add(self, rank: int, steps: int, sums_LE: npt.NDArray[np.integer[Any]]) -> None:
        known_LE = self._sums_R[rank]
        added_LE: RankSums = np.empty(sums_LE.shape, dtype=np.float32)
        np.add(sums_LE, 0 if known_LE is None else known_LE, out=added_LE, casting="unsafe")
        self._sums_R[rank] = added_LE
        self._steps_R[rank] += steps

    def fair(self) -> tuple[RankSums, ...]:
        """Return all ranks' sums where they are of equally many steps, so that shares can be compared; else none."""
        known = tuple(sums_LE for sums_LE in self._sums_R if sums_LE is not None)
        alike = len(known) == len(self._sums_R) and bool((self._steps_R == self._steps_R[0]).all())
        return known if alike else ()
