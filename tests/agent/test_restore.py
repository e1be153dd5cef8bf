"""Either all ranks restore their experts to the initial slots or none does, and no output changes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core.placement import Placement
from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.agent import Agent, RestoreError

RANKS = 3
LAYERS = 2


def _moved(dealing_width: int = 1, **changes: Any) -> tuple[Agent, list[Any], list[Any], Placement]:
    """Switch two layers twice, so that some experts return to their initial ranks in different slots."""
    agent, layers, still = live.start(LAYERS, dealing_width, **changes)
    first = agent.installed.placement
    for turn in (1, 2):
        targets = {layer: live.from_here(agent, 10 * turn + layer, layer) for layer in range(LAYERS)}
        live.offer(agent, targets, plan_id=turn)
        live.drive(agent, layers, still, 20, lambda _: time.sleep(0.002), epoch=turn * LAYERS)
    return agent, layers, still, first


def _slots_changed_within_a_rank(agent: Agent, first: Placement) -> int:
    """Return the number of experts that are on their initial rank but in a different slot."""
    rows = (placement.phy2log_LRS.reshape(-1, live.SLOTS) for placement in (first, agent.installed.placement))
    return sum(
        int((np.isin(old_S, new_S) & (old_S != new_S)).sum()) for old_S, new_S in zip(*rows, strict=True)
    )


def _restore(dealing_width: int) -> dict[str, Any]:
    agent, layers, still, first = _moved(dealing_width)
    facts: dict[str, Any] = {"within": _slots_changed_within_a_rank(agent, first)}
    # A third plan has reached only two of the three ranks.
    if agent.identity.rank:
        live.offer(agent, {0: live.linear_RS(RANKS)}, plan_id=3)
    worst = live.drive(agent, layers, still, 3)
    agent.restore(first)
    facts["as_at_first"] = all(
        torch.equal(tensor, reference)
        for layer, untouched in zip(layers, still, strict=True)
        for tensor, reference in zip(
            (*layer.expert_weights(), layer.expert_map, layer.log2phy),
            (*untouched.expert_weights(), untouched.expert_map, untouched.log2phy),
            strict=True,
        )
    )
    agent.restore(first)  # A second restore has nothing to do.
    worst = max(worst, live.drive(agent, layers, still, 5))
    restored = agent.installed.epoch
    agent.resume()
    live.offer(agent, {1: live.shuffled_RS(RANKS, seed=7)}, plan_id=4)
    worst = max(worst, live.drive(agent, layers, still, 20, lambda _: time.sleep(0.002), restored + 1))
    return live.facts(agent, worst, **facts)


@pytest.mark.parametrize("dealing_width", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_restore_returns_every_expert_and_balancing_can_resume(dealing_width: int) -> None:
    facts = run_ranks(RANKS, _restore, dealing_width)
    assert sum(fact["within"] for fact in facts) > 0
    assert all(fact["as_at_first"] for fact in facts)
    live.check_together(facts, epoch=3 * LAYERS + 1)


def _failed_restore(fault: str) -> dict[str, Any]:
    agent, layers, still, first = _moved(transfer_timeout_seconds=10)
    if fault == "a transfer fails" and agent.identity.rank == 1:
        live.fail_once_to_stage(agent)
    if fault == "a rank has stopped voting" and agent.identity.rank == 2:
        agent._switch.stumble("stopped by the test")
    began = time.monotonic()
    with pytest.raises(RestoreError) as error:
        agent.restore(first)
    seconds = time.monotonic() - began
    agent.resume()
    return live.facts(agent, live.drive(agent, layers, still, 10), error=str(error.value), seconds=seconds)


@pytest.mark.parametrize(
    ("fault", "reason"), [("a transfer fails", ""), ("a rank has stopped voting", "stopped by the test")]
)
def test_a_restore_that_fails_on_one_rank_changes_no_rank(fault: str, reason: str) -> None:
    facts = run_ranks(RANKS, _failed_restore, fault)
    assert reason in facts[2]["error"]
    for fact in facts:
        assert fact["halted"] is None
        assert "could not restore" in fact["error"]
        assert not reason or fact["seconds"] < 10
        assert fact["worst"] < 1e-5
        assert (fact["epoch"], fact["digest"]) == (2 * LAYERS, facts[0]["digest"])
