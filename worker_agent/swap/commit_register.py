"""Settles votes whose outcome reached only some ranks, with the cooperative termination protocol of two-phase commit.

If a link fails during a vote that would commit a layer, one rank may receive the outcome and another only an error. If
both kept serving, tokens could be routed to the wrong weights. A rank without the outcome therefore asks its peers
(Bernstein, Hadzilacos and Goodman, "Concurrency Control and Recovery in Database Systems", 1987, section 7.4). A rank
that has the outcome answers with its action. A rank without it is in doubt from the moment it is asked, even if the
outcome arrives later. If all ranks are in doubt, none has committed and none will. The ranks wait only for a rank that
does not answer at all, and the model's next collective would wait for it anyway.

A rank whose process has ended counts as in doubt, because the model cannot serve another token without it. Its peers
can be wrong about that: a network fault can look like the end of a process. A rank that has committed therefore does
not serve until every other rank has confirmed its install (``AgentGroup.wait_for_installs``).
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, replace

from worker_agent.runtime import REAL, Runtime
from worker_agent.swap.peers import Inquiry, PeerGoneError, Peers

_VOTES_KEPT = 16
"""Number of votes to remember. Ranks are at most one vote apart, because each vote needs all ballots."""
_ROUND_SECONDS = 1.0
"""Time limit for asking all remaining peers once."""


class FatalSwitchError(RuntimeError):
    """This rank cannot know whether its weights match its peers' tables. It must not serve any more tokens.

    Agents pass this error on to the model, because a wrong token is worse than none.
    """


class Verdict(enum.Enum):
    """Result of a vote to commit a layer, as known to one rank. ABORTED can only follow IN_DOUBT."""

    COMMITTED = b"c"
    ABORTED = b"a"
    IN_DOUBT = b"d"


@dataclass(frozen=True)
class Settlement:
    """One rank's knowledge of a vote. It is immutable: each event returns a new value.

    Parameters
    ----------
    peers
        All other ranks of the group.
    verdict
        Result of the vote on this rank; ``None`` until the rank receives the outcome or is asked for it.
    in_doubt
        Peers that have reported that they are in doubt.

    Examples
    --------
    A rank without the outcome asks both of its peers. The first is in doubt as well, so the second decides:

    >>> settlement = Settlement(peers=frozenset({1, 2})).with_doubt()
    >>> settlement = settlement.with_answer(1, Verdict.IN_DOUBT)
    >>> settlement.with_answer(2, Verdict.COMMITTED).verdict.name
    'COMMITTED'
    >>> settlement.with_answer(2, Verdict.IN_DOUBT).verdict.name
    'ABORTED'
    """

    peers: frozenset[int]
    verdict: Verdict | None = None
    in_doubt: frozenset[int] = frozenset()

    def with_commit(self) -> Settlement:
        """Record that the vote commits. This has no effect if this rank is already in doubt."""
        return self if self.verdict is not None else replace(self, verdict=Verdict.COMMITTED)

    def with_doubt(self) -> Settlement:
        """Record that this rank has no outcome, or that a peer asked before the outcome arrived."""
        return self if self.verdict is not None else replace(self, verdict=Verdict.IN_DOUBT)

    def with_answer(self, peer: int, verdict: Verdict) -> Settlement:
        """Record a peer's answer. It has no effect unless this rank is in doubt."""
        if self.verdict is not Verdict.IN_DOUBT:
            return self
        if verdict is not Verdict.IN_DOUBT:
            return replace(self, verdict=verdict)
        in_doubt = self.in_doubt | {peer}
        return replace(
            self, in_doubt=in_doubt, verdict=Verdict.ABORTED if in_doubt == self.peers else self.verdict
        )


class CommitRegister:
    """Register of this rank's latest vote results. It answers peers' questions and settles votes without an outcome.

    Parameters
    ----------
    peers
        Connection to the other ranks.
    patience
        Maximum time to wait for a peer that does not answer, in seconds. It is as long as the model would wait for that
        peer.
    runtime
        Clock to use.

    Attributes
    ----------
    departed : dict of int to int
        Last vote whose layers a rank had installed when it closed its agent, keyed by rank.
    """

    def __init__(self, peers: Peers, patience: float, runtime: Runtime = REAL) -> None:
        self.departed: dict[int, int] = {}
        self._peers = peers
        self._patience = patience
        self._runtime = runtime
        self._votes: dict[int, Settlement] = {}
        self._lock = threading.Lock()

    def answer(self, vote: int) -> Verdict | None:
        """Return this rank's verdict on a vote for a peer that asks, or ``None`` if the vote has been forgotten.

        If the vote has no outcome yet, this rank is in doubt about it from now on.
        """
        with self._lock:
            if self._votes and vote <= max(self._votes) - _VOTES_KEPT:
                return None
            return self._store(vote, self._settlement(vote).with_doubt())

    def may_commit(self, vote: int, *, has_outcome: bool) -> bool:
        """Return True if the vote commits its layer on all ranks.

        A rank that has the outcome does not wait, unless a peer asked before the outcome arrived.

        Parameters
        ----------
        vote
            Vote number.
        has_outcome
            True if this rank has received the outcome and the vote commits.

        Raises
        ------
        FatalSwitchError
            If a peer that may have committed does not answer in time.
        """
        with self._lock:
            settlement = self._settlement(vote)
            verdict = self._store(vote, settlement.with_commit() if has_outcome else settlement.with_doubt())
        return (self._settle(vote) if verdict is Verdict.IN_DOUBT else verdict) is Verdict.COMMITTED

    def aborted(self, vote: int) -> bool:
        """Return True if this rank has settled a vote by aborting it."""
        with self._lock:
            return self._settlement(vote).verdict is Verdict.ABORTED

    def _settle(self, vote: int) -> Verdict:
        """Ask the peers repeatedly until one knows the result or all are in doubt."""
        end = self._runtime.now() + self._patience
        inquiry = Inquiry(self._peers, self._patience)
        waiting = self._peers.others
        while waiting:
            for peer in sorted(waiting):
                answer = self._ask(inquiry, vote, peer, _ROUND_SECONDS / len(waiting))
                if answer is None:
                    continue
                waiting -= {peer}
                with self._lock:
                    verdict = self._store(vote, self._settlement(vote).with_answer(peer, answer))
                if verdict is not Verdict.IN_DOUBT:
                    return verdict
            if self._runtime.now() > end:
                raise FatalSwitchError(
                    f"vote {vote} may have committed a layer, and ranks {sorted(waiting)} did not answer within "
                    f"{self._patience:g} s"
                )
        return Verdict.ABORTED

    def _ask(self, inquiry: Inquiry, vote: int, peer: int, seconds: float) -> Verdict | None:
        """Ask a peer for its verdict. Return ``None`` if it does not answer within ``seconds``."""
        if peer in self.departed:
            return Verdict.COMMITTED if self.departed[peer] >= vote else Verdict.IN_DOUBT
        try:
            answer = inquiry.ask(peer, b"d%d" % vote, seconds)
        except PeerGoneError:
            return Verdict.IN_DOUBT
        return None if answer is None else Verdict(answer)

    def _settlement(self, vote: int) -> Settlement:
        return self._votes.get(vote, Settlement(self._peers.others))

    def _store(self, vote: int, settlement: Settlement) -> Verdict:
        self._votes[vote] = settlement
        while len(self._votes) > _VOTES_KEPT:
            del self._votes[min(self._votes)]
        assert settlement.verdict is not None
        return settlement.verdict
