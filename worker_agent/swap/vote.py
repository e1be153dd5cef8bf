"""Casts, counts and schedules this rank's votes, and resumes voting after the vote link has been lost.

A ballot is cast at one step boundary and counted at a later one. Both boundaries are fixed in advance and are the same
on every rank. A rank that reaches the second boundary early waits there. Ranks never poll for completion, because
different ranks could then see an outcome at different steps. The interval until the next vote depends only on the
previous outcome, which is the same on all ranks, so their next votes are also at the same forward pass.
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
"""Maximum time to wait for all ranks to confirm an install over the vote link. After that, this rank asks each peer."""
_FAILURE_SECONDS = 0.5
"""Interval for checking if a peer has reported a failure. The report may arrive before the peer's link closes."""
_SUSPICION_SECONDS = 5.0
"""Time after which a rank that lacks ballots asks its peers for their positions, to find a stuck pass count."""
_VOTE_LAG = 2
"""Number of forward passes between casting and counting a ballot. It is capped at the vote interval."""
_IDLE_INTERVALS = 4
"""Number of vote intervals between votes while no rank holds a plan. A new plan waits at most this long."""
_BUSY_PASSES = 64
"""Number of forward passes for which votes stay frequent after a plan. When heat drifts, another plan soon follows."""
_MAX_ASTRAY_VOTES = 3
"""Number of consecutive votes at different forward passes after which the ranks open a new vote link. Fewer are
harmless, for example after a missed call."""
_PROVEN_PASSES = 256
"""Number of forward passes with voting after which the vote link counts as reliable."""


