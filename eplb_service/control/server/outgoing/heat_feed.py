"""Heat for operators who watch a deployment, and the kind of reports that the ranks must send.

Sending never waits for a watcher. A watcher that reads too slowly loses reports and learns how many.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc

from eplb_core.wire.agent import Reporting
from eplb_core.wire.codec import encode
from eplb_core.wire.generated import agent_pb2, operator_pb2
from eplb_core.wire.heat import HeatReport
from eplb_core.wire.operator import ServedModel, SwitchedLayer, encode_served
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.deployment import Deployment, LayerCommitted
from eplb_service.control.core.errors import ExhaustedError
from eplb_service.control.server.listening import CallError
from eplb_service.io.recorder import MAX_SOURCE_COUNTS

MAX_WATCHERS = 32
"""Maximum number of heat-watching calls."""
MAX_WATCHERS_PER_HOST = 8
"""Maximum number of heat-watching calls per host, so that one host cannot use up all ``MAX_WATCHERS``."""
MAX_WAITING_BYTES = 16 << 20
"""Maximum number of bytes of heat queued for one watcher. Further reports are dropped and counted."""

_MIN_REPORT_STEPS = 4
"""Minimum number of steps per report after a change in heat. The first decision after the change uses this many
steps."""
_MAX_SHORTENING = 4
"""Maximum factor by which reports are shortened after a change in heat. It is limited, because a short report costs
nearly as much as a long one."""


class _Watcher:
    """Message queue of one heat-watching call from ``host``."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.dropped_reports = 0
        self._waiting: asyncio.Queue[tuple[operator_pb2.WatchHeatResponse | str, int]] = asyncio.Queue()
        self._bytes = 0

    def put(self, message: operator_pb2.WatchHeatResponse, size: int = 0) -> None:
        """Enqueue a message that must not be lost: the layout when it becomes known, or a switched layer."""
        self._waiting.put_nowait((message, size))
        self._bytes += size

    def put_heat(self, rank: int, report: agent_pb2.HeatReport) -> None:
        """Enqueue a rank's report, or drop it if the queue is full."""
        size = report.ByteSize()
        if self._bytes + size > MAX_WAITING_BYTES:
            self.dropped_reports += 1
            return
        heat = operator_pb2.RankHeat(rank=rank, report=report)
        self.put(operator_pb2.WatchHeatResponse(heat=heat), size)

    def end(self, reason: str) -> None:
        """End the stream with ``reason`` once the queued messages have been sent."""
        self._waiting.put_nowait((reason, 0))

    async def next(self) -> operator_pb2.WatchHeatResponse:
        """Return the next message; raises ``CallError`` at the end of the stream."""
        message, size = await self._waiting.get()
        if isinstance(message, str):
            raise CallError(grpc.StatusCode.UNAVAILABLE, message)
        self._bytes -= size
        message.dropped_reports = self.dropped_reports
        return message


class HeatFeed:
    """Sends the layouts and the heat of deployments to watchers.

    Parameters
    ----------
    pending_steps
        Maximum number of steps by which a deployment's fastest rank may be ahead of its slowest. Watchers need this
        number.
    """

    def __init__(self, pending_steps: int) -> None:
        self._pending_steps = pending_steps
        self._watchers: dict[str, list[_Watcher]] = {}

    @contextlib.contextmanager
    def watch(self, deployment: Deployment, host: str) -> Iterator[_Watcher]:
        """Watch a deployment until the context exits; raises ``ExhaustedError`` if there are too many watchers.

        Parameters
        ----------
        deployment
            Deployment to watch.
        host
            Host of the caller.
        """
        hosts = [watcher.host for watchers in self._watchers.values() for watcher in watchers]
        if len(hosts) >= MAX_WATCHERS or hosts.count(host) >= MAX_WATCHERS_PER_HOST:
            raise ExhaustedError(
                f"at most {MAX_WATCHERS} calls may watch heat, and at most {MAX_WATCHERS_PER_HOST} from one host; "
                "close some of them"
            )
        watcher = _Watcher(host)
        if deployment.live is not None:
            watcher.put(self._served(deployment, deployment.live))
        watchers = self._watchers.setdefault(deployment.name, [])
        watchers.append(watcher)
        try:
            yield watcher
        finally:
            watchers.remove(watcher)
            if not watchers:
                self._watchers.pop(deployment.name, None)

    def placed(self, deployment: Deployment, live: DeployedLayout) -> None:
        """Send watchers the layout on which all ranks agree."""
        for watcher in self._watchers.get(deployment.name, ()):
            watcher.put(self._served(deployment, live))

    def switched(self, name: str, event: LayerCommitted) -> None:
        """Send watchers a switched layer of deployment ``name``."""
        update = event.update
        layer = update.layer
        epoch = event.live.layer_epochs[layer]
        for watcher in self._watchers.get(name, ()):
            switched = encode(SwitchedLayer(layer, epoch, update.phy2log_RS, update.log2phy_RE))
            watcher.put(operator_pb2.WatchHeatResponse(switched=switched))

    def counted(self, name: str, rank: int, message: agent_pb2.HeatReport) -> None:
        """Send watchers a report from a rank of deployment ``name``."""
        for watcher in self._watchers.get(name, ()):
            watcher.put_heat(rank, message)

    def close(self, reason: str) -> None:
        """End the streams of all watchers with ``reason``."""
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.end(reason)

    def reporting(self, deployment: Deployment) -> Reporting:
        """Return the kind of reports that the ranks of a deployment must send.

        Source heat is summed over a report unless a watcher needs it for each step. Under load, ranks send fewer
        reports. After a change in heat, reports are short, so that decisions do not have to wait for long ones.
        """
        by_step = deployment.name in self._watchers and _is_recordable(deployment)
        ranks = 1 if by_step or deployment.group is None else deployment.group.shape.ranks
        steps = deployment.limits.steps_per_report(ranks)
        summed = not by_step and deployment.limits.heat_phase == "all"
        if deployment.session.settling and deployment.shedding.one_in == 1:
            steps = min(steps, max(_MIN_REPORT_STEPS, steps // _MAX_SHORTENING))
        return Reporting(summed, deployment.shedding.one_in, steps)

    def wants(self, deployment: Deployment, report: HeatReport) -> bool:
        """Return True if a report has the detail that watchers need; reports sent before they connected may lack it."""
        return report.source_sums_LE is None or self.reporting(deployment).source_sums

    def _served(self, deployment: Deployment, live: DeployedLayout) -> operator_pb2.WatchHeatResponse:
        assert deployment.group is not None
        group = deployment.group
        served = ServedModel(
            group.shape,
            tuple(group.topology.nodes_R.tolist()),
            live.placement,
            live.layer_epochs,
            self._pending_steps,
            live.log2phy_RLE,
        )
        return operator_pb2.WatchHeatResponse(served=encode_served(served))


def _is_recordable(deployment: Deployment) -> bool:
    """Return True if the source heat of one step is small enough for a trace."""
    if deployment.group is None:
        return True
    shape = deployment.group.shape
    return shape.ranks * shape.layers * shape.experts <= MAX_SOURCE_COUNTS
