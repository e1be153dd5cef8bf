"""Implementation of ``operator.proto``, the interface for operators and their tools."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Any

import grpc
import numpy as np

from eplb_core.placement import Float64
from eplb_core.wire.codec import encode, pack
from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc
from eplb_core.wire.operator import PastPlan, encode_placement
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.health import (
    RECENT_STEPS,
    mean_loads,
    mean_measured_par,
    measured_par,
    problems,
    rank_loads,
    recent_step_count,
    redundancy,
)
from eplb_service.control.server.access.gate import CALLER
from eplb_service.control.server.listening import CallError
from eplb_service.control.server.observer import Observer, shown_price
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.control.server.store import StoredDeployment


class OperatorService(operator_pb2_grpc.OperatorServiceServicer):
    """The gRPC service of ``operator.proto``, backed by the control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def ListDeployments(
        self, _request: operator_pb2.ListDeploymentsRequest, _context: Any
    ) -> operator_pb2.ListDeploymentsResponse:
        """List all deployments that the caller may access."""
        names = filter(CALLER.get().credential.reaches, sorted(self._plane.deployments))
        return operator_pb2.ListDeploymentsResponse(deployments=map(self._status, names))

    async def GetStatus(
        self, request: operator_pb2.GetStatusRequest, _context: Any
    ) -> operator_pb2.GetStatusResponse:
        """Return the status of one deployment, its layers and its agents."""
        deployment = self._plane.find(request.deployment)
        return operator_pb2.GetStatusResponse(
            status=self._status(request.deployment),
            layers=_layers(deployment),
            agents=_agents(deployment, self._plane.observer),
        )

    async def GetPlacement(
        self, request: operator_pb2.GetPlacementRequest, _context: Any
    ) -> operator_pb2.GetPlacementResponse:
        """Return the current placement and tables; raises ``ConflictError`` until all ranks have reported theirs."""
        live = self._plane.find(request.deployment).live
        if live is None:
            raise ConflictError(
                f"the placement of {request.deployment!r} is unknown, because not all ranks have reported theirs; "
                "retry once all ranks are connected"
            )
        return encode_placement(live.epoch, live.digest, live.placement, live.log2phy_RLE)

    async def Pause(self, request: operator_pb2.PauseRequest, _context: Any) -> operator_pb2.PauseResponse:
        """Pause planning for a deployment."""
        self._plane.set_paused(self._plane.find(request.deployment), True)
        await self._plane.store(f"planning for {request.deployment} is paused")
        return operator_pb2.PauseResponse()

    async def Resume(self, request: operator_pb2.ResumeRequest, _context: Any) -> operator_pb2.ResumeResponse:
        """Resume planning for a deployment."""
        self._plane.set_paused(self._plane.find(request.deployment), False)
        await self._plane.store(f"planning for {request.deployment} is resumed")
        return operator_pb2.ResumeResponse()

    async def Lead(self, request: operator_pb2.LeadRequest, _context: Any) -> operator_pb2.LeadResponse:
        """Raise the leader term above all terms that the ranks have followed, so that they follow this service."""
        deployment = self._plane.find(request.deployment)
        raised = self._plane.lead(deployment)
        if raised:
            await self._plane.store(f"the ranks of {request.deployment} follow this service")
        return operator_pb2.LeadResponse(leader_term=deployment.leader_term, raised=raised)

    async def Forget(self, request: operator_pb2.ForgetRequest, _context: Any) -> operator_pb2.ForgetResponse:
        """Remove a deployment whose ranks are gone."""
        self._plane.forget_departed(self._plane.find(request.deployment))
        await self._plane.store(f"{request.deployment} is forgotten")
        return operator_pb2.ForgetResponse()

    async def Rebalance(
        self, request: operator_pb2.RebalanceRequest, _context: Any
    ) -> operator_pb2.RebalanceResponse:
        """Make a decision now. The call returns once the decision is made and its plan, if any, is offered."""
        outcome = await asyncio.shield(self._plane.decider.start(self._plane.find(request.deployment)))
        if outcome.result == "failed":
            raise CallError(grpc.StatusCode.INTERNAL, outcome.message)
        if outcome.plan_id:
            await self._plane.store(outcome.message)
        return operator_pb2.RebalanceResponse(
            plan_id=outcome.plan_id, layers=outcome.layers, moves=outcome.moves, outcome=outcome.message
        )

    async def GetHistory(
        self, request: operator_pb2.GetHistoryRequest, _context: Any
    ) -> operator_pb2.GetHistoryResponse:
        """List past plans, newest first."""
        self._plane.find(request.deployment)
        plans = await self._plane.history(request.deployment, request.limit)
        return operator_pb2.GetHistoryResponse(plans=map(encode, plans))

    async def GetBalance(
        self, request: operator_pb2.GetBalanceRequest, _context: Any
    ) -> operator_pb2.GetBalanceResponse:
        """Return the balance over time, the rank loads and the last decisions."""
        deployment = self._plane.find(request.deployment)
        observed = self._plane.observer.of(deployment.name)
        steps, loads_LR = rank_loads(deployment, RECENT_STEPS)
        return operator_pb2.GetBalanceResponse(
            points=map(encode, observed.series.points),
            rank_loads=pack(np.rint(1000 * loads_LR).astype(np.int32)) if steps else None,
            load_steps=steps,
            last_decision=_with_outcome(observed.last_decision, deployment),
            last_plan=_with_outcome(observed.last_plan, deployment),
        )

    async def WatchHeat(self, request: operator_pb2.WatchHeatRequest, context: Any) -> None:
        """Stream heat reports as they arrive, until the caller cancels the call."""
        host = CALLER.get().host
        deployment = self._plane.find(request.deployment)
        with self._plane.feed.watch(deployment, host) as watcher:
            self._plane.follow_up(deployment)
            while True:
                await context.write(await watcher.next())

    def _status(self, name: str) -> operator_pb2.DeploymentStatus:
        """Return the status of a deployment. Values that the agents have not reported yet are read from the store."""
        deployment = self._plane.deployments[name]
        remembered = self._plane.remembered.get(name, StoredDeployment(name))
        is_connected = bool(deployment.connected)
        worth = deployment.session.worth if is_connected else None
        price = shown_price(deployment.session.move_price) if is_connected else None
        layout = deployment.live or remembered
        shape = deployment.group.shape if deployment.group else remembered
        par_L = measured_par(deployment)
        redundant_slots, redundant_bytes = redundancy(deployment)
        return operator_pb2.DeploymentStatus(
            deployment=name,
            layers=shape.layers,
            experts=shape.experts,
            ranks=shape.ranks,
            slots=shape.slots,
            agents_connected=len(deployment.connected),
            epoch=layout.epoch,
            digest=layout.digest,
            par=mean_measured_par(par_L),
            par_steps=recent_step_count(deployment),
            idle_seconds=self._plane.observer.idle_seconds(name) if is_connected else None,
            redundant_slots=redundant_slots,
            redundant_bytes_per_rank=redundant_bytes,
            **_hottest(deployment, par_L),
            window_steps=deployment.heat.steps if deployment.heat else 0,
            paused=deployment.paused,
            observed=deployment.observed,
            plan_id=deployment.plan.plan_id if deployment.plan else 0,
            last_decision=deployment.last_decision,
            problems=problems(deployment),
            leader_term=deployment.leader_term,
            worth=encode(worth) if worth else None,
            move_price=encode(price) if price else None,
            forecast=_forecast(deployment) if is_connected else None,
            **asdict(deployment.totals),
        )


