"""One rank in a network namespace: ``python -m tests.e2e.network_rank RANK GROUP SERVICE DATA_HOST WRONG...``.

The ranks first try to connect while rank 1 uses each of the ``WRONG`` data hosts. They then connect with the right
hosts and serve until a layer has switched. The last line of the output is JSON: the error for each wrong host, and the
facts from ``regrouped_host``.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from eplb_lab.layer import ExpertParallelMoE, MoEShape, seeded_experts
from tests.agent import live
from tests.e2e import regrouped_host
from worker_agent.agent import Agent
from worker_agent.settings import AgentSettings
from worker_agent.swap.group import RendezvousError

RANKS = 2
SLOTS = 5


def layers_of_rank() -> list[ExpertParallelMoE]:
    """Return this rank's part of two layers on two ranks, with two redundant slots."""
    shapes = [MoEShape(layer, live.EXPERTS, live.HIDDEN, live.INTERMEDIATE) for layer in range(2)]
    phy2log_RS = Placement.linear(1, live.EXPERTS, RANKS, SLOTS).phy2log_LRS[0]
    return [
        ExpertParallelMoE(shape, phy2log_RS, seeded_experts(shape), ep_group=dist.group.WORLD)
        for shape in shapes
    ]


def complaint(layers: list[ExpertParallelMoE], settings: AgentSettings) -> tuple[str, float]:
    """Return the error that the ranks raise when they fail to connect, and the seconds until they raise it."""
    began = time.monotonic()
    try:
        Agent.start(layers, dist.group.WORLD, settings).close()
    except RendezvousError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def main(rank: int, group: str, service: str, data_host: str, wrong: list[str]) -> None:
    """Connect the ranks, serve, and print the facts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{group}", rank=rank, world_size=RANKS)
    layers = layers_of_rank()
    errors = {}
    for host in wrong:
        settings = live.settings(node=f"node-{rank}", data_host=host if rank == 1 else data_host)
        errors[host] = complaint(layers, settings)
    os.environ["EPLB_AGENT_DATA_HOST"] = data_host
    facts = regrouped_host.balanced(layers, dist.group.WORLD, service, node=f"node-{rank}")
    print(json.dumps({"errors": errors, **facts}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5], sys.argv[5:])
