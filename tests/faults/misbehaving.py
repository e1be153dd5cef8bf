"""Ranks that undergo one fault after another. After each fault, layers must switch again, and outputs must not change.

All ranks run the same experiments in the same order. ``EXPERIMENTS`` defines the faults of each rank, and a test runs
``live_through_all`` on its ranks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.agent import live
from tests.agent.queued_device import Passes
from tests.faults.listening import knock, listening
from tests.faults.serving import FAULTS, Sample
from worker_agent.swap import staging, vote
from worker_agent.swap.vote import Voter

VOTE_TIMEOUT = 2.0
COMMIT_TIMEOUT = 0.5
_MOST_SECONDS = 150.0
_SWITCHES = 2
_FEWEST_PASSES = 16


class Host:
    """Host of one rank's model. It may miss or repeat its calls to the rank's agent.

    ``misses`` and ``doubles`` count the next calls that the host skips and makes twice, respectively. ``ahead`` has
    the same meaning as in ``Passes``.
    """

    def __init__(self, history: Path, ahead: Sequence[int]) -> None:
        vote._PROVEN_PASSES = 16
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.misses = self.doubles = 0
        self._passes = Passes(ahead)
        deadlines = {"vote_timeout_seconds": VOTE_TIMEOUT, "commit_timeout_seconds": COMMIT_TIMEOUT}
        plan_settings = {
            "transfer_timeout_seconds": 3.0,
            "offer_deadline_steps": 16,
            "verify_transfers": True,
        }
        self.agent, self.layers, self.still = live.start(
            1, place=self._passes.live, history=history, **deadlines, **plan_settings
        )
        self._generator = torch.Generator().manual_seed(self.rank)
        self._longest = self._worst = 0.0

    def live_through(self, fault: Callable[[Host], None]) -> dict[str, Any]:
        """Inject the fault and serve until layers have switched again.

        Return facts such as the number of switches and the duration of the longest call in seconds.
        """
        began = time.monotonic()
        epoch = self.agent.installed.epoch
        fewest = _FEWEST_PASSES
        self._longest = self._worst = 0.0
        fault(self)
        passes_follow = True
        while passes_follow:
            done = self.agent.installed.epoch >= epoch + _SWITCHES and fewest <= 0
            passes_follow = self._passes.run(
                self._forward, not done and time.monotonic() - began < _MOST_SECONDS
            )
            fewest -= 1
            self._offer()
            self._call()
        self._passes.end()
        # If a rank missed the last call, it would be at a different epoch from the other ranks until its next call.
        self.misses = self.doubles = 0
        switched = self.agent.installed.epoch - epoch
        return live.facts_so_far(self.agent, self._worst, switched=switched, longest=self._longest)

    def _forward(self) -> None:
        hidden_TH = torch.randn(3 + self.rank, live.HIDDEN, generator=self._generator)
        order_TE = torch.rand(3 + self.rank, live.EXPERTS, generator=self._generator).argsort(dim=1)
        difference = live.difference(self.layers, self.still, hidden_TH, order_TE[:, : live.TOP_K])
        self._worst = max(self._worst, difference)
        time.sleep(0.002)

    def _offer(self) -> None:
        installed = self.agent.installed
        if self.agent._switch.state.plan is None and self.agent.votes_lost is None:
            target_RS = live.from_here(self.agent, installed.epoch)
            live.offer(self.agent, {0: target_RS}, installed.epoch + 1)

    def _call(self) -> None:
        if self.misses:
            self.misses -= 1
            return
        calls = 2 if self.doubles else 1
        self.doubles = max(0, self.doubles - 1)
        for _ in range(calls):
            began = time.monotonic()
            self.agent.step()
            self._longest = max(self._longest, time.monotonic() - began)


def _nothing(_: Host) -> None:
    pass


def _on(rank: int, fault: Callable[[Host], None]) -> Callable[[Host], None]:
    return lambda host: fault(host) if host.rank == rank else None


def _each(*faults: Callable[[Host], None]) -> Callable[[Host], None]:
    return lambda host: faults[host.rank](host)


def _calls(*, missed: int = 0, doubled: int = 0) -> Callable[[Host], None]:
    return lambda host: host.__dict__.update(misses=missed, doubles=doubled)


def _own(fault: str) -> Callable[[Host], None]:
    return lambda host: FAULTS[fault](host.agent)


def _before_the_confirmation(do: Callable[[Host], None]) -> Callable[[Host], None]:
    """Run ``do`` once, just before the ranks confirm that they are all at the same step boundary for a commit."""
    return lambda host: live.before_next_call(Voter, "_all_are_at", lambda: do(host))


def _in_the_install(do: Callable[[Host], None]) -> Callable[[Host], None]:
    """Run ``do`` once, just before the rank installs a layer."""
    return lambda host: live.before_next_call(staging, "copy_into", lambda: do(host))


def _sleeps(seconds: float) -> Callable[[Host], None]:
    return lambda _: time.sleep(seconds)


def _freezes(seconds: float) -> Callable[[Host], None]:
    """Stop all threads of the process, including the ones that reply to its peers."""
    command = "kill -STOP {0}; sleep {1}; kill -CONT {0}"

    def freeze(_: Host) -> None:
        subprocess.Popen(["/bin/sh", "-c", command.format(os.getpid(), seconds)])
        time.sleep(0.2)

    return freeze


def _a_stranger_knocks(host: Host) -> None:
    """Send garbage to every rank's socket, and well-formed messages that are signed with the wrong key."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for address in host.agent._switch._group.peers._addresses.values():
            for size in (0, 1, 32, 48, 1400, 60_000):
                for _ in range(50):
                    stranger.sendto(os.urandom(size), address)
            stranger.sendto(os.urandom(32) + b"q" + bytes(16) + b"frank 0: serve no more", address)


