"""Opens a new vote link after the last one was lost, on a separate thread, while the model keeps serving.

A stall, a broken link or a late first step stops voting only temporarily. All ranks open a new link, compare their
layouts, and agree on the forward pass at which voting resumes. If a rank is missing, they try again later.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from worker_agent.forward_clock import ForwardClock
from worker_agent.runtime import REAL, Runtime
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.machine import SwitchState
from worker_agent.swap.vote_link import Kind, VoteError, VoteLink

_log = logging.getLogger("eplb.agent")

_INITIAL_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 60.0
"""Maximum delay before a failed attempt is retried."""
_MAX_DELAY_SECONDS = 3600.0
"""Maximum delay before an attempt if vote links are repeatedly lost soon after being opened."""
_GATHER_SECONDS = 60.0
_OPEN_SECONDS = 60.0
_POLL_SECONDS = 0.05
_INITIAL_MARGIN = 32
"""Number of forward passes until the first vote. No rank may reach the vote's pass before it knows of the vote."""
_MAX_MARGIN = 4096
_RENUMBERING_MARGIN = 256
"""Difference between the agreed pass number and the highest number that any rank has reached."""
_REST_SECONDS = 60.0
"""Maximum time for the model's thread to come to rest between two passes and agree with the other ranks."""
_GAVE_UP = 0
"""State of a rank that has given up on coming to rest."""
_QUEUED = 1
"""State of a rank whose device still has queued work."""
_QUIET = 2
"""State of a rank whose device has no queued work."""


class _TooLateError(TimeoutError):
    """A rank had already gone past the forward pass of the first vote. The next attempt schedules the vote later."""


@dataclass
class _RestRequest:
    """Request to the model's thread to agree with the other ranks on a new pass number.

    Parameters
    ----------
    link
        Vote link over which to agree.
    number
        The new number.
    verdicts
        Queue for the verdict, which is True if all ranks have agreed. Each request has its own queue, so that a late
        verdict cannot be mistaken for a verdict on the next request.
    taken
        True while the model's thread is working on the request.
    """

    link: VoteLink
    number: int
    verdicts: queue.SimpleQueue[bool]
    taken: bool = False


