"""Link over which the ranks vote. Its collectives all have the same width, and carry their kind and number.

Ranks can get out of step, for example after an interrupt that only one host survived. Their collectives could then
differ in buffer size, and gloo would terminate the process. With equal widths, every rank gets an error instead.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from worker_agent.runtime import REAL, Runtime
from worker_agent.swap.machine import BALLOT_WIDTH

_HEADER = 4
"""Length of the header: kind and number, and both negated, so that one MIN shows whether all ranks agree on them."""


class VoteError(RuntimeError):
    """Raised if a collective fails on this rank. Other ranks may have received its result."""


class Kind(enum.IntEnum):
    """Purpose of a collective on the vote link."""

    BALLOT = 1
    BOUNDARY = 2
    INSTALLED = 3
    SERVED = 4
    IN_TIME = 5
    BETWEEN_PASSES = 6
    AT_REST = 7
    PROBE = 8


@cache
def _min_options() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    return options


class Reduction:
    """Pending MIN all-reduce of integers.

    Parameters
    ----------
    group
        Gloo group of the ranks.
    kind
        Purpose of the collective.
    number
        Number of the collective's vote.
    values
        This rank's integers, at most ``BALLOT_WIDTH``.
    """

    def __init__(self, group: dist.ProcessGroup, kind: Kind, number: int, values: Sequence[int]) -> None:
        self._label = f"{kind.name.lower()} {number}"
        self._header = [int(kind), number, -int(kind), -number]
        self._size = len(values)
        padding = [0] * (BALLOT_WIDTH - len(values))
        self._tensor = torch.tensor([*self._header, *values, *padding], dtype=torch.int64)
        self._work: Any = group.allreduce([self._tensor], _min_options())

    def wait(self, seconds: float) -> list[int] | None:
        """Return the minimum of each value over all ranks, or ``None`` if not all ranks join within ``seconds``.

        Raises ``VoteError`` if the link is broken or the ranks are in different collectives.
        """
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if not self._work.is_completed():
                return None
            # A caller may keep the error and thus this frame alive. Drop the work, so that the link closes and peers
            # notice.
            self._work = None
            raise VoteError(f"{self._label}: {error}") from error
        reduced: list[int] = self._tensor.tolist()
        if reduced[:_HEADER] != self._header:
            raise VoteError(f"{self._label}: the ranks are in different collectives or votes")
        return reduced[_HEADER : _HEADER + self._size]

    @property
    def broken(self) -> bool:
        """True if the link is closed, as far as this rank knows. This never waits."""
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
        """True until all ranks have joined or the link is closed."""
        return self._work is not None and not self._work.is_completed()


class VoteLink:
    """Gloo group that the ranks use only for voting.

    Parameters
    ----------
    group
        The gloo group.
    runtime
        Threads to use.
    """

    def __init__(self, group: dist.ProcessGroup, runtime: Runtime = REAL) -> None:
        self._group: dist.ProcessGroup | None = group
        self._last: Reduction | None = None
        self._runtime = runtime

    def begin(self, kind: Kind, number: int, values: Sequence[int]) -> Reduction:
        """Start a collective. Raises ``VoteError`` if the link is broken.

        Parameters
        ----------
        kind
            Purpose of the collective.
        number
            Number of the collective's vote.
        values
            This rank's integers, at most ``BALLOT_WIDTH``.
        """
        if self._group is None:
            raise VoteError("this rank has left the vote link")
        try:
            self._last = Reduction(self._group, kind, number, values)
        except RuntimeError as error:
            raise VoteError(f"{kind.name.lower()} {number} could not be sent: {error}") from error
        return self._last

    def ended(self) -> bool:
        """Return True if this rank has left the link, or knows that it is closed. This never waits.

        A pending collective reveals this. If there is none, this call starts a probe that no other rank joins, and a
        later call checks whether the probe has failed or is still pending. Any vote over this link after a probe ends
        with an error.
        """
        last = self._last
        if self._group is None or (last is not None and last.broken):
            return True
        if last is None or not last.pending:
            try:
                self.begin(Kind.PROBE, 0, [])
            except VoteError:
                return True
        return False

    def leave(self) -> None:
        """Close the link without waiting. The other ranks notice immediately that it is closed."""
        # Destroying a group waits for its pending collective, up to the timeout, so a separate thread does it. That
        # thread is not a daemon, because destroying a group while the interpreter shuts down would abort the process.
        references: list[Any] = [self._last, self._group]
        self._last = self._group = None
        self._runtime.spawn("eplb-votes-end", references.clear, daemon=False)
