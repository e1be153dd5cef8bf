"""A plan goes out by turns, in the order of ranks and as there is room; one that is over goes no further."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from eplb_service.control.server.outgoing import streams as outgoing_streams
from eplb_service.control.server.outgoing.streams import RankStream, Streams, _PlanSending
from eplb_service.wire.plan import SharedPlan

RANKS = 6


class _Plan:
    """A plan whose copies name their rank."""

    def response(self, rank: int) -> bytes:
        return bytes([rank])


PLAN = cast("SharedPlan", _Plan())


class Scene:
    """Ranks that read only when they are let."""

    def __init__(self, at_a_time: int) -> None:
        self.sending = _PlanSending(PLAN, asyncio.Semaphore(at_a_time))
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


async def test_copies_go_out_in_order_as_there_is_room() -> None:
    scene = Scene(2)
    assert await scene.soon() == [0, 1]
    scene.reads[1].set()
    assert await scene.soon() == [0, 1, 2]
    scene.tasks[0].cancel()
    assert await scene.soon() == [0, 1, 2, 3], "a rank whose stream has ended gives its room back"
    scene.tasks[4].cancel()
    scene.reads[2].set()
    assert await scene.soon() == [0, 1, 2, 3, 5]
    await scene.end()


async def test_a_plan_that_is_over_goes_to_nobody_else() -> None:
    scene = Scene(2)
    await scene.soon()
    scene.sending.over = True
    scene.reads[0].set()
    assert await scene.soon() == [0, 1]
    await scene.end()
    assert scene.begun == [0, 1]


async def test_a_rank_that_does_not_read_keeps_its_turn_for_a_while_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing_streams, "_LONGEST_TURN_SECONDS", 0.01)
    scene = Scene(1)
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
    queued = [[rank.outbox.get_nowait() for _ in range(2)] for rank in ranks]
    assert [[sending.over for sending, _ in copies] for copies in queued] == [[True, False]] * 3
    assert [copies[0][1] for copies in queued] == [0, 1, 2]
    streams.withdraw("decode")
    assert queued[0][1][0].over
    assert not other.outbox.get_nowait()[0].over
