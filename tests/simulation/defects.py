"""Defects that were found before, put back one at a time: the simulation has to find every one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.simulation.world import BOUND_SECONDS, Outcome, World
from worker_agent.forward_clock import ForwardClock
from worker_agent.swap import transfer
from worker_agent.swap.peers import PeerGoneError, Peers
from worker_agent.swap.vote import Voter, VoteSchedule


@dataclass(frozen=True)
class Defect:
    """One defect: what is replaced where, the faults that give it away, and a seed that does.

    One that ``heals`` no more breaks no other promise.
    """

    holder: Any
    name: str
    broken: Callable[[Any], Any]
    faults: tuple[str, ...]
    seed: int
    heals: bool = False

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Put it in."""
        with mock.patch.object(self.holder, self.name, self.broken(getattr(self.holder, self.name))):
            yield


def _called(_: Any) -> Any:
    return lambda clock: clock.calls


def _all_equal(_: Any) -> Any:
    return lambda tensors: 0


def _refused(ask: Any) -> Any:
    def gone(peers: Peers, *asked: Any) -> Any:
        sockets = [part for part in asked if hasattr(part, "getpeername")]
        answer = ask(peers, *asked)
        if answer is None and sockets[0].saw_refusal:
            raise PeerGoneError("nothing listens there any more")
        return answer

    return gone


def _any_pass(all_are_at: Any) -> Any:
    return lambda voter, forward: all_are_at(voter, 0)


def _late_alone(all_are_at: Any) -> Any:
    return lambda voter, forward: True if forward == voter.due else all_are_at(voter, forward)


def _from_zero(make: Any) -> Any:
    return lambda schedule, votes, number: make(schedule, votes, 0)


def _never(_: Any) -> Any:
    def lost(schedule: VoteSchedule, *_: Any) -> None:
        schedule.voter = None

    return lost


_BY_CALLS = ("missed call", "doubled call")
_UNHEARD = ("stop", "cut", "hang", "cut in a commit")

DEFECTS: dict[str, Defect] = {
    "passes numbered by calls": Defect(ForwardClock, "_device_count", _called, _BY_CALLS, 5),
    "refused datagram taken for a dead process": Defect(
        Peers, "_ask_once", _refused, ("rejected datagrams", "rejected datagrams", "cut in a commit"), 4
    ),
    "commits confirmed at any pass": Defect(Voter, "_all_are_at", _any_pass, _BY_CALLS, 12),
    "only late ranks confirm": Defect(Voter, "_all_are_at", _late_alone, _BY_CALLS, 6),
    "a flipped bit is not seen": Defect(transfer, "_checksum", _all_equal, ("flipped bits",), 1),
    "votes restart at 1 after reforming": Defect(VoteSchedule, "_voter", _from_zero, _UNHEARD, 5),
    "lost votes never come back": Defect(VoteSchedule, "lost", _never, _UNHEARD, 1, heals=True),
}
"""Defects by name."""


def run(name: str, seed: int) -> Outcome:
    """One run with a defect."""
    defect = DEFECTS[name]
    with defect.present():
        return World(seed, defect.faults, ranks=3, bound=BOUND_SECONDS if defect.heals else 0.0).run()


def hunt(name: str, first: int, seeds: int) -> Outcome | None:
    """Run seeds with a defect until one finds it; ``None`` where it got away."""
    found = (run(name, seed) for seed in range(first, first + seeds))
    return next((outcome._replace(log=()) for outcome in found if outcome.breaches), None)
