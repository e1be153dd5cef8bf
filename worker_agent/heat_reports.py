"""A rank's heat on its way from the recorder to the outbox: what the service asks for, and whether any comes."""

from __future__ import annotations

from eplb_service.wire.reporting import EVERYTHING, Reporting
from worker_agent.heat import HeatRecorder
from worker_agent.heat_watchdog import HeatWatchdog
from worker_agent.history.record import History
from worker_agent.outbox import Outbox


class HeatReports:
    """Passes the recorder's segments on, at each step boundary.

    Parameters
    ----------
    recorder
        Counts on this rank.
    outbox, history
        Take each segment.
    deadline_calls
        Step boundaries without a valid count of heat after which ``complaint`` says so.

    Attributes
    ----------
    complaint : str or None
        What to report to the service about heat; may be read on any thread.
    """

    def __init__(self, recorder: HeatRecorder, outbox: Outbox, history: History, deadline_calls: int) -> None:
        self.complaint: str | None = None
        self._recorder = recorder
        self._outbox = outbox
        self._history = history
        self._watchdog = HeatWatchdog(deadline_calls)
        self._reporting = EVERYTHING
        self._lost_steps = 0

    def follow(self, report_steps: int, reporting: Reporting) -> None:
        """The service asks for this; heat that waits and is not asked for any more is thrown away."""
        self._recorder.adopt(reporting.report_steps or report_steps, reporting)
        if reporting != self._reporting:
            self._reporting = reporting
            self._outbox.thin(lambda report: self._recorder.wants(report.first_step))

    def publish(self, calls: int) -> None:
        """Pass on what has been counted by the step boundary of this number."""
        for segment in self._recorder.take():
            self._watchdog.seen(calls)
            self._history.heat(segment)
            self._outbox.put(segment)
        self.complaint = self._watchdog.complaint(calls)
        if self._recorder.lost_steps > self._lost_steps:
            self._outbox.count_lost(self._recorder.lost_steps - self._lost_steps)
            self._lost_steps = self._recorder.lost_steps
