"""Has reports that come seldom wait for each other: many in a row cost less CPU than one at a time between other work.

What a report costs is mostly code and data that have left the processor's caches since the one before.
"""

from __future__ import annotations

import asyncio
from collections import deque

BATCH_SECONDS = 0.2
"""That the first report of a batch waits for others: little beside the seconds that its steps took."""
_AT_ONCE = 16
"""Reports that are let in before the event loop comes to something else."""


class Batches:
    """Lets reports in by batches, in the order in which they came.

    Parameters
    ----------
    seconds
        From the first report of a batch until it is let in.
    at_once
        Reports let in by one turn of the event loop.
    """

    def __init__(self, seconds: float = BATCH_SECONDS, at_once: int = _AT_ONCE) -> None:
        self._seconds = seconds
        self._at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait for the batch."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(self._seconds, self._let_in, loop)
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _let_in(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(self._at_once, len(self._waiting))):
            turn = self._waiting.popleft()
            # Whoever waited for it may have been cancelled.
            if not turn.done():
                turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._let_in, loop)
