"""A deployment's state as operators are shown it: the plain values of the wire's messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import numpy as np

from eplb_service.control.core.deployment_state import DeploymentState
from eplb_service.control.core.health import mean_measured_par, measured_par, problems, rank_loads
from eplb_service.control.server.observing.observer import Observed, ObservedDecision, Observer
from eplb_service.control.server.observing.worth_figures import figures_of, priced_moves
from eplb_service.control.server.store.stored import StoredPlacement, StoredPlan
from eplb_service.planner.plan import LayerVerdict
from eplb_service.wire.balance import Balance, LayerMoves, MadeDecision
from eplb_service.wire.deployment_status import AgentStatus, DeploymentStatus, LayerStatus
from eplb_service.wire.past_plan import PastPlan, PastVerdict

_LOAD_STEPS = 64
"""Newest steps that the ranks' loads are of: what is served now, not a window ago."""


def deployment_status(deployment: DeploymentState, remembered: StoredPlacement | None) -> DeploymentStatus:
    """The whole; shape and version are those remembered while no agent has reported others."""
    totals, worth, price = deployment.totals, deployment.decisions.worth, deployment.decisions.move_price
    known = deployment.live or remembered
    if deployment.group is not None:
        shape = deployment.group.shape
        sizes = shape.layers, shape.experts, shape.ranks, shape.slots
    elif remembered is not None:
        placement = remembered.placement
        sizes = placement.layers, placement.experts, placement.ranks, placement.slots
    else:
        sizes = 0, 0, 0, 0
    return DeploymentStatus(
        deployment.name,
        *sizes,
        agents_connected=len(deployment.connected),
        epoch=known.epoch if known is not None else 0,
        digest=known.digest if known is not None else 0,
        par=mean_measured_par(measured_par(deployment)),
        window_steps=deployment.heat.steps if deployment.heat else 0,
        steps_received=totals.steps_received,
        steps_lost=totals.steps_lost,
        layers_switched=totals.layers_switched,
        experts_moved=totals.experts_moved,
        bytes_moved=totals.bytes_moved,
        paused=deployment.paused,
        plan_id=deployment.plan.offer.plan_id if deployment.plan else 0,
        last_decision=deployment.last_decision,
        problems=tuple(problems(deployment)),
        leader_term=deployment.leader_term,
        worth=None if worth is None else figures_of(worth),
        move_price=None if price is None else priced_moves(price),
    )


def layer_statuses(deployment: DeploymentState) -> tuple[LayerStatus, ...]:
    """One per layer, once the placement is known."""
    if deployment.live is None:
        return ()
    par_L, planned = measured_par(deployment).tolist(), deployment.planned_par
    return tuple(
        LayerStatus(layer, par_L[layer], planned.get(layer, 0.0), epoch)
        for layer, epoch in enumerate(deployment.live.layer_epochs)
    )


def agent_statuses(deployment: DeploymentState, observer: Observer) -> tuple[AgentStatus, ...]:
    """One per rank that has ever come, by rank."""
    members = deployment.group.members if deployment.group else {}
    return tuple(
        AgentStatus(
            rank=rank,
            node=member.node,
            connected=member.connected,
            step=member.step,
            epoch=member.epoch,
            error=member.error,
            agent_version=member.agent_version,
            dropped_steps=member.dropped_steps,
            silent_seconds=observer.silent_seconds(deployment.name, rank),
            staging_bytes=member.staging_bytes,
            ring_bytes=member.ring_bytes,
        )
        for rank, member in sorted(members.items())
    )


def past_plan(plan: StoredPlan) -> PastPlan:
    """A plan of the past with what it said of each layer."""
    return PastPlan(
        plan_id=plan.plan_id,
        at=plan.at,
        leader_term=plan.leader_term,
        base_epoch=plan.base_epoch,
        outcome=plan.outcome.value if plan.outcome else "",
        reason=plan.reason,
        committed=plan.committed,
        verdicts=_verdicts(plan.verdicts),
    )


def balance(deployment: DeploymentState, observed: Observed) -> Balance:
    """Balance over time, loads of the ranks, and the last decisions."""
    steps, loads_LR = rank_loads(deployment, _LOAD_STEPS)
    return Balance(
        points=tuple(observed.series.points),
        rank_loads_LR=np.rint(1000 * loads_LR).astype(np.int32) if steps else None,
        load_steps=steps,
        last_decision=_made(observed.last_decision, deployment),
        last_plan=_made(observed.last_plan, deployment),
    )


def _made(decision: ObservedDecision | None, deployment: DeploymentState) -> MadeDecision | None:
    """With what became of its plan, where it was one of the last two."""
    if decision is None:
        return None
    outcome, reason, committed = "", "", 0
    for plan in (deployment.plan, deployment.ended_plan):
        if plan is not None and plan.offer.plan_id == decision.plan_id:
            outcome = plan.outcome.value if plan.outcome else ""
            reason, committed = plan.reason, plan.committed
    return MadeDecision(
        at=decision.at,
        solve_seconds=decision.solve_seconds,
        plan_id=decision.plan_id,
        verdicts=_verdicts(decision.verdicts),
        moves=tuple(LayerMoves(layer, moves_M5) for layer, moves_M5 in sorted(decision.moves.items())),
        outcome=outcome,
        reason=reason,
        committed=committed,
    )


def _verdicts(verdicts: Iterable[LayerVerdict]) -> tuple[PastVerdict, ...]:
    shown = [field.name for field in fields(PastVerdict)]
    return tuple(PastVerdict(**{name: getattr(verdict, name) for name in shown}) for verdict in verdicts)
