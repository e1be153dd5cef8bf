"""Ranks that form a group start from what they hold, and all hear which of them does not fit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.agent import live
from tests.agent.live import RANKS
from tests.ranks import run_ranks
from worker_agent.agent import Agent
from worker_agent.swap.group import RendezvousError


def _met_again(size: int) -> dict[str, Any]:
    """Another group of ranks, another placement: nothing of the first remains."""
    agent, layers, still = live.start(1)
    agent._stream.plans.put(live.plan_for(agent, {0: live.target()}))
    worst = live.drive(agent, layers, still, 40, lambda _: time.sleep(0.005), epoch=1)
    first = (agent.installed.epoch, agent.identity.group_id)
    agent.drain()
    agent.close()
    layers[0].rank_bound = True
    again = Agent.start(layers, dist.group.WORLD, live.settings())
    same = bool((again.installed.placement.phy2log_LRS[0] == live.target()).all())
    again._stream.plans.put(
        live.plan_for(again, {0: live.keep_staying_slots(live.target(), live.shuffled_RS(RANKS, 5))})
    )
    worst = max(worst, live.drive(again, layers, still, 40, lambda _: time.sleep(0.005), epoch=1))
    facts = {
        "worst": worst,
        "first": first,
        "second": (again.installed.epoch, again.identity.group_id),
        "same": same,
        "bound": (agent.identity.rank_bound, again.identity.rank_bound),
    }
    again.close()
    return facts


def test_ranks_that_meet_again_start_from_what_they_hold() -> None:
    facts = run_ranks(RANKS, _met_again, RANKS)
    for fact in facts:
        assert fact["worst"] < 1e-5
        assert fact["same"]
        assert fact["first"][0] == fact["second"][0] == 1
        assert fact["first"][1] != fact["second"][1]
        assert fact["bound"] == (False, True)


def _fails_to_meet(what: str) -> str:
    layers: list[Any] = live.layers_of(1, live.linear_RS(RANKS))
    if dist.get_rank() == 1:
        if what == "weights":
            layers[0].w2_weight = layers[0].w2_weight[:, :, :4].contiguous()
            layers[0].w13_weight = torch.cat([layers[0].w13_weight, layers[0].w13_weight[:, :4]], dim=1)
        elif what == "table":
            layers[0].log2phy[0] = layers[0].log2phy[1]
        elif what == "dealing":
            layers[0].log2phy = layers[0].log2phy.unsqueeze(1).repeat(1, 4)
        elif what == "entries":
            layers[0].log2phy = layers[0].log2phy.unsqueeze(1).repeat(1, 65)
        else:
            layers[0].expert_weights = None
    with pytest.raises(RendezvousError) as caught:
        Agent.start(layers, dist.group.WORLD, live.settings())
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("weights", "expert weights of layer 0 differ"),
        ("table", "rank 1: layer 0: log2phy of rank 1: expert 0 points to slot"),
        ("dealing", "width differ: rank 0 has 1, rank 1 has 4"),
        ("entries", "rank 1: log2phy has the shape [8], or [8, entries] with at most 64; got [8, 65]"),
        ("host", "rank 1: 'NoneType' object is not callable"),
    ],
)
def test_one_rank_that_does_not_fit_is_reported_to_all(what: str, said: str) -> None:
    reported = run_ranks(RANKS, _fails_to_meet, what)
    assert len(set(reported)) == 1
    assert said in reported[0]
