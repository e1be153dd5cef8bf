"""Recommended slot count for each heat and rank count, checked on later windows.

As in ``eplb advise``, a placement is decided in every window for each number of slots, starting from the previous
placement. The first half of the measured windows determines the recommendation, and the second half checks it.
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
"""Relative excess of time on later windows from which a recommendation counts as wrong."""
WINDOW = 128
"""Steps per window."""
NAMING = 6
"""Windows that determine the recommendation."""
JUDGING = 6
"""Windows that check the recommendation."""
STEPS = WINDOW * (1 + NAMING + JUDGING)


@dataclass(frozen=True)
class Named:
    """Slot count that ``eplb advise`` would recommend, and the times of all slot counts on later windows.

    Parameters
    ----------
    heat
        Name of the heat.
    tokens
        Tokens per step.
    ranks
        Number of ranks.
    slots
        Recommended slots per rank.
    later_us
        Microseconds of the slowest rank in each later window, by slots per rank.
    seed
        Seed of the heat.
    """

    heat: str
    tokens: int
    ranks: int
    slots: int
    later_us: Mapping[int, tuple[float, ...]]
    seed: int = 0

    @property
    def fastest(self) -> int:
        """Slots per rank with the shortest time on later windows."""
        return min(self.later_us, key=lambda slots: sum(self.later_us[slots]))

    @property
    def slower(self) -> float:
        """Relative excess of the recommended slots' time over the fastest."""
        return self._excess(self.slots, self.fastest)[0]

    @property
    def error(self) -> float:
        """Standard error of ``slower`` over the windows."""
        return self._excess(self.slots, self.fastest)[1]

    def is_right(self, comparisons: int) -> bool:
        """Return False if the recommended slots are significantly slower than the fastest, or more than necessary.

        There are more slots than necessary if fewer are significantly no slower, within the tolerance of
        ``eplb advise``.

        Parameters
        ----------
        comparisons
            Number of recommendations in the run, for the correction of the significance level.
        """
        errors = errors_allowed(len(self.later_us[self.slots]), comparisons)
        if self.slower > NEAR and self.slower > errors * self.error:
            return False
        pairs = [self._excess(slots, self.slots) for slots in self.later_us if slots < self.slots]
        return not any(slower + errors * error <= SAME_TIME for slower, error in pairs)

    def _excess(self, slots: int, baseline: int) -> tuple[float, float]:
        """Return the relative excess of one number of slots' time over another's, and its standard error."""
        baseline_W = np.array(self.later_us[baseline])
        difference_W = np.array(self.later_us[slots]) - baseline_W
        mean = float(baseline_W.mean())
        error = float(difference_W.std(ddof=1)) / len(difference_W) ** 0.5
        return float(difference_W.mean()) / mean, error / mean


def named(heat: CellHeat, ranks: Sequence[int], curve: CostCurve) -> Iterator[Named]:
    """Yield the recommendation for each rank count up to the number of experts; ``heat`` has ``STEPS`` steps."""
    experts = heat.heat_TLE.shape[2]
    for count in ranks:
        fewest = -(-experts // count)
        tried = [fewest + more for more in MORE_SLOTS if fewest + more <= experts and count <= experts]
        if tried:
            served = {slots: _served(heat.heat_TLE, count, slots, curve) for slots in tried}
            yield judged(heat, count, served)


def judged(heat: CellHeat, ranks: int, served: Mapping[int, npt.NDArray[np.float64]]) -> Named:
    """Determine the recommendation from the first half of the windows.

    Parameters
    ----------
    heat
        Heat that was measured.
    ranks
        Number of ranks.
    served
        float64 microseconds of the slowest rank in each window, by slots per rank.
    """
    before = {slots: us_W[: len(us_W) // 2] for slots, us_W in served.items()}
    after = {slots: tuple(us_W[len(us_W) // 2 :].tolist()) for slots, us_W in served.items()}
    choice = cheapest([_option(slots, us_W) for slots, us_W in before.items()]).setup.slots
    return Named(heat.name, heat.tokens, ranks, choice, after, heat.seed)


def _served(
    heat_TLE: npt.NDArray[np.int32], ranks: int, slots: int, curve: CostCurve
) -> npt.NDArray[np.float64]:
    """Return the slowest rank's microseconds in each window except the first; each is placed on the previous one."""
    solution: Solution | None = None
    us = []
    for end in range(WINDOW, len(heat_TLE), WINDOW):
        seen_TLE = heat_TLE[end - WINDOW : end]
        coming_TLE = heat_TLE[end : end + WINDOW]
        start = {} if solution is None else {"placement": solution.phy2log, "log2phy": solution.log2phy}
        solution = solve(seen_TLE, ranks, slots, **start, cost_curve=curve, threads=1)
        us.append(float(slowest_us(coming_TLE, solution.phy2log, solution.log2phy, curve).mean()))
    return np.array(us)


def _option(slots: int, us_W: npt.NDArray[np.float64]) -> Option:
    setup = Setup(slots, 1, 1)
    return Option("", setup, 0.0, 1.0, 0.0, 0.0, moe_ms=float(us_W.mean()) / 1e3)
