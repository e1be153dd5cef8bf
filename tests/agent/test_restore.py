"""Ranks bring all experts back to where a host loads them: together or not at all, and no output changes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_service.placement import Placement
from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.agent import Agent, RestoreError

RANKS, LAYERS = 3, 2


def _moved(dealing_width: int = 1, **changes: Any) -> tuple[Agent, list[Any], list[Any], Placement]:
    """Ranks whose two layers have been switched twice: experts have left ranks and come back to other slots."""
    rank_RS = live.linear_RS(RANKS)
    layers, still = (
        live.layers_of(LAYERS, rank_RS, dealing_width=dealing_width),
        live.layers_of(LAYERS, rank_RS, dealing_width=dealing_width),
    )
    agent = Agent.start(layers, dist.group.WORLD, live.settings(**changes))
    first = agent.installed.placement
    for turn in (1, 2):
        targets = {
            layer: live.keep_staying_slots(
                agent.installed.placement.phy2log_LRS[layer], live.shuffled_RS(RANKS, seed=10 * turn + layer)
            )
            for layer in range(LAYERS)
        }
        agent._stream.plans.put(live.plan_for(agent, targets, plan_id=turn))
        live.drive(agent, layers, still, 20, lambda _: time.sleep(0.002), epoch=turn * LAYERS)
    return agent, layers, still, first


def _slots_changed_within_a_rank(agent: Agent, first: Placement) -> int:
    """How many experts are on the rank that they started on, in another slot."""
    changed = 0
    for old_RS, new_RS in zip(first.phy2log_LRS, agent.installed.placement.phy2log_LRS, strict=True):
        for old_S, new_S in zip(old_RS, new_RS, strict=True):
            changed += sum(
                int(expert in new_S and old_S[slot] != new_S[slot]) for slot, expert in enumerate(old_S)
            )
    return changed


def _restore(dealing_width: int) -> dict[str, Any]:
    agent, layers, still, first = _moved(dealing_width)
    facts: dict[str, Any] = {"within": _slots_changed_within_a_rank(agent, first)}
    # One more plan is on its way to two of the ranks.
    if agent.identity.rank:
        agent._stream.plans.put(live.plan_for(agent, {0: live.linear_RS(RANKS)}, plan_id=3))
    worst = live.drive(agent, layers, still, 3)
    agent.restore(first)
    facts["as_at_first"] = all(
        torch.equal(here, there)
        for layer, other in zip(layers, still, strict=True)
        for here, there in zip(
            (*layer.expert_weights(), layer.expert_map, layer.log2phy),
            (*other.expert_weights(), other.expert_map, other.log2phy),
            strict=True,
        )
    )
    agent.restore(first)  # nothing is left to be done
    worst = max(worst, live.drive(agent, layers, still, 5))
    facts |= {"epoch": agent.installed.epoch, "halted": agent.halted}
    agent.resume()
    agent._stream.plans.put(live.plan_for(agent, {1: live.shuffled_RS(RANKS, seed=7)}, plan_id=4))
    worst = max(worst, live.drive(agent, layers, still, 20, lambda _: time.sleep(0.002), facts["epoch"] + 1))
    facts |= {"worst": worst, "resumed": agent.installed.epoch - facts["epoch"]}
    agent.close()
    return facts


@pytest.mark.parametrize("dealing_width", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_expert_is_back_in_its_slot_and_balancing_goes_on(dealing_width: int) -> None:
    facts = run_ranks(RANKS, _restore, dealing_width)
    assert sum(fact["within"] for fact in facts) > 0
    for fact in facts:
        assert fact["as_at_first"]
        assert fact["epoch"] == 3 * LAYERS
        assert fact["halted"] is None
        assert fact["worst"] < 1e-5
        assert fact["resumed"] == 1


def _tried(agent: Agent, first: Placement) -> str:
    try:
        agent.restore(first)
    except RestoreError as error:
        return str(error)
    return ""


def _restore_where_a_transfer_fails() -> dict[str, Any]:
    agent, layers, still, first = _moved(transfer_timeout_seconds=10)
    if agent.identity.rank == 1:

        def no_memory(*_: Any) -> Any:
            raise MemoryError("no room for an expert")

        agent._switch.transfers.staging.reserve = no_memory  # type: ignore[method-assign]
    error = _tried(agent, first)
    agent.resume()
    facts = {"error": error, "epoch": agent.installed.epoch, "worst": live.drive(agent, layers, still, 10)}
    facts["digest"] = agent.installed.digest
    agent.close()
    return facts


def test_a_transfer_that_fails_on_one_rank_leaves_all_with_what_they_had() -> None:
    facts = run_ranks(RANKS, _restore_where_a_transfer_fails)
    for fact in facts:
        assert "could not be brought back" in fact["error"]
        assert fact["epoch"] == 2 * LAYERS
        assert fact["digest"] == facts[0]["digest"]
        assert fact["worst"] < 1e-5


def _restore_where_a_rank_has_halted() -> dict[str, Any]:
    agent, layers, still, first = _moved()
    if agent.identity.rank == 2:
        agent._switch.halt("the test wants it so")
    began = time.monotonic()
    error = _tried(agent, first)
    seconds = time.monotonic() - began
    worst = live.drive(agent, layers, still, 10)
    agent.close()
    same = np.array_equal(agent.installed.placement.phy2log_LRS, first.phy2log_LRS)
    return {"error": error, "seconds": seconds, "worst": worst, "same": same}


def test_a_rank_that_no_longer_takes_part_keeps_all_from_it() -> None:
    facts = run_ranks(RANKS, _restore_where_a_rank_has_halted)
    assert "the test wants it so" in facts[2]["error"]
    for fact in facts:
        assert "could not be brought back" in fact["error"]
        assert fact["seconds"] < 10
        assert fact["worst"] < 1e-5
        assert not fact["same"]
