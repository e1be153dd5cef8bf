"""Invariants of a service, checked in the explored world at every offer and in every state."""

from __future__ import annotations

import numpy as np

from eplb_service.control.core.deployment import Deployment
from tests.control.core.explored_crew import OfferedPlan, Version, live_at, offer_of
from tests.control.core.explored_state import State
from tests.exploring import must


def check_offer(state: State, service: int, offered: OfferedPlan) -> None:
    """Check that a service may offer this plan."""
    must(state.open_plans[service] is None, "offered a plan while another was in progress")
    offer = offer_of(offered)
    live = state.services[service].live
    assert live is not None
    must(
        (offer.base_epoch, offer.base_digest) == (live.epoch, live.digest),
        "offered a plan for a different placement",
    )
    for agent in state.crew.ranks:
        if agent.service == service and agent.reported_version is not None:
            must(offered.term >= agent.term, "offered a plan to a rank that follows another service")
            rank_layout = live_at(agent.reported_version)
            must(rank_layout.epoch == offer.base_epoch, "offered a plan for an epoch that a rank has left")


def check_done(state: State, offered: OfferedPlan | None) -> None:
    """Check that the ranks carried out a plan that a service records as done."""
    assert offered is not None
    switched = sum(version.path.count(offered) for version in (state.crew.version, *state.past_versions))
    must(switched == len(offered.layers), "recorded a plan as done although the ranks did not carry it out")


def check_called_off(state: State, offered: OfferedPlan | None) -> None:
    """Check that no rank holds a plan that a service records as called off."""
    must(
        all(agent.held_plan != offered for agent in state.crew.ranks),
        "recorded a plan as ended although a rank still holds it",
    )


def check_state(state: State) -> None:
    """Check the invariants of every state."""
    for service, deployment in enumerate(state.services):
        _check_plan(state, service, deployment)
        _check_layout(state, deployment)
        _check_formings(state, service, deployment)
        _check_heat(state, service, deployment)


def _check_plan(state: State, service: int, deployment: Deployment) -> None:
    """Check that the current plan is the offered one and that its group still exists."""
    offered = state.open_plans[service]
    plan = deployment.plan
    group = deployment.group
    must((offered is None) == (plan is None), "the current plan is not the one that was offered")
    if offered is None or plan is None:
        return
    must(plan.decision is offer_of(offered).decision, "the current plan is not the one that was offered")
    must(plan.outcome is None, "a plan that has ended is still the current plan")
    must(group is not None and group.group_id == f"forming {offered.forming}", "a plan outlived its ranks")


def _check_layout(state: State, deployment: Deployment) -> None:
    """Check that the recorded layout is one that the ranks serve or have served."""
    live = deployment.live
    group = deployment.group
    if live is None or group is None:
        return
    version = state.version_of(group)
    must(live.epoch <= len(version.path), "records an epoch that the ranks have not reached")
    served = live_at(Version(version.forming, version.path[: live.epoch]))
    must(
        (live.digest, live.layer_epochs) == (served.digest, served.layer_epochs)
        and np.array_equal(live.log2phy_RLE, served.log2phy_RLE),
        "records a layout that the ranks never served",
    )


def _check_formings(state: State, service: int, deployment: Deployment) -> None:
    """Check that a service never mixes ranks from two incarnations of the group."""
    connected_ranks = {rank for rank, agent in enumerate(state.crew.ranks) if agent.service == service}
    if not connected_ranks:
        return
    group = deployment.group
    connected = {member.rank for member in deployment.connected}
    must(group is not None and connected_ranks <= connected, "lost a connected rank")
    assert group is not None
    is_current = group.group_id == f"forming {state.crew.version.forming}"
    must(is_current and group.shape.ranks == len(state.crew.ranks), "registered a rank in the wrong group")
    lingering = {rank for at, rank, _ in state.dead_streams if at == service}
    must(service not in state.squatted, "a client outside the group is registered alongside its ranks")
    must(connected <= connected_ranks | lingering, "lists a rank that has left as connected")


def _check_heat(state: State, service: int, deployment: Deployment) -> None:
    """Check that heat that a rank may still report is dropped or read under the placement it was counted under."""
    heat = deployment.heat
    version = state.crew.version
    for agent in state.crew.ranks:
        if heat is None or agent.service != service or agent.reported_version is None:
            continue
        for switched in range(len(agent.reported_version.path) + 1):
            counted = live_at(Version(version.forming, version.path[:switched]))
            placement = counted.placement
            cells_LRS = heat.placements.cells(counted.layer_epochs, placement.experts)
            first_L11 = placement.experts * np.arange(placement.layers)[:, None, None]
            counted_as_LRS = first_L11 + placement.phy2log_LRS
            right = cells_LRS is None or np.array_equal(cells_LRS, counted_as_LRS)
            must(right, "reads heat under a placement other than the one it was counted under")
