"""Policies by name, when they decide, and on what: flashlb with one idea switched off, and any function of yours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eplb_core.planner.policies import ABLATIONS, NAMES, PolicyError, external_policy, options_of
from eplb_core.planner.request import with_options
from eplb_core.planner.settings import PlannerSettings
from eplb_core.solver.model import SearchOptions


class ReplayError(ValueError):
    """A replay that cannot be run as asked; the message says what was found and what to do."""


@dataclass(frozen=True)
class Setup:
    """Slots on each rank and the schedule of decisions, which all policies of one comparison share.

    Parameters
    ----------
    slots
        S.
    window
        Steps that a decision looks at, at most; ours looks at those alone whose heat is still what it is now.
    interval
        Steps from one decision to the next, of ours at most.
    start
        Step of the first decision; ``None`` for the end of the first window or interval, whichever is shorter.

    Raises ``ReplayError`` unless window and interval are positive and the start is no earlier than that.
    """

    slots: int
    window: int
    interval: int
    start: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "interval"):
            if getattr(self, name) < 1:
                raise ReplayError(f"{name} is {getattr(self, name)}; it must be at least one step")
        earliest = min(self.window, self.interval)
        if self.start is not None and self.start < earliest:
            raise ReplayError(f"start is {self.start}; the first window of {earliest} steps ends later")

    @property
    def first(self) -> int:
        """Step of the first decision."""
        return min(self.window, self.interval) if self.start is None else self.start

    def decisions(self, steps: int) -> range:
        """Steps before which a decision falls; raises ``ReplayError`` where a trace of ``steps`` has none."""
        if steps <= self.first:
            raise ReplayError(
                f"the trace has {steps} steps, a window of {self.first} leaves none to score; "
                "use a shorter window or interval"
            )
        return range(self.first, steps, self.interval)


@dataclass(frozen=True)
class Job:
    """One policy along the trace, or, without a policy, the baseline of a setup.

    Parameters
    ----------
    label
        Name of its own among a replay's jobs.
    setup
        Slots and schedule.
    policy
        Name as the user gave it; empty for the baseline.
    settings, search
        The planner's settings, and the parts of the solver's method, switched as the name says.
    hindsight
        For a baseline: also fit placements on the very steps that they serve.
    cpu_ms
        CPU of a step that decisions on change may take, on average; by default they wait for none.
    """

    label: str
    setup: Setup
    policy: str
    settings: PlannerSettings
    search: SearchOptions = field(default_factory=SearchOptions)
    hindsight: bool = False
    cpu_ms: float = math.inf

    @classmethod
    def of(cls, label: str, setup: Setup, policy: str, settings: PlannerSettings) -> Job:
        """Policy called ``policy``, otherwise as ``settings`` say; raises ``ReplayError`` where there is none."""
        if policy in NAMES:
            return cls(label, setup, policy, *with_options(settings, options_of(policy)))
        job = cls(label, setup, policy, settings)
        if ":" not in policy:
            job.external()
        return job

    @property
    def on_change(self) -> bool:
        """Decides when what is realised departs from what was promised, and not every interval, as others do."""
        return self.policy == "flashlb" or self.policy in ABLATIONS

    def external(self) -> Callable[..., Any] | None:
        """Return the function of an external policy; raises ``ReplayError`` if it cannot be imported."""
        try:
            return external_policy(self.policy) if self.policy else None
        except PolicyError as error:
            raise ReplayError(str(error)) from error
