"""What a service promises, checked on the explored world at every offer and in every state."""

from __future__ import annotations

import numpy as np

from eplb_service.control.core.deployment import Deployment
from tests.control.core.explored_crew import Given, Version, live_at, offer_of
from tests.control.core.explored_state import State
from tests.exploring import must


def check_offer(state: State, service: int, given: Given) -> None:
    """A service is about to send a plan."""
    must(state.open_plans[service] is None, "offered a plan while another was under way")
    offer = offer_of(given)
    live = state.services[service].live
    assert live is not None
    must(
        (offer.base_epoch, offer.base_digest) == (live.epoch, live.digest),
        "offered a plan for another placement",
    )
    for one in state.crew.ranks:
        if one.service == service and one.shown is not None:
            must(given.term >= one.term, "offered a plan to a rank that follows another service")
            shown = live_at(one.shown)
            must(shown.epoch == offer.base_epoch, "offered a plan under an epoch that a rank has left")


def check_done(state: State, given: Given | None) -> None:
    """A service takes a plan for carried out."""
    assert given is not None
    switched = sum(version.path.count(given) for version in (state.crew.version, *state.gone))
    must(switched == len(given.layers), "took a plan for done that was not carried out")


def check_called_off(state: State, given: Given | None) -> None:
    """Check that no rank holds a plan that a service records as called off."""
    must(all(one.held != given for one in state.crew.ranks), "took a plan for ended that a rank holds")


def check_state(state: State) -> None:
    """What must hold whatever has happened."""
    for service, deployment in enumerate(state.services):
        _check_plan(state, service, deployment)
        _check_believed(state, deployment)
        _check_formings(state, service, deployment)
        _check_heat(state, service, deployment)


def _check_plan(state: State, service: int, deployment: Deployment) -> None:
    """What is under way is what was offered, to the ranks that are there."""
    given, plan, group = state.open_plans[service], deployment.plan, deployment.group
    must((given is None) == (plan is None), "the plan under way is not the one that was offered")
    if given is None or plan is None:
        return
    must(plan.decision is offer_of(given).decision, "the plan under way is not the one that was offered")
    must(plan.outcome is None, "a plan that has ended is under way")
    must(group is not None and group.group_id == f"forming {given.forming}", "a plan outlived its ranks")


def _check_believed(state: State, deployment: Deployment) -> None:
    """What a service takes to be served, its ranks do serve, or did a moment ago."""
    live, group = deployment.live, deployment.group
    if live is None or group is None:
        return
    truth = state.truth_of(group)
    must(live.epoch <= len(truth.path), "believes more than the ranks did")
    served = live_at(Version(truth.forming, truth.path[: live.epoch]))
    must(
        (live.digest, live.layer_epochs) == (served.digest, served.layer_epochs)
        and np.array_equal(live.log2phy_RLE, served.log2phy_RLE),
        "believes what the ranks never served",
    )


def _check_formings(state: State, service: int, deployment: Deployment) -> None:
    """Ranks of two formings of the group are never taken for one."""
    here = {rank for rank, one in enumerate(state.crew.ranks) if one.service == service}
    if not here:
        return
    group, connected = deployment.group, {member.rank for member in deployment.connected}
    must(group is not None and here <= connected, "lost a rank that it talks to")
    assert group is not None
    ours = group.group_id == f"forming {state.crew.version.forming}"
    must(ours and group.shape.ranks == len(state.crew.ranks), "took a rank into the group of others")
    lingering = {rank for at, rank, _ in state.dead_streams if at == service}
    must(service not in state.squatted, "a stranger is there beside ranks")
    must(connected <= here | lingering, "takes a rank to be there that is gone")


def _check_heat(state: State, service: int, deployment: Deployment) -> None:
    """What a rank may have counted by now, and can report on its present stream, is read as it was counted, or not."""
    heat, version = deployment.heat, state.crew.version
    for one in state.crew.ranks:
        if heat is None or one.service != service or one.shown is None:
            continue
        for switched in range(len(one.shown.path) + 1):
            counted = live_at(Version(version.forming, version.path[:switched]))
            placement = counted.placement
            cells_LRS = heat.placements.cells(counted.layer_epochs, placement.experts)
            first_L11 = placement.experts * np.arange(placement.layers)[:, None, None]
            counted_as_LRS = first_L11 + placement.phy2log_LRS
            right = cells_LRS is None or np.array_equal(cells_LRS, counted_as_LRS)
            must(right, "reads heat under another placement than it was counted under")
