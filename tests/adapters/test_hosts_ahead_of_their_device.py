"""Real-adapter hosts that run ahead of their devices switch at the same pass, even if they miss calls."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.adapters import vllm_fakes as fakes
from tests.agent import live, queued_device
from tests.ranks import run_ranks
from worker_agent.swap import vote as vote_module
from worker_agent.swap.commit_register import FatalSwitchError

AHEAD = (2, 6)
"""Maximum number of passes that each rank's host queues ahead of its device."""
PASSES = 240
FAULT_AT = 80


class CheckedPasses:
    """Forward passes that check, on the device, that each rank's table points to slots with the right expert."""

    def __init__(self, state: Any, device: queued_device.DeviceQueue) -> None:
        self.wrong = 0
        self._state = state
        self._device = device
        self._group = dist.new_group(backend="gloo")

    def queue(self) -> None:
        """Queue one pass."""
        fakes.run_pass(self._state)
        for layer in range(fakes.LAYERS):
            self._device.put(lambda layer=layer: self._check(layer))

    def _check(self, layer: int) -> None:
        time.sleep(0.0005)
        experts_S = self._state.model.expert_weights[layer][0].held[:, 0].contiguous()
        all_RS = [torch.empty_like(experts_S) for _ in range(fakes.RANKS)]
        dist.all_gather(all_RS, experts_S, group=self._group)
        table_E = self._state.logical_to_physical_map.held[layer, :, 0]
        served_E = torch.cat(all_RS)[table_E]
        self.wrong += not torch.equal(served_E, torch.arange(fakes.EXPERTS) + 100.0 * layer)


def serve(fault: str | None) -> dict[str, Any]:
    """Run passes during many plans; inject the fault at one pass, on rank 1 or on every rank."""
    vote_module._SUSPICION_SECONDS = 0.5
    live.EXPERTS = fakes.EXPERTS
    device = queued_device.install()
    # Checksums would wait for the device, while the simulated device waits for its host's thread.
    fast = {"vote_interval": 2, "commit_timeout_seconds": 0.3, "verify_transfers": False}
    state, host = fakes.started(queued_device.QueuedTensor, **fast)
    rank = dist.get_rank()
    agent = host.agent
    queued = deque()
    passes = CheckedPasses(state, device)
    complaints = set()
    epochs = []
    for number in range(PASSES):
        passes.queue()
        calls = 1
        if number == FAULT_AT and rank == 1:
            calls = {"missed call": 0, "extra call": 2}.get(fault, 1)
        if number == FAULT_AT and fault == "counter reset":
            host._heat.passes.zero_()
        if number == FAULT_AT and fault == "corrupt table" and rank == 1:
            device.put(lambda: state.logical_to_physical_map.held[1, 3, 0].add_(1))
        try:
            for _ in range(calls):
                host.step(is_dummy=False)
        except FatalSwitchError as fatal:
            # Queue another pass, so that the peer's host does not wait for its device.
            passes.queue()
            return {"fatal": str(fatal)}
        if agent._switch.state.plan is None and number % 4 == 1:
            current_RS = agent.installed.placement.phy2log_LRS[0]
            live.offer(agent, {0: live.keep_staying_slots(current_RS, current_RS[::-1])}, number)
        complaints.add(agent._beat().error)
        epochs.append(agent.installed.epoch)
        queued.append(device.mark())
        if len(queued) > AHEAD[rank]:
            queued.popleft().wait()
    device.wait()
    agent.close()
    return {
        "wrong": passes.wrong,
        "switched": epochs[FAULT_AT - 1],
        "later": epochs[-1] - epochs[FAULT_AT + 20],
        "complaints": " | ".join(sorted(complaints)),
        "halted": agent.halted,
    }


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, marks=pytest.mark.slow),
        "missed call",
        pytest.param("extra call", marks=pytest.mark.slow),
        "counter reset",
        "corrupt table",
    ],
)
def test_no_pass_routes_to_a_slot_with_the_wrong_expert(fault):
    ranks = run_ranks(fakes.RANKS, serve, fault)
    if fault == "corrupt table":
        assert all(rank["fatal"].startswith("rank 1: layer 1: log2phy of expert 3 is") for rank in ranks)
        return
    assert [rank["wrong"] for rank in ranks] == [0, 0]
    assert [rank["halted"] for rank in ranks] == [None, None]
    assert min(rank["switched"] for rank in ranks) > 0
    # If few passes run in the meantime, the ranks agree on new numbers before any rank complains.
    complain = all("load_counter has decreased" in rank["complaints"] for rank in ranks)
    assert min(rank["later"] for rank in ranks) > 0 or (fault == "counter reset" and complain)
