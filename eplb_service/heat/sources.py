"""Which source ranks each expert's tokens come from, summed over about a window, in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_BUCKETS_PER_WINDOW = 4
SOURCE_BUCKETS = _BUCKETS_PER_WINDOW + 1
"""Buckets kept: a window, and the one that fills."""


class _Bucket:
    """Sums over a fixed stretch of steps."""

    def __init__(self, ranks: int, layers: int, experts: int) -> None:
        self.sum_RLE = np.zeros((ranks, layers, experts), dtype=np.float32)
        self.steps_R = np.zeros(ranks, dtype=np.int64)

    @property
    def fair(self) -> bool:
        """Whether all ranks have reported equally many steps, so that their shares can be compared."""
        return bool(self.steps_R[0] > 0 and (self.steps_R == self.steps_R[0]).all())


class SourceHeat:
    """Tokens of each source rank by logical expert over the newest ``window_steps`` or a little more.

    Steps fall into buckets of a quarter of a window; a bucket for which the ranks have reported different numbers of
    steps is left out rather than guessed.
    """

    def __init__(self, ranks: int, layers: int, experts: int, window_steps: int) -> None:
        self._shape = (ranks, layers, experts)
        self._bucket_steps = -(-window_steps // _BUCKETS_PER_WINDOW)
        self._buckets: dict[int, _Bucket] = {}

    def add(self, rank: int, first_step: int, counts_TLE: npt.NDArray[np.integer[Any]]) -> None:
        """Add one rank's counts of the steps from ``first_step`` on."""
        taken = 0
        while taken < len(counts_TLE):
            number, offset = divmod(first_step + taken, self._bucket_steps)
            part_TLE = counts_TLE[taken : taken + self._bucket_steps - offset]
            bucket = self._bucket(number)
            if bucket is not None:
                bucket.sum_RLE[rank] += part_TLE.sum(axis=0, dtype=np.int32)
                bucket.steps_R[rank] += len(part_TLE)
            taken += len(part_TLE)

    def clear(self) -> None:
        """Forget everything: the steps that it was counted for were none."""
        self._buckets.clear()

    def sums(self) -> npt.NDArray[np.float64] | None:
        """Float64 ``[R, L, E]``; ``None`` where not all ranks report theirs."""
        fair = [bucket.sum_RLE for bucket in self._buckets.values() if bucket.fair]
        return np.sum(fair, axis=0, dtype=np.float64) if fair else None

    def _bucket(self, number: int) -> _Bucket | None:
        if number not in self._buckets:
            if self._buckets and number < min(self._buckets):
                return None
            self._buckets[number] = _Bucket(*self._shape)
            while len(self._buckets) > SOURCE_BUCKETS:
                del self._buckets[min(self._buckets)]
        return self._buckets.get(number)
