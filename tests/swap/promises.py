"""Checks of the switch protocol's invariants in the explored world, at each action and in every state."""

from __future__ import annotations

from tests.exploring import must
from tests.swap.explored_state import RANKS, Running, State
from tests.swap.tags import TagPlan
from worker_agent.swap.machine import Commit, Progress, StartTransfer, SwitchState


def check_accepted(state: State, rank: int, plan: TagPlan, checked_for: int) -> None:
    """Check that a rank was right to accept a plan whose moves were checked against the placement ``checked_for``."""
    machine = state.machines[rank]
    base = (plan.base_epoch, plan.base_digest)
    must(
        checked_for == machine.installed.digest, "accepted moves that were not checked against its placement"
    )
    must(
        base == (machine.installed.epoch, machine.installed.digest),
        "accepted a plan for a different placement",
    )
    must(plan.leader_term >= state.terms[rank], "accepted a plan from an older term")
    must(machine.halted is None, "accepted a plan after it had halted")


def check_called(before: SwitchState, after: SwitchState, plan: TagPlan) -> None:
    """Check a rank that has received a call-off."""
    must(after.progress == before.progress, "changed its progress without a vote")
    holds = before.plan is not None and before.plan.plan_id == plan.plan_id
    must(
        after.called_off == (holds or before.called_off),
        "called off a plan that the service had not called off",
    )


def check_start(state: State, rank: int, action: StartTransfer, started: Running) -> None:
    """Check a rank that starts a transfer."""
    fits = len(started.layers) in (1, *range(1, state.scenario.rows + 1))
    must(fits, "began a transfer that does not fit in staging")
    must(state.transfers[rank] is None, "began a transfer while another was running")
    must(state.staged[rank] is None, "reused staging before the staged experts were committed")
    for lane, generation in state.dirty_lanes:
        late = lane == action.lane and generation < action.generation
        must(not late, "began a transfer on a lane that still carries late bytes")
    for transfer in (*state.transfers, *state.staged):
        same = transfer is None or transfer.generation != action.generation or transfer == started
        must(same, "ranks began different transfers with the same generation")


def check_commit(state: State, rank: int, action: Commit) -> None:
    """Check a rank that installs a part."""
    indices = tuple(layer.layer for layer in action.layers)
    tags = tuple(layer.phy2log_RS for layer in action.layers)
    staged = state.staged[rank]
    vote = state.vote
    must(vote is not None, "committed without a vote")
    for ballot in vote.ballots:
        must(ballot is not None and ballot.commits, "committed although a rank had not voted READY")
    must(staged is not None, "committed experts that were not staged")
    must(
        (staged.generation, staged.layers, staged.tags) == (action.generation, indices, tags),
        "committed the staged experts of a different transfer",
    )
    must(len(set(state.forwards)) == 1, "committed after a different forward pass than its peers")
    must(len(set(vote.truths)) == 1, "committed although its peers use a different placement")
    for running in state.transfers:
        reads = running is not None and set(running.layers) & set(indices)
        must(not reads, "overwrote sources that a rank was still sending")
    plan = next(plan for plan in state.scenario.plans if plan.plan_id == action.plan_id)
    begin = action.before.epoch - plan.base_epoch
    part = tuple(update.layer for update in plan.layers[begin : begin + len(indices)])
    must(part == indices, "committed layers out of order")
    epochs = [installed.epoch for installed in action.installed]
    must(
        epochs == list(range(action.before.epoch + 1, action.before.epoch + 1 + len(indices))),
        "committed layers whose epochs are not consecutive",
    )


def check_state(state: State) -> None:
    """Check the invariants that hold in every state."""
    faults = state.scenario.faults
    cause = faults.installs or faults.presumptions or len(set(state.scenario.starts)) > 1
    must(cause or not state.fatal, "stopped serving without a cause")
    for rank, machine in enumerate(state.machines):
        must(
            rank in state.fatal or state.weights[rank] == machine.installed.tags,
            "slots hold weights of experts other than those in the map",
        )
        has_plan = machine.plan is not None
        must(has_plan == (machine.progress != Progress.IDLE), "its progress does not match its plan")
        wishes = machine.abort_wish is not None or machine.called_off
        must(has_plan or not wishes, "asks to abort a plan that it no longer holds")
        if machine.progress == Progress.READY:
            must(state.staged[rank] is not None, "is READY although no experts are staged")
        vote = state.vote
        cast = vote.ballots[rank] if vote is not None and rank in vote.pending else None
        if cast is not None and cast.commits:
            plan = machine.plan
            kept = machine.progress == Progress.READY and plan is not None and plan.digest == cast.plan
            must(kept, "withdrew its READY ballot before the vote was counted")
    if state.vote is None:
        must(len(state.fatal) in (0, RANKS), "keeps serving although a rank could not install a layer")
    if state.vote is None and not state.fatal and len(set(state.scenario.starts)) == 1:
        served = {(machine.installed.epoch, machine.installed.tags) for machine in state.machines}
        must(len(served) == 1, f"ranks serve different placements: {sorted(served)}")
