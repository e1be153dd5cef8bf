"""Transfers of experts in the NPU's private formats, whose tensors torch_npu sends only as whole storages."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.agent import live
from tests.ranks import run_ranks
from tests.swap import npu_formats
from tests.swap.carried import CPU, order
from worker_agent.swap import lane as lane_module
from worker_agent.swap.checksum import checksum, device_sum
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.lane import MAX_LOST_LANES, Deadline, Lanes, Parcel, _DeviceLane
from worker_agent.swap.transfer import ByteBudget, TransferWorker

HIDDEN = 7168
INTERMEDIATE = 2048
"""A DeepSeek-V3 expert in W8A8 takes 44 MB. Split into chunks, its larger tensor would take seven messages."""
W13 = (HIDDEN, 2 * INTERMEDIATE)
W2 = (INTERMEDIATE, HIDDEN)
MOVES = [(0, 0, 1, 1, 0), (1, 0, 0, 1, 1)]


class QuantisedLayer:
    """Layer with two slots of W8A8 experts, stored as in vLLM-Ascend: lists of NZ tensors, and scales in ND format."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        self._weights = [
            [npu_formats.tagged(torch.randint(-128, 128, W13, dtype=torch.int8)) for _ in range(2)],
            [npu_formats.tagged(torch.randint(-128, 128, W2, dtype=torch.int8)) for _ in range(2)],
            [torch.rand(2 * INTERMEDIATE) for _ in range(2)],
            [torch.rand(HIDDEN).to(torch.bfloat16) for _ in range(2)],
        ]

    def expert_weights(self) -> list[list[torch.Tensor]]:
        return self._weights


def moved(backend: str) -> dict[str, Any]:
    """Exchange experts between two ranks, compare them with their sources, and count the handshakes."""
    npu_formats.install()
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    lanes_type = npu_formats.FakeHcclLanes if backend == "hccl" else Lanes
    lanes = lanes_type(group, "gloo", CPU, timedelta(seconds=60))
    lanes.open_first()
    layer = QuantisedLayer(group.rank)
    peer_weights = QuantisedLayer(1 - group.rank).expert_weights()
    handshakes = []
    lane = lanes.lane(0)
    host = lane._handshake if isinstance(lane, _DeviceLane) else lane
    meet = host.meet
    host.meet = lambda *arguments: (handshakes.append(1), meet(*arguments))
    worker = TransferWorker(lanes, live.settings(transfer_timeout_seconds=60), ByteBudget(None))
    worker.start(order(1, *MOVES), [layer])
    while (result := worker.poll()) is None:
        time.sleep(0.001)
    equal = [
        torch.equal(rows[0], source[0])
        for rows, source in zip(result.layers[0].staged, peer_weights, strict=True)
    ]
    formats = [npu_formats.format_of(rows[0]) for rows in result.layers[0].staged]
    worker.close()
    dist.barrier()
    return {
        "error": result.error,
        "equal": equal,
        "formats": formats,
        "handshakes": len(handshakes),
        "sums": len(result.layers[0].sums),
    }


@pytest.mark.parametrize("backend", ["hccl", "gloo"])
def test_quantised_deepseek_experts_arrive_intact_and_are_verified(backend: str) -> None:
    formats = [npu_formats.NZ, npu_formats.NZ, npu_formats.ND, npu_formats.ND]
    expected = {"error": None, "equal": [True] * 4, "formats": formats, "handshakes": 1, "sums": 1}
    assert run_ranks(2, moved, backend) == [expected] * 2


def _send_from_the_middle() -> str:
    npu_formats.install()
    lane: Any = object.__new__(_DeviceLane)
    lane._group = npu_formats.FakeHccl
    try:
        lane._at_storage_start("out", Parcel(1, npu_formats.tagged(torch.zeros(4, 4))[1:], 7))
    except ValueError as error:
        return str(error)
    return ""


def test_a_tensor_in_a_block_format_is_rejected_if_it_starts_inside_its_storage() -> None:
    assert run_ranks(1, _send_from_the_middle)[0].startswith(
        "expert 7 in the NPU's format 29 begins in the middle"
    )


@pytest.mark.parametrize("size", [1, 4, 4096, (1 << 22) + 8])
def test_the_device_checksum_detects_changed_and_reordered_bytes(size: int) -> None:
    torch.manual_seed(size)
    random_bytes = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)
    first = int(device_sum([random_bytes[:-1].clone()]))
    assert int(device_sum([random_bytes[1:].clone().copy_(random_bytes[:-1])])) == first
    for position in {0, size // 2, size - 1}:
        changed = random_bytes[:-1].clone()
        changed[position] ^= 128
        assert int(device_sum([changed])) != first
    if size > 1:
        assert int(device_sum([random_bytes[:-1].flip(0)])) != first
    # A slot may start at any byte of its tensor.
    shifted = torch.cat([random_bytes[:1], random_bytes[:-1]])[1:]
    assert int(device_sum([shifted])) == first
    assert checksum([random_bytes[:-1]]) == checksum([random_bytes[:-1].clone()])


def test_no_lane_is_opened_after_two_transfers_timed_out_on_the_device(monkeypatch) -> None:
    monkeypatch.setattr(lane_module, "_LOST_LANES", [None] * MAX_LOST_LANES)
    lanes: Any = object.__new__(Lanes)
    lanes._open = None
    lanes._backend = "hccl"
    with pytest.raises(RuntimeError, match="balancing has stopped: 2 transfers timed out on the device"):
        lanes.lane(3)


def test_transfers_pause_to_stay_within_their_share_of_the_link() -> None:
    budget = ByteBudget(None, share=0.25)
    began = time.monotonic()
    budget.rest(0.02, 1000, longest=5.0)
    assert 0.05 < time.monotonic() - began < 1.0
    began = time.monotonic()
    budget.rest(0.02, 1000, longest=0.001)
    budget.open()
    budget.rest(1.0, 1000, longest=5.0)
    assert time.monotonic() - began < 0.5, (
        "paused although the model runs no forward passes that the transfer could slow down"
    )
    budget.refill()
    ByteBudget(1, share=0.25).rest(1.0, 1000, longest=5.0)
    assert time.monotonic() - began < 0.5
    Deadline(1.0).remaining()
