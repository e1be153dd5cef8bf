"""Votes of the ranks, over the life of their formation: cast and counted at common forward passes, and formed again.

A vote is launched at one step boundary and counted at a later one that is fixed beforehand, the same on every rank,
waiting there if it must. Completion is never polled: two ranks would see the outcome at different steps. Every interval
follows from the outcome of the vote before, which is the same on all ranks; so are therefore the passes at which they
vote next.
"""

from __future__ import annotations

from collections.abc import Callable

from worker_agent.forward_clock import ForwardClock
from worker_agent.runtime import REAL, Runtime
from worker_agent.settings import AgentSettings
from worker_agent.swap.commit_register import CommitRegister
from worker_agent.swap.machine import Ballot, SwitchState, VoteOutcome, VoteResult
from worker_agent.swap.record import History
from worker_agent.swap.reformation import Reformation
from worker_agent.swap.rendezvous import Rendezvous
from worker_agent.swap.vote_link import Kind, Reduction, VoteError, VoteLink

_INSTALL_SECONDS = 30.0
"""A rank that is not heard by then either installs the layer or serves no more: the model's next collective waits."""
_FAILURE_SECONDS = 0.5
"""A failure of another rank may be heard of before its link is known to have ended."""
_SUSPICION_SECONDS = 5.0
"""After so long a rank asks where the others are: one whose count of passes hangs never comes."""
_VOTE_LAG = 2
"""Forward passes from a vote's launch to its consumption; no more than from one vote to the next."""
_IDLE_INTERVALS = 4
"""Vote intervals to the next vote while no rank holds a plan: a new plan waits so long at most."""
_BUSY_PASSES = 64
"""Forward passes after a plan for which votes stay as frequent as during it; if heat drifts, the next plan is near."""
_ASTRAY_VOTES = 3
"""Fewer votes in a row that find the ranks at different passes are no problem: a host has missed a call."""
_PROVEN_PASSES = 256
"""Forward passes over which a formation votes before its links are taken to be sound."""


