"""Tests that all ranks stop before the next pass if one rank cannot install a committed layer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.agent import live
from tests.faults.serving import FAULTS
from tests.ranks import RankFailure, run_ranks
from worker_agent.swap import staging
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.group import AgentGroup

RANKS = 3


def _serve(how: str) -> tuple[str, int, float]:
    """Make the install on rank 1 fail.

    Return this rank's error, the number of passes that it has run, and the duration of its last pass.
    """
    agent, layers, still = live.start(1)
    offered = live.offering(agent, {1: {0: live.target()}}, pause=0.005)
    passes = 0
    began = 0.0

    def fail(*_: object) -> int:
        if "links break" in how:
            FAULTS["lose-votes"](agent)
        raise (KeyboardInterrupt if "interrupt" in how else MemoryError)("no memory on the device")

    if dist.get_rank() == 1:
        staging.copy_into = fail
    if "no failure is announced" in how:
        AgentGroup.fail = lambda self, reason: setattr(self, "failure", self.failure or reason)

    def between(step: int) -> None:
        nonlocal passes, began
        passes = step
        began = time.monotonic()
        offered(step)

    interrupted = "interrupt" in how and dist.get_rank() == 1
    with pytest.raises(KeyboardInterrupt if interrupted else FatalSwitchError) as fatal:
        live.drive(agent, layers, still, 200, between)
    took = time.monotonic() - began
    with pytest.raises(FatalSwitchError):
        agent.step()
    # The last rank to learn of the failure must still find the other ranks running.
    dist.barrier()
    return str(fatal.value), passes, took


BROKEN = ["its links break as well", "its links break and no failure is announced"]


@pytest.mark.parametrize("how", ["out of memory", *BROKEN, "no failure is announced", "an interrupt"])
def test_a_failed_install_on_one_rank_stops_every_rank_before_the_next_pass(how: str) -> None:
    results = run_ranks(RANKS, _serve, how)
    assert len({passes for _, passes, _ in results}) == 1
    assert "no memory on the device" in results[1][0]
    if how != "no failure is announced":
        assert all(
            "rank 1" in why and "no memory on the device" in why for why, _, _ in (results[0], results[2])
        )
    assert max(took for _, _, took in results) < 20


def _installs_a_damaged_expert() -> None:
    """Flip a bit on rank 1 between the check of the received experts and their install."""
    agent, layers, still = live.start(1)
    copy_into = staging.copy_into

    def copy(layer: Any, staged: Any, slots: Any, *tables: Any) -> int:
        staged[0][0].view(torch.int32).view(-1)[3] ^= 1
        return copy_into(layer, staged, slots, *tables)

    if dist.get_rank() == 1:
        staging.copy_into = copy
    live.drive(agent, layers, still, 400, live.offering(agent, {1: {0: live.target()}}, pause=0.005))


def test_damage_to_an_expert_during_its_install_is_fatal() -> None:
    """The other ranks are already in a pass with this rank, so their collectives fail when its process exits."""
    with pytest.raises(
        RankFailure, match=r"FatalSwitchError: rank 1: layer 0: the expert in slot \d .* its sender computed"
    ):
        run_ranks(RANKS, _installs_a_damaged_expert)
