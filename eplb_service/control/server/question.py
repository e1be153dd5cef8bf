"""One decision as the planner's thread computes it: on what, and what comes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.pacing import Pacing
from eplb_service.heat.assembler import RememberedHeat
from eplb_service.heat.window import Window
from eplb_service.placement import Int32
from eplb_service.planner.decide import plan
from eplb_service.planner.outlook import Outlook, gain_over, promise_for
from eplb_service.planner.plan import Plan
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology


@dataclass(frozen=True)
class Question:
    """What a decision is made on.

    Parameters
    ----------
    heat
        What the deployment remembers.
    live, found
        What serves, and what served when the ranks first came together; ``None`` where that is not known.
    topology, settings
        Of the ranks; how to decide.
    pacing
        When the deployment is decided for; ``None`` where that is by the clock.
    """

    heat: RememberedHeat
    live: LivePlacement
    found: LivePlacement | None
    topology: Topology
    settings: PlannerSettings
    pacing: Pacing | None

    @property
    def heat_TLE(self) -> Int32:
        """Heat of the steps that are remembered, int32 ``[T, L, E]``."""
        return self._arrays[0]

    @property
    def source_RLE(self) -> npt.NDArray[np.float64] | None:
        """Heat by source rank, float64 ``[R, L, E]``; ``None`` where it is not known."""
        return self._arrays[1]

    @cached_property
    def _arrays(self) -> tuple[Int32, npt.NDArray[np.float64] | None]:
        return self.heat.arrays()

    def newest(self, steps: int) -> Window:
        """The newest steps that are remembered."""
        return Window(self.heat_TLE[len(self.heat_TLE) - steps :], self.source_RLE)


def answer(question: Question) -> tuple[Plan, Outlook, float]:
    """The plan, what is to be watched of it, and the seconds that it took."""
    started = time.perf_counter()
    live, settings, pacing = question.live, question.settings, question.pacing
    remembered = len(question.heat_TLE)
    steps = remembered if pacing is None else pacing.pace.window_steps(question.heat_TLE)
    serving_steps = None if pacing is None else pacing.pace.serving_steps
    window = question.newest(steps)
    made = plan(window, live.placement, live.log2phy_RLE, question.topology, settings, serving_steps)
    promise = promise_for(window, live.serving, made, settings.split)
    won = None
    if question.found is not None:
        won = gain_over(window, question.found.serving, live.serving, settings.split)
    return made, Outlook(promise, _paid(question), won), time.perf_counter() - started


def _paid(question: Question) -> bool | None:
    """Whether the last decision's change has won anything on the steps since, as far as they are remembered."""
    if question.pacing is None or question.pacing.replaced is None:
        return None
    replaced = question.pacing.replaced
    steps = min(question.pacing.pace.seen - replaced.seen, len(question.heat_TLE))
    split = question.settings.split
    return gain_over(question.newest(steps), replaced.live.serving, question.live.serving, split).paid
