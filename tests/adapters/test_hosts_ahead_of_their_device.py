"""Real adapters' hosts that run ahead of their device switch between the same two passes, whatever calls they miss."""

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
"""Passes that each rank's host is ahead of its device at most."""
PASSES, FAULT_AT = 240, 80


class Pass:
    """Checks on the device, in one pass after another, that each rank's table leads to slots that hold the expert."""

    def __init__(self, state: Any, device: queued_device.DeviceQueue) -> None:
        self.wrong = 0
        self._state, self._device, self._group = state, device, dist.new_group(backend="gloo")

    def queue(self) -> None:
        """Queue one."""
        fakes.run_pass(self._state)
        for layer in range(fakes.LAYERS):
            self._device.put(lambda layer=layer: self._check(layer))

    def _check(self, layer: int) -> None:
        time.sleep(0.0005)
        mine_S = self._state.model.expert_weights[layer][0].held[:, 0].contiguous()
        all_RS = [torch.empty_like(mine_S) for _ in range(fakes.RANKS)]
        dist.all_gather(all_RS, mine_S, group=self._group)
        table_E = self._state.logical_to_physical_map.held[layer, :, 0]
        served_E = torch.cat(all_RS)[table_E]
        self.wrong += not torch.equal(served_E, torch.arange(fakes.EXPERTS) + 100.0 * layer)


def serve(fault: str | None) -> dict[str, Any]:
    """Serve passes while plans come; rank 1, or every rank, does as the ``fault`` has it at one pass."""
    vote_module._SUSPICION_SECONDS = 0.5
    live.EXPERTS = fakes.EXPERTS
    device = queued_device.install()
    # Checksums wait for the device, and this one for its host's thread.
    fast = {"vote_interval": 2, "commit_timeout_seconds": 0.3, "verify_transfers": False}
    state, host = fakes.started(queued_device.QueuedTensor, **fast)
    rank, agent, under_way = dist.get_rank(), host.agent, deque()
    made, complaints, epochs = Pass(state, device), set(), []
    for number in range(PASSES):
        made.queue()
        calls = 1
        if number == FAULT_AT and rank == 1:
            calls = {"a call missed": 0, "a call too many": 2}.get(fault, 1)
        if number == FAULT_AT and fault == "the count begins again":
            host._heat.passes.zero_()
        if number == FAULT_AT and fault == "a table that is another" and rank == 1:
            device.put(lambda: state.logical_to_physical_map.held[1, 3, 0].add_(1))
        try:
            for _ in range(calls):
                host.step(is_dummy=False)
        except FatalSwitchError as fatal:
            # The other host is not to wait for its device before it hears of it.
            made.queue()
            return {"fatal": str(fatal)}
        if agent._switch.state.plan is None and number % 4 == 1:
            here_RS = agent.installed.placement.phy2log_LRS[0]
            live.offer(agent, {0: live.keep_staying_slots(here_RS, here_RS[::-1])}, number)
        complaints.add(agent._beat().error)
        epochs.append(agent.installed.epoch)
        under_way.append(device.mark())
        if len(under_way) > AHEAD[rank]:
            under_way.popleft().wait()
    device.wait()
    agent.close()
    return {
        "wrong": made.wrong,
        "switched": epochs[FAULT_AT - 1],
        "later": epochs[-1] - epochs[FAULT_AT + 20],
        "complaints": " | ".join(sorted(complaints)),
        "halted": agent.halted,
    }


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, marks=pytest.mark.slow),
        "a call missed",
        pytest.param("a call too many", marks=pytest.mark.slow),
        "the count begins again",
        "a table that is another",
    ],
)
def test_no_pass_routes_to_weights_that_are_not_there(fault):
    ranks = run_ranks(fakes.RANKS, serve, fault)
    if fault == "a table that is another":
        assert all(one["fatal"].startswith("rank 1: layer 1: log2phy of expert 3 is") for one in ranks)
        return
    assert [one["wrong"] for one in ranks] == [0, 0]
    assert [one["halted"] for one in ranks] == [None, None]
    assert min(one["switched"] for one in ranks) > 0
    # Where few passes are made meanwhile, the ranks have agreed on other numbers before anybody has to complain.
    complain = all("load_counter has gone back" in one["complaints"] for one in ranks)
    assert min(one["later"] for one in ranks) > 0 or (fault == "the count begins again" and complain)
