"""Brings the votes of a formation back after they were lost, on a thread of its own, while the model serves on.

A stall, a broken link or a late first step ends the votes, not the balancing: all ranks open new links, compare what
they serve, and agree on a forward pass from which they vote again. Where they do not all come, they try again later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.group import AgentGroup

_log = logging.getLogger("eplb.agent")

_FIRST_BACKOFF_SECONDS = 0.5
_LAST_BACKOFF_SECONDS = 60.0
_LONGEST_DELAY_SECONDS = 3600.0
_GATHER_SECONDS = 60.0
_OPEN_TIMEOUT = timedelta(seconds=60)
_POLL_SECONDS = 0.05
_FIRST_MARGIN = 32
"""Forward passes until the first vote: all ranks must have heard of it before they get there."""
_LAST_MARGIN = 4096


@dataclass(frozen=True)
class Standing:
    """Where a rank was when it lost the votes; the last transfer, lane and vote that it knows of."""

    version_digest: int
    generation: int
    lane: int
    vote: int


@dataclass(frozen=True)
class Reformed:
    """Votes that can be cast again, the first one at ``start``; the numbers are the highest that any rank knew."""

    votes: dist.ProcessGroup
    start: int
    generation: int
    lane: int
    vote: int


class Reformation:
    """Tries until the ranks vote again.

    Parameters
    ----------
    group
        The formation.
    standing
        Where this rank was.
    attempts
        Attempts before this one, over the life of the formation.
    fruitless
        How often in a row votes that were formed again were lost before long; each time they come later.
    now
        Gives the number of the last forward pass.

    ``complaint`` is what came of the last attempt, or ``None``.
    """

    def __init__(
        self,
        group: AgentGroup,
        standing: Standing,
        attempts: int,
        fruitless: int,
        now: Callable[[], int],
    ) -> None:
        self.attempts = attempts
        self._group = group
        self._standing = standing
        self._now = now
        self._backoff = min(_FIRST_BACKOFF_SECONDS * 4**fruitless, _LONGEST_DELAY_SECONDS)
        self.complaint: str | None = None
        self._margin = _FIRST_MARGIN
        self._closing = threading.Event()
        self._reformed: Reformed | FatalSwitchError | None = None
        threading.Thread(target=self._run, name="eplb-reformation", daemon=True).start()

    def poll(self) -> Reformed | None:
        """The new votes, or ``None`` as long as there are none; never waits.

        Raises
        ------
        FatalSwitchError
            Where the ranks have found that they serve different placements.
        """
        if isinstance(self._reformed, FatalSwitchError):
            raise self._reformed
        return self._reformed

    def close(self) -> None:
        """Try no more."""
        self._closing.set()

    def _run(self) -> None:
        backoff = self._backoff
        while not self._closing.wait(backoff):
            try:
                self._reformed = self._attempt()
                return
            except FatalSwitchError as diverged:
                self._reformed = diverged
                return
            except Exception as error:
                self.complaint = f"the ranks do not vote again yet: {error}"
                _log.warning("rank %d: the ranks do not vote again yet: %s", self._group.rank, error)
            backoff = max(self._backoff, min(2 * backoff, _LAST_BACKOFF_SECONDS))
            self._margin = min(4 * self._margin, _LAST_MARGIN)

    def _attempt(self) -> Reformed:
        self._gather()
        votes = self._group.process_group(f"vote/{self.attempts}")
        mine = self._standing
        low, high, generation, lane, vote, earliest, latest = _all_min(
            votes,
            [
                mine.version_digest,
                -mine.version_digest,
                -mine.generation,
                -mine.lane,
                -mine.vote,
                self._now(),
                -self._now(),
            ],
        )
        if low != -high:
            raise FatalSwitchError("the ranks serve different placements")
        if -latest - earliest > self._margin:
            raise TimeoutError(f"the ranks count different forward passes, {earliest} to {-latest}")
        start = self._margin - latest
        (in_time,) = _all_min(votes, [int(self._now() < start)])
        if not in_time:
            raise TimeoutError(f"a rank was past forward pass {start} before all had heard of it")
        return Reformed(votes, start, -generation, -lane, -vote)

    def _gather(self) -> None:
        """Agree on the number of the attempt, the highest that any rank is at, once all ranks have lost the votes."""
        self.attempts += 1
        end = time.monotonic() + _GATHER_SECONDS
        waiting = sorted(self._group.peers.others)
        # One rank is waited for at a time: many that wait must not flood the one that is late.
        while waiting:
            self._group.store.set(f"attempt/{self._group.rank}", str(self.attempts))
            theirs = self._attempt_of(waiting[-1])
            if theirs == self.attempts:
                waiting.pop()
            elif theirs > self.attempts:
                self.attempts, waiting = theirs, sorted(self._group.peers.others)
            elif time.monotonic() > end or self._closing.wait(_POLL_SECONDS):
                raise TimeoutError(f"rank {waiting[-1]} has not come")

    def _attempt_of(self, rank: int) -> int:
        question = f"vattempt/{rank}".encode()
        answer = self._group.peers.ask([rank], question, _POLL_SECONDS).get(rank, b"-")
        if answer[:1] == b"!":
            raise FatalSwitchError(answer[1:].decode())
        return int(answer[1:]) if answer[:1] == b"+" else 0


def _all_min(group: dist.ProcessGroup, values: list[int]) -> list[int]:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    reduced = torch.tensor(values, dtype=torch.int64)
    group.allreduce([reduced], options).wait(_OPEN_TIMEOUT)
    return [int(value) for value in reduced.tolist()]
