"""This rank's part in the votes: its ballot out, the outcome in, the register where others may have heard more."""

from __future__ import annotations

from worker_agent.history.record import History
from worker_agent.swap.arbiter import Arbiter
from worker_agent.swap.ballot import Ballot, Decision, Outcome, Progress
from worker_agent.swap.vote import VoteBox


class Voting:
    """Casts and counts, one vote at a time.

    Parameters
    ----------
    box
        Carries ballots.
    interval
        Steps from one vote to the next.
    arbiter
        Has the last word on a vote that may commit a layer.
    history
        Where votes are recorded.
    """

    def __init__(self, box: VoteBox, interval: int, arbiter: Arbiter, history: History) -> None:
        self._box = box
        self._interval = interval
        self._arbiter = arbiter
        self._history = history
        self._cast: Ballot | None = None

    @property
    def under_way(self) -> bool:
        """Whether a ballot has left whose outcome has not been counted."""
        return self._box.under_way

    def due(self, step: int) -> bool:
        """Whether an outcome must be counted at this boundary."""
        return self._box.due(step)

    def begins(self, step: int) -> bool:
        """Whether a vote is launched at this boundary."""
        return step % self._interval == 0

    def cast(self, ballot: Ballot, step: int) -> None:
        """Send this rank's ballot. Raises ``VoteError`` where it cannot be sent."""
        self._cast = ballot
        self._box.launch(ballot, step)

    def count(self, step: int) -> Outcome:
        """The outcome that counts. Raises ``VoteError`` where the ranks were not heard: then ``settle``."""
        outcome = self._box.consume()
        if outcome.decision is Decision.COMMIT and not self._arbiter.may_commit(self._box.number, heard=True):
            # A rank that did not hear this vote was first to record that it does not count.
            outcome = outcome.with_abort()
        self._history.vote(step, self._box.number, self._cast, outcome)
        return outcome

    def settle(self, step: int) -> Outcome:
        """What counts of a vote that this rank has not heard: obeys its register, where it may have committed a layer.

        Raises ``FatalSwitchError`` where the register is out of reach.
        """
        cast = self._cast
        if cast is None or cast.progress != Progress.READY or cast.abort:
            return Outcome.nobody()
        unanimous = Outcome(Progress.READY, cast.plan, cast.plan, installed_agree=True, abort=False)
        if not self._arbiter.may_commit(self._box.number, heard=False):
            unanimous = unanimous.with_abort()
        self._history.vote(step, self._box.number, cast, unanimous, heard=False)
        return unanimous

    def leave(self) -> None:
        """Vote no more; the other ranks learn of it at once."""
        self._box.leave()
