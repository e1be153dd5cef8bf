"""A deployment's state in the operators' messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from eplb_service.control.core.deployment_state import DeploymentState
from eplb_service.control.core.health import mean_par, measured_par, problems, rank_loads
from eplb_service.control.server.observing.observer import Decision, Observed, Observer
from eplb_service.control.server.observing.worth_figures import figures_of, priced_moves
from eplb_service.control.server.store.stored import StoredPlacement, StoredPlan
from eplb_service.planner.plan import LayerVerdict
from eplb_service.wire.codec import pack
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.move_price import encode_move_price
from eplb_service.wire.worth import encode_worth

_LOAD_STEPS = 64
"""Newest steps that the ranks' loads are of: what is served now, not a window ago."""


def deployment_status(
    deployment: DeploymentState, remembered: StoredPlacement | None
) -> operator_pb2.DeploymentStatus:
    """The whole in one message; shape and version are those remembered while no agent has reported others."""
    totals = deployment.totals
    status = operator_pb2.DeploymentStatus(
        deployment=deployment.name,
        agents_connected=len(deployment.connected),
        par=mean_par(measured_par(deployment)),
        window_steps=deployment.heat.steps if deployment.heat else 0,
        steps_received=totals.steps_received,
        steps_lost=totals.steps_lost,
        layers_switched=totals.layers_switched,
        experts_moved=totals.experts_moved,
        bytes_moved=totals.bytes_moved,
        paused=deployment.paused,
        plan_id=deployment.plan.offer.plan_id if deployment.plan else 0,
        last_decision=deployment.last_decision,
        problems=problems(deployment),
        leader_term=deployment.leader_term,
    )
    if deployment.group is not None:
        shape = deployment.group.shape
        status.layers, status.experts, status.ranks, status.slots = (
            shape.layers,
            shape.experts,
            shape.ranks,
            shape.slots,
        )
    elif remembered is not None:
        placement = remembered.placement
        status.layers, status.experts, status.ranks, status.slots = (
            placement.layers,
            placement.experts,
            placement.ranks,
            placement.slots,
        )
    if deployment.decisions.worth is not None:
        status.worth.CopyFrom(encode_worth(figures_of(deployment.decisions.worth)))
    if deployment.decisions.move_price is not None:
        status.move_price.CopyFrom(encode_move_price(priced_moves(deployment.decisions.move_price)))
    known = deployment.live or remembered
    if known is not None:
        status.epoch, status.digest = known.epoch, known.digest
    return status


def layer_statuses(deployment: DeploymentState) -> list[operator_pb2.LayerStatus]:
    """One per layer, once the placement is known."""
    if deployment.live is None:
        return []
    par_L = measured_par(deployment)
    return [
        operator_pb2.LayerStatus(
            layer=layer, par=par_L[layer], planned_par=deployment.planned_par.get(layer, 0.0), epoch=epoch
        )
        for layer, epoch in enumerate(deployment.live.layer_epochs)
    ]


def agent_statuses(deployment: DeploymentState, observer: Observer) -> list[operator_pb2.AgentStatus]:
    """One per rank that has ever come, by rank."""
    members = deployment.group.members if deployment.group else {}
    return [
        operator_pb2.AgentStatus(
            rank=rank,
            node=member.node,
            connected=member.connected,
            step=member.step,
            epoch=member.epoch,
            error=member.error,
            agent_version=member.agent_version,
            dropped_steps=member.dropped_steps,
            silent_seconds=observer.silent_seconds(deployment.name, rank),
        )
        for rank, member in sorted(members.items())
    ]


def past_plan(plan: StoredPlan) -> operator_pb2.PastPlan:
    """A plan of the past with what it said of each layer."""
    return operator_pb2.PastPlan(
        plan_id=plan.plan_id,
        at=plan.at,
        leader_term=plan.leader_term,
        base_epoch=plan.base_epoch,
        outcome=plan.outcome.value if plan.outcome else "",
        reason=plan.reason,
        committed=plan.committed,
        verdicts=_verdicts(plan.verdicts),
    )


def balance(deployment: DeploymentState, observed: Observed) -> operator_pb2.GetBalanceResponse:
    """Balance over time, loads of the ranks, and the last decisions."""
    steps, loads_LR = rank_loads(deployment, _LOAD_STEPS)
    response = operator_pb2.GetBalanceResponse(
        points=[operator_pb2.BalancePoint(**vars(point)) for point in observed.series.points],
        load_steps=steps,
    )
    if steps:
        response.rank_loads.CopyFrom(pack(np.rint(1000 * loads_LR).astype(np.int32)))
    for name in ("last_decision", "last_plan"):
        decision = getattr(observed, name)
        if decision is not None:
            getattr(response, name).CopyFrom(_made(decision, deployment))
    return response


def _made(decision: Decision, deployment: DeploymentState) -> operator_pb2.MadeDecision:
    made = operator_pb2.MadeDecision(
        at=decision.at,
        solve_seconds=decision.solve_seconds,
        plan_id=decision.plan_id,
        verdicts=_verdicts(decision.verdicts),
        moves=[
            operator_pb2.LayerMoves(layer=layer, moves=pack(moves_M5))
            for layer, moves_M5 in sorted(decision.moves.items())
        ],
    )
    for plan in (deployment.plan, deployment.ended_plan):
        if plan is not None and plan.offer.plan_id == decision.plan_id:
            made.outcome = plan.outcome.value if plan.outcome else ""
            made.reason, made.committed = plan.reason, plan.committed
    return made


def _verdicts(verdicts: Iterable[LayerVerdict]) -> list[operator_pb2.PastVerdict]:
    return [operator_pb2.PastVerdict(**_fields(verdict)) for verdict in verdicts]


def _fields(verdict: LayerVerdict) -> dict[str, Any]:
    known = operator_pb2.PastVerdict.DESCRIPTOR.fields_by_name
    return {name: value for name, value in asdict(verdict).items() if name in known and value is not None}
