"""Decides a vote that some ranks heard and others did not: cooperative termination of a two-phase commit.

Where a link fails in the middle of the vote that would commit a layer, one rank may hold the outcome and another only
an error. Going on would route tokens to the wrong weights. So a rank that has not heard asks the others (Bernstein,
Hadzilacos and Goodman, "Concurrency Control and Recovery in Database Systems", 1987, section 7.4): one that has
heard answers with what it did, and one that has not is in doubt from the moment it is asked, whatever it hears later.
If all are in doubt, nobody has committed and nobody will. Only a rank that does not answer at all leaves the others
waiting, and the model's next collective would wait for that one as well.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

from worker_agent.runtime import REAL, Runtime
from worker_agent.swap.peers import PeerGoneError, Peers

_VOTES_KEPT = 16
"""No rank can be more than one vote behind another: the next one needs all ballots."""
_ROUND_SECONDS = 1.0


class FatalSwitchError(RuntimeError):
    """This rank cannot know that its weights are those its peers route to; it must not serve another token.

    The one error that an agent lets through to the model: a wrong token is worse than none.
    """


class Verdict(enum.Enum):
    """State of a vote that was to commit a layer, on one rank; ABORTED only follows IN_DOUBT."""

    COMMITTED = b"c"
    ABORTED = b"a"
    IN_DOUBT = b"d"


@dataclass(frozen=True)
class Settlement:
    """Knowledge of one rank about one vote, a value; each event gives another.

    ``verdict`` is ``None`` before the rank has heard or was asked; ``in_doubt`` are the peers that have answered so.
    """

    peers: frozenset[int]
    verdict: Verdict | None = None
    in_doubt: frozenset[int] = frozenset()

    def heard(self) -> Settlement:
        """Note that this rank has heard that the vote commits; that comes too late where it is in doubt already."""
        return self if self.verdict is not None else replace(self, verdict=Verdict.COMMITTED)

    def doubted(self) -> Settlement:
        """Note that this rank has not heard, or that a peer has asked before it did."""
        return self if self.verdict is not None else replace(self, verdict=Verdict.IN_DOUBT)

    def answered(self, peer: int, verdict: Verdict) -> Settlement:
        """Note the answer of a peer to this rank, which is in doubt."""
        if self.verdict is not Verdict.IN_DOUBT:
            return self
        if verdict is not Verdict.IN_DOUBT:
            return replace(self, verdict=verdict)
        in_doubt = self.in_doubt | {peer}
        return replace(
            self, in_doubt=in_doubt, verdict=Verdict.ABORTED if in_doubt == self.peers else self.verdict
        )


class CommitRegister:
    """Knowledge of the last votes; answers for it, and settles with the peers what this rank has not heard.

    ``patience`` is the longest wait, in seconds, for a peer that does not answer: as long as the model would wait for
    it.
    """

    def __init__(self, peers: Peers, patience: float, runtime: Runtime = REAL) -> None:
        self._peers = peers
        self._patience = patience
        self._runtime = runtime
        self._votes: dict[int, Settlement] = {}
        self._lock = threading.Lock()

    def answer(self, vote: int) -> Verdict | None:
        """Return what this rank holds of a vote, in doubt from here on if not heard; ``None`` where forgotten."""
        with self._lock:
            if self._votes and vote <= max(self._votes) - _VOTES_KEPT:
                return None
            return self._put(vote, self._vote(vote).doubted())

    def may_commit(self, vote: int, *, heard: bool) -> bool:
        """Return whether the layer is committed, given whether this rank ``heard`` the vote decide so.

        Never waits where it has heard, but for a peer that was quicker to ask. Raises ``FatalSwitchError`` where a peer
        that may have committed does not answer.
        """
        with self._lock:
            settlement = self._vote(vote)
            verdict = self._put(vote, settlement.heard() if heard else settlement.doubted())
        return (self._settle(vote) if verdict is Verdict.IN_DOUBT else verdict) is Verdict.COMMITTED

    def _settle(self, vote: int) -> Verdict:
        end = self._runtime.now() + self._patience
        waiting = self._peers.others
        while waiting:
            for peer, verdict in self._asked(vote, waiting):
                waiting -= {peer}
                with self._lock:
                    verdict = self._put(vote, self._vote(vote).answered(peer, verdict))
                if verdict is not Verdict.IN_DOUBT:
                    return verdict
            if self._runtime.now() > end:
                raise FatalSwitchError(
                    f"vote {vote} may have committed a layer, and ranks {sorted(waiting)} did not answer within "
                    f"{self._patience:g} s"
                )
        return Verdict.ABORTED

    def _asked(self, vote: int, waiting: frozenset[int]) -> Iterable[tuple[int, Verdict]]:
        for peer in sorted(waiting):
            try:
                answers = self._peers.ask([peer], b"d%d" % vote, _ROUND_SECONDS / len(waiting))
            except PeerGoneError:
                # Without that rank the model cannot serve another token: what it did binds nobody any more.
                yield peer, Verdict.IN_DOUBT
                continue
            if peer in answers:
                yield peer, Verdict(answers[peer])

    def _vote(self, vote: int) -> Settlement:
        return self._votes.get(vote, Settlement(self._peers.others))

    def _put(self, vote: int, settlement: Settlement) -> Verdict:
        self._votes[vote] = settlement
        while len(self._votes) > _VOTES_KEPT:
            del self._votes[min(self._votes)]
        assert settlement.verdict is not None
        return settlement.verdict
