"""Which number of slots is named for each heat and expert-parallel size, and whether it was right afterwards.

As `eplb advise` does: each number of slots is decided for in every window, from what the one before it left. The first
half of the windows served names a number; the second half says whether it was right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.time.cells import MORE_SLOTS, errors_allowed, slowest_us
from benchmarks.time.heats import CellHeat
from eplb_core.cost.curve import CostCurve
from eplb_service.offline import Solution, solve
from eplb_service.replay.advise import SAME_TIME, Option, cheapest
from eplb_service.replay.policy import Setup

NEAR = 0.01
"""Part of the time by which a number of slots must be slower afterwards to have been wrong."""
WINDOW, NAMING, JUDGING = 128, 6, 6
"""Steps of a window, and windows that name a number of slots and that judge it, after one to place by."""
STEPS = WINDOW * (1 + NAMING + JUDGING)


@dataclass(frozen=True)
class Named:
    """The slots named, by `eplb advise`'s rule on the first windows served, and what all took in the later ones.

    Parameters
    ----------
    heat, tokens, ranks
        Where.
    slots
        The number named.
    later_us
        Of each number of slots, microseconds of the slowest rank in each of the later windows.
    seed
        Of the heat.
    """

    heat: str
    tokens: int
    ranks: int
    slots: int
    later_us: Mapping[int, tuple[float, ...]]
    seed: int = 0

    @property
    def fastest(self) -> int:
        """The slots that were fastest later."""
        return min(self.later_us, key=lambda slots: sum(self.later_us[slots]))

    @property
    def slower(self) -> float:
        """Part of the time that the slots named took more than the fastest."""
        return self._more(self.slots, self.fastest)[0]

    @property
    def error(self) -> float:
        """Standard error of that, over the windows."""
        return self._more(self.slots, self.fastest)[1]

    def is_right(self, comparisons: int) -> bool:
        """Whether, as one of so many, it is shown neither to be slower than the fastest nor to have slots for nothing.

        Slots are for nothing where fewer are shown to be as fast, up to what advice takes for the same time.
        """
        errors = errors_allowed(len(self.later_us[self.slots]), comparisons)
        if self.slower > NEAR and self.slower > errors * self.error:
            return False
        pairs = [self._more(slots, self.slots) for slots in self.later_us if slots < self.slots]
        return not any(slower + errors * error <= SAME_TIME for slower, error in pairs)

    def _more(self, slots: int, others: int) -> tuple[float, float]:
        """Part of the time that some slots took more than others, and its standard error over the windows."""
        others_W = np.array(self.later_us[others])
        difference_W, mean = np.array(self.later_us[slots]) - others_W, float(others_W.mean())
        error = float(difference_W.std(ddof=1)) / len(difference_W) ** 0.5
        return float(difference_W.mean()) / mean, error / mean


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
    after = {slots: tuple(us_W[len(us_W) // 2 :].tolist()) for slots, us_W in served.items()}
    choice = cheapest([_option(slots, us_W) for slots, us_W in before.items()]).setup.slots
    return Named(heat.name, heat.tokens, ranks, choice, after, heat.seed)


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


def _option(slots: int, us_W: npt.NDArray[np.float64]) -> Option:
    setup = Setup(slots, 1, 1)
    return Option("", setup, 0.0, 1.0, 0.0, 0.0, moe_ms=float(us_W.mean()) / 1e3)
