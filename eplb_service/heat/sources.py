"""Which source ranks each expert's tokens come from, summed over about a window, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_BUCKETS_PER_WINDOW = 4
SOURCE_BUCKETS = _BUCKETS_PER_WINDOW + 1
"""Buckets kept: a window, and the one that fills."""

RankSums: TypeAlias = npt.NDArray[np.float32]
"""One rank's tokens by expert over a bucket, ``[L, E]``; replaced as it grows, never written to."""


@dataclass(frozen=True)
class SourceSums:
    """Source heat as it was at one moment: cheap to take, and put together by whoever has the time.

    Parameters
    ----------
    buckets
        The sums of all ranks, in order of rank, for each stretch of steps.
    """

    buckets: tuple[tuple[RankSums, ...], ...]

    def total(self) -> npt.NDArray[np.float64] | None:
        """Float64 ``[R, L, E]``; ``None`` where not all ranks report theirs."""
        if not self.buckets:
            return None
        first = self.buckets[0]
        total_RLE = np.zeros((len(first), *first[0].shape))
        for bucket in self.buckets:
            for total_LE, sums_LE in zip(total_RLE, bucket, strict=True):
                total_LE += sums_LE
        return total_RLE


class _Bucket:
    """Sums over a fixed stretch of steps."""

    def __init__(self, ranks: int) -> None:
        self.sums_R: list[RankSums | None] = [None] * ranks
        self.steps_R = np.zeros(ranks, dtype=np.int64)

    def add(self, rank: int, steps: int, sums_LE: npt.NDArray[np.integer[Any]]) -> None:
        known_LE = self.sums_R[rank]
        added_LE: RankSums = np.empty(sums_LE.shape, dtype=np.float32)
        np.add(sums_LE, 0 if known_LE is None else known_LE, out=added_LE, casting="unsafe")
        self.sums_R[rank] = added_LE
        self.steps_R[rank] += steps

    def fair(self) -> tuple[RankSums, ...]:
        """All ranks' sums where they are of equally many steps, so that shares can be compared; otherwise none."""
        known = tuple(sums_LE for sums_LE in self.sums_R if sums_LE is not None)
        alike = len(known) == len(self.sums_R) and bool((self.steps_R == self.steps_R[0]).all())
        return known if alike else ()


class SourceHeat:
    """Tokens of each source rank by logical expert over the newest ``window_steps`` or a little more.

    Steps fall into buckets of a quarter of a window; a bucket for which the ranks have reported different numbers of
    steps is left out rather than guessed.
    """

    def __init__(self, ranks: int, window_steps: int) -> None:
        self._ranks = ranks
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
                bucket.add(rank, len(part_TLE), part_TLE.sum(axis=0, dtype=np.int64))
            taken += len(part_TLE)

    def add_sums(self, rank: int, first_step: int, steps: int, sums_LE: npt.NDArray[np.integer[Any]]) -> None:
        """Add one rank's counts summed over ``steps`` steps; all are of the bucket of the first.

        Ranks cut their reports at the same steps, so that this is the same for all of them.
        """
        bucket = self._bucket(first_step // self._bucket_steps)
        if bucket is not None:
            bucket.add(rank, steps, sums_LE)

    def clear(self) -> None:
        """Forget everything: the steps that it was counted for were none."""
        self._buckets.clear()

    def sums(self) -> SourceSums:
        """What is known by now of stretches that all ranks have reported alike."""
        fair: Sequence[tuple[RankSums, ...]] = [bucket.fair() for bucket in self._buckets.values()]
        return SourceSums(tuple(bucket for bucket in fair if bucket))

    def _bucket(self, number: int) -> _Bucket | None:
        if number not in self._buckets:
            if self._buckets and number < min(self._buckets):
                return None
            self._buckets[number] = _Bucket(self._ranks)
            while len(self._buckets) > SOURCE_BUCKETS:
                del self._buckets[min(self._buckets)]
        return self._buckets.get(number)
