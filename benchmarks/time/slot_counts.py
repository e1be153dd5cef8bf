"""Which number of slots is named for each heat and expert-parallel size, and whether it was right afterwards.

As `eplb advise` does: each number of slots is decided for in every window, from what the one before it left. The first
half of the windows served names a number; the second half says whether it was right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.time.cells import MORE_SLOTS
from benchmarks.time.heats import CellHeat
from benchmarks.time.scoring import slowest_us
from eplb_service.cost.curve import CostCurve
from eplb_service.offline import Solution, solve
from eplb_service.replay.advice import SAME_TIME, Option, cheapest
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.schedule import Schedule

NEAR = 0.01
"""Part of the time by which a number of slots must be slower afterwards to have been wrong."""
ERRORS = 2.0
"""Standard errors over the windows by which it must be slower besides."""
WINDOW, NAMING, JUDGING = 128, 6, 6
"""Steps of a window, and windows that name a number of slots and that judge it, after one to place by."""
STEPS = WINDOW * (1 + NAMING + JUDGING)


@dataclass(frozen=True)
class Named:
    """The slots named, by `eplb advise`'s rule on the first windows served, and those fastest on the later ones."""

    heat: str
    tokens: int
    ranks: int
    slots: int
    fastest: int
    slower: float
    """Part of the time that the slots named take more than the fastest, on the later windows."""
    error: float
    """Standard error of that, over the windows."""
    wasted: int
    """Slots named beyond the fewest that are shown to be as fast there, up to what advice takes for the same time."""

    @property
    def right(self) -> bool:
        """Not shown to be slower than the fastest, nor to have more slots than that takes; noise counts for neither."""
        is_slower = self.slower > NEAR and self.slower > ERRORS * self.error
        return not is_slower and self.wasted <= 0


def named(heat: CellHeat, ranks: Sequence[int], curve: CostCurve) -> Iterator[Named]:
    """One for each expert-parallel size that the heat's experts fit; ``heat`` has ``STEPS`` steps."""
    experts = heat.heat_TLE.shape[2]
    for count in ranks:
        fewest = -(-experts // count)
        tried = [fewest + more for more in MORE_SLOTS if fewest + more <= experts and count <= experts]
        if tried:
            served = {slots: _served(heat.heat_TLE, count, slots, curve) for slots in tried}
            yield judged(heat, count, served)


def judged(heat: CellHeat, ranks: int, served: Mapping[int, npt.NDArray[np.float64]]) -> Named:
    """What is named by the first half of ``served``, float64 microseconds of each window by slots, and how it did."""
    before = {slots: us_W[: len(us_W) // 2] for slots, us_W in served.items()}
    after = {slots: us_W[len(us_W) // 2 :] for slots, us_W in served.items()}
    choice = cheapest([_option(slots, us_W) for slots, us_W in before.items()]).setup.slots
    fastest = min(after, key=lambda slots: float(after[slots].mean()))
    slower, error = _more(after[choice], after[fastest])
    return Named(
        heat.name,
        heat.tokens,
        ranks,
        choice,
        fastest,
        slower,
        error,
        choice - _fewest_as_fast(after, choice),
    )


def _served(
    heat_TLE: npt.NDArray[np.int32], ranks: int, slots: int, curve: CostCurve
) -> npt.NDArray[np.float64]:
    """Microseconds of the slowest rank in each window but the first, each decided on the one before it."""
    serving: Solution | None = None
    us = []
    for end in range(WINDOW, len(heat_TLE), WINDOW):
        seen_TLE, coming_TLE = heat_TLE[end - WINDOW : end], heat_TLE[end : end + WINDOW]
        started = {} if serving is None else {"placement": serving.phy2log, "log2phy": serving.log2phy}
        serving = solve(seen_TLE, ranks, slots, **started, cost_curve=curve, threads=1)
        us.append(float(slowest_us(coming_TLE, serving.phy2log, serving.log2phy, curve).mean()))
    return np.array(us)


def _fewest_as_fast(us_of_slots: Mapping[int, npt.NDArray[np.float64]], choice: int) -> int:
    """The fewest slots that are shown to be as fast as those chosen."""
    pairs = ((slots, *_more(us_W, us_of_slots[choice])) for slots, us_W in us_of_slots.items())
    return min(slots for slots, slower, error in pairs if slower + ERRORS * error <= SAME_TIME)


def _more(us_W: npt.NDArray[np.float64], others_W: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Part of the time that windows take more than others do, and its standard error over the windows."""
    difference_W, mean = us_W - others_W, float(others_W.mean())
    error = float(difference_W.std(ddof=1)) / len(difference_W) ** 0.5
    return float(difference_W.mean()) / mean, error / mean


def _option(slots: int, us_W: npt.NDArray[np.float64]) -> Option:
    setup = Setup(slots, Schedule(1, 1))
    return Option("", setup, 0.0, 1.0, 0.0, 0.0, 0.0, moe_ms=float(us_W.mean()) / 1e3)
