"""Heat for operators who watch it, asked of the ranks accordingly.

Nobody here is waited for. A watcher who is too slow loses reports, and learns how many.
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
from eplb_service.control.server.listening import StatusError
from eplb_service.io.recorder import MAX_SOURCE_COUNTS

MAX_WATCHERS = 32
"""Calls that may watch a service's heat at a time."""
MAX_WATCHERS_PER_HOST = 8
"""Calls from one host that may: who reads too much keeps nobody else from reading."""
MAX_WAITING_BYTES = 16 << 20
"""Heat that waits for one watcher; what comes beyond is dropped and counted."""

_MIN_REPORT = 4
"""Fewest steps of a report while heat has just changed: as many as the first decision after a change uses."""
_SHORTENED = 4
"""Reports are at most so many times as short then: they cost the same, however few steps they hold."""


class _Watcher:
    """Messages that one call from ``host`` has yet to receive."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.dropped_reports = 0
        self._waiting: asyncio.Queue[tuple[operator_pb2.WatchHeatResponse | str, int]] = asyncio.Queue()
        self._bytes = 0

    def put(self, message: operator_pb2.WatchHeatResponse, size: int = 0) -> None:
        """Queue a message that must not be lost; there is one where a layer switches, or all ranks come together."""
        self._waiting.put_nowait((message, size))
        self._bytes += size

    def put_heat(self, rank: int, report: agent_pb2.HeatReport) -> None:
        """Queue one rank's report, unless too much waits already."""
        size = report.ByteSize()
        if self._bytes + size > MAX_WAITING_BYTES:
            self.dropped_reports += 1
            return
        heat = operator_pb2.RankHeat(rank=rank, report=report)
        self.put(operator_pb2.WatchHeatResponse(heat=heat), size)

    def end(self, reason: str) -> None:
        """End the stream once it is empty."""
        self._waiting.put_nowait((reason, 0))

    async def next(self) -> operator_pb2.WatchHeatResponse:
        """Return the next message; raises ``StatusError`` once it is over."""
        message, size = await self._waiting.get()
        if isinstance(message, str):
            raise StatusError(grpc.StatusCode.UNAVAILABLE, message)
        self._bytes -= size
        message.dropped_reports = self.dropped_reports
        return message


class HeatFeed:
    """Hands what deployments serve and count to watchers.

    They hear that a deployment's fastest rank may be ``pending_steps`` ahead of its slowest.
    """

    def __init__(self, pending_steps: int) -> None:
        self._pending_steps = pending_steps
        self._watchers: dict[str, list[_Watcher]] = {}

    @contextlib.contextmanager
    def watch(self, deployment: Deployment, host: str) -> Iterator[_Watcher]:
        """Hand ``deployment``'s heat to a watcher within it; raises ``ExhaustedError`` where too many watch already."""
        hosts = [watcher.host for watchers in self._watchers.values() for watcher in watchers]
        if len(hosts) >= MAX_WATCHERS or hosts.count(host) >= MAX_WATCHERS_PER_HOST:
            raise ExhaustedError(
                f"at most {MAX_WATCHERS} calls may watch this service's heat, {MAX_WATCHERS_PER_HOST} from one host"
            )
        watcher = _Watcher(host)
        if deployment.live is not None:
            watcher.put(self._served(deployment, deployment.live))
        same = self._watchers.setdefault(deployment.name, [])
        same.append(watcher)
        try:
            yield watcher
        finally:
            same.remove(watcher)
            if not same:
                self._watchers.pop(deployment.name, None)

    def placed(self, deployment: Deployment, live: DeployedLayout) -> None:
        """Hand on the placement on which all ranks agree."""
        for watcher in self._watchers.get(deployment.name, ()):
            watcher.put(self._served(deployment, live))

    def switched(self, name: str, event: LayerCommitted) -> None:
        """Hand on a layer of deployment ``name`` that has switched."""
        update, layer = event.update, event.update.layer
        epoch = event.live.layer_epochs[layer]
        for watcher in self._watchers.get(name, ()):
            switched = encode(SwitchedLayer(layer, epoch, update.phy2log_RS, update.log2phy_RE))
            watcher.put(operator_pb2.WatchHeatResponse(switched=switched))

    def counted(self, name: str, rank: int, message: agent_pb2.HeatReport) -> None:
        """Hand on what a rank of deployment ``name`` has sent."""
        for watcher in self._watchers.get(name, ()):
            watcher.put_heat(rank, message)

    def close(self, reason: str) -> None:
        """End the watchers' streams."""
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.end(reason)

    def reporting(self, deployment: Deployment) -> Reporting:
        """Return how much heat its ranks report.

        Own tokens are summed over a report, unless somebody listens to each step. Reports are fewer under load, and
        short while heat has just changed, so that no decision waits for a long report to fill.
        """
        by_step = deployment.name in self._watchers and _is_recordable(deployment)
        ranks = 1 if by_step or deployment.group is None else deployment.group.shape.ranks
        steps = deployment.limits.steps_per_report(ranks)
        summed = not by_step and deployment.limits.heat_phase == "all"
        if deployment.decisions.settling and deployment.shedding.one_in == 1:
            steps = min(steps, max(_MIN_REPORT, steps // _SHORTENED))
        return Reporting(summed, deployment.shedding.one_in, steps)

    def wants(self, deployment: Deployment, report: HeatReport) -> bool:
        """Return whether a report is for listeners: not one that was on its way when the first began to listen."""
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
    """Return whether all ranks' own tokens of one step are few enough for a trace."""
    if deployment.group is None:
        return True
    shape = deployment.group.shape
    return shape.ranks * shape.layers * shape.experts <= MAX_SOURCE_COUNTS
