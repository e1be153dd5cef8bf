"""Real ranks switch layers while serving: either all at the same step or none, and no output changes."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from eplb_core.placement import default_log2phy
from eplb_core.wire.agent import CallOff, PlanState, PlanStatus
from tests.agent import live
from tests.agent.live import RANKS
from tests.faults.serving import FAULTS, tensor_addresses
from tests.ranks import run_ranks
from tests.swap.carried import DeviceLikeLanes
from worker_agent.swap import reformation, rendezvous


def _switch_two_layers(dealing_width: int) -> dict[str, Any]:
    agent, layers, still = live.start(3, dealing_width)
    before = tensor_addresses(layers)
    noted: dict[int, Any] = {}
    for index, layer in enumerate(layers):
        layer.install_placement = partial(noted.__setitem__, index)
    targets = {layer: live.target(layer) for layer in (2, 0)}
    epochs: list[int] = []
    # The plan reaches the ranks at different steps.
    offered = live.offering(agent, {3 + 2 * agent.identity.rank: targets})

    def between(step: int) -> None:
        epochs.append(agent.installed.epoch)
        offered(step)

    worst = live.drive(agent, layers, still, 60, between, epoch=2)
    return live.facts(
        agent,
        worst,
        epochs=epochs,
        layer_epochs=agent.installed.layer_epochs,
        placement=agent.installed.placement.phy2log_LRS.tolist(),
        same_addresses=before == tensor_addresses(layers),
        stats=agent.stats,
        changed_tables=[bool((a.log2phy != b.log2phy).any()) for a, b in zip(layers, still, strict=True)],
        tables=[layer.log2phy.tolist() for layer in layers],
        targets={layer: target.tolist() for layer, target in targets.items()},
        noted={layer: placed_RS.tolist() for layer, placed_RS in noted.items()},
    )


@pytest.mark.parametrize("dealing_width", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_plan_switches_its_layers_on_all_ranks_at_the_same_step(dealing_width: int) -> None:
    facts = run_ranks(RANKS, _switch_two_layers, dealing_width)
    live.check_together(facts, epoch=2)
    for rank, fact in enumerate(facts):
        assert fact["epochs"] == facts[0]["epochs"]
        assert fact["layer_epochs"] == (2, 0, 1)
        assert fact["same_addresses"]
        assert fact["stats"].layers_switched == 2
        for layer, target in fact["targets"].items():
            assert fact["placement"][layer] == target
            tables_RE = default_log2phy(np.array(target, dtype=np.int32), live.EXPERTS, dealing_width)
            assert fact["tables"][layer] == tables_RE[rank].tolist()
        # Layers that define ``install_placement`` have been notified of the new placement.
        assert fact["noted"] == fact["targets"]
    assert sum(fact["stats"].experts_received for fact in facts) > 0
    assert any(any(fact["changed_tables"]) for fact in facts)


def _switch_a_deep_model(layer_count: int) -> dict[str, Any]:
    """Exchange four experts between ranks 0 and 1 in each layer, two in each direction."""
    agent, layers, still = live.start(layer_count)
    target_RS = live.linear_RS(RANKS)
    for expert, partner in ((4, 5), (3, 7)):
        target_RS[0, target_RS[0] == expert] = partner
        target_RS[1, target_RS[1] == partner] = expert
    plan = dict.fromkeys(range(layer_count), target_RS)
    worst = live.drive(agent, layers, still, 20, live.offering(agent, {1: plan}), layer_count)
    statuses = [message for message in live.waiting(agent) if isinstance(message, PlanStatus)]
    committed = [
        (status.step, status.layer, status.epoch)
        for status in statuses
        if status.state is PlanState.COMMITTED
    ]
    return live.facts(agent, worst, committed=committed, seconds=agent.stats.commit_seconds)


def test_a_plan_of_many_layers_is_committed_in_parts() -> None:
    """In each layer, a rank receives two experts, so staging for all slots of four layers has room for ten layers."""
    layers = 24
    facts = run_ranks(RANKS, _switch_a_deep_model, layers)
    live.check_together(facts, epoch=layers)
    for fact in facts:
        assert fact["committed"] == facts[0]["committed"]
        assert fact["seconds"] > 0
    steps = [step for step, _, _ in facts[0]["committed"]]
    assert [steps.count(step) for step in sorted(set(steps))] == [10, 10, 4]
    assert [epoch for _, _, epoch in facts[0]["committed"]] == list(range(1, layers + 1))
    passes = np.diff(sorted(set(steps)))
    assert (passes % 4 == 0).all(), (
        f"parts must be a multiple of four passes apart, one vote each; got {passes}"
    )


def _called_off(when: str) -> dict[str, Any]:
    """Offer a plan of three layers, then call off that plan, or an unknown one, on rank 1 only."""
    # Staging has no room for two layers, so layers are switched one at a time.
    agent, layers, still = live.start(3, vote_interval=2, staging_mib=0)
    called_at: list[int] = []
    next_offers: list[int] = []

    def between(step: int) -> None:
        if step == 2:
            live.offer(agent, {layer: live.target(1 + layer) for layer in range(3)})
        moments = {
            "at once": step == 2,
            "after a layer": agent.installed.epoch == 1,
            "of an unknown plan": step == 2,
        }
        if moments[when] and not called_at:
            called_at.append(agent.installed.epoch)
            if agent.identity.rank == 1:
                agent._stream.plans.put(CallOff(99 if when == "of an unknown plan" else 1))
        if called_at and step > 4 and agent._switch.state.plan is None and not next_offers:
            # All ranks drop the plan at the same step, so all of them can accept the next one.
            next_offers.append(agent.installed.epoch)
            live.offer(agent, {2: live.from_here(agent, 7, 2)}, plan_id=2)
        time.sleep(0.002)

    epoch = {"at once": 1, "after a layer": 2, "of an unknown plan": 4}[when]
    worst = live.drive(agent, layers, still, 60, between, epoch)
    messages = live.waiting(agent)
    states = [(message.plan_id, message.state) for message in messages if isinstance(message, PlanStatus)]
    return live.facts(agent, worst, states=states)


@pytest.mark.parametrize(
    "when", ["at once", pytest.param("after a layer", marks=pytest.mark.slow), "of an unknown plan"]
)
def test_a_call_off_that_reaches_one_rank_ends_the_plan_on_all_ranks(when: str) -> None:
    facts = run_ranks(RANKS, _called_off, when)
    live.check_together(facts)
    for rank, fact in enumerate(facts):
        first = [state for plan_id, state in fact["states"] if plan_id == 1]
        committed = first.count(PlanState.COMMITTED)
        assert fact["aborted"] == 0
        if when == "of an unknown plan":
            assert committed == 3
            assert ((99, PlanState.CALLED_OFF) in fact["states"]) == (rank == 1)
        else:
            assert first[-1] is PlanState.CALLED_OFF
            assert committed in ((0, 1) if when == "at once" else (1, 2))
            assert (2, PlanState.COMMITTED) in fact["states"]


def _one_ranks_transfer_fails(fault: str, device: bool) -> dict[str, Any]:
    if device:
        rendezvous.Lanes = DeviceLikeLanes
    agent, layers, still = live.start(1, verify_transfers=True, transfer_timeout_seconds=20)
    if agent.identity.rank == 0:
        FAULTS[fault](agent)
    between = live.planned_again(agent, live.target())
    worst = live.drive(agent, layers, still, 60, between, epoch=1)
    return live.facts(agent, worst, reasons=live.reasons(agent))


@pytest.mark.parametrize(
    ("fault", "device", "reason"),
    [
        ("fail-next-transfer", False, "no memory for staging"),
        ("fail-next-transfer", True, "no memory for staging"),
        ("corrupt-next-transfer", False, "has the checksum"),
    ],
)
def test_a_failed_transfer_aborts_the_plan_on_all_ranks_and_a_later_plan_succeeds(
    fault: str, device: bool, reason: str
) -> None:
    facts = run_ranks(RANKS, _one_ranks_transfer_fails, fault, device)
    live.check_together(facts, epoch=1)
    assert [fact["aborted"] for fact in facts] == [1] * RANKS
    assert any(reason in text for text in facts[0]["reasons"])


def _agent_breaks_on_one_rank(times: int) -> dict[str, Any]:
    """Make rank 1's heat recorder fail at ``times`` steps during a plan."""
    reformation._INITIAL_BACKOFF_SECONDS = 0.05
    agent, layers, still = live.start(1)
    record = agent._heat.step_done
    calls = 0
    errors = set()

    def fail(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if 4 <= calls < 4 + times:
            raise MemoryError("no memory for counts")
        record(*arguments)

    if agent.identity.rank == 1:
        agent._heat.step_done = fail

    def between(step: int) -> None:
        errors.add(agent._beat().error)
        if agent._switch.state.plan is None and agent.votes_lost is None and not agent.installed.epoch:
            live.offer(agent, {0: live.target()}, step)
        time.sleep(0.002)

    worst = live.drive(agent, layers, still, 60, between, epoch=0 if times > 1 else 1)
    return live.facts(agent, worst, errors=" | ".join(sorted(errors)))


@pytest.mark.parametrize("times", [1, 10**9])
def test_an_agent_error_pauses_balancing_but_not_the_model(times) -> None:
    facts = run_ranks(RANKS, _agent_breaks_on_one_rank, times)
    live.check_together(facts, epoch=1 if times == 1 else 0)
    assert "MemoryError: no memory for counts" in facts[1]["errors"]
    # A peer learns of the failure either during a vote or between two votes, and its message differs accordingly.
    assert any(reason in facts[0]["errors"] for reason in ("has no outcome", "has left the vote link"))
