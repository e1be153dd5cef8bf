"""Health of a deployment: its current balance, its balance over time, and its problems."""

from __future__ import annotations

import numpy as np

from eplb_core.heat.assembler import HeatAssembler
from eplb_core.placement import Float64, mean_par
from eplb_core.planner.settings import DEAL, STEP, TABLES
from eplb_core.wire.agent import mixed_releases
from eplb_core.wire.operator import BalancePoint
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.flow import LATE_SECONDS, Limits
from eplb_service.control.core.group import rank_list

RECENT_STEPS = 64
"""Number of recent steps over which the current balance is measured."""
MAX_POINTS = 512
"""Maximum number of points in a balance series. A series that reaches it is thinned out."""
_SILENT_SECONDS = 30.0
"""Time without a completed step after which a problem is reported, provided that the ranks are running steps."""
_UNDECIDED_SECONDS = 600.0
"""Time without a decision after which a problem is reported."""
_UNDECIDED_WINDOWS = 16
"""Number of windows without a decision after which a problem is reported. Together, they are longer than any decision
interval.

If no rank has ever counted a token, a problem is reported after the same number of windows without tokens."""
_MISROUTED_STEPS = 16
"""Number of steps with misrouted tokens after which the host is assumed to ignore its tables."""


class BalanceSeries:
    """Balance over time, as a bounded series of evenly spaced points.

    Once the series has ``MAX_POINTS`` points, every other point is removed and the interval doubles.

    Parameters
    ----------
    interval
        Seconds between points of a new series.

    Attributes
    ----------
    points
        Points in chronological order.
    """

    def __init__(self, interval: float = 1.0) -> None:
        self._interval = interval
        self.points: list[BalancePoint] = []

    def add(self, point: BalancePoint) -> bool:
        """Add a point unless the last one is too recent. Return True if it was added."""
        if self.points and point.at - self.points[-1].at < self._interval:
            return False
        self.points.append(point)
        if len(self.points) >= MAX_POINTS:
            self.points = self.points[1::2]
            self._interval *= 2
        return True


def recent_step_count(deployment: Deployment) -> int:
    """Return the number of recent steps over which the current balance is measured; 0 while no rank is connected."""
    if deployment.heat is None or deployment.live is None or not deployment.connected:
        return 0
    return min(deployment.heat.steps, RECENT_STEPS)


def measured_par(deployment: Deployment) -> Float64:
    """Return the measured PAR of each layer over the recent steps.

    It is computed from the loads that the ranks reported, not predicted.

    Returns
    -------
    Float64
        ``[L]``, mean over the steps with tokens; 0 for a layer without tokens. Empty while the layout is unknown or no
        rank is connected.
    """
    steps = recent_step_count(deployment)
    if deployment.heat is None or deployment.live is None or not deployment.connected:
        return np.zeros(0)
    return np.nan_to_num(mean_par(deployment.heat.served_par(steps), axis=0), nan=0.0)


def mean_measured_par(par_L: Float64) -> float:
    """Return the mean PAR over the layers with tokens; 0 if no layer had tokens.

    Examples
    --------
    The second layer had no tokens:

    >>> mean_measured_par(np.array([1.5, 0.0, 1.25]))
    1.375
    """
    measured = par_L[par_L > 0]
    return float(measured.mean()) if measured.size else 0.0


def rank_loads(deployment: Deployment, newest: int) -> tuple[int, Float64]:
    """Return the measured load of each rank relative to its layer's mean.

    Parameters
    ----------
    deployment
        Deployment with its heat.
    newest
        Maximum number of recent steps to sum over.

    Returns
    -------
    int
        Number of steps that the loads cover.
    Float64
        ``[L, R]``, relative loads; 0 in a layer without tokens. Empty if there is no step or no rank is connected.
    """
    if deployment.heat is None or not recent_step_count(deployment):
        return 0, np.zeros((0, 0))
    steps, loads_LR = deployment.heat.load_sums(newest)
    mean_L1 = loads_LR.mean(axis=1, keepdims=True)
    return steps, loads_LR / np.where(mean_L1 > 0, mean_L1, 1.0)


def mean_loads(loads_LR: Float64) -> Float64:
    """Return each rank's mean load over the layers with tokens, ``[R]``; empty if no layer had tokens."""
    measured_L = loads_LR.any(axis=1)
    return loads_LR[measured_L].mean(axis=0) if measured_L.any() else np.zeros(0)


def redundancy(deployment: Deployment) -> tuple[int, int]:
    """Return the number of redundant slots per layer, and the memory that they occupy on each rank.

    Returns
    -------
    int
        Number of slots of all ranks in one layer, minus one per expert.
    int
        Mean memory per rank over all layers, in bytes; 0 if the size of an expert is unknown.
    """
    if deployment.group is None:
        return 0, 0
    shape = deployment.group.shape
    slots = shape.ranks * shape.slots - shape.experts
    return slots, round(slots * shape.layers * shape.bytes_per_expert / shape.ranks)


def problems(deployment: Deployment) -> list[str]:
    """Return the problems that an operator should look at, one line each. ``docs/runbook.md`` explains them."""
    group = deployment.group
    if group is None:
        return ["no agent has connected since the service started", *deployment.service_problems]
    lines = []
    if group.missing:
        lines.append(
            f"{len(group.connected)} of {group.shape.ranks} ranks connected, missing {rank_list(group.missing)}"
        )
    if deployment.outdated is not None:
        lines.append(
            f"{deployment.outdated}; stop this service, or make it lead: `eplb lead {deployment.name}`"
        )
    lines += [f"rank {member.rank}: {member.error}" for member in group.connected if member.error]
    if group.out_of_step and deployment.plan is None and group.live is not None:
        lines.append(
            f"waiting for {rank_list(group.out_of_step)} to reach epoch {group.live.epoch}, the epoch of the rest of "
            "the group"
        )
    mixed = mixed_releases({member.rank: member.agent_version for member in group.connected})
    if mixed is not None:
        lines.append(mixed)
    rejections = sorted(deployment.attendance.rejections.items())
    lines += [f"rank {rank} was rejected: {reason}" for rank, (reason, _) in rejections]
    lines += _balancing_problems(deployment)
    return lines + deployment.plan_problems + list(deployment.service_problems)


