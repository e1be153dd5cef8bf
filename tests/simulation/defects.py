"""Past bugs, reintroduced one at a time. The simulation must detect each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.simulation.engine import Engine
from tests.simulation.faults import LONE_OUTCOME
from tests.simulation.world import Outcome, simulate
from worker_agent.swap import transfer
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.driver import SwitchDriver
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.peers import Inquiry, PeerGoneError
from worker_agent.swap.reformation import Reformation
from worker_agent.swap.vote import Voter, VoteSchedule

_BOUND_SECONDS = 600.0


@dataclass(frozen=True)
class Defect:
    """A bug: the function that it replaces, and the faults that expose it.

    If ``heals`` is true, the bug's only symptom is that balancing does not recover.
    """

    holder: Any
    name: str
    broken: Callable[[Any], Any]
    faults: tuple[str, ...]
    heals: bool = False


def _by_calls(call: Any) -> Any:
    def counted(engine: Engine, rank: int, agent: Any) -> None:
        misfits = engine.misfits[rank]
        engine.counters[rank] += min(misfits.doubled, 1) - min(misfits.missed, 1)
        agent._clock.exact = lambda: agent._clock.now
        call(engine, rank, agent)

    return counted


def _never_withdrawn(attempt: Any) -> Any:
    def kept(reformed: Any) -> Any:
        put = reformed._group.store.set
        reformed._group.store.set = lambda key, value: None if value == "0" else put(key, value)
        return attempt(reformed)

    return kept


def _presuming_installs(has_installed: Any) -> Any:
    def presumed(group: AgentGroup, inquiry: Inquiry, peer: int, vote: int) -> bool:
        try:
            return bool(has_installed(group, inquiry, peer, vote))
        except FatalSwitchError as fatal:
            if isinstance(fatal.__cause__, PeerGoneError):
                return True
            raise

    return presumed


_BY_CALLS = ("missed call", "doubled call")
_UNHEARD = ("stop", "cut", "hang", "cut in a commit")
_APART = ("cut", "cut in a commit", "exception")

DEFECTS: dict[str, Defect] = {
    "passes numbered by calls": Defect(Engine, "_call", _by_calls, _BY_CALLS),
    "a peer that seems gone counts as installed": Defect(
        AgentGroup, "_has_installed", _presuming_installs, (LONE_OUTCOME,)
    ),
    "commits confirmed at any pass": Defect(
        Voter, "count", lambda count: lambda voter, step, _: count(voter, step, lambda: voter.due), _BY_CALLS
    ),
    "only late ranks confirm": Defect(
        Voter, "_all_are_at", lambda at: lambda voter, now: now == voter.due or at(voter, now), _BY_CALLS
    ),
    "a flipped bit is not detected": Defect(
        transfer, "checksum", lambda _: lambda tensors: 0, ("flipped bits",)
    ),
    "lost votes never restart": Defect(
        VoteSchedule, "lost", lambda _: lambda schedule, *_: setattr(schedule, "voter", None), _UNHEARD, True
    ),
    "an error halts the ranks permanently": Defect(
        SwitchDriver, "stumble", lambda _: lambda driver, _: driver.votes.leave(), ("exception",), True
    ),
    "a failed attempt counts as a success": Defect(Reformation, "_attempt", _never_withdrawn, _APART, True),
}
"""Bugs by name."""


def hunt(name: str, first: int = 1, seeds: int = 90) -> Outcome | None:
    """Run seeds with a bug until one exposes it. Return ``None`` if no seed does."""
    defect = DEFECTS[name]
    broken = defect.broken(getattr(defect.holder, defect.name))
    bound, many = (_BOUND_SECONDS, 6) if defect.heals else (0.0, 24)
    with mock.patch.object(defect.holder, defect.name, broken):
        runs = (simulate(seed, defect.faults, 3, bound, many) for seed in range(first, first + seeds))
        return next((outcome for outcome in runs if outcome.breaches), None)
