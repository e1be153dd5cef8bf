"""Ranks that live through one fault after another: after each they must switch layers again, with no output changed.

All ranks run the same experiments in the same order. What happens to whom is in ``EXPERIMENTS``; ``live_through`` is
what a test runs on its ranks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.agent import live
from tests.faults.listening import knock, listening
from tests.faults.serving import FAULTS, Sample
from worker_agent.agent import Agent
from worker_agent.swap import layer_commit, vote_schedule
from worker_agent.swap.vote import BallotBox

VOTE_TIMEOUT, COMMIT_TIMEOUT = 2.0, 0.5
_MOST_SECONDS = 150.0
_SWITCHES = 2
_FEWEST_PASSES = 16


@dataclass(frozen=True)
class Survived:
    """What one rank saw of one experiment: ``seconds`` until layers were switched again, ``longest`` of its calls."""

    worst: float
    switched: int
    epoch: int
    digest: int
    seconds: float
    longest: float
    halted: str | None


class Host:
    """One rank's model and agent, and a host that calls the agent more or less as it should.

    ``misses`` are calls that it will not make, ``doubles`` those that it will make twice.
    """

    def __init__(self, history: Path) -> None:
        vote_schedule._PROVEN_VOTES = 4
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        first_RS = live.linear_RS(self.ranks)
        self.layers, self.still = live.layers_of(1, first_RS), live.layers_of(1, first_RS)
        self.misses = self.doubles = 0
        settings = live.settings(
            vote_timeout_seconds=VOTE_TIMEOUT,
            commit_timeout_seconds=COMMIT_TIMEOUT,
            transfer_timeout_seconds=3.0,
            offer_deadline_steps=16,
            verify_transfers=True,
            history=history,
        )
        self.agent = Agent.start(self.layers, dist.group.WORLD, settings)
        self._generator = torch.Generator().manual_seed(self.rank)
        self._longest = 0.0

    def live_through(self, fault: Callable[[Host], None]) -> Survived:
        """Let it happen, and serve until layers are switched again."""
        began, epoch, worst, passes = time.monotonic(), self.agent.installed.epoch, 0.0, 0
        self._longest = 0.0
        fault(self)
        going = torch.ones(1)
        while going.item():
            worst = max(worst, self._forward())
            passes += 1
            self._offer()
            self._call()
            done = self.agent.installed.epoch >= epoch + _SWITCHES and passes >= _FEWEST_PASSES
            over = time.monotonic() - began > _MOST_SECONDS
            going.fill_(0.0 if done or over else 1.0)
            dist.all_reduce(going, op=dist.ReduceOp.MAX)
            time.sleep(0.002)
        # A rank that misses the last call would serve another epoch than the others until its next one.
        self.misses = self.doubles = 0
        installed = self.agent.installed
        return Survived(
            worst,
            installed.epoch - epoch,
            installed.epoch,
            installed.digest,
            time.monotonic() - began,
            self._longest,
            self.agent.halted,
        )

    def _forward(self) -> float:
        tokens = 3 + self.rank
        hidden_TH = torch.randn(tokens, live.HIDDEN, generator=self._generator)
        order_TE = torch.rand(tokens, live.EXPERTS, generator=self._generator).argsort(dim=1)
        weights_TK = torch.full((tokens, live.TOP_K), 1 / live.TOP_K)
        outputs = [
            layer[0](hidden_TH, order_TE[:, : live.TOP_K], weights_TK) for layer in (self.layers, self.still)
        ]
        return float((outputs[0] - outputs[1]).abs().max())

    def _offer(self) -> None:
        installed = self.agent.installed
        if self.agent._switch.state.plan is None and self.agent.unheard is None:
            here_RS = installed.placement.phy2log_LRS[0]
            target_RS = live.keep_staying_slots(here_RS, live.shuffled_RS(self.ranks, installed.epoch))
            self.agent._stream.plans.put(live.plan_for(self.agent, {0: target_RS}, installed.epoch + 1))

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


def _misses(calls: int) -> Callable[[Host], None]:
    return lambda host: setattr(host, "misses", calls)


def _doubles(calls: int) -> Callable[[Host], None]:
    return lambda host: setattr(host, "doubles", calls)


def _own(fault: str) -> Callable[[Host], None]:
    return lambda host: FAULTS[fault](host.agent)


def _before_the_confirmation(do: Callable[[Host], None]) -> Callable[[Host], None]:
    """Once, when the ranks are about to confirm that they are all at the boundary of a commit."""

    def arrange(host: Host) -> None:
        all_are_at = BallotBox.all_are_at

        def once(box: BallotBox, forward: int) -> bool | None:
            BallotBox.all_are_at = all_are_at  # type: ignore[method-assign]
            do(host)
            return all_are_at(box, forward)

        BallotBox.all_are_at = once  # type: ignore[method-assign]

    return arrange


def _in_the_install(do: Callable[[Host], None]) -> Callable[[Host], None]:
    """Once, when the rank is about to install a layer."""

    def arrange(host: Host) -> None:
        install = layer_commit.install

        def once(*arguments: object) -> int:
            layer_commit.install = install
            do(host)
            return install(*arguments)  # type: ignore[arg-type]

        layer_commit.install = once  # type: ignore[assignment]

    return arrange


def _sleeps(seconds: float) -> Callable[[Host], None]:
    return lambda _: time.sleep(seconds)


def _freezes(seconds: float) -> Callable[[Host], None]:
    """All threads of the process stop, those that answer its peers as well."""

    def freeze(_: Host) -> None:
        me = os.getpid()
        command = f"kill -STOP {me}; sleep {seconds}; kill -CONT {me}"
        subprocess.Popen(["/bin/sh", "-c", command])
        time.sleep(0.2)

    return freeze


def _leaves_the_votes(host: Host) -> None:
    voter = host.agent._switch.votes.voter
    if voter is not None:
        voter.box.leave()


def _a_stranger_knocks(host: Host) -> None:
    """Garbage, and well-formed questions and statements under another key, to every rank's socket."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for address in host.agent._switch._group.peers._addresses.values():
            for size in (0, 1, 32, 48, 1400, 60_000):
                for _ in range(50):
                    stranger.sendto(os.urandom(size), address)
            stranger.sendto(os.urandom(32) + b"q" + bytes(16) + b"frank 0: serve no more", address)


