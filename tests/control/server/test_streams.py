"""A plan goes out by turns, in the order of ranks and as there is room; one that is over goes no further."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.control.server.outgoing import streams as outgoing_streams
from eplb_service.control.server.outgoing.streams import RankStream, Streams, _PlanSending, _SendQueue
from eplb_service.wire.plan import SharedPlan

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
        self.room = _SendQueue(most_bytes)
        self.sending = _PlanSending(PLAN, self.room)
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
    monkeypatch.setattr(outgoing_streams, "_LONGEST_TURN_SECONDS", 0.01)
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
    queued = [[rank.outbox.get_nowait() for _ in range(2)] for rank in ranks]
    assert [[sending.over for sending, _ in copies] for copies in queued] == [[True, False]] * 3
    assert [copies[0][1] for copies in queued] == [0, 1, 2]
    streams.withdraw("decode")
    assert queued[0][1][0].over
    assert not other.outbox.get_nowait()[0].over


def test_who_no_longer_waits_holds_nobody_up() -> None:
    async def asking() -> None:
        queue = _SendQueue(10)
        first, gone, large, last = (queue.ask(size) for size in (6, 10, 50, 1))
        queue.over(gone)
        assert [turn.done() for turn in (first, large, last)] == [True, False, False]
        queue.over(first)
        queue.over(first)
        assert [turn.done() for turn in (large, last)] == [True, False], "larger than the room: alone"
        queue.over(large)
        assert (last.done(), queue.held) == (True, 1)

    asyncio.run(asking())


@given(st.data())
def test_whatever_happens_all_get_their_turn_and_the_room_is_kept(data: st.DataObject) -> None:
    async def asking() -> None:
        most = data.draw(st.integers(1, 20))
        queue, sizes = _SendQueue(most), data.draw(st.lists(st.integers(0, 30), max_size=12))
        asked: list[asyncio.Future[None]] = []
        ended: set[int] = set()
        sending: list[int] = []
        while len(asked) < len(sizes) or sending:
            if len(asked) < len(sizes) and data.draw(st.booleans()):
                asked.append(queue.ask(sizes[len(asked)]))
            elif sending:
                over = data.draw(st.sampled_from(sending))
                ended.add(over)
                queue.over(asked[over])
            begun = [number for number, turn in enumerate(asked) if turn.done()]
            assert begun == list(range(len(begun))), "in the order of asking"
            sending = [number for number in begun if number not in ended]
            assert queue.held == sum(sizes[number] for number in sending)
            assert queue.held <= most or len(sending) == 1
            assert sending or len(begun) == len(asked), "nobody waits while nobody sends"
        assert (len(ended), queue.held) == (len(sizes), 0)

    asyncio.run(asking())