def _hottest(deployment: Deployment, par_L: Float64) -> dict[str, Any]:
    """Return the status fields for the rank with the highest mean load and for the layer with the highest PAR.

    Both are measured over the newest steps and omitted if nothing was measured.
    """
    fields: dict[str, Any] = {}
    if par_L.any():
        fields["hottest_layer"] = int(par_L.argmax())
        fields["hottest_layer_par"] = float(par_L.max())
    loads_R = mean_loads(rank_loads(deployment, RECENT_STEPS)[1])
    if loads_R.size:
        fields["hottest_rank"] = int(loads_R.argmax())
        fields["hottest_rank_load"] = float(loads_R.max())
    return fields


def _forecast(deployment: Deployment) -> operator_pb2.Forecast | None:
    """Return the last decision's forecast of the gain until the next decision; ``None`` if there is none."""
    gain = deployment.session.forecasts.gain
    if gain is None:
        return None
    return operator_pb2.Forecast(gain=gain.mean, gain_low=gain.low, gain_high=gain.high)


def _layers(deployment: Deployment) -> list[operator_pb2.LayerStatus]:
    """Return the status of each layer; empty until the placement is known."""
    if deployment.live is None:
        return []
    is_connected = bool(deployment.connected)
    par_L = measured_par(deployment).tolist() if is_connected else [0.0] * deployment.live.placement.layers
    planned = deployment.planned_par if is_connected else {}
    return [
        operator_pb2.LayerStatus(
            layer=layer, par=par_L[layer], planned_par=planned.get(layer, 0.0), epoch=epoch
        )
        for layer, epoch in enumerate(deployment.live.layer_epochs)
    ]


def _agents(deployment: Deployment, observer: Observer) -> list[operator_pb2.AgentStatus]:
    """Return the status of each rank of the group that has ever connected, in rank order."""
    members = deployment.group.members if deployment.group else {}
    fields = set(operator_pb2.AgentStatus.DESCRIPTOR.fields_by_name) - {"silent_seconds"}
    return [
        operator_pb2.AgentStatus(
            **{name: getattr(member, name) for name in fields},
            silent_seconds=observer.silent_seconds(deployment.name, rank),
        )
        for rank, member in sorted(members.items())
    ]


def _with_outcome(decision: PastPlan | None, deployment: Deployment) -> operator_pb2.MadeDecision | None:
    """Return the decision, with the outcome of its plan if that is the current plan or the previous one."""
    if decision is None:
        return None
    for plan in (deployment.plan, deployment.ended_plan):
        if plan is not None and plan.plan_id == decision.plan_id:
            outcome = plan.outcome.value if plan.outcome else ""
            decision = replace(decision, outcome=outcome, reason=plan.reason, committed=plan.committed)
    message: operator_pb2.MadeDecision = encode(decision, operator_pb2.MadeDecision())
    return message
