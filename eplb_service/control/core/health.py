"""Balance of a deployment, now and over time, and what is wrong with it."""

from __future__ import annotations

import numpy as np

from eplb_core.placement import Float64, mean_par
from eplb_core.wire.agent import mixed_releases
from eplb_core.wire.operator import BalancePoint
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.flow import LATE_SECONDS
from eplb_service.control.core.group import rank_list

RECENT_STEPS = 64
"""Steps that figures of the present are of: the newest ones, as they were served."""
MAX_POINTS = 512
"""Points of one deployment's balance; where there are more, neighbours become one."""
_SILENT_SECONDS = 30.0
_UNDECIDED_SECONDS = 600.0
_UNDECIDED_WINDOWS = 16
"""Windows of steps without a decision that are too many: far past any decision interval.

So many windows of steps without a counted token are a problem as well, if none has ever been counted."""


_MISROUTED_STEPS = 16
"""Number of misrouted steps from which on a host is assumed not to route by its tables."""


class BalanceSeries:
    """Points of time, at most ``MAX_POINTS``, ``interval`` seconds apart; that doubles whenever the series is full."""

    def __init__(self, interval: float = 1.0) -> None:
        self._interval = interval
        self.points: list[BalancePoint] = []

    def add(self, point: BalancePoint) -> bool:
        """Add the balance as it is now, unless the last point is too recent; return whether it was added."""
        if self.points and point.at - self.points[-1].at < self._interval:
            return False
        self.points.append(point)
        if len(self.points) >= MAX_POINTS:
            self.points = self.points[1::2]
            self._interval *= 2
        return True


def served_now(deployment: Deployment) -> int:
    """Return the number of newest steps that figures of the present are of; 0 while no rank is connected."""
    if deployment.heat is None or deployment.live is None or not deployment.connected:
        return 0
    return min(deployment.heat.steps, RECENT_STEPS)


def measured_par(deployment: Deployment) -> Float64:
    """Return the peak-to-average ratio of each layer over the newest steps, as they were served, float64 ``[L]``.

    From the loads that the ranks measured, not from a prediction: per step, averaged over the steps with tokens; 0 if
    nothing was measured yet. Empty while the placement is not known or no rank is connected.
    """
    steps = served_now(deployment)
    if deployment.heat is None or deployment.live is None or not deployment.connected:
        return np.zeros(0)
    return np.nan_to_num(mean_par(deployment.heat.served_par(steps), axis=0), nan=0.0)


def mean_measured_par(par_L: Float64) -> float:
    """Mean over the layers that were measured; 0 where none was."""
    measured = par_L[par_L > 0]
    return float(measured.mean()) if measured.size else 0.0


def rank_loads(deployment: Deployment, newest: int) -> tuple[int, Float64]:
    """Load of each rank over its layer's mean, float64 ``[L, R]``, and the newest steps, at most ``newest``, it is of.

    As they were served; zero in a layer without tokens. Empty if nothing was measured, or no rank is connected.
    """
    if deployment.heat is None or not served_now(deployment):
        return 0, np.zeros((0, 0))
    steps, loads_LR = deployment.heat.load_sums(newest)
    mean_L1 = loads_LR.mean(axis=1, keepdims=True)
    return steps, loads_LR / np.where(mean_L1 > 0, mean_L1, 1.0)


def redundancy(deployment: Deployment) -> tuple[int, int]:
    """Return slots of all ranks beyond one per expert, and bytes that a rank holds in them over all layers.

    The second is 0 if an expert's size is not known.
    """
    if deployment.group is None:
        return 0, 0
    shape = deployment.group.shape
    slots = shape.ranks * shape.slots - shape.experts
    return slots, round(slots * shape.layers * shape.bytes_per_expert / shape.ranks)


