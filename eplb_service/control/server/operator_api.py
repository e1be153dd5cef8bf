"""Serves ``operator.proto``: what operators and their tools may ask of a running service."""

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
    mean_measured_par,
    measured_par,
    problems,
    rank_loads,
    redundancy,
    served_now,
)
from eplb_service.control.server.access.gate import CALLER
from eplb_service.control.server.listening import StatusError
from eplb_service.control.server.observer import Observer, shown_price
from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.control.server.store import StoredDeployment


class OperatorService(operator_pb2_grpc.OperatorServiceServicer):
    """Serves ``operator.proto`` from the control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def ListDeployments(
        self, _request: operator_pb2.ListDeploymentsRequest, _context: Any
    ) -> operator_pb2.ListDeploymentsResponse:
        """List all that the caller may name."""
        names = filter(CALLER.get().credential.reaches, sorted(self._plane.deployments))
        return operator_pb2.ListDeploymentsResponse(deployments=map(self._status, names))

    async def GetStatus(
        self, request: operator_pb2.GetStatusRequest, _context: Any
    ) -> operator_pb2.GetStatusResponse:
        """Describe one deployment with its layers and agents."""
        deployment = self._plane.find(request.deployment)
        return operator_pb2.GetStatusResponse(
            status=self._status(request.deployment),
            layers=_layers(deployment),
            agents=_agents(deployment, self._plane.observer),
        )

    async def GetPlacement(
        self, request: operator_pb2.GetPlacementRequest, _context: Any
    ) -> operator_pb2.GetPlacementResponse:
        """Return the placement and tables that are served now."""
        live = self._plane.find(request.deployment).live
        if live is None:
            raise ConflictError(
                f"the placement of {request.deployment!r} is not known: not all ranks have reported theirs"
            )
        return encode_placement(live.epoch, live.digest, live.placement, live.log2phy_RLE)

    async def Pause(self, request: operator_pb2.PauseRequest, _context: Any) -> operator_pb2.PauseResponse:
        """Stop planning."""
        self._plane.set_paused(self._plane.find(request.deployment), True)
        await self._plane.store(f"planning for {request.deployment} is paused")
        return operator_pb2.PauseResponse()

    async def Resume(self, request: operator_pb2.ResumeRequest, _context: Any) -> operator_pb2.ResumeResponse:
        """Plan again."""
        self._plane.set_paused(self._plane.find(request.deployment), False)
        await self._plane.store(f"planning for {request.deployment} continues")
        return operator_pb2.ResumeResponse()

    async def Lead(self, request: operator_pb2.LeadRequest, _context: Any) -> operator_pb2.LeadResponse:
        """Have the ranks follow this service."""
        deployment = self._plane.find(request.deployment)
        raised = self._plane.lead(deployment)
        if raised:
            await self._plane.store(f"the ranks of {request.deployment} follow this service")
        return operator_pb2.LeadResponse(leader_term=deployment.leader_term, raised=raised)

    async def Forget(self, request: operator_pb2.ForgetRequest, _context: Any) -> operator_pb2.ForgetResponse:
        """Remove a deployment that is gone."""
        self._plane.forget_departed(self._plane.find(request.deployment))
        await self._plane.store(f"{request.deployment} is forgotten")
        return operator_pb2.ForgetResponse()

    async def Rebalance(
        self, request: operator_pb2.RebalanceRequest, _context: Any
    ) -> operator_pb2.RebalanceResponse:
        """Decide now; answers once the decision is made and, where there is a plan, offered."""
        outcome = await asyncio.shield(self._plane.decider.start(self._plane.find(request.deployment)))
        if outcome.result == "failed":
            raise StatusError(grpc.StatusCode.INTERNAL, outcome.message)
        if outcome.plan_id:
            await self._plane.store(outcome.message)
        return operator_pb2.RebalanceResponse(
            plan_id=outcome.plan_id, layers=outcome.layers, moves=outcome.moves, outcome=outcome.message
        )

    async def GetHistory(
        self, request: operator_pb2.GetHistoryRequest, _context: Any
    ) -> operator_pb2.GetHistoryResponse:
        """List plans of the past, newest first."""
        self._plane.find(request.deployment)
        plans = await self._plane.history(request.deployment, request.limit)
        return operator_pb2.GetHistoryResponse(plans=map(encode, plans))

    async def GetBalance(
        self, request: operator_pb2.GetBalanceRequest, _context: Any
    ) -> operator_pb2.GetBalanceResponse:
        """Return balance over time, loads of the ranks, and the last decisions."""
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
        """Send heat as it is counted, until the caller ends the call."""
        host, deployment = CALLER.get().host, self._plane.find(request.deployment)
        with self._plane.feed.watch(deployment, host) as watcher:
            self._plane.follow_up(deployment)
            while True:
                await context.write(await watcher.next())

    def _status(self, name: str) -> operator_pb2.DeploymentStatus:
        """Return a deployment's state; what agents have not reported is as remembered."""
        deployment = self._plane.deployments[name]
        remembered = self._plane.remembered.get(name, StoredDeployment(name))
        here = bool(deployment.connected)
        worth = deployment.decisions.worth if here else None
        price = shown_price(deployment.decisions.move_price) if here else None
        served = deployment.live or remembered
        sized = deployment.group.shape if deployment.group else remembered
        par_L = measured_par(deployment)
        redundant_slots, redundant_bytes = redundancy(deployment)
        return operator_pb2.DeploymentStatus(
            deployment=name,
            layers=sized.layers,
            experts=sized.experts,
            ranks=sized.ranks,
            slots=sized.slots,
            agents_connected=len(deployment.connected),
            epoch=served.epoch,
            digest=served.digest,
            par=mean_measured_par(par_L),
            par_steps=served_now(deployment),
            idle_seconds=self._plane.observer.idle_seconds(name) if here else None,
            redundant_slots=redundant_slots,
            redundant_bytes_per_rank=redundant_bytes,
            **_hottest(deployment, par_L),
            window_steps=deployment.heat.steps if deployment.heat else 0,
            paused=deployment.paused,
            plan_id=deployment.plan.plan_id if deployment.plan else 0,
            last_decision=deployment.last_decision,
            problems=problems(deployment),
            leader_term=deployment.leader_term,
            worth=encode(worth) if worth else None,
            move_price=encode(price) if price else None,
            forecast=_forecast(deployment) if here else None,
            **asdict(deployment.totals),
        )


