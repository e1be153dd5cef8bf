"""Ratios of two timings taken alternately, with their spread. A busy machine slows down both equally."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """Ratio of two paired timings.

    Parameters
    ----------
    name
        Name of the ratio.
    one
        Median of the measured timing, in seconds.
    other
        Median of the timing that it is compared with, in seconds.
    ratio
        Median of the paired ratios.
    low
        10th percentile of the paired ratios.
    high
        90th percentile of the paired ratios.
    target
        Largest ratio that meets the target.
    """

    name: str
    one: float
    other: float
    ratio: float
    low: float
    high: float
    target: float

    @classmethod
    def of(cls, name: str, ones: list[float], others: list[float], target: float) -> Ratio:
        """Compute the ratio from paired timings in seconds."""
        paired = np.array(ones) / np.array(others)
        low, middle, high = np.percentile(paired, [10, 50, 90]).tolist()
        return cls(name, float(np.median(ones)), float(np.median(others)), middle, low, high, target)

    @property
    def line(self) -> str:
        """The ratio as one line of text."""
        verdict = "met" if self.ratio <= self.target else "MISSED"
        return (
            f"{self.name:<58}{1e3 * self.one:>9.3f} ms /{1e3 * self.other:>9.3f} ms ={self.ratio:>7.3f} "
            f"({self.low:.3f} to {self.high:.3f}), target <= {self.target:g}: {verdict}"
        )


def by_turns(
    one: Callable[[], object], other: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Time two functions ``rounds`` times each, in seconds, alternating which one runs first."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        order = ((0, one), (1, other)) if turn % 2 else ((1, other), (0, one))
        for index, call in order:
            began = time.perf_counter()
            call()
            seconds[index].append(time.perf_counter() - began)
    return seconds


def means_of(seconds: list[float], steps: int) -> list[float]:
    """Return the mean of each group of ``steps`` values, which spreads the cost of rare expensive steps. Drop the rest.

    Examples
    --------
    >>> means_of([1.0, 3.0, 2.0, 4.0, 9.0], 2)
    [2.0, 3.0]
    """
    whole = len(seconds) - len(seconds) % steps
    means: list[float] = np.reshape(seconds[:whole], (-1, steps)).mean(axis=1).tolist()
    return means
