"""How many steps one report holds: more where many ranks step fast, so that the service hears few reports per second.

What a report costs hardly depends on how many steps it holds. But what the service knows of the ranks is as old as
their last reports, so that reports are long only where that is no long time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from eplb_service.wire.heat import HeatReport

FEWEST_STEPS = 16
MOST_STEPS = 64
"""As many as the heat rings of layers hold."""
_PART_OF_WINDOW = 4
"""A report is no longer than a fourth of the steps that decisions look at, or that are between them."""
_MOST_REPORTS_PER_SECOND = 100.0
_MOST_SECONDS = 5.0
"""That the steps of a report may take, where it holds more than the fewest."""
_TOO_MANY_SECONDS = 1.5 * _MOST_SECONDS
"""The size is not changed with every little change of the model's speed."""
_LOOK_SECONDS = 20.0
"""From one look to the next: steps are known as reports come, so that a rate over less time is a guess."""


@dataclass(frozen=True)
class ReportSize:
    """How many steps the ranks of a deployment gather into one report; a value.

    Parameters
    ----------
    steps
        That many.
    fewest, most
        Its bounds; equal where the number is fixed.
    by_step
        Whether the ranks report own tokens step by step: such reports grow with their steps, and nothing is won.
    looked_at, step
        When the ranks were last looked at, ``None`` before the first look; the step that they were at by then.
    """

    steps: int = FEWEST_STEPS
    fewest: int = FEWEST_STEPS
    most: int = FEWEST_STEPS
    by_step: bool = False
    looked_at: float | None = None
    step: int = 0

    @classmethod
    def up_to(cls, window_steps: int) -> ReportSize:
        """One that follows the ranks, where decisions look at so many steps, or are so many apart."""
        most = FEWEST_STEPS
        while most < MOST_STEPS and 2 * most * _PART_OF_WINDOW <= window_steps:
            most *= 2
        return cls(most=most)

    @classmethod
    def fixed(cls, steps: int) -> ReportSize:
        """One that stays as it is."""
        return cls(steps, steps, steps)

    def after_report(self, report: HeatReport) -> ReportSize:
        """A rank has reported."""
        by_step = report.source_counts_TLE is not None
        return self if by_step == self.by_step else replace(self, by_step=by_step)

    def after(self, now: float, ranks: int, step: int) -> ReportSize:
        """By now, in seconds, the furthest of so many ranks is at ``step``."""
        if self.looked_at is None or step < self.step:
            return replace(self, looked_at=now, step=step)
        seconds = now - self.looked_at
        if seconds < _LOOK_SECONDS:
            return self
        rate = (step - self.step) / seconds
        # A model at rest says nothing of how fast it will step.
        steps = self._fitting(ranks, rate) if rate > 0 else self.steps
        return replace(self, steps=steps, looked_at=now, step=step)

    def _fitting(self, ranks: int, rate: float) -> int:
        """Steps of a report for ranks that make ``rate`` steps per second."""
        steps, most = self.steps, self.fewest if self.by_step else self.most
        while steps > self.fewest and (steps > most or steps / rate > _TOO_MANY_SECONDS):
            steps //= 2
        while (
            2 * steps <= most
            and ranks * rate / steps > _MOST_REPORTS_PER_SECOND
            and 2 * steps / rate <= _MOST_SECONDS
        ):
            steps *= 2
        return steps
