"""Ranks that form a group start from the experts that they hold.

If a rank does not fit the group, all ranks learn which rank it is.
"""

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


def _form_second_group() -> dict[str, Any]:
    """Form a second group after a switch. Epochs restart and the group number changes."""
    agent, layers, still = live.start(1)
    worst = live.drive(agent, layers, still, 40, live.offering(agent, {0: {0: live.target()}}), epoch=1)
    first_group = (agent.installed.epoch, agent.identity.group_id)
    agent.drain()
    agent.close()
    layers[0].rank_bound = True
    second = Agent.start(layers, dist.group.WORLD, live.settings())
    same = bool((second.installed.placement.phy2log_LRS[0] == live.target()).all())
    offered = live.offering(second, {0: {0: live.from_here(second, 5)}})
    worst = max(worst, live.drive(second, layers, still, 40, offered, epoch=1))
    return live.facts(
        second,
        worst,
        first=first_group,
        second=(second.installed.epoch, second.identity.group_id),
        same=same,
        bound=(agent.identity.shape.rank_bound, second.identity.shape.rank_bound),
    )


def test_a_new_group_starts_from_the_current_placement() -> None:
    facts = run_ranks(RANKS, _form_second_group)
    live.check_together(facts, epoch=1)
    for fact in facts:
        assert fact["same"]
        assert fact["first"][0] == fact["second"][0] == 1
        assert fact["first"][1] != fact["second"][1]
        assert fact["bound"] == (False, True)


def _fails_to_meet(mismatch: str) -> str:
    layers: list[Any] = live.layers_of(2 if "layers" in mismatch else 1, live.linear_RS(RANKS))
    for index, layer in enumerate(layers):
        layer.name = f"mlp.{index}" if "named" in mismatch else ""
    if dist.get_rank() == 1:
        if mismatch == "more layers":
            layers = live.layers_of(3, live.linear_RS(RANKS))
        elif mismatch in ("layers in another order", "named layers in another order"):
            layers.reverse()
        elif mismatch == "layers of one memory":
            layers[1].expert_weights = layers[0].expert_weights
        elif mismatch == "another expert":
            # Expert 1 is also on rank 0; rank 1 has loaded different weights for it.
            layers[0].w2_weight[int(layers[0].expert_map[1])] *= 2
        elif mismatch == "another protocol":
            rendezvous.PROTOCOL_VERSION += 1
        elif mismatch == "none":
            layers = []
        elif mismatch == "weights":
            layers[0].w2_weight = layers[0].w2_weight[:, :, :4].contiguous()
            layers[0].w13_weight = torch.cat([layers[0].w13_weight, layers[0].w13_weight[:, :4]], dim=1)
        elif mismatch == "table":
            layers[0].log2phy[0] = layers[0].log2phy[1]
        elif mismatch == "dealing":
            layers[0].log2phy = layers[0].log2phy.unsqueeze(1).repeat(1, 4)
        elif mismatch == "entries":
            layers[0].log2phy = layers[0].log2phy.unsqueeze(1).repeat(1, 65)
        elif mismatch == "host":
            layers[0].expert_weights = None
    settings = live.settings(transfer_backend="nccl" if mismatch == "backend" else "auto")
    with pytest.raises(RendezvousError) as error_info:
        Agent.start(layers, dist.group.WORLD, settings)
    return str(error_info.value)


@pytest.mark.parametrize(
    ("mismatch", "message"),
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
            "rank 1: log2phy must have shape [8], or [8, entries] with at most 64 entries; got [8, 65]",
        ),
        ("host", "rank 1: 'NoneType' object is not callable"),
        ("backend", "rank 0: transfer_backend nccl moves experts between cuda devices"),
    ],
)
def test_a_rank_that_does_not_fit_the_group_is_reported_to_all_ranks(mismatch: str, message: str) -> None:
    reported = run_ranks(RANKS, _fails_to_meet, mismatch)
    assert len(set(reported)) == 1
    assert message in reported[0]


def _meets_another_release(rank: int) -> str:
    """Return this rank's log lines when ``rank`` runs a different agent release."""
    handler = logging.handlers.BufferingHandler(1000)
    logging.getLogger("eplb.agent").addHandler(handler)
    if dist.get_rank() == rank:
        rendezvous.__version__ = "99.0"
    agent, _, _ = live.start(1)
    agent.close()
    return "\n".join(record.getMessage() for record in handler.buffer)


def test_every_rank_logs_the_releases_if_the_ranks_run_different_ones() -> None:
    logged = run_ranks(RANKS, _meets_another_release, 1)
    assert len(logged) == RANKS
    for text in logged:
        assert "the ranks run different agent releases" in text
        assert "99.0 on ranks 1" in text
        assert f"{__version__} on ranks 0, 2" in text