def _hottest(deployment: Deployment, par_L: Float64) -> dict[str, Any]:
    """Name the rank with most tokens over all layers, and the layer of the highest ratio, of the newest steps."""
    found: dict[str, Any] = {}
    if par_L.any():
        found["hottest_layer"] = int(par_L.argmax())
        found["hottest_layer_par"] = float(par_L.max())
    steps, loads_LR = rank_loads(deployment, RECENT_STEPS)
    measured_L = loads_LR.any(axis=1) if steps else np.zeros(0, dtype=bool)
    if measured_L.any():
        loads_R = loads_LR[measured_L].mean(axis=0)
        found["hottest_rank"] = int(loads_R.argmax())
        found["hottest_rank_load"] = float(loads_R.max())
    return found


def _forecast(deployment: Deployment) -> operator_pb2.Forecast | None:
    """Return the gain until the next decision, where the last one has said any."""
    gain = deployment.decisions.forecasts.gain
    if gain is None:
        return None
    return operator_pb2.Forecast(gain=gain.mean, gain_low=gain.low, gain_high=gain.high)


def _layers(deployment: Deployment) -> list[operator_pb2.LayerStatus]:
    """Return one per layer, once the placement is known."""
    if deployment.live is None:
        return []
    here = bool(deployment.connected)
    par_L = measured_par(deployment).tolist() if here else [0.0] * deployment.live.placement.layers
    planned = deployment.planned_par if here else {}
    return [
        operator_pb2.LayerStatus(
            layer=layer, par=par_L[layer], planned_par=planned.get(layer, 0.0), epoch=epoch
        )
        for layer, epoch in enumerate(deployment.live.layer_epochs)
    ]


def _agents(deployment: Deployment, observer: Observer) -> list[operator_pb2.AgentStatus]:
    """Return one per rank that has ever come, by rank."""
    members = deployment.group.members if deployment.group else {}
    shown = set(operator_pb2.AgentStatus.DESCRIPTOR.fields_by_name) - {"silent_seconds"}
    return [
        operator_pb2.AgentStatus(
            **{name: getattr(member, name) for name in shown},
            silent_seconds=observer.silent_seconds(deployment.name, rank),
        )
        for rank, member in sorted(members.items())
    ]


def _with_outcome(decision: PastPlan | None, deployment: Deployment) -> operator_pb2.MadeDecision | None:
    """Return the decision with the outcome of its plan, where that was one of the last two."""
    if decision is None:
        return None
    for plan in (deployment.plan, deployment.ended_plan):
        if plan is not None and plan.plan_id == decision.plan_id:
            outcome = plan.outcome.value if plan.outcome else ""
            decision = replace(decision, outcome=outcome, reason=plan.reason, committed=plan.committed)
    message: operator_pb2.MadeDecision = encode(decision, operator_pb2.MadeDecision())
    return message
