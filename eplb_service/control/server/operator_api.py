"""What operators and their tools may ask of a running service."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from eplb_service.control.server.plane import ControlPlane
from eplb_service.control.server.refusal import RefusedError, contradicts
from eplb_service.control.server.status import agent_statuses, deployment_status, layer_statuses, past_plan
from eplb_service.wire.codec import pack
from eplb_service.wire.generated import operator_pb2, operator_pb2_grpc

Self = TypeVar("Self")
Answer = TypeVar("Answer")
Handler = Callable[[Self, Any, Any], Awaitable[Answer]]


def _with_statuses(handler: Handler[Self, Answer]) -> Handler[Self, Answer]:
    """Turn ``RefusedError`` into the status that it carries."""

    @functools.wraps(handler)
    async def answer(self: Self, request: Any, context: Any) -> Answer:
        try:
            return await handler(self, request, context)
        except RefusedError as error:
            await context.abort(error.code, error.message)
            raise

    return answer


class OperatorService(operator_pb2_grpc.OperatorServiceServicer):
    """Serves ``operator.proto``."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    @_with_statuses
    async def ListDeployments(
        self, _request: operator_pb2.ListDeploymentsRequest, _context: Any
    ) -> operator_pb2.ListDeploymentsResponse:
        """All that are known, by name."""
        names = sorted(self._plane.deployments)
        return operator_pb2.ListDeploymentsResponse(deployments=[self._status(name) for name in names])

    @_with_statuses
    async def GetStatus(
        self, request: operator_pb2.GetStatusRequest, _context: Any
    ) -> operator_pb2.GetStatusResponse:
        """One deployment with its layers and agents."""
        deployment = self._plane.find(request.deployment)
        return operator_pb2.GetStatusResponse(
            status=self._status(request.deployment),
            layers=layer_statuses(deployment),
            agents=agent_statuses(deployment),
        )

    @_with_statuses
    async def GetPlacement(
        self, request: operator_pb2.GetPlacementRequest, _context: Any
    ) -> operator_pb2.GetPlacementResponse:
        """What is served now."""
        live = self._plane.find(request.deployment).live
        if live is None:
            raise contradicts(
                f"the placement of {request.deployment!r} is not known: not all ranks have said theirs"
            )
        return operator_pb2.GetPlacementResponse(
            epoch=live.epoch,
            digest=live.digest,
            experts=live.placement.experts,
            physical_to_logical=pack(live.placement.phy2log_LRS),
            log2phy=pack(live.log2phy_RLE),
        )

    @_with_statuses
    async def Pause(self, request: operator_pb2.PauseRequest, _context: Any) -> operator_pb2.PauseResponse:
        """Stop planning."""
        self._plane.set_paused(self._plane.find(request.deployment), True)
        return operator_pb2.PauseResponse()

    @_with_statuses
    async def Resume(self, request: operator_pb2.ResumeRequest, _context: Any) -> operator_pb2.ResumeResponse:
        """Plan again."""
        self._plane.set_paused(self._plane.find(request.deployment), False)
        return operator_pb2.ResumeResponse()

    @_with_statuses
    async def Rebalance(
        self, request: operator_pb2.RebalanceRequest, _context: Any
    ) -> operator_pb2.RebalanceResponse:
        """Decide now; answers once the decision is made and, where there is a plan, offered."""
        decision = await asyncio.shield(self._plane.decider.start(self._plane.find(request.deployment)))
        if decision.result == "failed":
            raise RefusedError(grpc.StatusCode.INTERNAL, decision.words)
        return operator_pb2.RebalanceResponse(
            plan_id=decision.plan_id, layers=decision.layers, moves=decision.moves, outcome=decision.words
        )

    @_with_statuses
    async def GetHistory(
        self, request: operator_pb2.GetHistoryRequest, _context: Any
    ) -> operator_pb2.GetHistoryResponse:
        """Plans of the past, newest first."""
        self._plane.find(request.deployment)
        plans = await self._plane.history(request.deployment, request.limit)
        return operator_pb2.GetHistoryResponse(plans=map(past_plan, plans))

    @_with_statuses
    async def WatchHeat(self, request: operator_pb2.WatchHeatRequest, context: Any) -> None:
        """Heat as it is counted, until the caller has enough."""
        with self._plane.feed.watch(self._plane.find(request.deployment)) as watcher:
            while True:
                await context.write(await watcher.next())

    def _status(self, name: str) -> operator_pb2.DeploymentStatus:
        return deployment_status(self._plane.deployments[name], self._plane.remembered.get(name))
