"""The outbox is bounded, and counts what it drops."""

from __future__ import annotations

from tests.agent import live
from worker_agent.outbox import Outbox


def test_a_full_outbox_drops_the_oldest_heat_and_counts_its_steps() -> None:
    outbox = Outbox(heat_segments=2)
    segments = [live.segment(first_step=step, steps=4) for step in (0, 4, 8)]
    for segment in segments:
        outbox.put(segment)
    assert outbox.dropped_steps == 4
    taken = outbox.take(timeout=0)
    assert taken is segments[1]
    assert taken is not None
    outbox.restore(taken)
    assert outbox.take(timeout=0) is segments[1]
    assert outbox.take(timeout=0) is segments[2]
    assert outbox.take(timeout=0) is None


def test_heat_that_is_no_more_asked_for_goes_without_being_counted_as_dropped() -> None:
    outbox = Outbox(heat_segments=8)
    segments = [live.segment(first_step=step, steps=4) for step in (0, 4, 8)]
    for segment in segments:
        outbox.put(segment)
    outbox.thin(lambda report: report.first_step != 4)
    assert [outbox.take(timeout=0), outbox.take(timeout=0)] == [segments[0], segments[2]]
    assert outbox.take(timeout=0) is None
    assert outbox.dropped_steps == 0
