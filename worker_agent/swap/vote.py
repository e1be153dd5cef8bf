"""This rank's part in the votes: its ballot out, the outcome in, the others asked where they may have heard more.

A vote is launched at one step boundary and counted at a later one that is fixed beforehand, the same on every rank,
waiting there if it must. Completion is never polled: two ranks would see the outcome at different steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worker_agent.history.record import History
from worker_agent.swap.ballot import BALLOT_WIDTH, Ballot, Outcome, Progress, VoteResult
from worker_agent.swap.commit_register import CommitRegister

_INSTALL_TIMEOUT = timedelta(seconds=30)
"""A rank that is not heard by then either installs the layer or serves no more: the model's next collective waits."""
_SUSPICION = timedelta(seconds=5)
"""After so long a rank asks where the others are: one whose count of passes hangs never comes."""


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
    patience
        Longest wait for all to be at the boundary at which a layer is committed.
    number
        Of the last vote before, where this box goes on for another.

    ``number`` counts the votes; ``under_way`` says whether one has been launched and not been consumed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        lag: int,
        timeout: timedelta,
        patience: timedelta = timedelta(seconds=1),
        number: int = 0,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self._lag = lag
        self._timeout = timeout
        self._patience = patience
        self._first_wait = min(_SUSPICION, timeout)
        self._tensor = torch.zeros(BALLOT_WIDTH, dtype=torch.int64)
        self._ballot = self._tensor.numpy()
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
        self._ballot[:] = ballot.encode()
        self._due = ballot.forward + self._lag
        try:
            self._work = self._group.allreduce([self._tensor], self._options)
            self.under_way = True
        except RuntimeError as error:
            raise VoteError(f"vote {self.number} could not be sent: {error}") from error

    def due(self, forward: int) -> bool:
        """Whether an outcome must be consumed after this forward pass."""
        return self.under_way and forward >= self._due

    def consume(self, never_coming: Callable[[int], str | None] = lambda _: None) -> Outcome:
        """The outcome, waiting for the slowest rank.

        Parameters
        ----------
        never_coming
            Given the forward pass after which the outcome is due, says which rank will not come to it; asked now and
            then by a rank that has waited for long.

        Raises
        ------
        VoteError
            Past the timeout, on a broken link, or where a rank will not come.
        """
        assert self.under_way
        work, self._work, self.under_way = self._work, None, False
        if work is None:
            raise VoteError(f"vote {self.number}: this rank has left the votes")
        end = time.monotonic() + self._timeout.total_seconds()
        wait = self._first_wait
        try:
            while not _done(work, wait):
                absent = never_coming(self._due)
                if absent is None and time.monotonic() > end:
                    absent = f"not all ranks came within {self._timeout.total_seconds():g} s"
                if absent is not None:
                    raise VoteError(f"vote {self.number} came to nothing: {absent}")
                wait = min(_SUSPICION, timedelta(seconds=max(0.001, end - time.monotonic())))
            return Outcome.decode(self._ballot.tolist())
        except (RuntimeError, ValueError) as error:
            if isinstance(error, VoteError):
                raise
            raise VoteError(f"vote {self.number} came to nothing: {error}") from error

    def all_are_at(self, forward: int) -> bool | None:
        """Whether every rank is at this boundary, the one after pass ``forward``; ``None`` if not all came in time.

        Those that come later find the others' answers, so the next vote is none the worse. Raises ``VoteError`` on a
        broken link.
        """
        bounds = self._all_min([forward, -forward], min(self._patience, self._timeout))
        return None if bounds is None else bounds[0] == -bounds[1]

    def all_have_installed(self, done: bool) -> bool:
        """Whether no rank says that it has failed to install the layer. Raises ``VoteError`` on a broken link."""
        return self._all_min([int(done)], min(_INSTALL_TIMEOUT, self._timeout)) != [0]

    def _all_min(self, values: list[int], timeout: timedelta) -> list[int] | None:
        if self._group is None:
            raise VoteError(f"vote {self.number}: this rank has left the votes")
        tensor = torch.tensor(values, dtype=torch.int64)
        try:
            work = self._group.allreduce([tensor], self._options)
            return [int(value) for value in tensor.tolist()] if _done(work, timeout) else None
        except RuntimeError as error:
            raise VoteError(f"vote {self.number} was not confirmed by all ranks: {error}") from error

    def leave(self) -> None:
        """Vote no more. The other ranks learn of it at once, by their broken links; returns at once as well.

        A vote under way is lost, not forgotten: the others may have heard its verdict, which is still to be found out.
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
    never_coming
        See ``BallotBox.consume``.
    """

    def __init__(
        self,
        box: BallotBox,
        register: CommitRegister,
        history: History,
        never_coming: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self.box = box
        self._never_coming = never_coming
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
        outcome = self.box.consume(self._never_coming)
        if outcome.result is VoteResult.COMMIT:
            together = self.box.all_are_at(exact_forward())
            # Where not all came in time, or one that gave up has asked this rank before it heard, the ranks settle it.
            if together is False or not self._register.may_commit(self.box.number, heard=together is True):
                outcome = outcome.unconfirmed()
        self._history.vote(step, self.box.number, self._cast, outcome)
        self._cast = None
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


def _done(work: dist.Work, timeout: timedelta) -> bool:
    """Whether it is done within that time; it goes on if not. Raises ``RuntimeError`` where it has failed."""
    try:
        work.wait(timeout)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True
