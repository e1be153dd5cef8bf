"""Bounds of a deployment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a deployment.

    Parameters
    ----------
    window_steps
        Steps that a decision looks at at most.
    pending_steps
        Steps that the fastest rank's reports may be ahead of the slowest's; also the most steps of one report.
    plan_timeout
        Seconds of silence that end a plan.
    first_decision
        Steps before the first decision where later ones follow what is realised; ``None`` where all fall by the clock.
    """

    window_steps: int
    pending_steps: int
    plan_timeout: float
    first_decision: int | None = None
