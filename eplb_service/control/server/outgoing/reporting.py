"""What the ranks of each deployment are asked to report."""

from __future__ import annotations

from eplb_service.control.core.deployment_state import DeploymentState
from eplb_service.control.server.outgoing.heat_feed import HeatFeed
from eplb_service.control.server.outgoing.streams import Streams
from eplb_service.io.recorder import MOST_SOURCE_COUNTS
from eplb_service.wire.heat import HeatReport
from eplb_service.wire.reporting import Reporting


class ReportingPolicy:
    """Asks for own tokens summed over each report, unless somebody records them, and for less where less can be taken.

    How many steps a report holds follows the ranks' number and speed, unless it is set.

    Parameters
    ----------
    streams
        To the ranks.
    feed
        Who hears of heat.
    """

    def __init__(self, streams: Streams, feed: HeatFeed) -> None:
        self._streams = streams
        self._feed = feed
        self._asked: dict[str, Reporting] = {}

    def of(self, deployment: DeploymentState) -> Reporting:
        """What its ranks are to report."""
        by_step = _is_recordable(deployment) and self._feed.is_heard(deployment.name)
        watches = deployment.watches
        # Step by step own tokens are many: at once, not only when the next look at the ranks finds it so.
        steps = watches.report_size.fewest if by_step else watches.report_size.steps
        return Reporting(source_sums=not by_step, one_in=watches.shedding.one_in, report_steps=steps)

    def welcome(self, deployment: DeploymentState) -> Reporting:
        """What a rank that is taken in is to report: what the others were asked for last."""
        return self._asked.setdefault(deployment.name, self.of(deployment))

    def is_asked_for(self, deployment: DeploymentState, report: HeatReport) -> bool:
        """Whether those who hear of heat want the report: not one that was on its way when they began to listen."""
        return report.source_sums_LE is None or self.of(deployment).source_sums

    def follow_up(self, deployment: DeploymentState) -> None:
        """Ask the ranks that are there, where it is something else than before."""
        reporting = self.of(deployment)
        if self._asked.setdefault(deployment.name, reporting) != reporting:
            self._asked[deployment.name] = reporting
            self._streams.ask(deployment.name, reporting)

    def forget(self, name: str) -> None:
        """The deployment is known no more."""
        self._asked.pop(name, None)


def _is_recordable(deployment: DeploymentState) -> bool:
    """Whether all ranks' own tokens of one step are few enough for a trace."""
    if deployment.group is None:
        return True
    shape = deployment.group.shape
    return shape.ranks * shape.layers * shape.experts <= MOST_SOURCE_COUNTS