def problems(deployment: Deployment) -> list[str]:
    """Return what an operator should look at, one line each; empty while all is well."""
    group = deployment.group
    if group is None:
        return ["no agent has connected since the service started", *deployment.service_problems]
    found = []
    if group.missing:
        found.append(
            f"{len(group.connected)} of {group.shape.ranks} ranks connected, missing {rank_list(group.missing)}"
        )
    if deployment.outdated is not None:
        found.append(
            f"{deployment.outdated}; stop this service, or have it lead: `eplb lead {deployment.name}`"
        )
    found += [f"rank {member.rank}: {member.error}" for member in group.connected if member.error]
    if group.out_of_step and deployment.plan is None and group.live is not None:
        found.append(
            f"{rank_list(group.out_of_step)} not at epoch {group.live.epoch}, which the others serve"
        )
    mixed = mixed_releases({member.rank: member.agent_version for member in group.connected})
    if mixed is not None:
        found.append(mixed)
    refused = sorted(deployment.attendance.refused.items())
    found += [f"rank {rank} was turned away: {reason}" for rank, (reason, _) in refused]
    return found + _useless(deployment) + deployment.plan_problems + list(deployment.service_problems)


def _useless(deployment: Deployment) -> list[str]:
    """Reasons why balancing, though nothing fails, can do nothing."""
    found, heat, limits = [], deployment.heat, deployment.limits
    one_in, windows = deployment.shedding.one_in, _UNDECIDED_WINDOWS * limits.decision_steps
    if deployment.group is not None and deployment.group.shape.rank_bound and not deployment.paused:
        found.append(
            "experts are bound to their ranks (grouped experts), so that no plan can be made: heat is watched alone"
        )
    # A host that has served nothing yet looks like one whose counters stay zero.
    many_empty = windows if heat is None or not heat.pending.tokens_uncounted else limits.decision_steps
    if heat is not None and heat.pending.empty_steps >= many_empty:
        found.append(
            f"no rank has counted a token in the newest {heat.pending.empty_steps} steps, though they are no dummies: "
            "the layers' counters stay zero, or nothing has been served since the ranks started"
        )
    if heat is not None and heat.pending.mislabelled_steps >= limits.decision_steps:
        found.append(
            f"tokens were counted in {heat.pending.mislabelled_steps} steps that all ranks label as dummies: "
            "decisions leave these steps out; have the host label steps with tokens prefill or decode"
        )
    if heat is not None and limits.routed_by_tables and heat.misrouted_steps >= _MISROUTED_STEPS:
        assert heat.misrouted is not None
        rank, layer, slot = heat.misrouted
        found.append(
            f"in {heat.misrouted_steps} steps since the last switch, slots that no rank's table names received tokens, "
            f"such as slot {slot} of rank {rank} in layer {layer}: the host does not route by log2phy; check its "
            "adapter, or set split to even if the host spreads tokens over the replicas itself"
        )
    if heat is not None and heat.passed_over >= windows:
        found.append(
            f"none of the newest {heat.passed_over} steps with tokens was {limits.heat_phase}, the only phase that "
            "heat_phase lets decisions look at: serve with --heat-phase all, or have the host label its steps"
        )
    if one_in > 1:
        found.append(
            f"the service cannot take all heat of these ranks: of every {one_in} reports they send "
            "one, so that a window spans longer; give it more CPU, or fewer deployments"
        )
    late, seconds = deployment.late.for_seconds(LATE_SECONDS)
    if late:
        held = "decisions" if deployment.decisions.decided_at else "the first decision"
        found.append(
            f"heat of {rank_list(late)} has been late for {seconds:.0f} s, by up to {deployment.late.steps} steps, "
            f"which holds up {held}: see to its process, its host and its link to the service"
        )
    stall = deployment.without_heat
    if stall.seconds > _SILENT_SECONDS and stall.steps > one_in * limits.pending_steps:
        found.append(
            f"no step's heat has been put together for {stall.seconds:.0f} s, though the ranks make steps"
        )
    stall = deployment.without_decision
    if stall.seconds > _UNDECIDED_SECONDS and stall.steps > windows and not deployment.paused:
        reason = deployment.obstacle() or "steps are put together too slowly"
        found.append(
            f"no decision for {stall.seconds:.0f} s, in which the ranks made {stall.steps} steps: {reason}"
        )
    return found
