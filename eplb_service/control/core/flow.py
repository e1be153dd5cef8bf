"""Flow of heat from the ranks: bounds, report sizes, shedding, patience with ranks ahead, and what is watched of it.

All are values that change with what the ranks report and with the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from eplb_service.heat.assembler import StepCounts
from eplb_service.wire.agent import MOST_BLOCKS
from eplb_service.wire.heat import HeatReport

FEWEST_STEPS, MOST_STEPS = 16, 64
"""Steps of one report; the heat rings of layers hold no more."""
_PART_OF_WINDOW = 4
"""A report is no longer than a fourth of the steps that decisions look at, or that are between them."""
_MOST_REPORTS_PER_SECOND = 100.0
_MOST_SECONDS = 5.0
"""Time that the steps of a report may take, where it holds more than the fewest."""
_TOO_MANY_SECONDS = 1.5 * _MOST_SECONDS
"""The size is not changed with every little change of the model's speed."""
_SIZE_LOOK_SECONDS, _SHED_LOOK_SECONDS = 20.0, 10.0
"""From one look to the next: steps are known as reports come, and an idle model's ranks report seldom."""
_STRIKES = 2
"""Looks in a row that must find ranks dropping heat: what they dropped while the service was away counts once."""
_CALM_SECONDS, _MOST_CALM_SECONDS = 60.0, 3600.0
NOWHERE = -1
"""Step that a rank has reported which has not come yet."""
HELD_SECONDS, MOST_HELD_SECONDS = 5.0, 20.0
"""Longest that a rank is held back while slower ones report nothing, and in a row where they hardly get on."""
_MINUTE = 60.0


@dataclass(frozen=True)
class ReportSize:
    """Steps that the ranks of a deployment gather into one report (immutable).

    A report's cost hardly depends on its steps, so that many ranks which step fast send long ones. But the ranks are
    known as they were at their last reports, so that reports are long only where that is no long time.

    With ``by_step`` the ranks report own tokens step by step: such reports grow with their steps, and nothing is won.
    The ranks were at ``step`` when they were last looked at.
    """

    steps: int = FEWEST_STEPS
    fewest: int = FEWEST_STEPS
    most: int = FEWEST_STEPS
    by_step: bool = False
    looked_at: float | None = None
    step: int = 0

    @classmethod
    def up_to(cls, window_steps: int) -> ReportSize:
        """Follow the ranks, where decisions look at so many steps, or are so many apart."""
        most = FEWEST_STEPS
        while most < MOST_STEPS and 2 * most * _PART_OF_WINDOW <= window_steps:
            most *= 2
        return cls(most=most)

    @classmethod
    def fixed(cls, steps: int) -> ReportSize:
        """Stay at ``steps``."""
        return cls(steps, steps, steps)

    def after_report(self, report: HeatReport) -> ReportSize:
        """Note a rank's report."""
        by_step = report.source_counts_TLE is not None
        return self if by_step == self.by_step else replace(self, by_step=by_step)

    def after(self, now: float, ranks: int, step: int) -> ReportSize:
        """Look at the clock, in seconds; the furthest of so many ranks is at ``step``."""
        if self.looked_at is None or step < self.step:
            return replace(self, looked_at=now, step=step)
        seconds = now - self.looked_at
        if seconds < _SIZE_LOOK_SECONDS:
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
    first_decision, interval
        Steps before the first decision where later ones follow what is realised; steps between those by the clock.
    report_size
        Steps of the ranks' reports at first, and their bounds.
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