def _a_stranger_connects(_: Host) -> None:
    """To every port that the process listens on: the model's take links, those of the votes and the lane do not."""
    here = Sample.now()
    assert {address for address, _ in listening()} == {"127.0.0.1"}, "where all ranks are on one node"
    _, closed = knock()
    assert closed >= 2
    assert Sample.now().megabytes - here.megabytes < 32


def _drains_and_resumes(host: Host) -> None:
    host.agent.drain("the host sleeps")
    host.agent.resume()


def _offers_another_plan(host: Host) -> None:
    here_RS = host.agent.installed.placement.phy2log_LRS[0]
    target_RS = live.keep_staying_slots(here_RS, live.shuffled_RS(host.ranks, 77))
    host.agent._stream.plans.put(live.plan_for(host.agent, {0: target_RS}, 9_000_000))


EXPERIMENTS: dict[str, Callable[[Host], None]] = {
    "no fault": _nothing,
    "a missed call": _on(1, _misses(1)),
    "five calls missed in a row": _on(1, _misses(5)),
    "rank 0 misses a call": _on(0, _misses(1)),
    "a doubled call": _on(1, _doubles(1)),
    "ten doubled calls": _on(2, _doubles(10)),
    "one misses calls, another doubles them": lambda host: (_nothing, _misses(3), _doubles(3))[host.rank](
        host
    ),
    "all miss different numbers of calls": lambda host: _misses(host.rank)(host),
    "seconds late at the boundary of a commit": _on(1, _before_the_confirmation(_sleeps(2.0))),
    "rank 0 seconds late at the boundary of a commit": _on(0, _before_the_confirmation(_sleeps(2.0))),
    "an install that takes seconds": _on(1, _in_the_install(_sleeps(1.5))),
    "a stall past the votes' deadline": _on(1, _own("stall")),
    "rank 0 stalls past the votes' deadline": _on(0, _own("stall")),
    "a lost link": _on(1, _leaves_the_votes),
    "rank 0 loses its links": _on(0, _leaves_the_votes),
    "all lose their links": _leaves_the_votes,
    "links lost at the boundary of a commit": _on(2, _before_the_confirmation(_leaves_the_votes)),
    "links lost in an install": _on(1, _in_the_install(_leaves_the_votes)),
    "a frozen rank": _on(1, _freezes(3.0)),
    "rank 0 frozen": _on(0, _freezes(3.0)),
    "rank 0 frozen at the boundary of a commit": _on(0, _before_the_confirmation(_freezes(3.0))),
    "rank 0 frozen in an install": _on(0, _in_the_install(_freezes(3.0))),
    "a frozen rank, and links lost": lambda host: (_freezes(3.0), _leaves_the_votes, _nothing)[host.rank](
        host
    ),
    "a stranger at the agents' port": _on(0, _a_stranger_knocks),
    "a stranger at the links' ports": _on(1, _a_stranger_connects),
    "a drain in the middle": _drains_and_resumes,
    "a plan that one rank alone gets": _on(2, _offers_another_plan),
    "a transfer that fails": _on(1, _own("fail-next-transfer")),
    "an expert that arrives damaged": _own("corrupt-next-transfer"),
}


def live_through_all(history: str) -> dict[str, Survived]:
    """Every experiment on these ranks, one after the other."""
    host = Host(Path(history))
    survived = {name: host.live_through(fault) for name, fault in EXPERIMENTS.items()}
    host.agent.drain("the test is over")
    host.agent.close()
    return survived