def _a_stranger_connects(host: Host) -> None:
    """Connect to every port that the process listens on.

    The model's ports accept the connections; the vote and lane ports do not.
    """
    resources_before = Sample.now()
    assert {address for address, _ in listening()} == {"127.0.0.1"}, (
        "expected listeners only on 127.0.0.1, because all ranks are on one node"
    )
    lanes = host.agent._switch._lanes
    before = lanes._open
    _, closed = knock()
    # Only the vote port is closed if there is no lane, for example after a transfer that timed out on a busy machine.
    assert closed >= (2 if before is not None and lanes._open is before else 1)
    assert Sample.now().megabytes - resources_before.megabytes < 32


def _drains_and_resumes(host: Host) -> None:
    host.agent.drain("the host sleeps")
    host.agent.resume()


def _offers_another_plan(host: Host) -> None:
    live.offer(host.agent, {0: live.from_here(host.agent, 77)}, 9_000_000)


EXPERIMENTS: dict[str, Callable[[Host], None]] = {
    "no fault": _nothing,
    "a missed call": _on(1, _calls(missed=1)),
    "five calls missed in a row": _on(1, _calls(missed=5)),
    "rank 0 misses a call": _on(0, _calls(missed=1)),
    "a doubled call": _on(1, _calls(doubled=1)),
    "ten doubled calls": _on(2, _calls(doubled=10)),
    "one rank misses calls, another repeats them": _each(_nothing, _calls(missed=3), _calls(doubled=3)),
    "all ranks miss different numbers of calls": _each(*(_calls(missed=rank) for rank in range(3))),
    "a rank seconds late at a commit boundary": _on(1, _before_the_confirmation(_sleeps(2.0))),
    "rank 0 seconds late at a commit boundary": _on(0, _before_the_confirmation(_sleeps(2.0))),
    "an install that takes seconds": _on(1, _in_the_install(_sleeps(1.5))),
    "a stall past the vote deadline": _on(1, _own("stall")),
    "rank 0 stalls past the vote deadline": _on(0, _own("stall")),
    "a lost link": _on(1, _own("lose-votes")),
    "rank 0 loses its links": _on(0, _own("lose-votes")),
    "all ranks lose their links": _own("lose-votes"),
    "links lost at a commit boundary": _on(2, _before_the_confirmation(_own("lose-votes"))),
    "links lost during an install": _on(1, _in_the_install(_own("lose-votes"))),
    "a frozen rank": _on(1, _freezes(3.0)),
    "rank 0 frozen": _on(0, _freezes(3.0)),
    "rank 0 frozen at a commit boundary": _on(0, _before_the_confirmation(_freezes(3.0))),
    "rank 0 frozen during an install": _on(0, _in_the_install(_freezes(3.0))),
    "a frozen rank and lost links": _each(_freezes(3.0), _own("lose-votes"), _nothing),
    "a stranger at the agents' port": _on(0, _a_stranger_knocks),
    "a stranger at the links' ports": _on(1, _a_stranger_connects),
    "a drain and a resume": _drains_and_resumes,
    "a plan that only one rank receives": _on(2, _offers_another_plan),
    "a transfer that fails": _on(1, _own("fail-next-transfer")),
    "an expert that arrives damaged": _own("corrupt-next-transfer"),
}


def live_through_all(history: str, ahead: Sequence[int]) -> dict[str, Any]:
    """Run all experiments on these ranks, one after the other."""
    host = Host(Path(history), ahead)
    survived = {name: host.live_through(fault) for name, fault in EXPERIMENTS.items()}
    host.agent.drain("the test is over")
    host.agent.close()
    return survived
