"""Ranks that form a group start from what they hold, and all hear which of them does not fit."""

from __future__ import annotations

import logging.handlers
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eplb_core import __version__
from tests.agent import live
from tests.agent.live import RANKS
from tests.ranks import run_ranks
from worker_agent.agent import Agent
from worker_agent.swap import rendezvous
from worker_agent.swap.group import RendezvousError


def _met_again() -> dict[str, Any]:
    """Another group of ranks, another placement: nothing of the first remains."""
    agent, layers, still = live.start(1)
    worst = live.drive(agent, layers, still, 40, live.offering(agent, {0: {0: live.target()}}), epoch=1)
    first = (agent.installed.epoch, agent.identity.group_id)
    agent.drain()
    agent.close()
    layers[0].rank_bound = True
    again = Agent.start(layers, dist.group.WORLD, live.settings())
    same = bool((again.installed.placement.phy2log_LRS[0] == live.target()).all())
    offered = live.offering(again, {0: {0: live.from_here(again, 5)}})
    worst = max(worst, live.drive(again, layers, still, 40, offered, epoch=1))
    return live.facts(
        again,
        worst,
        first=first,
        second=(again.installed.epoch, again.identity.group_id),
        same=same,
        bound=(agent.identity.shape.rank_bound, again.identity.shape.rank_bound),
    )


def test_ranks_that_meet_again_start_from_what_they_hold() -> None:
    facts = run_ranks(RANKS, _met_again)
    live.check_together(facts, epoch=1)
    for fact in facts:
        assert fact["same"]
        assert fact["first"][0] == fact["second"][0] == 1
        assert fact["first"][1] != fact["second"][1]
        assert fact["bound"] == (False, True)


def _fails_to_meet(what: str) -> str:
    layers: list[Any] = live.layers_of(2 if "layers" in what else 1, live.linear_RS(RANKS))
    for index, layer in enumerate(layers):
        layer.name = f"mlp.{index}" if "named" in what else ""
    if dist.get_rank() == 1:
        if what == "more layers":
            layers = live.layers_of(3, live.linear_RS(RANKS))
        elif what in ("layers in another order", "named layers in another order"):
            layers.reverse()
        elif what == "layers of one memory":
            layers[1].expert_weights = layers[0].expert_weights
        elif what == "another expert":
            # Expert 1 is on rank 0 as well; rank 1 has loaded something else for it.
            layers[0].w2_weight[int(layers[0].expert_map[1])] *= 2
        elif what == "another protocol":
            rendezvous.PROTOCOL_VERSION += 1
        elif what == "none":
            layers = []
        elif what == "weights":
            layers[0].w2_weight = layers[0].w2_weight[:, :, :4].contiguous()
            layers[0].w13_weight = torch.cat([layers[0].w13_weight, layers[0].w13_weight[:, :4]], dim=1)
        elif what == "table":
            layers[0].log2phy[0] = layers[0].log2phy[1]
        elif what == "dealing":
            layers[0].log2phy = layers[0].log2phy.unsqueeze(1).repeat(1, 4)
        elif what == "entries":
            layers[0].log2phy = layers[0].log2phy.unsqueeze(1).repeat(1, 65)
        elif what == "host":
            layers[0].expert_weights = None
    settings = live.settings(transfer_backend="nccl" if what == "backend" else "auto")
    with pytest.raises(RendezvousError) as caught:
        Agent.start(layers, dist.group.WORLD, settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("more layers", "layers differ: rank 0 has 2, rank 1 has 3"),
        ("layers in another order", "layer 0: ranks 0 and 1 hold different weights of expert"),
        ("named layers in another order", "names of layers differ: rank 0 has ['mlp.0', 'mlp.1']"),
        ("layers of one memory", "rank 1: layer 0 and layer 1 share the memory of their experts"),
        ("another expert", "layer 0: ranks 0 and 1 hold different weights of expert 1"),
        ("another protocol", "protocol version differ: rank 0 has"),
        ("none", "rank 1: there are no MoE layers to balance"),
        ("weights", "expert weights of layer 0 differ"),
        ("table", "rank 1: layer 0: log2phy of rank 1: expert 0 points to slot"),
        ("dealing", "width differ: rank 0 has 1, rank 1 has 4"),
        (
            "entries",
            "rank 1: log2phy must have the shape [8], or [8, entries] with at most 64 entries; got [8, 65]",
        ),
        ("host", "rank 1: 'NoneType' object is not callable"),
        ("backend", "rank 0: transfer_backend nccl moves experts between cuda devices"),
    ],
)
def test_one_rank_that_does_not_fit_is_reported_to_all(what: str, said: str) -> None:
    reported = run_ranks(RANKS, _fails_to_meet, what)
    assert len(set(reported)) == 1
    assert said in reported[0]


def _meets_another_release(rank: int) -> str:
    """Return what the engine's log says where this rank runs another release of the agent."""
    handler = logging.handlers.BufferingHandler(1000)
    logging.getLogger("eplb.agent").addHandler(handler)
    if dist.get_rank() == rank:
        rendezvous.__version__ = "99.0"
    agent, _, _ = live.start(1)
    agent.close()
    return "\n".join(record.getMessage() for record in handler.buffer)


def test_ranks_of_a_mixed_group_are_named_on_all() -> None:
    logged = run_ranks(RANKS, _meets_another_release, 1)
    assert len(logged) == RANKS
    for text in logged:
        assert "the ranks run different releases of the agent" in text
        assert "99.0 on ranks 1" in text
        assert f"{__version__} on ranks 0, 2" in text