class Voter:
    """Casts this rank's ballots and counts the votes over one vote link, one vote at a time.

    Parameters
    ----------
    link
        Link to vote over.
    settings
        The agent's settings.
    register
        Register that settles a vote that may commit a layer if some ranks do not have its outcome.
    history
        Record of this rank's votes.
    number
        Number of the last vote so far.
    find_absent
        Callable that takes the forward pass at which a vote is due, and names a rank that will never reach it, or
        returns ``None``. It is called after a long wait.
    runtime
        Clock to use.
    has_failed
        Callable that returns True if any rank has reported that it must no longer serve.

    Attributes
    ----------
    number
        Number of the last vote.
    under_way
        True while a ballot has been cast but not yet counted.
    due
        Forward pass after which the vote is counted.
    ballots_at
        Time by which all ballots of the last counted vote had arrived, in seconds.
    """

    def __init__(
        self,
        link: VoteLink,
        settings: AgentSettings,
        register: CommitRegister,
        history: History,
        number: int = 0,
        find_absent: Callable[[int], str | None] = lambda _: None,
        runtime: Runtime = REAL,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.number = number
        self.under_way = False
        self.due = 0
        self.ballots_at = runtime.now()
        self._link = link
        self._lag = min(_VOTE_LAG, settings.vote_interval)
        self._timeout = settings.vote_timeout_seconds
        self._commit_timeout = min(settings.commit_timeout_seconds, self._timeout)
        self._register = register
        self._history = history
        self._find_absent = find_absent
        self._has_failed = has_failed
        self._runtime = runtime
        self._work: Reduction | None = None
        self._ballot: Ballot | None = None

    @property
    def may_commit(self) -> bool:
        """True if, as far as this rank knows, its last ballot may commit a layer."""
        return self._ballot is not None and self._ballot.commits

    def cast(self, ballot: Ballot) -> None:
        """Send this rank's ballot, to be counted a few forward passes later. Raises ``VoteError`` if the link fails."""
        assert not self.under_way, "a vote is already in progress"
        self._ballot = ballot
        self.number += 1
        self.due = ballot.forward + self._lag
        self._work = self._link.begin(Kind.BALLOT, self.number, ballot.encode())
        self.under_way = True

    def count(self, step: int, exact_forward: Callable[[], int]) -> VoteOutcome:
        """Wait for the slowest rank's ballot, and return the outcome to act on.

        A commit requires every rank to be at this step boundary, which the ranks confirm to each other here. A rank
        that has missed a call would already have begun the next forward pass.

        Parameters
        ----------
        step
            Current step.
        exact_forward
            Callable that waits for the device and returns the last forward pass. It is called only before a commit.

        Raises
        ------
        VoteError
            If the link is broken, ballots are missing after the timeout, or a rank will never vote. The caller must
            then call ``settle``.
        """
        outcome = self._wait_for_ballots()
        self.ballots_at = self._runtime.now()
        if outcome.result is VoteResult.COMMIT:
            same_pass = self._all_are_at(exact_forward())
            # The register settles the vote if not all ranks confirmed in time, or if a rank that gave up waiting has
            # already asked this one for the outcome.
            if same_pass is False or not self._register.may_commit(
                self.number, has_outcome=same_pass is True
            ):
                outcome = outcome.unconfirmed()
        self._history.vote(step, self.number, self._ballot, outcome)
        self._ballot = None
        return outcome

    def settle(self, step: int) -> VoteOutcome:
        """Settle the last vote if it may have committed a layer and this rank has no outcome, and return the outcome.

        Raises ``FatalSwitchError`` if a rank that may have committed does not answer.
        """
        ballot = self._ballot
        if ballot is None or not self.may_commit:
            return VoteOutcome.without_plans()
        outcome = VoteOutcome.unanimous(ballot.plan)
        if not self._register.may_commit(self.number, has_outcome=False):
            outcome = outcome.with_abort()
        self._history.vote(step, self.number, ballot, outcome, has_outcome=False)
        # A second call must not commit the layer again.
        self._ballot = None
        return outcome

    def all_have_installed(self, done: bool) -> bool | None:
        """Exchange install results with all ranks, and return True if all have installed the part.

        Returns False if a rank reports a failure, and ``None`` if not all ranks answer within the timeout. Raises
        ``VoteError`` if the link fails.

        Parameters
        ----------
        done
            True if this rank has installed the part.
        """
        installed = self._link.begin(Kind.INSTALLED, self.number, [int(done)])
        end = self._runtime.now() + min(_INSTALL_SECONDS, self._timeout)
        answers = None
        while answers is None and not self._has_failed() and (remaining := end - self._runtime.now()) > 0:
            answers = installed.wait(min(_FAILURE_SECONDS, remaining))
        if self._has_failed() or answers == [0]:
            return False
        return None if answers is None else True

    def leave(self) -> None:
        """Stop voting without waiting. The other ranks notice immediately that the link is closed.

        A vote in progress may still have to be settled, because other ranks may have its outcome.
        """
        self._work = None
        self._link.leave()

    def _wait_for_ballots(self) -> VoteOutcome:
        """Wait for the slowest rank's ballot and return the outcome."""
        assert self.under_way
        work = self._work
        self._work = None
        self.under_way = False
        if work is None:
            raise VoteError(f"vote {self.number}: this rank has left the vote link")
        end = self._runtime.now() + self._timeout
        wait = min(_SUSPICION_SECONDS, self._timeout)
        try:
            while (reduced := work.wait(wait)) is None:
                reason = self._find_absent(self.due)
                if reason is None and self._runtime.now() > end:
                    reason = f"not all ranks voted within {self._timeout:g} s"
                if reason is not None:
                    raise VoteError(reason)
                wait = min(_SUSPICION_SECONDS, max(0.001, end - self._runtime.now()))
            return VoteOutcome.decode(reduced)
        except (VoteError, ValueError) as error:
            raise VoteError(f"vote {self.number} has no outcome: {error}") from error

    def _all_are_at(self, forward: int) -> bool | None:
        """Return True if every rank is at the boundary after pass ``forward``; ``None`` if not all answered in time.

        A late rank still receives the other ranks' answers, so the next vote is not affected.
        """
        boundary = self._link.begin(Kind.BOUNDARY, self.number, [forward, -forward])
        bounds = boundary.wait(self._commit_timeout)
        return None if bounds is None else bounds[0] == -bounds[1]


class VoteSchedule:
    """Schedule for casting and counting ballots. It also resumes voting after the vote link has been lost.

    Parameters
    ----------
    rendezvous
        The group and its first vote link.
    settings
        The agent's settings.
    clock
        Counter of forward passes.
    history
        Record of this rank's votes.
    runtime
        Clock and threads to use.

    Attributes
    ----------
    voter
        Voter on the current link; ``None`` while the ranks are not voting.
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
        self._at_loss: tuple[int, SwitchState] | None = None
        """Number of the last vote and the state at the time when voting stopped."""
        self._next = 1
        """Forward pass of the next vote."""
        self._last_plan_pass: int | None = None
        """Forward pass of the last vote in which any rank held a plan."""
        self._astray_votes = 0
        self._voting_since = 0
        self._early_losses = 0
        self._attempts = 0
        self._reformation: Reformation | None = None
        self.voter: Voter | None = self._make_voter(VoteLink(rendezvous.votes, runtime), 0)
        self._group.position = lambda: (clock.calls, clock.now)

    @property
    def complaint(self) -> str | None:
        """Problem that keeps the ranks from voting again, or ``None``."""
        return None if self._reformation is None else self._reformation.complaint

    @property
    def trouble(self) -> str | None:
        """Reason to open a new vote link, other than the outcome of a vote; ``None`` if there is none."""
        if self._group.peer_left and self.voter is not None:
            # The link is broken, but this rank would only notice at its next vote, which may be far off.
            return "another rank has left the vote link"
        return self._clock.trouble

    def to_count(self, step: int) -> Voter | None:
        """Return the voter if a vote is due to be counted at this boundary, otherwise ``None``."""
        voter = self.voter
        return voter if voter is not None and voter.under_way and step >= voter.due else None

    def to_cast(self, step: int) -> tuple[Voter, int] | None:
        """Return the voter and the ballot's forward pass if a ballot is due now, or was due at a missed boundary."""
        forward = step - step % self._settings.vote_interval
        if self.voter is None or forward < self._next:
            return None
        self._next = forward + self._settings.vote_interval
        return self.voter, forward

    def counted(self, outcome: VoteOutcome) -> str | None:
        """Schedule the next vote based on the outcome of the last one.

        Returns
        -------
        str or None
            Reason to open a new vote link if the ranks' forward passes have diverged. It is the same on all ranks.
        """
        if outcome.forward_low - self._voting_since >= _PROVEN_PASSES:
            self._early_losses = 0
        if outcome.result is VoteResult.COMMIT:
            self._astray_votes = 0
        if outcome.plans:
            self._last_plan_pass = outcome.forward_high
        busy = self._last_plan_pass is not None and outcome.forward_high - self._last_plan_pass < _BUSY_PASSES
        if outcome.idle and not busy:
            self._next = outcome.forward_high + _IDLE_INTERVALS * self._settings.vote_interval
        if outcome.result is VoteResult.REALIGN:
            # A host that has missed a call will have caught up by then.
            delay = self._settings.vote_interval * (2**self._astray_votes - 1)
            self._astray_votes += 1
            self._next = outcome.forward_high + self._lag + 1 + delay
        if self._astray_votes < _MAX_ASTRAY_VOTES:
            return None
        return f"{self._astray_votes} votes in a row found the ranks at different forward passes"

    def lost(self, voter: Voter, state: SwitchState) -> None:
        """Start opening a new vote link. The delay grows each time a link is lost early."""
        self._at_loss = voter.number, state
        self.voter = None
        self._reform()
        self._early_losses += 1
        self._astray_votes = 0

    def rest(self) -> bool:
        """If requested, agree with the other ranks on a new number for this pass. Return True on success."""
        reformation = self._reformation
        return reformation is not None and reformation.rest(
            self._clock, self._settings.commit_timeout_seconds
        )

    def formed_again(self, step: int) -> Reformation | None:
        """Resume voting when a new vote link is open and its first forward pass has been reached.

        Returns the reformation that opened the link, or ``None`` if voting does not resume at this boundary.

        Raises ``FatalSwitchError`` if the ranks have found that they must not serve together.
        """
        reformation = self._reformation
        if (
            self.voter is None
            and self._at_loss is not None
            and (reformation is None or not reformation.alive)
        ):
            # The reformation's thread has died or could not be started.
            self._reform()
            return None
        if reformation is None or (link := reformation.poll()) is None or step < reformation.start:
            return None
        # If an error occurs between any two of these lines, either a voter or a reformation must remain.
        self._attempts = self._group.formed_attempt = reformation.attempts
        self._next = self._voting_since = reformation.start
        # The last counted vote may differ between ranks, but their schedules must not.
        self._last_plan_pass = None
        self._group.peer_left = False
        self.voter = self._make_voter(link, reformation.vote)
        self._reformation = None
        self._at_loss = None
        return reformation

    def leave(self) -> None:
        """Stop voting permanently."""
        if self.voter is not None:
            self.voter.leave()
            self.voter = None
        if self._reformation is not None:
            self._reformation.close()
        self._at_loss = None

    def _reform(self) -> None:
        """Start a thread that opens a new vote link."""
        assert self._at_loss is not None
        number, state = self._at_loss
        attempts = self._attempts if self._reformation is None else self._reformation.attempts
        astray = self._astray_votes >= _MAX_ASTRAY_VOTES or self._clock.trouble is not None
        self._reformation = Reformation(
            self._group,
            state,
            number,
            attempts,
            self._early_losses,
            lambda: self._clock.reached,
            self._runtime,
            astray=astray,
        )

    def _make_voter(self, link: VoteLink, number: int) -> Voter:
        self._group.peers.vote_link_ended = link.ended
        return Voter(
            link,
            self._settings,
            self._group.register,
            self._history,
            number,
            self._find_absent,
            self._runtime,
            lambda: self._group.failure is not None,
        )

    def _find_absent(self, due: int) -> str | None:
        """Name a rank that will never count the vote due after pass ``due``, or return ``None``.

        Such a rank has been called at least as often as this one but counts fewer passes, so its count is stuck or has
        diverged.
        """
        for rank, (calls, forward) in sorted(self._group.positions().items()):
            if calls >= self._clock.calls and forward < due:
                self._astray_votes = _MAX_ASTRAY_VOTES
                return (
                    f"rank {rank} has made {calls} calls but counts {forward} forward passes; "
                    f"the vote is due after pass {due}"
                )
        return None
