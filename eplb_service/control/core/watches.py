"""What is watched of a deployment as time passes: heat that stops, is lost or too much, decisions that do not come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from eplb_service.control.core.heat_watchdog import HeatWatchdog, Losses, Undecided
from eplb_service.control.core.membership import Member
from eplb_service.control.core.report_size import ReportSize
from eplb_service.control.core.shedding import Shedding
from eplb_service.heat.assembler import StepCounts
from eplb_service.wire.heat import HeatReport


@dataclass(frozen=True)
class Watches:
    """All that only time shows of one forming of the ranks, and what they are asked for because of it; a value.

    Parameters
    ----------
    heat
        How long no heat has come.
    losses
        How many steps were lost lately.
    undecided
        How long no decision has been made.
    shedding
        How much heat the ranks are asked for.
    report_size
        How many steps they gather into one report.
    """

    heat: HeatWatchdog = field(default_factory=HeatWatchdog)
    losses: Losses = field(default_factory=Losses)
    undecided: Undecided = field(default_factory=Undecided)
    shedding: Shedding = field(default_factory=Shedding)
    report_size: ReportSize = field(default_factory=ReportSize)

    def after_report(self, report: HeatReport) -> Watches:
        """A rank has reported heat."""
        size = self.report_size.after_report(report)
        return self if size is self.report_size else replace(self, report_size=size)

    def after(
        self, now: float, ranks: Sequence[Member], counted: StepCounts | None, decided_at: int, known: bool
    ) -> Watches:
        """Time has passed.

        Parameters
        ----------
        now
            Seconds.
        ranks
            Those that are connected.
        counted
            Steps so far; ``None`` where no heat is expected yet.
        decided_at
            Steps assembled when the last decision was made.
        known
            Whether all ranks have reported what they serve, so that a decision could be made.
        """
        step = max((member.step for member in ranks), default=0)
        heat, losses, report_size = self.heat, self.losses, self.report_size
        if counted is not None and ranks:
            heat = heat.after(now, step, counted.received)
            report_size = report_size.after(now, len(ranks), step)
        if counted is not None:
            losses = losses.after(now, *counted)
        undecided = self.undecided.after(now, step, decided_at, known)
        shedding = self.shedding.after(now, {member.rank: member.dropped_steps for member in ranks})
        return Watches(heat, losses, undecided, shedding, report_size)
