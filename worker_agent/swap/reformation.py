"""Brings the votes of a formation back after they were lost, on a thread of its own, while the model serves on.

A stall, a broken link or a late first step ends the votes, not the balancing: all ranks open new links, compare what
they serve, and agree on a forward pass from which they vote again. Where they do not all come, they try again later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.machine import SwitchState

_log = logging.getLogger("eplb.agent")

_FIRST_BACKOFF_SECONDS = 0.5
_LAST_BACKOFF_SECONDS = 60.0
_LONGEST_DELAY_SECONDS = 3600.0
_GATHER_SECONDS = 60.0
_OPEN_TIMEOUT = timedelta(seconds=60)
_POLL_SECONDS = 0.05
_FIRST_MARGIN = 32
"""Forward passes until the first vote: all ranks must have heard of it before they get there."""
_LAST_MARGIN = 4096


class Reformation:
    """Tries until the ranks vote again.

    ``state`` and ``vote`` are this rank's when it lost the votes, ``attempts`` counts those of the formation's life,
    and ``fruitless`` how often in a row votes were lost soon after they had been formed: each time they come later.
    ``complaint`` is the last attempt's error. Once ``poll`` gives the votes, ``start`` is the forward pass of the
    first; ``generation``, ``lane`` and ``vote`` are the last that any rank knew of.
    """

    def __init__(
        self,
        group: AgentGroup,
        state: SwitchState,
        vote: int,
        attempts: int,
        fruitless: int,
        now: Callable[[], int],
    ) -> None:
        self.attempts = attempts
        self.complaint: str | None = None
        self.start = 0
        self.generation, self.lane, self.vote = state.generation, state.lane, vote
        self._group = group
        self._version_digest = state.installed.version_digest
        self._now = now
        self._backoff = min(_FIRST_BACKOFF_SECONDS * 4**fruitless, _LONGEST_DELAY_SECONDS)
        self._margin = _FIRST_MARGIN
        self._closing = threading.Event()
        self._votes: dist.ProcessGroup | FatalSwitchError | None = None
        threading.Thread(target=self._run, name="eplb-reformation", daemon=True).start()

    def poll(self) -> dist.ProcessGroup | None:
        """Return the new votes' group, or ``None`` as long as there is none; never waits.

        Raises ``FatalSwitchError`` where the ranks have found that they serve different placements.
        """
        if isinstance(self._votes, FatalSwitchError):
            raise self._votes
        return self._votes

    def close(self) -> None:
        """Try no more."""
        self._closing.set()

    def _run(self) -> None:
        backoff = self._backoff
        while not self._closing.wait(backoff):
            try:
                self._votes = self._attempt()
                return
            except FatalSwitchError as diverged:
                self._votes = diverged
                return
            except Exception as error:
                self.complaint = f"the ranks do not vote again yet: {error}"
                _log.warning("rank %d: the ranks do not vote again yet: %s", self._group.rank, error)
            backoff = max(self._backoff, min(2 * backoff, _LAST_BACKOFF_SECONDS))
            self._margin = min(4 * self._margin, _LAST_MARGIN)

    def _attempt(self) -> dist.ProcessGroup:
        self._gather()
        votes = self._group.process_group(f"vote/{self.attempts}")
        digest, now = self._version_digest, self._now()
        mine = [digest, -digest, -self.generation, -self.lane, -self.vote, now, -now]
        low, high, generation, lane, vote, earliest, latest = _all_min(votes, mine)
        if low != -high:
            raise FatalSwitchError("the ranks serve different placements")
        if -latest - earliest > self._margin:
            raise TimeoutError(f"the ranks count different forward passes, {earliest} to {-latest}")
        start = self._margin - latest
        (in_time,) = _all_min(votes, [int(self._now() < start)])
        if not in_time:
            raise TimeoutError(f"a rank was past forward pass {start} before all had heard of it")
        self.start, self.generation, self.lane, self.vote = start, -generation, -lane, -vote
        return votes

    def _gather(self) -> None:
        """Agree on the number of the attempt, the highest that any rank is at, once all ranks have lost the votes."""
        self.attempts += 1
        end = time.monotonic() + _GATHER_SECONDS
        waiting = sorted(self._group.peers.others)
        # One rank is waited for at a time: many that wait must not flood the one that is late.
        while waiting:
            self._group.store.set(f"attempt/{self._group.rank}", str(self.attempts))
            question = f"vattempt/{waiting[-1]}".encode()
            answer = self._group.peers.ask(waiting[-1:], question, _POLL_SECONDS).get(waiting[-1], b"-")
            if answer[:1] == b"!":
                raise FatalSwitchError(answer[1:].decode())
            theirs = int(answer[1:]) if answer[:1] == b"+" else 0
            if theirs == self.attempts:
                waiting.pop()
            elif theirs > self.attempts:
                self.attempts, waiting = theirs, sorted(self._group.peers.others)
            elif time.monotonic() > end or self._closing.wait(_POLL_SECONDS):
                raise TimeoutError(f"rank {waiting[-1]} has not come")


def _all_min(group: dist.ProcessGroup, values: list[int]) -> list[int]:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    reduced = torch.tensor(values, dtype=torch.int64)
    group.allreduce([reduced], options).wait(_OPEN_TIMEOUT)
    return [int(value) for value in reduced.tolist()]
