"""When a rank votes, over the life of its formation: at common forward passes, lost now and then, and formed again.

Every interval follows from the outcome of the vote before, which is the same on all ranks; so are therefore the
passes at which they vote next.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from worker_agent.forward_clock import ForwardClock
from worker_agent.history.record import History
from worker_agent.rendezvous import Rendezvous
from worker_agent.settings import AgentSettings
from worker_agent.swap.ballot import Outcome, VoteResult
from worker_agent.swap.reformation import Reformation, Reformed, Standing
from worker_agent.swap.vote import BallotBox, Voter

_LONGEST_DELAY = 4096
"""Forward passes, at most, to the next vote after commits that not all ranks confirmed."""
_ASTRAY_VOTES = 3
"""Fewer votes in a row that find the ranks at different passes are no problem: a host has missed a call."""
_PROVEN_VOTES = 64
"""Votes that a formation counts before its links are taken to be sound."""


class VoteSchedule:
    """Says when to cast and when to count, delays votes that lead nowhere, and forms lost ones again.

    Parameters
    ----------
    rendezvous
        The ranks, and the votes that they have formed.
    settings
        Intervals, lag and timeouts.
    clock
        Numbers forward passes.
    history
        Where votes are recorded.

    ``voter`` is ``None`` while the ranks do not vote.
    """

    def __init__(
        self, rendezvous: Rendezvous, settings: AgentSettings, clock: ForwardClock, history: History
    ) -> None:
        self._group = rendezvous.group
        self._settings = settings
        self._idle_interval = max(settings.vote_interval, settings.idle_vote_interval)
        self._clock = clock
        self._history = history
        self._next = 1
        self._astray = 0
        self._counted = 0
        self._fruitless = 0
        self._attempts = 0
        self._reformation: Reformation | None = None
        self.voter: Voter | None = self._voter(rendezvous.votes, 0)
        self._group.position = lambda: (clock.calls, clock.now)

    @property
    def complaint(self) -> str | None:
        """What keeps the ranks from voting, or their votes from coming to anything; or ``None``."""
        if self._reformation is not None:
            return self._reformation.complaint
        if self._astray < _ASTRAY_VOTES:
            return None
        return f"{self._astray} votes in a row found the ranks at different forward passes"

    def to_count(self, step: int) -> Voter | None:
        """The voter, where a vote must be counted at this boundary."""
        return self.voter if self.voter is not None and self.voter.box.due(step) else None

    def to_cast(self, step: int) -> tuple[Voter, int] | None:
        """The voter and the forward pass of its ballot, where one begins here or has begun at a boundary missed."""
        forward = step - step % self._settings.vote_interval
        if self.voter is None or forward < self._next:
            return None
        self._next = forward + self._settings.vote_interval
        return self.voter, forward

    def counted(self, outcome: Outcome) -> None:
        """A vote was counted with this outcome."""
        self._counted += 1
        if self._counted == _PROVEN_VOTES:
            self._fruitless = 0
        if outcome.result is VoteResult.COMMIT:
            self._astray = 0
        if outcome.idle:
            self._next = outcome.forward_high + self._idle_interval
        if outcome.result is VoteResult.REALIGN:
            # A host that always counts otherwise than its peers must not hold them up at every vote.
            delay = min(self._settings.vote_interval * (2**self._astray - 1), _LONGEST_DELAY)
            self._astray = min(self._astray + 1, 16)
            self._next = outcome.forward_high + self._settings.vote_lag + 1 + delay

    def lost(self, voter: Voter, version_digest: int, generation: int, lane: int) -> None:
        """The ranks can no longer be heard; they form the votes again, the later the less the last ones came to."""
        self.voter = None
        standing = Standing(version_digest, generation, lane, voter.box.number)
        self._reformation = Reformation(
            self._group, standing, self._attempts, self._fruitless, lambda: self._clock.now
        )
        self._fruitless += 1
        self._counted = 0

    def formed_again(self, step: int) -> Reformed | None:
        """Votes that the ranks have formed again, once the forward pass is here on which they have agreed.

        Raises
        ------
        FatalSwitchError
            Where they have found that they may no longer serve together.
        """
        reformed = None if self._reformation is None else self._reformation.poll()
        if self._reformation is None or reformed is None or step < reformed.start:
            return None
        self._attempts, self._reformation = self._reformation.attempts, None
        self.voter = self._voter(reformed.votes, reformed.vote)
        self._next = reformed.start
        return reformed

    def leave(self) -> None:
        """Vote no more."""
        if self.voter is not None:
            self.voter.box.leave()
            self.voter = None
        if self._reformation is not None:
            self._reformation.close()

    def _voter(self, votes: dist.ProcessGroup, number: int) -> Voter:
        box = BallotBox(
            votes,
            self._settings.vote_lag,
            timedelta(seconds=self._settings.vote_timeout_seconds),
            timedelta(seconds=self._settings.commit_timeout_seconds),
            number,
        )
        return Voter(box, self._group.register, self._history, self._never_coming)

    def _never_coming(self, due: int) -> str | None:
        """Which rank will not come to count the vote that is due after pass ``due``, or ``None``.

        One that was called no less often than this one, yet counts fewer passes: its count hangs, or runs apart.
        """
        for rank, (calls, forward) in sorted(self._group.positions().items()):
            if calls >= self._clock.calls and forward < due:
                return (
                    f"rank {rank} has made {calls} calls but counts {forward} forward passes, this rank {due}"
                )
        return None
