"""How a demo's ranks come together with each other and with the service."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from worker_agent.agent import Agent
from worker_agent.demo.task import Task

_CONNECT_SECONDS = 30.0


@contextmanager
def joined(task: Task, rank: int) -> Iterator[dist.ProcessGroup]:
    """This process as a rank of the demo, for as long as the context lasts; a gloo group over all ranks."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.rendezvous}",
        rank=rank,
        world_size=task.ranks,
        timeout=timedelta(seconds=120),
    )
    yield dist.new_group(backend="gloo")
    dist.barrier()
    dist.destroy_process_group()


def await_service(agent: Agent) -> None:
    """A demo is to show balancing: wait for the service, where a real host would just begin."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while not agent.connected and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()
