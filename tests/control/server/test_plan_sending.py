"""A plan goes out by turns, in the order of ranks; one that is over goes no further, and a frozen rank stops nobody."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from eplb_service.control.server.outgoing import plan_sending
from eplb_service.control.server.outgoing.plan_sending import PlanRoom, PlanSending, RankCopy
from eplb_service.control.server.outgoing.streams import RankStream, Streams
from eplb_service.wire.shared_plan import SharedPlan

RANKS, SIZE = 6, 100


class _Plan:
    """A plan of ``SIZE`` bytes for each rank."""

    size = SIZE

    def response(self, rank: int) -> bytes:
        return bytes([rank]) * SIZE


PLAN = cast("SharedPlan", _Plan())


class Scene:
    """Ranks that read only when they are let."""

    def __init__(self, most_bytes: int) -> None:
        self.room = PlanRoom(most_bytes)
        self.sending = PlanSending(PLAN, self.room)
        self.begun: list[int] = []
        self.reads = [asyncio.Event() for _ in range(RANKS)]
        self.tasks = [asyncio.ensure_future(self.sending.send(rank, self._write)) for rank in range(RANKS)]

    async def _write(self, data: bytes) -> None:
        self.begun.append(data[0])
        await self.reads[data[0]].wait()

    async def soon(self) -> list[int]:
        for _ in range(5):
            await asyncio.sleep(0)
        return self.begun

    async def end(self) -> None:
        for event in self.reads:
            event.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.room.held == 0


async def test_copies_go_out_in_order_as_there_is_room() -> None:
    scene = Scene(2 * SIZE)
    assert await scene.soon() == [0, 1]
    assert scene.room.held == 2 * SIZE
    scene.reads[1].set()
    assert await scene.soon() == [0, 1, 2]
    scene.tasks[0].cancel()
    assert await scene.soon() == [0, 1, 2, 3], "a rank whose stream has ended gives its room back"
    scene.tasks[4].cancel()
    scene.reads[2].set()
    assert await scene.soon() == [0, 1, 2, 3, 5]
    await scene.end()


async def test_a_plan_that_is_over_goes_to_nobody_else() -> None:
    scene = Scene(2 * SIZE)
    await scene.soon()
    scene.sending.over = True
    scene.reads[0].set()
    assert await scene.soon() == [0, 1]
    await scene.end()
    assert scene.begun == [0, 1]


async def test_a_rank_that_does_not_read_keeps_its_turn_for_a_while_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_sending, "_LONGEST_TURN_SECONDS", 0.01)
    scene = Scene(SIZE)
    begun = await scene.soon()
    assert begun == list(range(len(begun)))
    for _ in range(1000):
        if len(scene.begun) == RANKS:
            break
        await asyncio.sleep(0.01)
    assert scene.begun == list(range(RANKS))
    assert not any(task.done() for task in scene.tasks)
    await scene.end()


def test_a_newer_plan_takes_the_place_of_the_one_that_is_being_sent() -> None:
    streams = Streams()
    ranks = [RankStream() for _ in range(3)]
    for rank in (2, 0, 1):
        streams.add("decode", rank, ranks[rank])
    other = RankStream()
    streams.add("prefill", 0, other)
    streams.send("decode", PLAN)
    streams.send("prefill", PLAN)
    streams.send("decode", PLAN)
    queued = [[cast("RankCopy", rank.outbox.get_nowait()) for _ in range(2)] for rank in ranks]
    assert [[copy.sending.over for copy in copies] for copies in queued] == [[True, False]] * 3
    assert [copies[0].rank for copies in queued] == [0, 1, 2]
    streams.withdraw("decode")
    assert queued[0][1].sending.over
    assert not cast("RankCopy", other.outbox.get_nowait()).sending.over
