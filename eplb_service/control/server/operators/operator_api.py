"""What operators and their tools may ask of a running service."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from eplb_service.control.core.errors import ConflictError
from eplb_service.control.server.access.gate import current_caller
from eplb_service.control.server.grpc_status import StatusError
from eplb_service.control.server.operators.status import (
    agent_statuses,
    balance,
    deployment_status,
    layer_statuses,
    past_plan,
)
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.wire.balance import encode_balance
from eplb_service.wire.deployment_status import (
    DeploymentReport,
    DeploymentStatus,
    PlacementInForce,
    encode_deployment_status,
    encode_placement,
    encode_report,
)
from eplb_service.wire.generated import operator_pb2, operator_pb2_grpc
from eplb_service.wire.past_plan import encode_past_plan


class OperatorService(operator_pb2_grpc.OperatorServiceServicer):
    """Serves ``operator.proto``."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def ListDeployments(
        self, _request: operator_pb2.ListDeploymentsRequest, _context: Any
    ) -> operator_pb2.ListDeploymentsResponse:
        """All that are known, by name."""
        names = filter(current_caller().credential.reaches, sorted(self._plane.deployments))
        return operator_pb2.ListDeploymentsResponse(
            deployments=[encode_deployment_status(self._status(name)) for name in names]
        )

    async def GetStatus(
        self, request: operator_pb2.GetStatusRequest, _context: Any
    ) -> operator_pb2.GetStatusResponse:
        """One deployment with its layers and agents."""
        deployment = self._plane.find(request.deployment)
        layers, agents = layer_statuses(deployment), agent_statuses(deployment, self._plane.observer)
        return encode_report(DeploymentReport(self._status(request.deployment), layers, agents))

    async def GetPlacement(
        self, request: operator_pb2.GetPlacementRequest, _context: Any
    ) -> operator_pb2.GetPlacementResponse:
        """What is served now."""
        live = self._plane.find(request.deployment).live
        if live is None:
            raise ConflictError(
                f"the placement of {request.deployment!r} is not known: not all ranks have reported theirs"
            )
        return encode_placement(PlacementInForce(live.epoch, live.digest, live.placement, live.log2phy_RLE))

    async def Pause(self, request: operator_pb2.PauseRequest, _context: Any) -> operator_pb2.PauseResponse:
        """Stop planning."""
        self._plane.orders.set_paused(self._plane.find(request.deployment), True)
        return operator_pb2.PauseResponse()

    async def Resume(self, request: operator_pb2.ResumeRequest, _context: Any) -> operator_pb2.ResumeResponse:
        """Plan again."""
        self._plane.orders.set_paused(self._plane.find(request.deployment), False)
        return operator_pb2.ResumeResponse()

    async def Lead(self, request: operator_pb2.LeadRequest, _context: Any) -> operator_pb2.LeadResponse:
        """Have the ranks follow this service."""
        deployment = self._plane.find(request.deployment)
        raised = await self._plane.orders.lead(deployment)
        return operator_pb2.LeadResponse(leader_term=deployment.leader_term, raised=raised)

    async def Forget(self, request: operator_pb2.ForgetRequest, _context: Any) -> operator_pb2.ForgetResponse:
        """Remove a deployment that is gone."""
        self._plane.forget_departed(self._plane.find(request.deployment))
        return operator_pb2.ForgetResponse()

    async def Rebalance(
        self, request: operator_pb2.RebalanceRequest, _context: Any
    ) -> operator_pb2.RebalanceResponse:
        """Decide now; answers once the decision is made and, where there is a plan, offered."""
        outcome = await asyncio.shield(self._plane.decider.start(self._plane.find(request.deployment)))
        if outcome.result == "failed":
            raise StatusError(grpc.StatusCode.INTERNAL, outcome.message)
        return operator_pb2.RebalanceResponse(
            plan_id=outcome.plan_id, layers=outcome.layers, moves=outcome.moves, outcome=outcome.message
        )

    async def GetHistory(
        self, request: operator_pb2.GetHistoryRequest, _context: Any
    ) -> operator_pb2.GetHistoryResponse:
        """Plans of the past, newest first."""
        self._plane.find(request.deployment)
        plans = await self._plane.orders.history(request.deployment, request.limit)
        return operator_pb2.GetHistoryResponse(plans=[encode_past_plan(past_plan(plan)) for plan in plans])

    async def GetBalance(
        self, request: operator_pb2.GetBalanceRequest, _context: Any
    ) -> operator_pb2.GetBalanceResponse:
        """Balance over time, loads of the ranks, and the last decisions."""
        deployment = self._plane.find(request.deployment)
        return encode_balance(balance(deployment, self._plane.observer.of(deployment.name)))

    async def WatchHeat(self, request: operator_pb2.WatchHeatRequest, context: Any) -> None:
        """Heat as it is counted, until the caller has enough."""
        host, deployment = current_caller().host, self._plane.find(request.deployment)
        with self._plane.feed.watch(deployment, host) as watcher:
            self._plane.reporting.follow_up(deployment)
            while True:
                await context.write(await watcher.next())

    def _status(self, name: str) -> DeploymentStatus:
        return deployment_status(self._plane.deployments[name], self._plane.remembered.get(name))
