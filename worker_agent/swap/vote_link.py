"""The link that ranks vote over: every collective on it has one width and carries its kind and number.

Ranks that are at different collectives, as after an interrupt that only one host has survived, would otherwise reduce
buffers of different sizes, at which gloo ends the process. So they learn of it, all at once, as an error.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from worker_agent.runtime import REAL, Runtime
from worker_agent.swap.machine import BALLOT_WIDTH

_HEAD = 4
"""Kind and number, and both negated: one MIN gives the lowest and the highest of all ranks."""


class VoteError(RuntimeError):
    """The ranks could not be heard; what the others saw is not known here."""


class Kind(enum.IntEnum):
    """Subject of a collective on the votes' link."""

    BALLOT = 1
    BOUNDARY = 2
    INSTALLED = 3
    SERVED = 4
    IN_TIME = 5
    BETWEEN_PASSES = 6
    AT_REST = 7
    PROBE = 8


@cache
def _least() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    return options


class Reduction:
    """MIN all-reduce of integers that is under way."""

    def __init__(self, group: dist.ProcessGroup, kind: Kind, number: int, values: Sequence[int]) -> None:
        self._about = f"{kind.name.lower()} {number}"
        self._head = [int(kind), number, -int(kind), -number]
        self._values = len(values)
        padding = [0] * (BALLOT_WIDTH - len(values))
        self._tensor = torch.tensor([*self._head, *values, *padding], dtype=torch.int64)
        self._work: Any = group.allreduce([self._tensor], _least())

    def wait(self, seconds: float) -> list[int] | None:
        """Return the least of all ranks' values, ``None`` where not all ranks have come within so many seconds.

        Raises ``VoteError`` on a broken link, or where the ranks are at different collectives.
        """
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if not self._work.is_completed():
                return None
            # Whoever keeps the error must not keep the link open: the others learn by its end.
            self._work = None
            raise VoteError(f"{self._about}: {error}") from error
        reduced: list[int] = self._tensor.tolist()
        if reduced[:_HEAD] != self._head:
            raise VoteError(f"{self._about}: the ranks are at different collectives, or at different votes")
        return reduced[_HEAD : _HEAD + self._values]

    @property
    def broken(self) -> bool:
        """True if the link has ended, as far as this rank knows; never waits."""
        if self._work is None:
            return True
        if not self._work.is_completed():
            return False
        try:
            self._work.wait(timedelta(seconds=1))
        except RuntimeError:
            return True
        return False

    @property
    def pending(self) -> bool:
        """True until all ranks have come, or the link has ended."""
        return self._work is not None and not self._work.is_completed()


class VoteLink:
    """Gloo group of the ranks, for votes alone; ``number`` is that of the vote that a collective belongs to."""

    def __init__(self, group: dist.ProcessGroup, runtime: Runtime = REAL) -> None:
        self._group: dist.ProcessGroup | None = group
        self._last: Reduction | None = None
        self._runtime = runtime

    def begin(self, kind: Kind, number: int, values: Sequence[int]) -> Reduction:
        """Send this rank's values, ``BALLOT_WIDTH`` at most. Raises ``VoteError`` where the link is broken."""
        if self._group is None:
            raise VoteError("this rank has left the votes")
        try:
            self._last = Reduction(self._group, kind, number, values)
        except RuntimeError as error:
            raise VoteError(f"{kind.name.lower()} {number} could not be sent: {error}") from error
        return self._last

    def ended(self) -> bool:
        """Return whether the link to some rank is known to have ended, or this rank has left it; never waits.

        A collective that is under way shows it. If there is none, one begins that no other rank takes part in: asked
        again, it has failed or still waits. Whoever votes on over this link afterwards learns of it as an error.
        """
        last = self._last
        if self._group is None or (last is not None and last.broken):
            return True
        if last is None or not last.pending:
            with suppress(VoteError):
                self.begin(Kind.PROBE, 0, [])
        return False

    def leave(self) -> None:
        """Give the link up; the other ranks learn of it at once, by its end. Returns at once as well."""
        # A group that still has a collective under way ends with it, which may take until its timeout.
        # No daemon: a group that is destroyed while Python itself ends would abort the process.
        held: list[Any] = [self._last, self._group]
        self._last = self._group = None
        self._runtime.spawn("eplb-votes-end", held.clear, daemon=False)
