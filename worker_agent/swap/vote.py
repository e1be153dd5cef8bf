"""Carries ballots to all ranks and back, without ever polling for completion.

A vote is launched at one step boundary and consumed at a later one that is fixed beforehand, the same on every rank,
waiting there if it must. Polling would let two ranks see the outcome at different steps.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worker_agent.swap.ballot import BALLOT_WIDTH, Ballot, Outcome


class VoteError(RuntimeError):
    """The ranks could not be heard; what the others saw is not known here."""


class VoteBox:
    """At most one vote under way.

    Parameters
    ----------
    group
        A gloo group used for nothing else.
    lag
        Step boundaries between launch and consumption.
    timeout
        Longest wait at consumption.

    ``number`` counts the votes; ``under_way`` tells whether one has been launched and not been consumed.
    """

    def __init__(self, group: dist.ProcessGroup, lag: int, timeout: timedelta) -> None:
        self._group: dist.ProcessGroup | None = group
        self._lag = lag
        self._timeout = timeout
        self._tensor = torch.zeros(BALLOT_WIDTH, dtype=torch.int64)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._work: dist.Work | None = None
        self._due = 0
        self.number = 0
        self.under_way = False

    def launch(self, ballot: Ballot, step: int) -> None:
        """Send this rank's ballot; the outcome is due at ``step + lag``."""
        assert not self.under_way, "a vote is already under way"
        self.number += 1
        if self._group is None:
            raise VoteError(f"vote {self.number}: this rank has left the votes")
        self._tensor.copy_(torch.tensor(ballot.encode(), dtype=torch.int64))
        self._due = step + self._lag
        try:
            self._work = self._group.allreduce([self._tensor], self._options)
            self.under_way = True
        except RuntimeError as error:
            raise VoteError(f"vote {self.number} could not be sent: {error}") from error

    def due(self, step: int) -> bool:
        """Whether an outcome must be consumed at this boundary."""
        return self.under_way and step >= self._due

    def consume(self) -> Outcome:
        """The outcome, waiting for the slowest rank. Raises ``VoteError`` past the timeout or on a broken link."""
        assert self.under_way
        work, self._work, self.under_way = self._work, None, False
        if work is None:
            raise VoteError(f"vote {self.number}: this rank has left the votes")
        try:
            work.wait(self._timeout)
            return Outcome.decode(self._tensor.tolist())
        except (RuntimeError, ValueError) as error:
            raise VoteError(f"vote {self.number} came to nothing: {error}") from error

    def leave(self) -> None:
        """Vote no more. The other ranks learn of it at once, by their broken links; returns at once as well.

        A vote under way is lost, not forgotten: what it decided the others may have heard, and is still to be settled.
        """
        # A group that still has a vote under way ends with it, which may take until the timeout.
        # No daemon: a group that is destroyed while Python itself ends would abort the process.
        held: list[Any] = [self._work, self._group]
        self._work = self._group = None
        threading.Thread(target=held.clear, name="eplb-votes-end").start()
