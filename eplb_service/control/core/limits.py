"""Bounds of a deployment."""

from __future__ import annotations

from dataclasses import dataclass, field

from eplb_service.control.core.report_size import ReportSize


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
    interval
        Steps between decisions where they fall by the clock; ``None`` where that is not known.
    report_size
        How many steps the ranks' reports hold at first, and between which bounds.
    """

    window_steps: int
    pending_steps: int
    plan_timeout: float
    first_decision: int | None = None
    interval: int | None = None
    report_size: ReportSize = field(default_factory=ReportSize)

    @property
    def decision_steps(self) -> int:
        """Steps after which something should have come of them: the window, or the interval where that is shorter."""
        return self.window_steps if self.interval is None else min(self.window_steps, self.interval)
