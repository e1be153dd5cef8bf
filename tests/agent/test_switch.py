"""Real ranks switch layers while they serve, all at the same step or not at all, and no output changes."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from eplb_service.placement import dealt_log2phy, without_single_entries
from eplb_service.wire.heat import HeatReport
from tests.agent import live
from tests.agent.live import RANKS
from tests.ranks import run_ranks
from worker_agent.agent import Agent


def _addresses(layers: list[Any]) -> list[int]:
    tensors = [t for layer in layers for t in (*layer.expert_weights(), layer.expert_map, layer.log2phy)]
    return [tensor.data_ptr() for tensor in tensors]


def _switch_two_layers(dealing_width: int) -> dict[str, Any]:
    agent, layers, still = live.start(3, dealing_width)
    before = _addresses(layers)
    noted: dict[int, Any] = {}
    for index, layer in enumerate(layers):
        layer.install_placement = partial(noted.__setitem__, index)
    targets = {layer: live.target(layer) for layer in (2, 0)}
    seen: list[int] = []

    def between(step: int) -> None:
        seen.append(agent.installed.epoch)
        # The service's plan reaches the ranks at different steps.
        if step == 3 + 2 * agent.identity.rank:
            agent._stream.plans.put(live.plan_for(agent, targets))
        time.sleep(0.002)

    worst = live.drive(agent, layers, still, 60, between, epoch=2)
    # Slots hold what the placement names: each equals the never-switched copy of that expert on some rank.
    facts = {
        "worst": worst,
        "epochs": seen,
        "digest": agent.installed.digest,
        "layer_epochs": agent.installed.layer_epochs,
        "placement": agent.installed.placement.phy2log_LRS.tolist(),
        "same_addresses": before == _addresses(layers),
        "halted": agent.halted,
        "switched": agent.stats.layers_switched,
        "received": agent.stats.experts_received,
        "changed_tables": [
            not bool((a.log2phy == b.log2phy).all()) for a, b in zip(layers, still, strict=True)
        ],
        "tables": [layer.log2phy.tolist() for layer in layers],
        "targets": {layer: target.tolist() for layer, target in targets.items()},
        "noted": {layer: placed_RS.tolist() for layer, placed_RS in noted.items()},
    }
    agent.close()
    return facts


@pytest.mark.parametrize("dealing_width", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_plan_switches_its_layers_on_all_ranks_at_the_same_step(dealing_width: int) -> None:
    facts = run_ranks(RANKS, _switch_two_layers, dealing_width)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert facts[0]["epochs"][-1] == 2
    for rank, fact in enumerate(facts):
        assert fact["halted"] is None
        assert fact["epochs"] == facts[0]["epochs"]
        assert fact["digest"] == facts[0]["digest"]
        assert fact["layer_epochs"] == (2, 0, 1)
        assert fact["same_addresses"]
        assert fact["switched"] == 2
        for layer, target in fact["targets"].items():
            assert fact["placement"][layer] == target
            dealt_RED = dealt_log2phy(np.array(target, dtype=np.int32), live.EXPERTS, dealing_width)
            assert fact["tables"][layer] == without_single_entries(dealt_RED[rank]).tolist()
        # Layers that must know where all replicas are have been given it.
        assert fact["noted"] == fact["targets"]
    assert sum(fact["received"] for fact in facts) > 0
    assert any(any(fact["changed_tables"]) for fact in facts)


def _plan_reaches_some_ranks_only() -> dict[str, Any]:
    agent, layers, still = live.start(1, offer_deadline_steps=6)
    target = live.target()

    def between(step: int) -> None:
        if step == 2 and agent.identity.rank != 1:
            agent._stream.plans.put(live.plan_for(agent, {0: target}))
        if step == 30:
            agent._stream.plans.put(live.plan_for(agent, {0: target}, plan_id=2))
        time.sleep(0.002)

    worst = live.drive(agent, layers, still, 60, between, epoch=1)
    agent.close()
    return {
        "worst": worst,
        "aborted": agent.stats.plans_aborted,
        "epoch": agent.installed.epoch,
        "halted": agent.halted,
    }


def test_a_plan_that_not_all_ranks_hold_is_dropped_and_the_next_one_goes_through() -> None:
    facts = run_ranks(RANKS, _plan_reaches_some_ranks_only)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert [fact["aborted"] for fact in facts] == [1, 0, 1]
    assert [fact["epoch"] for fact in facts] == [1, 1, 1]
    assert [fact["halted"] for fact in facts] == [None] * RANKS


def _one_ranks_transfer_fails() -> dict[str, Any]:
    agent, layers, still = live.start(1, transfer_timeout_seconds=10)
    target = live.target()
    if agent.identity.rank == 2:
        live.fail_once_to_stage(agent)
    worst = live.drive(agent, layers, still, 60, live.planned_again(agent, target), epoch=1)
    agent.close()
    return {
        "worst": worst,
        "aborted": agent.stats.plans_aborted,
        "epoch": agent.installed.epoch,
        "halted": agent.halted,
    }


def test_a_failed_transfer_aborts_on_all_ranks_and_a_later_plan_uses_a_fresh_lane() -> None:
    facts = run_ranks(RANKS, _one_ranks_transfer_fails)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert [fact["aborted"] for fact in facts] == [1] * RANKS
    assert [fact["epoch"] for fact in facts] == [1] * RANKS
    assert [fact["halted"] for fact in facts] == [None] * RANKS


def _agent_breaks_on_one_rank() -> dict[str, Any]:
    agent, layers, still = live.start(1, offer_deadline_steps=6)
    target = live.target()

    def between(step: int) -> None:
        if step == 4 and agent.identity.rank == 1:
            agent._heat = None  # type: ignore[assignment]
        if step == 10:
            agent._stream.plans.put(live.plan_for(agent, {0: target}))
        time.sleep(0.002)

    worst = live.drive(agent, layers, still, 40, between)
    agent.close()
    return {"worst": worst, "epoch": agent.installed.epoch, "halted": agent.halted}


def test_an_agent_that_breaks_stops_balancing_but_not_the_model() -> None:
    facts = run_ranks(RANKS, _agent_breaks_on_one_rank)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert [fact["epoch"] for fact in facts] == [0] * RANKS
    assert "AttributeError" in facts[1]["halted"]
    assert facts[0]["halted"] is None


def _count_heat() -> dict[str, Any]:
    agent, layers, still = live.start(2, report_steps=4)
    target = live.target()

    def between(step: int) -> None:
        if step == 5:
            agent._stream.plans.put(live.plan_for(agent, {1: target}))
        time.sleep(0.002)

    live.drive(agent, layers, still, 40, between, epoch=1)
    segments: list[HeatReport] = []
    while isinstance(item := agent._outbox.take(timeout=0), HeatReport) or item is not None:
        if isinstance(item, HeatReport):
            segments.append(item)
    agent.close()
    return {"segments": segments, "lost": agent._heat.lost_steps}


def test_heat_is_counted_under_the_placement_that_served_it() -> None:
    facts = run_ranks(RANKS, _count_heat)
    assert [fact["lost"] for fact in facts] == [0] * RANKS
    cuts = [[(s.first_step, s.steps, s.layer_epochs) for s in fact["segments"]] for fact in facts]
    assert cuts[0] == cuts[1] == cuts[2]
    epochs = [epochs for _, _, epochs in cuts[0]]
    assert epochs[0] == (0, 0)
    assert epochs[-1] == (0, 1)
    for first, (start, length, _) in zip([c[0] for c in cuts[0]][1:], cuts[0], strict=False):
        assert first == start + length
    for parts in zip(*(fact["segments"] for fact in facts), strict=True):
        received = sum(part.slot_counts_TLS.sum(axis=2) for part in parts)
        sent = sum(part.source_counts_TLE.sum(axis=2) for part in parts)
        assert (received == sent).all()


def _unequal_layers() -> str:
    rank = dist.get_rank()
    layers = live.layers_of(1 + (rank == 1), live.linear_RS(RANKS))
    with pytest.raises(RuntimeError) as caught:
        Agent.start(layers, dist.group.WORLD, live.settings())
    return str(caught.value)


def test_ranks_that_do_not_fit_together_all_get_the_reason() -> None:
    reported = run_ranks(RANKS, _unequal_layers)
    assert reported == ["[layers, slots] differ: rank 0 has [1, 5], rank 1 has [2, 5]"] * RANKS
