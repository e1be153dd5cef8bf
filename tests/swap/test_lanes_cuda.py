"""On GPUs experts arrive whole too, from device to device and by way of the host."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.swap.carried import RANKS
from tests.swap.test_lanes import exchange_experts
from worker_agent.swap.lane.backend import Backend, choose_backend
from worker_agent.swap.lane.lanes import Lanes

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="there is no GPU here")


def _over(backend: Backend) -> None:
    where = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    exchange_experts(lambda group: Lanes(group, backend, where, timedelta(seconds=60)), where)


def test_experts_go_by_way_of_the_host_where_gloo_is_asked_for() -> None:
    run_ranks(RANKS, _over, choose_backend("gloo", "cuda"))


@pytest.mark.skipif(GPUS < RANKS, reason="NCCL takes one rank per GPU")
def test_experts_go_from_gpu_to_gpu() -> None:
    run_ranks(RANKS, _over, choose_backend("auto", "cuda"), deadline=120)
