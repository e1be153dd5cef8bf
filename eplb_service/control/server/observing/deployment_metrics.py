"""A deployment's state as gauges, brought up to date every second."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eplb_service.control.core.deployment_state import DeploymentState
from eplb_service.control.core.health import mean_measured_par, measured_par, problems, rank_loads
from eplb_service.control.server.observing.observer import Observer
from eplb_service.telemetry.metrics import Metrics

_LOAD_STEPS = 16
"""Newest steps of a rank's load: few, because this is done every second on the event loop."""
_RANKS_AT_A_TIME = 256


def reporting(deployment: DeploymentState, metrics: Metrics, observer: Observer) -> Iterator[None]:
    """Set the gauges of ``deployment`` to what is known now; what needs ranks is removed while none is connected.

    A part at a time, so that many ranks do not hold the event loop.
    """
    name, connected = deployment.name, deployment.connected
    metrics.agents.connected.labels(name).set(len(connected))
    metrics.agents.expected.labels(name).set(deployment.group.shape.ranks if deployment.group else 0)
    metrics.plans.paused.labels(name).set(deployment.paused)
    metrics.agents.halted.labels(name).set(sum(bool(member.error) for member in connected))
    metrics.agents.dropped_steps.labels(name).set(sum(member.dropped_steps for member in connected))
    metrics.agents.heat_one_in.labels(name).set(deployment.watches.shedding.one_in)
    metrics.plans.last_decision_age.labels(name).set(deployment.watches.undecided.seconds)
    metrics.service.problems.labels(name).set(len(problems(deployment)))
    if deployment.heat is not None:
        metrics.agents.empty_steps.labels(name).set(deployment.heat.empty_steps)
        metrics.agents.dummy_steps.labels(name).set(deployment.heat.dummy_steps)
    if deployment.live is not None:
        metrics.plans.epoch.labels(name).set(deployment.live.epoch)
    if not connected:
        metrics.forget_balance(name)
        return
    silent = [observer.silent_seconds(name, member.rank) or 0.0 for member in connected]
    metrics.agents.silent_seconds.labels(name).set(max(silent))
    staging = [member.staging_bytes for member in connected if member.staging_bytes is not None]
    rings = [member.ring_bytes for member in connected if member.ring_bytes is not None]
    metrics.agents.memory(name, max(staging, default=None), max(rings, default=None))
    if deployment.live is not None:
        yield
        _report_par(deployment, metrics)
        yield
        yield from _reporting_loads(deployment, metrics)


def _report_par(deployment: DeploymentState, metrics: Metrics) -> None:
    par_L = measured_par(deployment)
    metrics.balance.layer_pars(deployment.name, par_L.tolist(), deployment.planned_par)
    if mean_measured_par(par_L):
        metrics.balance.deployment_par_realised.labels(deployment.name).set(mean_measured_par(par_L))


def _reporting_loads(deployment: DeploymentState, metrics: Metrics) -> Iterator[None]:
    steps, loads_LR = rank_loads(deployment, _LOAD_STEPS)
    measured_L = loads_LR.any(axis=1) if steps else np.zeros(0, dtype=bool)
    if not measured_L.any():
        return
    for rank, load in enumerate(loads_LR[measured_L].mean(axis=0).tolist()):
        if rank % _RANKS_AT_A_TIME == 0:
            yield
        metrics.balance.rank_load.labels(deployment.name, str(rank)).set(load)
