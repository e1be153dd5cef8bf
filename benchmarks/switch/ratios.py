"""Ratios of two things timed by turns in one run, with their spread: a busy machine slows both alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """``one`` over ``other``: medians in seconds, the median of the paired ratios and where 80 % of them lie."""

    name: str
    one: float
    other: float
    ratio: float
    low: float
    high: float
    target: float

    @classmethod
    def of(cls, name: str, ones: list[float], others: list[float], target: float) -> Ratio:
        """From paired timings."""
        paired = np.array(ones) / np.array(others)
        low, middle, high = np.percentile(paired, [10, 50, 90]).tolist()
        return cls(name, float(np.median(ones)), float(np.median(others)), middle, low, high, target)

    @property
    def line(self) -> str:
        """For a terminal."""
        verdict = "met" if self.ratio <= self.target else "MISSED"
        return (
            f"{self.name:<58}{1e3 * self.one:>9.3f} ms /{1e3 * self.other:>9.3f} ms ={self.ratio:>7.3f} "
            f"({self.low:.3f} to {self.high:.3f}), target <= {self.target:g}: {verdict}"
        )


def by_turns(
    one: Callable[[], object], other: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each call, the two taking turns to be first."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        order = ((0, one), (1, other)) if turn % 2 else ((1, other), (0, one))
        for place, call in order:
            began = time.perf_counter()
            call()
            seconds[place].append(time.perf_counter() - began)
    return seconds


def means_of(seconds: list[float], steps: int) -> list[float]:
    """Means over as many steps each: what is dear now and then is spread over them."""
    whole = len(seconds) - len(seconds) % steps
    means: list[float] = np.reshape(seconds[:whole], (-1, steps)).mean(axis=1).tolist()
    return means
