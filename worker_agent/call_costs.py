"""What the host's calls of the agent take of the model's time, and how much of that votes do.

Time by the host's clock: waits for the slowest rank's ballot and the copies of a commit are in it, what the device does
later is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CallCosts:
    """Sums since the agent's start; another thread may read them.

    Parameters
    ----------
    clock
        Nanoseconds that never go back.

    ``calls`` counts them; ``nanoseconds`` is what they took, ``vote_nanoseconds`` the part of it that votes took.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.calls = self.nanoseconds = self.vote_nanoseconds = 0
        self._clock = clock

    @contextmanager
    def call(self) -> Iterator[None]:
        """Within it is a call, whether or not it ends well."""
        began = self._clock()
        try:
            yield
        finally:
            self.nanoseconds += self._clock() - began
            self.calls += 1

    @contextmanager
    def vote(self) -> Iterator[None]:
        """Within it, and within a call, is a vote and what it leads to."""
        began = self._clock()
        try:
            yield
        finally:
            self.vote_nanoseconds += self._clock() - began