class Voter:
    """Casts this rank's ballots over a link of their own and counts them, one vote at a time.

    ``number`` counts the votes, from that of the last one before; ``under_way`` is true while one has been cast and not
    been counted, which is to be done from forward pass ``due`` on. The register decides a vote that may commit a layer.
    ``never_coming``, given that pass, names a rank that will not come to it; a rank that has waited for long asks it.
    ``has_failed`` says whether a rank has reported that it must not serve any more.
    """

    def __init__(
        self,
        link: VoteLink,
        settings: AgentSettings,
        register: CommitRegister,
        history: History,
        number: int = 0,
        never_coming: Callable[[int], str | None] = lambda _: None,
        runtime: Runtime = REAL,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.number = number
        self.under_way = False
        self._link = link
        self._lag = min(_VOTE_LAG, settings.vote_interval)
        self._timeout = settings.vote_timeout_seconds
        self._commit_timeout = min(settings.commit_timeout_seconds, self._timeout)
        self._register = register
        self._history = history
        self._never_coming, self._has_failed = never_coming, has_failed
        self._runtime = runtime
        self._work: Reduction | None = None
        self.due = 0
        self.heard_at = runtime.now()
        """Time at which the ballots of the last counted vote had arrived, in seconds."""
        self._cast: Ballot | None = None

    @property
    def may_commit(self) -> bool:
        """True if the vote under way, or last cast, can commit a layer as far as this rank knows."""
        return self._cast is not None and self._cast.commits

    def cast(self, ballot: Ballot) -> None:
        """Send this rank's ballot; its outcome is due a few forward passes after its own. Raises ``VoteError``."""
        assert not self.under_way, "a vote is already under way"
        self._cast = ballot
        self.number += 1
        self.due = ballot.forward + self._lag
        self._work = self._link.begin(Kind.BALLOT, self.number, ballot.encode())
        self.under_way = True

    def count(self, step: int, exact_forward: Callable[[], int]) -> VoteOutcome:
        """Wait for the slowest rank; return the outcome that counts.

        A layer is committed only where every rank is at this very boundary, which all confirm to each other here:
        one that missed a call has already begun another forward pass. Only for that the pass is asked of
        ``exact_forward``. Raises ``VoteError`` past the timeout, on a broken link, or where a rank will not come: then
        ``settle``.
        """
        outcome = self._heard()
        self.heard_at = self._runtime.now()
        if outcome.result is VoteResult.COMMIT:
            together = self._all_are_at(exact_forward())
            # Where not all came in time, or one that gave up has asked this rank before it heard, the ranks settle it.
            if together is False or not self._register.may_commit(self.number, heard=together is True):
                outcome = outcome.unconfirmed()
        self._history.vote(step, self.number, self._cast, outcome)
        self._cast = None
        return outcome

    def settle(self, step: int) -> VoteOutcome:
        """Ask the others what counts of a vote that this rank has not heard, where it may have committed a layer.

        Raises ``FatalSwitchError`` where one that may have committed does not answer.
        """
        cast = self._cast
        if cast is None or not self.may_commit:
            return VoteOutcome.nobody()
        outcome = VoteOutcome.unanimous(cast.plan)
        if not self._register.may_commit(self.number, heard=False):
            outcome = outcome.with_abort()
        self._history.vote(step, self.number, cast, outcome, heard=False)
        # Asked again, it must not commit a second time.
        self._cast = None
        return outcome

    def all_have_installed(self, done: bool) -> bool:
        """Return whether no rank reports that it failed to install the layer. Raises ``VoteError`` on a broken link."""
        installed = self._link.begin(Kind.INSTALLED, self.number, [int(done)])
        end, answers = self._runtime.now() + min(_INSTALL_SECONDS, self._timeout), None
        while answers is None and not self._has_failed() and (left := end - self._runtime.now()) > 0:
            answers = installed.wait(min(_FAILURE_SECONDS, left))
        return answers != [0] and not self._has_failed()

    def leave(self) -> None:
        """Vote no more. The other ranks learn of it at once, by their broken links; returns at once as well.

        A vote under way is lost, not forgotten: the others may have heard its verdict, which is still to be found out.
        """
        self._work = None
        self._link.leave()

    def _heard(self) -> VoteOutcome:
        """VoteOutcome of the ballots, waiting for the slowest rank."""
        assert self.under_way
        work, self._work, self.under_way = self._work, None, False
        if work is None:
            raise VoteError(f"vote {self.number}: this rank has left the votes")
        end = self._runtime.now() + self._timeout
        wait = min(_SUSPICION_SECONDS, self._timeout)
        try:
            while (reduced := work.wait(wait)) is None:
                absent = self._never_coming(self.due)
                if absent is None and self._runtime.now() > end:
                    absent = f"not all ranks came within {self._timeout:g} s"
                if absent is not None:
                    raise VoteError(absent)
                wait = min(_SUSPICION_SECONDS, max(0.001, end - self._runtime.now()))
            return VoteOutcome.decode(reduced)
        except (VoteError, ValueError) as error:
            raise VoteError(f"vote {self.number} came to nothing: {error}") from error

    def _all_are_at(self, forward: int) -> bool | None:
        """Return whether every rank is at this boundary, after pass ``forward``; ``None`` if not all came in time.

        Those that come later find the others' answers, so the next vote is none the worse.
        """
        boundary = self._link.begin(Kind.BOUNDARY, self.number, [forward, -forward])
        bounds = boundary.wait(self._commit_timeout)
        return None if bounds is None else bounds[0] == -bounds[1]


class VoteSchedule:
    """Decides when to cast and when to count, delays votes that lead nowhere, and forms lost ones again.

    ``voter`` is ``None`` while the ranks do not vote.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        settings: AgentSettings,
        clock: ForwardClock,
        history: History,
        runtime: Runtime = REAL,
    ) -> None:
        self._group = rendezvous.group
        self._settings = settings
        self._lag = min(_VOTE_LAG, settings.vote_interval)
        self._clock = clock
        self._runtime = runtime
        self._history = history
        self._lost: tuple[int, SwitchState] | None = None
        self._next = 1
        self._held_at: int | None = None
        self._astray = 0
        self._formed_at = 0
        self._fruitless = 0
        self._attempts = 0
        self._reformation: Reformation | None = None
        self.voter: Voter | None = self._voter(VoteLink(rendezvous.votes, runtime), 0)
        self._group.position = lambda: (clock.calls, clock.now)

    @property
    def complaint(self) -> str | None:
        """Problem that keeps the ranks from voting again, or ``None``."""
        return None if self._reformation is None else self._reformation.complaint

    @property
    def trouble(self) -> str | None:
        """Reason to form the votes again, other than their own outcome, or ``None``."""
        if self._group.left and self.voter is not None:
            # Its links broke, but this rank may not vote for long.
            return "another rank has left the votes"
        return self._clock.trouble

    def to_count(self, step: int) -> Voter | None:
        """Return the voter, where a vote must be counted at this boundary."""
        voter = self.voter
        return voter if voter is not None and voter.under_way and step >= voter.due else None

    def to_cast(self, step: int) -> tuple[Voter, int] | None:
        """Return the voter and the forward pass of its ballot, where one begins here or has at a boundary missed."""
        forward = step - step % self._settings.vote_interval
        if self.voter is None or forward < self._next:
            return None
        self._next = forward + self._settings.vote_interval
        return self.voter, forward

    def counted(self, outcome: VoteOutcome) -> str | None:
        """Set the next vote by the outcome of one that was counted.

        Returns the reason to form the votes again, on all ranks alike, where they have lost each other's passes.
        """
        if outcome.forward_low - self._formed_at >= _PROVEN_PASSES:
            self._fruitless = 0
        if outcome.result is VoteResult.COMMIT:
            self._astray = 0
        if outcome.plans:
            self._held_at = outcome.forward_high
        busy = self._held_at is not None and outcome.forward_high - self._held_at < _BUSY_PASSES
        if outcome.idle and not busy:
            self._next = outcome.forward_high + _IDLE_INTERVALS * self._settings.vote_interval
        if outcome.result is VoteResult.REALIGN:
            # A host that has missed a call is back by then.
            delay = self._settings.vote_interval * (2**self._astray - 1)
            self._astray += 1
            self._next = outcome.forward_high + self._lag + 1 + delay
        if self._astray < _ASTRAY_VOTES:
            return None
        return f"{self._astray} votes in a row found the ranks at different forward passes"

    def lost(self, voter: Voter, state: SwitchState) -> None:
        """Form the votes again, as the ranks can no longer be heard; the later the less the last ones came to."""
        self._lost = voter.number, state
        self.voter = None
        self._form_again()
        self._fruitless += 1
        self._astray = 0

    def rest(self) -> bool:
        """Take part where the ranks are to agree on the number of this pass; return whether they have."""
        reformed = self._reformation
        return reformed is not None and reformed.rest(self._clock, self._settings.commit_timeout_seconds)

    def formed_again(self, step: int) -> Reformation | None:
        """Return what the ranks have agreed on, once the forward pass is here from which they vote again.

        Raises ``FatalSwitchError`` where they have found that they may no longer serve together.
        """
        reformed = self._reformation
        if self.voter is None and self._lost is not None and (reformed is None or not reformed.alive):
            # Its thread has died, or could not be started.
            self._form_again()
            return None
        if reformed is None or (votes := reformed.poll()) is None or step < reformed.start:
            return None
        # An error between any two of these lines must leave votes, or something that forms them again.
        self._attempts = self._group.formed = reformed.attempts
        self._next = self._formed_at = reformed.start
        # The last vote counted may differ between ranks, but their schedules must not.
        self._held_at = None
        self._group.left = False
        self.voter = self._voter(votes, reformed.vote)
        self._reformation = None
        self._lost = None
        return reformed

    def leave(self) -> None:
        """Vote no more."""
        if self.voter is not None:
            self.voter.leave()
            self.voter = None
        if self._reformation is not None:
            self._reformation.close()
        self._lost = None

    def _form_again(self) -> None:
        assert self._lost is not None
        number, state = self._lost
        attempts = self._attempts if self._reformation is None else self._reformation.attempts
        astray = self._astray >= _ASTRAY_VOTES or self._clock.trouble is not None
        self._reformation = Reformation(
            self._group,
            state,
            number,
            attempts,
            self._fruitless,
            lambda: self._clock.reached,
            self._runtime,
            astray=astray,
        )

    def _voter(self, votes: VoteLink, number: int) -> Voter:
        self._group.peers.vote_link_ended = votes.ended
        shared = (
            self._settings,
            self._group.register,
            self._history,
            number,
            self._never_coming,
            self._runtime,
        )
        return Voter(votes, *shared, lambda: self._group.failure is not None)

    def _never_coming(self, due: int) -> str | None:
        """Name the rank that will not come to count the vote that is due after pass ``due``, or ``None``.

        It was called no less often than this one, yet counts fewer passes: its count hangs, or runs apart.
        """
        for rank, (calls, forward) in sorted(self._group.positions().items()):
            if calls >= self._clock.calls and forward < due:
                self._astray = _ASTRAY_VOTES
                return (
                    f"rank {rank} has made {calls} calls but counts {forward} forward passes, this rank {due}"
                )
        return None