def _balancing_problems(deployment: Deployment) -> list[str]:
    """Return the reasons why balancing has no effect although nothing has failed."""
    lines = []
    idle = deployment.paused or deployment.observed
    if deployment.group is not None and deployment.group.shape.rank_bound and not idle:
        lines.append(
            "experts are bound to their ranks (grouped experts), so there is nothing to plan; the service only "
            "monitors the heat"
        )
    if deployment.group is not None and not deployment.observed:
        lines += _split_problems(deployment.group.shape.splits_by_step, deployment.limits.split)
    if deployment.heat is not None:
        lines += _heat_problems(deployment.heat, deployment.limits, _routed_by_tables(deployment))
    return lines + _flow_problems(deployment)


def _split_problems(splits_by_step: bool, planned: str) -> list[str]:
    """Return the problem if the service plans for a different split than the ranks perform."""
    if splits_by_step and planned not in (TABLES, STEP):
        return [
            "the ranks choose replicas according to each step's own counts (EPLB_AGENT_STEP_SPLIT), but the service "
            f"plans for split={planned}; serve with --split step"
        ]
    if planned == STEP and not splits_by_step:
        return [
            "the service plans for split=step, but the ranks do not choose replicas according to each step's own "
            "counts, which leaves them less balanced than any other split would; set EPLB_AGENT_STEP_SPLIT=on, or "
            "serve without --split step"
        ]
    return []


def _routed_by_tables(deployment: Deployment) -> bool:
    """Return True if hosts should route tokens according to the tables instead of using a routing rule."""
    group = deployment.group
    return deployment.limits.split in (TABLES, DEAL) and not (group and group.shape.splits_by_step)


def _heat_problems(heat: HeatAssembler, limits: Limits, routed_by_tables: bool) -> list[str]:
    """Return the problems with the reported heat: steps that decisions cannot use, and misrouted tokens."""
    lines = []
    pending = heat.pending
    many_steps = _UNDECIDED_WINDOWS * limits.decision_steps
    # A host that has not yet served a request looks like one whose counters stay at zero, so allow it more time.
    max_empty_steps = limits.decision_steps if pending.tokens_uncounted else many_steps
    if pending.empty_steps >= max_empty_steps:
        lines.append(
            f"no rank has counted a token in the last {pending.empty_steps} steps, although these are not dummy "
            "steps: either the layers' counters stay at zero, or the ranks have served nothing since they started"
        )
    if pending.mislabelled_steps >= limits.decision_steps:
        lines.append(
            f"tokens were counted in {pending.mislabelled_steps} steps that all ranks label as dummies, so decisions "
            "skip these steps; have the host label steps with tokens as prefill or decode"
        )
    if routed_by_tables and heat.misrouted_steps >= _MISROUTED_STEPS:
        assert heat.misrouted is not None
        rank, layer, slot = heat.misrouted
        lines.append(
            f"in {heat.misrouted_steps} steps since the last switch, slots that appear in no rank's table received "
            f"tokens, for example slot {slot} of rank {rank} in layer {layer}: the host does not route by log2phy; "
            "check its adapter, or set split=even if the host itself spreads tokens over the replicas"
        )
    if heat.other_phase_steps >= many_steps:
        lines.append(
            f"none of the last {heat.other_phase_steps} steps with tokens was a {limits.heat_phase} step, but "
            f"decisions use only {limits.heat_phase} steps (heat_phase); serve with --heat-phase all, or have the host "
            "label its steps"
        )
    return lines


def _flow_problems(deployment: Deployment) -> list[str]:
    """Return the problems with the flow of heat and decisions: shed heat, late ranks and stalls."""
    lines = []
    limits = deployment.limits
    one_in = deployment.shedding.one_in
    if one_in > 1:
        lines.append(
            f"the service cannot process all the heat from these ranks: they send only one in {one_in} reports, so a "
            "window spans a longer time; give the service more CPU, or fewer deployments"
        )
    late_ranks, seconds = deployment.late.for_seconds(LATE_SECONDS)
    if late_ranks:
        delayed = "decisions" if deployment.session.decided_at else "the first decision"
        lines.append(
            f"heat of {rank_list(late_ranks)} has been late for {seconds:.0f} s, by up to {deployment.late.steps} "
            f"steps, which delays {delayed}; check each such rank's process, host and link to the service"
        )
    heat_stall = deployment.heat_stall
    if heat_stall.seconds > _SILENT_SECONDS and heat_stall.steps > one_in * limits.pending_steps:
        lines.append(
            f"no heat has been assembled for {heat_stall.seconds:.0f} s, although the ranks are running steps"
        )
    stall = deployment.decision_stall
    idle = deployment.paused or deployment.observed
    min_steps = _UNDECIDED_WINDOWS * limits.decision_steps
    if stall.seconds > _UNDECIDED_SECONDS and stall.steps > min_steps and not idle:
        reason = deployment.obstacle() or "steps are assembled too slowly"
        lines.append(
            f"no decision has been made for {stall.seconds:.0f} s, during which the ranks ran {stall.steps} steps: "
            f"{reason}"
        )
    return lines
