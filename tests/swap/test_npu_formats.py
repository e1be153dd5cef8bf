"""Experts in the NPU's own formats arrive intact, although torch_npu sends such memory only in one piece."""

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
from tests.swap.carried import HERE, order
from worker_agent.swap import lane as lane_module
from worker_agent.swap.checksum import checksum, device_sum
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.lane import MAX_LOST_LANES, Deadline, Lanes, Parcel, _DeviceLane
from worker_agent.swap.transfer import ByteBudget, TransferWorker

HIDDEN = 7168
INTERMEDIATE = 2048
"""DeepSeek-V3's W8A8 experts take 44 MB each. The larger tensor would take seven messages."""
W13 = (HIDDEN, 2 * INTERMEDIATE)
W2 = (INTERMEDIATE, HIDDEN)
MOVES = [(0, 0, 1, 1, 0), (1, 0, 0, 1, 1)]


class QuantisedLayer:
    """Two slots of W8A8 experts in vLLM-Ascend's layout: lists of NZ tensors, and ordered scales."""

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
    """Exchange an expert between two ranks; return how the copy differs from its source, and the number of meetings."""
    npu_formats.install()
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    make = npu_formats.FakeHcclLanes if backend == "hccl" else Lanes
    lanes = make(group, "gloo", HERE, timedelta(seconds=60))
    lanes.open_first()
    layer = QuantisedLayer(group.rank)
    theirs = QuantisedLayer(1 - group.rank).expert_weights()
    meetings = []
    lane = lanes.lane(0)
    host = lane._handshake if isinstance(lane, _DeviceLane) else lane
    meet = host.meet
    host.meet = lambda *arguments: (meetings.append(1), meet(*arguments))
    worker = TransferWorker(lanes, live.settings(transfer_timeout_seconds=60), ByteBudget(None))
    worker.start(order(1, *MOVES), [layer])
    while (result := worker.poll()) is None:
        time.sleep(0.001)
    alike = [
        torch.equal(rows[0], source[0]) for rows, source in zip(result.layers[0].staged, theirs, strict=True)
    ]
    formats = [npu_formats.format_of(rows[0]) for rows in result.layers[0].staged]
    worker.close()
    dist.barrier()
    return {
        "error": result.error,
        "alike": alike,
        "formats": formats,
        "meetings": len(meetings),
        "sums": len(result.layers[0].sums),
    }


@pytest.mark.parametrize("backend", ["hccl", "gloo"])
def test_deepseek_s_quantised_experts_arrive_whole_and_verified(backend: str) -> None:
    formats = [npu_formats.NZ, npu_formats.NZ, npu_formats.ND, npu_formats.ND]
    whole = {"error": None, "alike": [True] * 4, "formats": formats, "meetings": 1, "sums": 1}
    assert run_ranks(2, moved, backend) == [whole] * 2


def _in_the_middle() -> str:
    npu_formats.install()
    lane: Any = object.__new__(_DeviceLane)
    lane._group = npu_formats.FakeHccl
    try:
        lane._at_storage_start("out", Parcel(1, npu_formats.tagged(torch.zeros(4, 4))[1:], 7))
    except ValueError as error:
        return str(error)
    return ""


def test_a_piece_of_memory_in_blocks_is_never_copied_for_sending() -> None:
    assert run_ranks(1, _in_the_middle)[0].startswith("expert 7 in the NPU's format 29 begins in the middle")


@pytest.mark.parametrize("size", [1, 4, 4096, (1 << 22) + 8])
def test_a_device_s_checksum_sees_every_changed_and_every_moved_byte(size: int) -> None:
    torch.manual_seed(size)
    held = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)
    first = int(device_sum([held[:-1].clone()]))
    assert int(device_sum([held[1:].clone().copy_(held[:-1])])) == first
    for place in {0, size // 2, size - 1}:
        changed = held[:-1].clone()
        changed[place] ^= 128
        assert int(device_sum([changed])) != first
    if size > 1:
        assert int(device_sum([held[:-1].flip(0)])) != first
    # A slot may start at any byte of its tensor.
    shifted = torch.cat([held[:1], held[:-1]])[1:]
    assert int(device_sum([shifted])) == first
    assert checksum([held[:-1]]) == checksum([held[:-1].clone()])


def test_lanes_that_timed_out_on_a_device_are_counted_and_then_no_more_are_opened(monkeypatch) -> None:
    monkeypatch.setattr(lane_module, "_LOST_LANES", [None] * MAX_LOST_LANES)
    lanes: Any = object.__new__(Lanes)
    lanes._open, lanes._backend = None, "hccl"
    with pytest.raises(RuntimeError, match="balancing has stopped: 2 transfers timed out on the device"):
        lanes.lane(3)


def test_transfers_leave_the_link_to_the_model_for_the_rest_of_the_time() -> None:
    budget = ByteBudget(None, share=0.25)
    began = time.monotonic()
    budget.rest(0.02, 1000, longest=5.0)
    assert 0.05 < time.monotonic() - began < 1.0
    began = time.monotonic()
    budget.rest(0.02, 1000, longest=0.001)
    budget.open()
    budget.rest(1.0, 1000, longest=5.0)
    assert time.monotonic() - began < 0.5, "the model makes no passes that could be slowed"
    budget.refill()
    ByteBudget(1, share=0.25).rest(1.0, 1000, longest=5.0)
    assert time.monotonic() - began < 0.5
    Deadline(1.0).remaining()
