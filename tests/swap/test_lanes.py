"""What carries experts follows from where they are, and whatever it is, they arrive whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.agent import live
from tests.ranks import run_ranks
from tests.swap.carried import HERE, RANKS, DeviceLikeLanes, PlainLayer, order
from worker_agent.swap import transfer
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.lane import Deadline, Lanes, Parcel, choose_backend
from worker_agent.swap.transfer import ByteBudget, TransferWorker

# Which library


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "npu", "xpu"])
def test_the_device_chooses_the_library(device_type: str) -> None:
    library: Any = {"cuda": "nccl", "npu": "hccl"}.get(device_type, "gloo")
    assert choose_backend("auto", device_type) == choose_backend(library, device_type) == library
    assert choose_backend("gloo", device_type) == "gloo"


@pytest.mark.parametrize(
    ("asked", "device_type", "reached"),
    [("nccl", "npu", "cuda"), ("hccl", "cuda", "npu"), ("nccl", "cpu", "cuda")],
)
def test_a_library_that_cannot_reach_the_experts_is_refused(asked, device_type, reached) -> None:
    with pytest.raises(
        ValueError, match=f"between {reached} devices, but they are on {device_type} here; set it to auto"
    ):
        choose_backend(asked, device_type)


# Experts arrive


MOVES = [(2, 0, 0, 2, 0), (0, 1, 1, 0, 0), (0, 3, 2, 1, 0), (1, 2, 2, 3, 0)]
"""A ring and one more: source rank and slot, destination rank and slot, expert."""


def exchange_experts(make: Callable[[AgentGroup], Lanes], where: torch.device = HERE) -> None:
    """Two transfers over ``RANKS`` ranks, with checksums and odd chunks; what is staged is what its source holds."""
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    layer = PlainLayer(group.rank, where)
    every: list[Any] = [None] * group.size
    dist.all_gather_object(every, [weight.cpu() for weight in layer.expert_weights()])
    lanes = make(group)
    lanes.open_first()
    transfer._CHUNK_BYTES = 17
    settings = live.settings(transfer_timeout_seconds=20, verify_transfers=True)
    budget = ByteBudget(1 << 20)
    budget.refill()
    worker = TransferWorker(lanes, settings, budget)
    for generation in (1, 2):
        worker.start(order(generation, *MOVES), [layer])
        while (result := worker.poll()) is None:
            time.sleep(0.001)
        assert result.error is None, result.error
        incoming = [move for move in MOVES if move[2] == group.rank]
        assert result.layers[0].slots == [slot for _, _, _, slot, _ in incoming]
        for tensor, staged in enumerate(result.layers[0].staged):
            assert staged.device.type == where.type
            for row, (source, slot, _, _, _) in enumerate(incoming):
                assert torch.equal(staged[row].cpu(), every[source][tensor][slot])
    worker.close()
    dist.barrier()


def _over(backend: str, kind: str) -> None:
    if kind == "like a device":
        exchange_experts(lambda group: DeviceLikeLanes(group, backend, HERE, timedelta(seconds=20)))
        return
    where = HERE if kind == "cpu" else torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    exchange_experts(lambda group: Lanes(group, backend, where, timedelta(seconds=60)), where)


@pytest.mark.parametrize(
    ("asked", "kind", "gpus"),
    [("auto", "cpu", 0), ("gloo", "like a device", 0), ("gloo", "cuda", 1), ("auto", "cuda", RANKS)],
)
def test_experts_arrive_whole_over_every_kind_of_lane(asked: Any, kind: str, gpus: int) -> None:
    """On GPUs by way of the host where gloo is asked for, else from device to device: NCCL takes a rank per GPU."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"there are fewer than {gpus} GPUs here")
    run_ranks(RANKS, _over, choose_backend(asked, "cpu" if kind != "cuda" else kind), kind)


def _apart() -> tuple[str, float]:
    """Ranks 0 and 1 exchange experts of other sizes; return the error that each gets."""
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    lanes = Lanes(group, "gloo", HERE, timedelta(seconds=20))
    lanes.open_first()
    lane, size = lanes.lane(0), 64 + 32 * group.rank
    began, reported = time.monotonic(), ""
    try:
        parcels = [[Parcel(1 - group.rank, torch.zeros(size, dtype=torch.uint8))] for _ in range(2)]
        lane.exchange(parcels[0], parcels[1], Deadline(20))
    except (ValueError, RuntimeError) as error:
        reported = str(error)
    lanes.retire()
    return reported, time.monotonic() - began


def test_experts_of_other_sizes_are_an_error_on_both_ranks_and_end_no_process() -> None:
    (first, _), (second, _) = run_ranks(2, _apart)
    assert first.startswith(
        "rank 1 sends 96 bytes, this rank expects 64: their experts differ in dtype or shape"
    )
    assert second.startswith("rank 0 sends 64 bytes, this rank expects 96")


def _late() -> float:
    """Delay rank 1 by half a second; return the seconds for which the exchange reports the link busy."""
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    lanes = Lanes(group, "gloo", HERE, timedelta(seconds=20))
    lanes.open_first()
    parcels = [[Parcel(1 - group.rank, torch.zeros(64, dtype=torch.uint8))] for _ in range(2)]
    time.sleep(0.5 * group.rank)
    seconds = lanes.lane(0).exchange(*parcels, Deadline(20))
    dist.barrier()
    lanes.retire()
    return seconds


def test_a_wait_for_a_peer_does_not_count_as_time_on_the_link() -> None:
    """Otherwise each rank's pause would count as link time on its peer and lengthen the peer's pause."""
    assert max(run_ranks(2, _late)) < 0.4
