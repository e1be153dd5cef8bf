"""Policies in a replay, and their decision schedules."""

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
    """Raised if a replay cannot be run. The error message states the reason and the remedy."""


@dataclass(frozen=True)
class Setup:
    """Slots per rank and decision schedule, shared by all policies in a comparison.

    Parameters
    ----------
    slots
        Slots per rank.
    window
        Maximum number of steps that a decision uses. flashlb and its ablations use only the steps since heat last
        changed.
    interval
        Number of steps between decisions, or the maximum number for flashlb and its ablations.
    start
        Step of the first decision; ``None`` to use the end of the first window or interval, whichever is shorter.

    Raises
    ------
    ReplayError
        If window or interval is not positive, or if ``start`` is too early.

    Examples
    --------
    >>> setup = Setup(slots=5, window=40, interval=30)
    >>> setup.first, list(setup.decisions(steps=100))
    (30, [30, 60, 90])
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
            raise ReplayError(
                f"start is {self.start}; it must be at least {earliest}, the end of the first window"
            )

    @property
    def first(self) -> int:
        """Step of the first decision."""
        return min(self.window, self.interval) if self.start is None else self.start

    def decisions(self, steps: int) -> range:
        """Return the steps before which decisions are due, for a trace of ``steps`` steps.

        Raises ``ReplayError`` if the trace is too short for any decision.
        """
        if steps <= self.first:
            raise ReplayError(
                f"the trace has {steps} steps, so a first window of {self.first} leaves no step to score; "
                "use a shorter window or interval"
            )
        return range(self.first, steps, self.interval)


@dataclass(frozen=True)
class Job:
    """One policy, or the baseline of a setup, to be run over a trace.

    Parameters
    ----------
    label
        Name of the job, unique within a replay.
    setup
        Slots and schedule.
    policy
        Name of the policy as the user gave it; empty for the baseline.
    settings
        Planner settings, including any changes made by an ablation.
    search
        Search options, in which an ablation disables components of the method.
    hindsight
        True if a baseline also scores placements that are fitted to the very steps that they serve.
    cpu_ms
        Mean CPU budget per step, in milliseconds, for a policy that decides when heat changes. Decisions are postponed
        to stay within the budget, which is unlimited by default.
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
        """Return a job for the policy with this name. Raises ``ReplayError`` if the name is unknown."""
        if policy in NAMES:
            return cls(label, setup, policy, *with_options(settings, options_of(policy)))
        job = cls(label, setup, policy, settings)
        if ":" not in policy:
            job.external()
        return job

    @property
    def on_change(self) -> bool:
        """True if the policy decides when heat changes, False if it decides at every interval."""
        return self.policy == "flashlb" or self.policy in ABLATIONS

    def external(self) -> Callable[..., Any] | None:
        """Return the function of an external policy, or ``None`` for built-in policies and the baseline.

        Raises ``ReplayError`` if the policy cannot be imported.
        """
        try:
            return external_policy(self.policy) if self.policy else None
        except PolicyError as error:
            raise ReplayError(str(error)) from error