@dataclass(frozen=True)
class Shedding:
    """Share of their heat that the ranks of a deployment are asked for (immutable).

    All leave out the same steps, so that the others are whole: of 1,024 ranks of which each drops what it cannot send
    in time, and sends nine of ten reports, all have the same one once in 10^47.

    Of ``one_in`` blocks of steps they report one. At the last look each had dropped so many steps, ``strikes`` looks in
    a row found most ranks dropping heat, and since ``calm_since`` none did. After ``calm_seconds`` they are asked for
    more; that doubles where it was too much.
    """

    one_in: int = 1
    looked_at: float | None = None
    dropped: Mapping[int, int] = field(default_factory=dict)
    strikes: int = 0
    calm_since: float = 0.0
    calm_seconds: float = _CALM_SECONDS

    def after(self, now: float, dropped: Mapping[int, int]) -> Shedding:
        """Look at the clock; each connected rank has dropped so many steps by now."""
        if self.looked_at is None:
            return replace(self, looked_at=now, dropped=dict(dropped), calm_since=now)
        if now - self.looked_at < _SHED_LOOK_SECONDS:
            return self
        dropping = sum(steps > self.dropped.get(rank, steps) for rank, steps in dropped.items())
        looked = replace(self, looked_at=now, dropped=dict(dropped))
        if 2 * dropping > len(dropped):
            return looked._struck(now)
        if dropping:
            return replace(looked, strikes=0, calm_since=now)
        return looked._calm(now)

    def _struck(self, now: float) -> Shedding:
        strikes = self.strikes + 1
        if strikes < _STRIKES or self.one_in == MOST_BLOCKS:
            return replace(self, strikes=strikes, calm_since=now)
        # Asked for less before, and for more since: that was too early.
        patience = min(2 * self.calm_seconds, _MOST_CALM_SECONDS)
        return replace(self, one_in=2 * self.one_in, strikes=0, calm_since=now, calm_seconds=patience)

    def _calm(self, now: float) -> Shedding:
        if self.one_in == 1 or now - self.calm_since < self.calm_seconds:
            return replace(self, strikes=0)
        return replace(self, one_in=self.one_in // 2, strikes=0, calm_since=now)


@dataclass(frozen=True)
class Patience:
    """Time for which one rank's reports are held back while they are ahead of slower ranks' (immutable).

    A backlog, say of a service that stood still, may be read rank after rank. The first would be as far ahead as the
    backlog is long, and push out steps that the others are about to report. So it waits for as long as they get on. A
    rank that stays behind, as a dead one does, holds the others up but once.

    The slowest rank had reported step ``behind``, ``None`` where the rank was not ahead by its last report. Patience
    runs out at ``until`` if the slowest gets no further, and ``at_last`` in any case.
    """

    behind: int | None = None
    until: float = 0.0
    at_last: float = 0.0

    def after(self, now: float, behind: int | None) -> Patience:
        """Look at a clock that never jumps, in seconds; ``behind`` as above."""
        if behind is None:
            return Patience()
        if self.behind is None:
            return Patience(behind, now + HELD_SECONDS, now + MOST_HELD_SECONDS)
        if behind > self.behind and self.holds(now):
            return replace(self, behind=behind, until=min(now + HELD_SECONDS, self.at_last))
        return self

    def holds(self, now: float) -> bool:
        """Return whether the report waits for the others."""
        return self.behind is not None and now < self.until


@dataclass(frozen=True)
class Watches:
    """Silent failures of one forming of the ranks, which only time shows (immutable).

    Parameters
    ----------
    silent_seconds
        Time in which the ranks have made steps of which none was completed.
    lost_share
        Share of the steps lost in the last whole minute, 0 to 1.
    undecided_seconds, undecided_steps
        Time without a decision, and steps that the ranks have made meanwhile.
    heat_seen, decision_seen, minute
        Steps completed, the ranks' step, and when heat last came or they rested; steps assembled by the last decision,
        time and the ranks' step then; when the minute at hand began, and steps received and lost by then.
    """

    silent_seconds: float = 0.0
    lost_share: float = 0.0
    undecided_seconds: float = 0.0
    undecided_steps: int = 0
    heat_seen: tuple[int, int, float] = (-1, -1, 0.0)
    decision_seen: tuple[int, float, int] | None = None
    minute: tuple[float, int, int] | None = None

    def after(
        self, now: float, step: int | None, counted: StepCounts | None, decided_at: int | None
    ) -> Watches:
        """Look at the clock, in seconds.

        ``step`` is the furthest of the connected ranks, ``counted`` their steps, ``decided_at`` the steps assembled at
        the last decision; ``None`` where no rank is connected, no heat is expected yet, no decision could be made.
        """
        watches = self._looked_at_decision(now, step or 0, decided_at)
        if counted is None:
            return watches
        if step is not None:
            watches = watches._looked_at_heat(now, step, counted.received)
        return watches._looked_at_losses(now, *counted)

    def _looked_at_heat(self, now: float, step: int, completed: int) -> Watches:
        known, known_step, since = self.heat_seen
        if completed != known or (step == known_step and self.silent_seconds == 0.0):
            return replace(self, silent_seconds=0.0, heat_seen=(completed, step, now))
        silent = self.silent_seconds if step == known_step else now - since
        return replace(self, silent_seconds=silent, heat_seen=(completed, step, since))

    def _looked_at_decision(self, now: float, step: int, decided_at: int | None) -> Watches:
        if decided_at is None:
            return replace(self, undecided_seconds=0.0, undecided_steps=0, decision_seen=None)
        known = self.decision_seen
        if known is None or decided_at != known[0] or step < known[2]:
            known = decided_at, now, step
        return replace(
            self, undecided_seconds=now - known[1], undecided_steps=step - known[2], decision_seen=known
        )

    def _looked_at_losses(self, now: float, received: int, lost: int) -> Watches:
        if self.minute is None:
            return replace(self, minute=(now, received, lost))
        since, received_before, lost_before = self.minute
        if now - since < _MINUTE:
            return self
        steps, lost_since = received - received_before + lost - lost_before, lost - lost_before
        share = lost_since / steps if steps else 0.0
        return replace(self, lost_share=share, minute=(now, received, lost))
