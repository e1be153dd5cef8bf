"""Brings the votes of a formation back after they were lost, on a thread of its own, while the model serves on.

A stall, a broken link or a late first step ends the votes, not the balancing: all ranks open new links, compare what
they serve, and agree on a forward pass from which they vote again. Where they do not all come, they try again later.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from worker_agent.forward_clock import ForwardClock
from worker_agent.runtime import REAL, Runtime
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.machine import SwitchState
from worker_agent.swap.vote_link import Kind, VoteError, VoteLink

_log = logging.getLogger("eplb.agent")

_INITIAL_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 60.0
_MAX_DELAY_SECONDS = 3600.0
_GATHER_SECONDS = 60.0
_OPEN_SECONDS = 60.0
_POLL_SECONDS = 0.05
_INITIAL_MARGIN = 32
"""Forward passes until the first vote: all ranks must have heard of it before they get there."""
_MAX_MARGIN = 4096
_AHEAD = 256
"""Forward passes by which the number that the ranks agree on is ahead of any that one of them has reached."""
_REST_SECONDS = 60.0
_QUEUED, _QUIET = 1, 2
"""States of a rank between two passes: some are still to be run on its device, or none."""


class _TooLateError(TimeoutError):
    """A rank had already passed the forward pass of the first vote. The next attempt schedules it later."""


class Reformation:
    """Tries until the ranks vote again.

    ``state`` and ``vote`` are this rank's when it lost the votes, ``attempts`` counts those of the formation's life,
    and ``fruitless`` how often in a row votes were lost soon after they had been formed: each time they come later.
    ``complaint`` is the last attempt's error. Once ``poll`` gives the votes, ``start`` is the forward pass of the
    first; ``generation``, ``lane`` and ``vote`` are the last that any rank knew of.

    Where a rank is ``astray``, or the ranks count passes that are far apart, they first agree on the number of one. For
    that each comes to rest between two passes on its model's thread (``rest``), with nothing left to do on its device:
    every pass holds collectives of all ranks, so when all are at rest at one time they have made the same passes.
    """

    def __init__(
        self,
        group: AgentGroup,
        state: SwitchState,
        vote: int,
        attempts: int,
        fruitless: int,
        now: Callable[[], int],
        runtime: Runtime = REAL,
        *,
        astray: bool = False,
    ) -> None:
        self.attempts = attempts
        self.complaint: str | None = None
        self.start = 0
        self.generation, self.lane, self.vote = state.generation, state.lane, vote
        self._group = group
        self._version_digest = state.installed.version_digest
        self._now = now
        self._runtime = runtime
        self._backoff = min(_INITIAL_BACKOFF_SECONDS * 4**fruitless, _MAX_DELAY_SECONDS)
        self._margin = _INITIAL_MARGIN
        self._astray = astray
        self._resting: tuple[VoteLink, int] | None = None
        self._verdicts: queue.SimpleQueue[bool] = runtime.queue()
        self._lock = threading.Lock()
        self._closing = runtime.event()
        self._votes: VoteLink | FatalSwitchError | None = None
        self._thread = runtime.spawn("eplb-reformation", self._run)

    @property
    def alive(self) -> bool:
        """True while it tries, or once it has come to an end."""
        return self._thread.is_alive() or self._votes is not None

    def poll(self) -> VoteLink | None:
        """Return the new votes' link, or ``None`` as long as there is none; never waits.

        Raises ``FatalSwitchError`` where the ranks have found that they serve different placements.
        """
        if isinstance(self._votes, FatalSwitchError):
            raise self._votes
        return self._votes

    def close(self) -> None:
        """Try no more."""
        self._closing.set()

    def _run(self) -> None:
        shortest = _INITIAL_BACKOFF_SECONDS
        while not self._rests(shortest):
            try:
                self._votes = self._attempt()
                return
            except FatalSwitchError as diverged:
                self._votes = diverged
                return
            except Exception as error:
                if isinstance(error, _TooLateError):
                    self._margin = min(4 * self._margin, _MAX_MARGIN)
                self.complaint = f"the ranks do not vote again yet: {error}"
                _log.warning("rank %d: the ranks do not vote again yet: %s", self._group.rank, error)
                # The others would take this rank for there, and be gone when it comes.
                self._group.store.set(f"attempt/{self._group.rank}", "0")
            shortest = min(2 * shortest, _MAX_BACKOFF_SECONDS)

    def _rests(self, shortest: float) -> bool:
        """Wait before the next attempt, only ``shortest`` once another rank makes one; return whether to try no more.

        Ranks that rest by turns, for longer than they wait for each other, would never meet.
        """
        began, longest = self._runtime.now(), max(self._backoff, shortest)
        self._group.left = False
        while self._runtime.now() - began < (shortest if self._group.left else longest):
            if self._closing.wait(_INITIAL_BACKOFF_SECONDS):
                break
        return self._closing.is_set()

    def _attempt(self) -> VoteLink:
        self._gather()
        votes = VoteLink(self._group.process_group(f"vote/{self.attempts}"), self._runtime)
        self._group.peers.vote_link_ended = votes.ended
        try:
            self.start = self._first_vote(votes)
        except BaseException:
            votes.leave()
            raise
        return votes

    def _first_vote(self, votes: VoteLink) -> int:
        """Forward pass of the first vote, by what all ranks serve and count."""
        digest, now = self._version_digest, self._now()
        mine = [digest, -digest, -self.generation, -self.lane, -self.vote, now, -now, -int(self._astray)]
        # Ranks may have failed unequally often.
        mine.append(-self._margin)
        low, high, generation, lane, vote, *passes, astray, margin = self._all_min(votes, Kind.SERVED, mine)
        if low != -high:
            raise FatalSwitchError("the ranks serve different placements")
        earliest, latest, self._margin = passes[0], -passes[1], -margin
        self.generation, self.lane, self.vote = -generation, -lane, -vote
        if astray or latest - earliest > self._margin:
            latest = self._agreed(votes, latest)
        start = self._margin + latest
        (in_time,) = self._all_min(votes, Kind.IN_TIME, [int(self._now() < start)])
        if not in_time:
            raise _TooLateError(f"a rank was past forward pass {start} before all had heard of it")
        return start

    def _agreed(self, votes: VoteLink, latest: int) -> int:
        """Number of a forward pass that all ranks have agreed on; raises ``TimeoutError`` where they have not."""
        self.vote += 1
        number = latest + _AHEAD
        with self._lock:
            self._resting = votes, number
        try:
            agreed = self._verdicts.get(timeout=_REST_SECONDS)
        except queue.Empty:
            with self._lock:
                withdrawn, self._resting = self._resting is not None, None
            # A rank that has begun to rest is waited for: it may have agreed.
            agreed = not withdrawn and self._verdicts.get()
        if not agreed:
            raise TimeoutError(
                "the ranks count different forward passes, and were not at rest between two at one time"
            )
        self._astray = False
        return number

    def rest(self, clock: ForwardClock, seconds: float) -> bool:
        """Agree on a pass, where the ranks are to do so; called between two passes on the model's thread.

        Waits twice ``seconds`` for the others, and as long again for each pass that they have still to queue; what they
        have then agreed on the register says.
        """
        with self._lock:
            resting, self._resting = self._resting, None
        if resting is None:
            return False
        agreed = again = False
        try:
            mine, least = self._at_rest(*resting, clock, seconds)
            again = (mine, least) == (_QUIET, _QUEUED)
            if again:
                # This rank's next pass is one that others have queued.
                with self._lock:
                    self._resting = resting
            else:
                agreed = self._group.register.may_commit(self.vote, heard=least == _QUIET)
            if agreed:
                clock.agree(resting[1])
        finally:
            if not again:
                self._verdicts.put(agreed)
        return agreed

    def _at_rest(self, votes: VoteLink, number: int, clock: ForwardClock, seconds: float) -> tuple[int, int]:
        """Return this rank's state and the least of all, once this one's device has no pass left or all give up."""
        mine = least = _QUEUED
        with suppress(VoteError):
            while mine == least == _QUEUED:
                came = votes.begin(Kind.BETWEEN_PASSES, self.attempts, []).wait(seconds) is not None
                mine = _QUIET if came and clock.at_rest(seconds) else _QUEUED
                state = mine if came and clock.reached < number else 0
                (least,) = votes.begin(Kind.AT_REST, self.attempts, [state]).wait(seconds) or [0]
            return mine, least
        return 0, 0

    def _all_min(self, votes: VoteLink, kind: Kind, values: list[int]) -> list[int]:
        least = votes.begin(kind, self.attempts, values).wait(_OPEN_SECONDS)
        if least is None:
            raise TimeoutError("not all ranks have come")
        return least

    def _gather(self) -> None:
        """Agree on the number of the attempt, the highest that any rank is at, once all ranks have lost the votes."""
        self.attempts += 1
        end = self._runtime.now() + _GATHER_SECONDS
        waiting = sorted(self._group.peers.others)
        # One rank is waited for at a time: many that wait must not flood the one that is late.
        while waiting:
            self._group.store.set(f"attempt/{self._group.rank}", str(self.attempts))
            question = b"t%d" % self.attempts
            answer = self._group.peers.ask(waiting[-1:], question, _POLL_SECONDS).get(waiting[-1], b"-")
            if answer[:1] == b"!":
                raise FatalSwitchError(answer[1:].decode())
            theirs = int(answer[1:]) if answer[:1] == b"+" else 0
            if theirs == self.attempts:
                waiting.pop()
            elif theirs > self.attempts:
                self.attempts, waiting = theirs, sorted(self._group.peers.others)
            elif self._runtime.now() > end or self._closing.wait(_POLL_SECONDS):
                raise TimeoutError(f"rank {waiting[-1]} has not come")
