"""Sends a plan to all ranks by turns: together their copies of it are large, and the event loop has more to do.

Copies go out in the order of ranks, a megabyte at a time: what the kernel takes over at once, it takes on this thread.
What has not gone out by the time that the plan is over is not sent: ranks drop a plan that not all of them hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from eplb_service.control.core.turns import Turns
from eplb_service.wire.shared_plan import SharedPlan

MOST_BYTES = 1 << 20
"""Of plans that may be on their way at a time."""
_LONGEST_TURN_SECONDS = 1.0
"""Who takes longer goes on beside those whose turn comes next: one frozen rank must not keep a plan from the others."""

Write = Callable[[bytes], Awaitable[None]]


class PlanRoom:
    """Gives turns to all who send plans.

    Parameters
    ----------
    most_bytes
        That may be on their way at a time.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._turns: Turns[asyncio.Future[None]] = Turns(most_bytes)

    @property
    def held(self) -> int:
        """Bytes on their way."""
        return self._turns.held

    @contextlib.asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait for the turn to send ``size`` bytes; it is over with the context, or a second after it began."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        _begin(self._turns.ask(turn, size))
        try:
            await turn
            overdue = loop.call_later(_LONGEST_TURN_SECONDS, self._over, turn)
            try:
                yield
            finally:
                overdue.cancel()
        finally:
            self._over(turn)

    def _over(self, turn: asyncio.Future[None]) -> None:
        _begin(self._turns.over(turn))


class PlanSending:
    """One plan on its way to all ranks.

    Parameters
    ----------
    plan
        To be sent.
    room
        Gives its copies their turns.

    ``over`` says that no more copies are to go out.
    """

    def __init__(self, plan: SharedPlan, room: PlanRoom) -> None:
        self.over = False
        self._plan = plan
        self._room = room

    async def send(self, rank: int, write: Write) -> None:
        """Send one rank its copy by ``write`` when its turn comes, unless the plan is over by then."""
        if self.over:
            return
        async with self._room.turn(self._plan.size):
            if not self.over:
                await write(self._plan.response(rank))


@dataclass(frozen=True)
class RankCopy:
    """One rank's copy of a plan, which waits to be sent."""

    sending: PlanSending
    rank: int


def _begin(turns: Iterable[asyncio.Future[None]]) -> None:
    """Wake those whose turn it is; whoever has been cancelled meanwhile ends its turn by itself."""
    for turn in turns:
        if not turn.done():
            turn.set_result(None)
