"""This rank's part in the votes: its ballot out, the outcome in, the others asked where they may have heard more.

A vote is launched at one step boundary and counted at a later one that is fixed beforehand, the same on every rank,
waiting there if it must. Completion is never polled: two ranks would see the outcome at different steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worker_agent.history.record import History
from worker_agent.swap.ballot import BALLOT_WIDTH, Ballot, Outcome, Progress, VoteResult
from worker_agent.swap.commit_register import CommitRegister

_CONFIRM_TIMEOUT = timedelta(seconds=30)
"""All ranks have voted a few passes ago: one that does not come to confirm has missed the boundary, and never will."""


class VoteError(RuntimeError):
    """The ranks could not be heard; what the others saw is not known here."""


class BallotBox:
    """Carries ballots over a process group; at most one vote is under way.

    Parameters
    ----------
    group
        A gloo group used for nothing else.
    lag
        Step boundaries between launch and consumption.
    timeout
        Longest wait at consumption.

    number
        Of the last vote before, where this box goes on for another.

    ``number`` counts the votes; ``under_way`` says whether one has been launched and not been consumed.
    """

    def __init__(self, group: dist.ProcessGroup, lag: int, timeout: timedelta, number: int = 0) -> None:
        self._group: dist.ProcessGroup | None = group
        self._lag = lag
        self._timeout = timeout
        self._tensor = torch.zeros(BALLOT_WIDTH, dtype=torch.int64)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._work: dist.Work | None = None
        self._due = 0
        self.number = number
        self.under_way = False

    def launch(self, ballot: Ballot) -> None:
        """Send this rank's ballot; the outcome is due ``lag`` forward passes after its own. Raises ``VoteError``."""
        assert not self.under_way, "a vote is already under way"
        self.number += 1
        if self._group is None:
            raise VoteError(f"vote {self.number}: this rank has left the votes")
        self._tensor.copy_(torch.tensor(ballot.encode(), dtype=torch.int64))
        self._due = ballot.forward + self._lag
        try:
            self._work = self._group.allreduce([self._tensor], self._options)
            self.under_way = True
        except RuntimeError as error:
            raise VoteError(f"vote {self.number} could not be sent: {error}") from error

    def due(self, forward: int) -> bool:
        """Whether an outcome must be consumed after this forward pass."""
        return self.under_way and forward >= self._due

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

    def all_are_at(self, forward: int) -> bool:
        """Whether every rank is at this boundary, the one after pass ``forward``; waits for the slowest to say so.

        Raises ``VoteError`` past the timeout or on a broken link.
        """
        if self._group is None:
            raise VoteError(f"vote {self.number}: this rank has left the votes")
        bounds = torch.tensor([forward, -forward], dtype=torch.int64)
        try:
            self._group.allreduce([bounds], self._options).wait(min(self._timeout, _CONFIRM_TIMEOUT))
        except RuntimeError as error:
            raise VoteError(f"vote {self.number} was not confirmed by all ranks: {error}") from error
        low, high = bounds.tolist()
        return bool(low == -high)

    def leave(self) -> None:
        """Vote no more. The other ranks learn of it at once, by their broken links; returns at once as well.

        A vote under way is lost, not forgotten: what it decided the others may have heard, and is still to be settled.
        """
        # A group that still has a vote under way ends with it, which may take until the timeout.
        # No daemon: a group that is destroyed while Python itself ends would abort the process.
        held: list[Any] = [self._work, self._group]
        self._work = self._group = None
        threading.Thread(target=held.clear, name="eplb-votes-end").start()


class Voter:
    """Casts this rank's ballots and counts what comes of them, one vote at a time.

    Parameters
    ----------
    box
        Carries ballots.
    register
        Has the last word on a vote that may commit a layer.
    history
        Where votes are recorded.
    """

    def __init__(self, box: BallotBox, register: CommitRegister, history: History) -> None:
        self.box = box
        self._register = register
        self._history = history
        self._cast: Ballot | None = None

    @property
    def may_commit(self) -> bool:
        """Whether the vote under way, or last cast, can commit a layer as far as this rank knows."""
        return self._cast is not None and self._cast.progress == Progress.READY and not self._cast.abort

    def cast(self, ballot: Ballot) -> None:
        """Send this rank's ballot. Raises ``VoteError`` where it cannot be sent."""
        self._cast = ballot
        self.box.launch(ballot)

    def count(self, step: int, exact_forward: Callable[[], int]) -> Outcome:
        """The outcome that counts. Raises ``VoteError`` where the ranks were not heard: then ``settle``.

        A layer is committed only where every rank is at this very boundary, which all confirm to each other here:
        one that missed a call has already begun another forward pass.

        Parameters
        ----------
        step
            The boundary, for the history.
        exact_forward
            Gives the forward pass that this boundary comes after; called only where a layer is to be committed.
        """
        outcome = self.box.consume()
        if outcome.result is VoteResult.COMMIT and not (
            self.box.all_are_at(exact_forward()) and self._register.may_commit(self.box.number, heard=True)
        ):
            # The ranks are not at one boundary, or one that did not hear this has recorded that it does not count.
            outcome = outcome.with_abort()
        self._history.vote(step, self.box.number, self._cast, outcome)
        return outcome

    def settle(self, step: int) -> Outcome:
        """What counts of a vote that this rank has not heard: asks the others, where it may have committed a layer.

        Raises ``FatalSwitchError`` where one that may have committed does not answer.
        """
        cast = self._cast
        if cast is None or not self.may_commit:
            return Outcome.nobody()
        unanimous = Outcome(Progress.READY, cast.plan, cast.plan, installed_agree=True, abort=False)
        if not self._register.may_commit(self.box.number, heard=False):
            unanimous = unanimous.with_abort()
        self._history.vote(step, self.box.number, cast, unanimous, heard=False)
        return unanimous