class Reformation:
    """Procedure that repeatedly attempts to open a new vote link, until all ranks have joined.

    If any rank requires it (``astray``), or if the ranks' pass counts are far apart, the ranks first agree on a new
    number for the current forward pass. To do so, each rank's model thread comes to rest between two passes (``rest``),
    with no queued work on its device. Every pass contains collectives over all ranks, so if all are at rest at the same
    time, they have run the same passes.

    Parameters
    ----------
    group
        The agents' group.
    state
        This rank's state when voting stopped.
    vote
        Number of this rank's last vote.
    attempts
        Number of attempts so far over the group's lifetime.
    early_losses
        Number of consecutive vote links that were lost soon after being opened. Each such loss delays the next attempt
        further.
    current_pass
        Callable that returns the highest forward pass that this rank has reached.
    runtime
        Clock and threads to use.
    astray
        True if this rank requires the ranks to agree on a new pass number.

    Attributes
    ----------
    attempts
        Number of the current attempt.
    complaint
        Error of the last attempt, or ``None``.
    start
        Forward pass of the first vote, once ``poll`` has returned the link.
    generation
        Highest transfer number on any rank, once ``poll`` has returned the link.
    lane
        Highest lane number on any rank, once ``poll`` has returned the link.
    vote
        Highest vote number on any rank, once ``poll`` has returned the link.
    """

    def __init__(
        self,
        group: AgentGroup,
        state: SwitchState,
        vote: int,
        attempts: int,
        early_losses: int,
        current_pass: Callable[[], int],
        runtime: Runtime = REAL,
        *,
        astray: bool = False,
    ) -> None:
        self.attempts = attempts
        self.complaint: str | None = None
        self.start = 0
        self.generation = state.generation
        self.lane = state.lane
        self.vote = vote
        self._group = group
        self._version_digest = state.installed.version_digest
        self._current_pass = current_pass
        self._runtime = runtime
        self._backoff = min(_INITIAL_BACKOFF_SECONDS * 4**early_losses, _MAX_DELAY_SECONDS)
        self._margin = _INITIAL_MARGIN
        self._astray = astray
        self._rest_request: _RestRequest | None = None
        self._lock = threading.Lock()
        self._closing = runtime.event()
        self._result: VoteLink | FatalSwitchError | None = None
        self._thread = runtime.spawn("eplb-reformation", self._run)

    @property
    def alive(self) -> bool:
        """True while attempts continue, and after they have ended with a result."""
        return self._thread.is_alive() or self._result is not None

    def poll(self) -> VoteLink | None:
        """Return the new vote link, or ``None`` if there is none yet. This never waits.

        Raises ``FatalSwitchError`` if the ranks serve different placements.
        """
        if isinstance(self._result, FatalSwitchError):
            raise self._result
        return self._result

    def close(self) -> None:
        """Stop making attempts."""
        self._closing.set()

    def _run(self) -> None:
        shortest = _INITIAL_BACKOFF_SECONDS
        while not self._wait_for_attempt(shortest):
            try:
                self._result = self._attempt()
                return
            except FatalSwitchError as fatal:
                self._result = fatal
                return
            except Exception as error:
                if isinstance(error, _TooLateError):
                    self._margin = min(4 * self._margin, _MAX_MARGIN)
                self.complaint = f"the ranks cannot vote again yet: {error}"
                _log.warning("rank %d: the ranks cannot vote again yet: %s", self._group.rank, error)
                # Otherwise, other ranks would count this one as present while it waits for its next attempt.
                self._group.store.set(f"attempt/{self._group.rank}", "0")
            shortest = min(2 * shortest, _MAX_BACKOFF_SECONDS)

    def _wait_for_attempt(self, shortest: float) -> bool:
        """Wait before the next attempt. Return True if this rank is closing.

        Once another rank makes an attempt, the wait is shortened to ``shortest`` seconds. Without this, ranks with
        long waits might never meet, because each would give up its attempt before the next rank begins.
        """
        start = self._runtime.now()
        longest = max(self._backoff, shortest)
        self._group.peer_left = False
        while self._runtime.now() - start < (shortest if self._group.peer_left else longest):
            if self._closing.wait(_INITIAL_BACKOFF_SECONDS):
                break
        return self._closing.is_set()

    def _attempt(self) -> VoteLink:
        """Wait for the other ranks, open a link, agree on the first vote, and return the link."""
        self._gather()
        link = VoteLink(self._group.process_group(f"vote/{self.attempts}"), self._runtime)
        self._group.peers.vote_link_ended = link.ended
        try:
            self.start = self._first_vote(link)
        except BaseException:
            link.leave()
            raise
        return link

    def _first_vote(self, link: VoteLink) -> int:
        """Compare all ranks' layouts and pass counts, and return the forward pass of the first vote."""
        digest = self._version_digest
        forward = self._current_pass()
        values = [
            digest,
            -digest,
            -self.generation,
            -self.lane,
            -self.vote,
            forward,
            -forward,
            -int(self._astray),
        ]
        # Margins differ if some ranks have failed more often than others.
        values.append(-self._margin)
        low, high, generation, lane, vote, earliest, latest, astray, margin = self._all_min(
            link, Kind.SERVED, values
        )
        if low != -high:
            raise FatalSwitchError("the ranks serve different placements")
        latest = -latest
        self._margin = -margin
        self.generation = -generation
        self.lane = -lane
        self.vote = -vote
        if astray or latest - earliest > self._margin:
            latest = self._agree_on_number(link, latest)
        start = self._margin + latest
        (in_time,) = self._all_min(link, Kind.IN_TIME, [int(self._current_pass() < start)])
        if not in_time:
            raise _TooLateError(
                f"a rank had passed forward pass {start} before all ranks knew of the first vote"
            )
        return start

    def _agree_on_number(self, link: VoteLink, latest: int) -> int:
        """Have the model's thread agree on a new pass number, and return it. Raises ``TimeoutError`` if it fails."""
        self.vote += 1
        request = _RestRequest(link, latest + _RENUMBERING_MARGIN, self._runtime.queue())
        with self._lock:
            self._rest_request = request
        try:
            agreed = request.verdicts.get(timeout=_REST_SECONDS)
        except queue.Empty:
            with self._lock:
                withdrawn = not request.taken
                if withdrawn:
                    self._rest_request = None
            # If the model's thread has already accepted the request, wait for its verdict, because it may have agreed.
            agreed = not withdrawn and request.verdicts.get()
        with self._lock:
            self._rest_request = None
        if not agreed:
            raise TimeoutError(
                "the ranks count different forward passes, and were never all idle between two passes at the same time"
            )
        self._astray = False
        return request.number

    def rest(self, clock: ForwardClock, seconds: float) -> bool:
        """If requested, agree with the other ranks on a new number for this pass. Return True on success.

        The model's thread calls this between two passes. It waits for the other ranks for up to twice ``seconds``, and
        again for each pass that they have yet to queue. The commit register then settles whether they have agreed.
        """
        with self._lock:
            request = self._rest_request
            if request is None:
                return False
            interrupted = request.taken
            request.taken = True
        agreed = False
        # If the call that accepted the request failed, the verdict is still pending, so the ranks have not agreed.
        if not interrupted:
            state, lowest = self._compare_queues(request.link, request.number, clock, seconds)
            if (state, lowest) == (_QUIET, _QUEUED):
                # Another rank has queued one more pass, so this rank must run that pass too and then try again.
                with self._lock:
                    request.taken = False
                return False
            agreed = self._group.register.may_commit(self.vote, has_outcome=lowest == _QUIET)
            if agreed:
                clock.agree(request.number)
        request.verdicts.put(agreed)
        return agreed

    def _compare_queues(
        self, link: VoteLink, number: int, clock: ForwardClock, seconds: float
    ) -> tuple[int, int]:
        """Wait until this rank's device is quiet or any rank gives up. Return the rank's state and the lowest state."""
        state = _QUEUED
        lowest = _QUEUED
        with suppress(VoteError):
            while state == lowest == _QUEUED:
                complete = link.begin(Kind.BETWEEN_PASSES, self.attempts, []).wait(seconds) is not None
                state = _QUIET if complete and clock.at_rest(seconds) else _QUEUED
                reported = state if complete and clock.reached < number else _GAVE_UP
                (lowest,) = link.begin(Kind.AT_REST, self.attempts, [reported]).wait(seconds) or [_GAVE_UP]
            return state, lowest
        return _GAVE_UP, _GAVE_UP

    def _all_min(self, link: VoteLink, kind: Kind, values: list[int]) -> list[int]:
        """Return the minimum of each value over all ranks. Raises ``TimeoutError`` if not all ranks join."""
        lowest = link.begin(kind, self.attempts, values).wait(_OPEN_SECONDS)
        if lowest is None:
            raise TimeoutError(f"not all ranks joined the new vote link within {_OPEN_SECONDS:g} s")
        return lowest

    def _gather(self) -> None:
        """Wait until all ranks have lost the old link, and agree on the highest attempt number on any rank."""
        self.attempts += 1
        end = self._runtime.now() + _GATHER_SECONDS
        waiting = sorted(self._group.peers.others)
        # Ask one rank at a time, so that many waiting ranks do not flood a late one.
        while waiting:
            self._group.store.set(f"attempt/{self._group.rank}", str(self.attempts))
            question = b"t%d" % self.attempts
            answer = self._group.peers.ask(waiting[-1:], question, _POLL_SECONDS).get(waiting[-1], b"-")
            if answer[:1] == b"!":
                raise FatalSwitchError(answer[1:].decode())
            attempt = int(answer[1:]) if answer[:1] == b"+" else 0
            if attempt == self.attempts:
                waiting.pop()
            elif attempt > self.attempts:
                self.attempts = attempt
                waiting = sorted(self._group.peers.others)
            elif self._runtime.now() > end or self._closing.wait(_POLL_SECONDS):
                raise TimeoutError(f"rank {waiting[-1]} has not joined attempt {self.attempts}")
