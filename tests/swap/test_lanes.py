"""Tests for choosing a device's transfer library, and for transfers over every kind of lane."""

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
from tests.swap.carried import CPU, RANKS, DeviceLikeLanes, PlainLayer, order
from worker_agent.swap import transfer
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.lane import Deadline, Lanes, Parcel, choose_backend
from worker_agent.swap.transfer import ByteBudget, TransferWorker


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "npu", "xpu"])
def test_the_device_type_selects_the_library(device_type: str) -> None:
    library: Any = {"cuda": "nccl", "npu": "hccl"}.get(device_type, "gloo")
    assert choose_backend("auto", device_type) == choose_backend(library, device_type) == library
    assert choose_backend("gloo", device_type) == "gloo"


@pytest.mark.parametrize(
    ("backend", "device_type", "supported"),
    [("nccl", "npu", "cuda"), ("hccl", "cuda", "npu"), ("nccl", "cpu", "cuda")],
)
def test_a_library_for_a_different_device_type_is_rejected(backend, device_type, supported) -> None:
    with pytest.raises(
        ValueError,
        match=f"between {supported} devices, but the experts are on {device_type} here; set transfer_backend to auto",
    ):
        choose_backend(backend, device_type)


MOVES = [(2, 0, 0, 2, 0), (0, 1, 1, 0, 0), (0, 3, 2, 1, 0), (1, 2, 2, 3, 0)]
"""A ring of moves, plus one further move. Columns: source rank and slot, destination rank and slot, expert."""


def exchange_experts(make_lanes: Callable[[AgentGroup], Lanes], device: torch.device = CPU) -> None:
    """Run two transfers with checksums and chunks of odd size, and check the staged experts against their sources."""
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    layer = PlainLayer(group.rank, device)
    weights_by_rank: list[Any] = [None] * group.size
    dist.all_gather_object(weights_by_rank, [weight.cpu() for weight in layer.expert_weights()])
    lanes = make_lanes(group)
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
            assert staged.device.type == device.type
            for row, (source, slot, _, _, _) in enumerate(incoming):
                assert torch.equal(staged[row].cpu(), weights_by_rank[source][tensor][slot])
    worker.close()
    dist.barrier()


def _exchange_over(backend: str, kind: str) -> None:
    if kind == "like a device":
        exchange_experts(lambda group: DeviceLikeLanes(group, backend, CPU, timedelta(seconds=20)))
        return
    device = CPU if kind == "cpu" else torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    exchange_experts(lambda group: Lanes(group, backend, device, timedelta(seconds=60)), device)


@pytest.mark.parametrize(
    ("backend", "kind", "gpus"),
    [("auto", "cpu", 0), ("gloo", "like a device", 0), ("gloo", "cuda", 1), ("auto", "cuda", RANKS)],
)
def test_experts_arrive_intact_over_every_kind_of_lane(backend: Any, kind: str, gpus: int) -> None:
    """On GPUs, gloo copies experts through host memory, whereas NCCL sends them directly. NCCL needs a GPU per rank."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"this machine has fewer than {gpus} GPUs")
    run_ranks(RANKS, _exchange_over, choose_backend(backend, "cpu" if kind != "cuda" else kind), kind)


def _mismatched_sizes() -> tuple[str, float]:
    """Exchange parcels of sizes that the ranks disagree on; return this rank's error and the elapsed seconds."""
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    lanes = Lanes(group, "gloo", CPU, timedelta(seconds=20))
    lanes.open_first()
    lane = lanes.lane(0)
    size = 64 + 32 * group.rank
    began = time.monotonic()
    error_text = ""
    try:
        parcels = [[Parcel(1 - group.rank, torch.zeros(size, dtype=torch.uint8))] for _ in range(2)]
        lane.exchange(parcels[0], parcels[1], Deadline(20))
    except (ValueError, RuntimeError) as error:
        error_text = str(error)
    lanes.retire()
    return error_text, time.monotonic() - began


def test_experts_of_different_sizes_raise_an_error_on_both_ranks() -> None:
    (first, _), (second, _) = run_ranks(2, _mismatched_sizes)
    assert first.startswith(
        "expected 64 bytes from rank 1, but it announced 96: the experts of the two ranks differ in dtype or shape"
    )
    assert second.startswith("expected 96 bytes from rank 0, but it announced 64")


def _late() -> float:
    """Delay rank 1 by half a second; return the link time that the exchange reports, in seconds."""
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    lanes = Lanes(group, "gloo", CPU, timedelta(seconds=20))
    lanes.open_first()
    parcels = [[Parcel(1 - group.rank, torch.zeros(64, dtype=torch.uint8))] for _ in range(2)]
    time.sleep(0.5 * group.rank)
    seconds = lanes.lane(0).exchange(*parcels, Deadline(20))
    dist.barrier()
    lanes.retire()
    return seconds


def test_waiting_for_a_peer_does_not_count_as_time_on_the_link() -> None:
    """Otherwise, a rank's pause would count as link time on its peer and lengthen the peer's pause."""
    assert max(run_ranks(2, _late)) < 0.4
