"""Recorded segments hold exactly the steps that were counted, or say how many were lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.heat.phase import StepPhase
from eplb_core.wire.agent import Reporting
from eplb_core.wire.heat import HeatReport
from tests.agent.counting_layer import ROWS, SLOTS, CountingLayer
from worker_agent import heat
from worker_agent.heat import HeatRecorder


def _run(layers: list[CountingLayer], recorder: HeatRecorder, steps: range) -> None:
    for step in steps:
        for layer in layers:
            layer.forward(step)
        recorder.step_done(step, StepPhase.DECODE, (0, 0))


def _steps_of(segments: list[HeatReport]) -> list[int]:
    return [int(row.flat[0]) for segment in segments for row in segment.slot_counts_TLS]


@given(cuts=st.sets(st.integers(1, 40)), segment_steps=st.integers(1, ROWS), warm_up=st.integers(0, 20))
def test_every_step_is_in_one_segment_in_order_wherever_it_is_cut(cuts, segment_steps, warm_up) -> None:
    layers = [CountingLayer(), CountingLayer()]
    for layer in layers:
        for _ in range(warm_up):
            layer.forward(999)
    recorder = HeatRecorder(layers, segment_steps)
    for step in range(40):
        _run(layers, recorder, range(step, step + 1))
        if step in cuts:
            recorder.cut((0, 0))
    recorder.cut((0, 0))
    segments = recorder.take()
    assert _steps_of(segments) == list(range(40))
    for segment in segments:
        assert segment.steps <= segment_steps
        assert segment.slot_counts_TLS.shape == (segment.steps, 2, SLOTS)
        assert (segment.source_counts_TLE[:, :, 0] == 10 * segment.slot_counts_TLS[:, :, 0]).all()
        assert segment.slot_counts_TLS[0, 0, 0] == segment.first_step
    assert recorder.lost_steps == 0


@pytest.mark.parametrize("known_after", [1, 3])
def test_a_forward_pass_unknown_to_the_agent_loses_heat_but_misplaces_none(known_after: int) -> None:
    """The clock knows of it some calls later, and no row before is reported as another step."""
    layers = [CountingLayer(), CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=4)
    _run(layers, recorder, range(0, 6))
    for layer in layers:
        layer.forward(6)
    for step in range(7, 20):
        for layer in layers:
            layer.forward(step)
        recorder.step_done(step - (step < 6 + known_after), StepPhase.DECODE, (0, 0))
    segments = recorder.take()
    for segment in segments:
        assert _steps_of([segment]) == [*range(segment.first_step, segment.first_step + segment.steps)]
    taken = _steps_of(segments)
    assert set(range(4)) <= set(taken)
    assert set(range(12, 20)) <= set(taken)
    assert 6 not in taken
    assert recorder.lost_steps == 20 - len(taken)


def test_a_call_too_many_and_one_too_few_never_make_up_for_each_other() -> None:
    """Their sum is right, but one row is of two passes, and one of none."""
    layer = CountingLayer()
    recorder = HeatRecorder([layer], segment_steps=8)
    _run([layer], recorder, range(3))
    layer.forward(3)
    layer.forward(4)
    for step in (3, 4):
        recorder.step_done(step, StepPhase.DECODE, (0,))
    _run([layer], recorder, range(5, 16))
    assert _steps_of(recorder.take()) == list(range(8, 16))
    assert recorder.lost_steps == 8


def test_steps_that_cannot_be_copied_are_lost_and_never_reported_with_later_ones(monkeypatch) -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=8)
    _run(layers, recorder, range(3))
    with monkeypatch.context() as broken:
        broken.setattr(heat._Rings, "read_range", None)
        with pytest.raises(TypeError):
            recorder.cut((0, 0))
    _run(layers, recorder, range(3, 5))
    recorder.cut((0, 1))
    (segment,) = recorder.take()
    assert (segment.first_step, segment.steps, segment.layer_epochs) == (3, 2, (0, 1))
    assert recorder.lost_steps == 3


@pytest.mark.parametrize("asked", [Reporting(), Reporting(source_sums=True)], ids=["steps", "sums"])
@pytest.mark.parametrize(("slots", "sources"), [(True, True), (True, False), (False, True)])
def test_what_a_host_does_not_count_is_left_out(asked: Reporting, slots: bool, sources: bool) -> None:
    """Sums are over the steps of their report, and made only where slots are counted."""
    layers = [CountingLayer(counts_source=sources) for _ in range(2)]
    for layer in layers if not slots else ():
        layer.moe_load = None
    recorder = HeatRecorder(layers, segment_steps=5)
    recorder.adopt(5, asked)
    # Rings of eight rows: the second segment goes around their end.
    _run(layers, recorder, range(10))
    for first, report in zip((0, 5), recorder.take(), strict=True):
        steps = range(first, first + 5)
        summed = asked.source_sums and slots
        assert (report.slot_counts_TLS is not None) == slots
        assert (report.source_counts_TLE is not None) == (sources and not summed)
        assert (report.source_sums_LE is not None) == (sources and summed)
        if report.slot_counts_TLS is not None:
            assert report.slot_counts_TLS[:, 1, 2].tolist() == list(steps)
        if report.source_counts_TLE is not None:
            assert report.source_counts_TLE[:, 1, 3].tolist() == [10 * step for step in steps]
        if report.source_sums_LE is not None:
            assert (report.source_sums_LE == 10 * sum(steps)).all()


@pytest.mark.parametrize("first_step", [0, 5, 7])
def test_segments_end_at_the_same_steps_wherever_a_rank_began(first_step: int) -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=4)
    for step in range(first_step):
        layers[0].forward(step)
    _run(layers, recorder, range(first_step, 16))
    ends = [one.first_step + one.steps for one in recorder.take()]
    assert ends == [step for step in (4, 8, 12, 16) if step > first_step]


@pytest.mark.parametrize("cut_at", [None, 5])
def test_of_a_few_blocks_one_is_reported_the_same_by_all_ranks(cut_at: int | None) -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=2)
    recorder.adopt(2, Reporting(one_in=4))
    for step in range(20):
        _run(layers, recorder, range(step, step + 1))
        if step == cut_at:
            recorder.cut((0,))
    assert _steps_of(recorder.take()) == [0, 1, 8, 9, 16, 17]
    assert recorder.lost_steps == 0


def test_a_rank_that_is_asked_for_shorter_reports_sends_what_it_has_with_the_next_step() -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=8)
    sent = []
    for step in range(12):
        if step in (2, 3):
            recorder.adopt(4)
        _run(layers, recorder, range(step, step + 1))
        sent += [(step, one.first_step, one.steps) for one in recorder.take()]
    assert sent == [(2, 0, 3), (3, 3, 1), (7, 4, 4), (11, 8, 4)]


@pytest.mark.parametrize("heard_at", [0, 3, 4, 6])
def test_ranks_that_hear_of_longer_reports_at_different_steps_cut_alike_again(heard_at: int) -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=2)
    for step in range(24):
        if step == heard_at:
            recorder.adopt(500)  # Rings hold eight.
        _run(layers, recorder, range(step, step + 1))
    taken = recorder.take()
    assert _steps_of(taken) == list(range(24))
    assert [one.first_step for one in taken if one.first_step >= 8] == [8, 16]


def test_tokens_and_wall_times_go_with_their_steps_where_they_are_known() -> None:
    """Tokens only where the host gave them for every step, and no time that the message does not hold."""
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, 3)
    for step, (tokens, micros) in enumerate([(5, 0), (6, 800), (7, 900), (9, 1 << 32), (None, -1), (2, 700)]):
        layers[0].forward(step)
        recorder.step_done(step, StepPhase.DECODE, (0,), tokens, micros)
    whole, partly = recorder.take()
    assert (whole.tokens_T.tolist(), whole.micros_T.tolist()) == ([5, 6, 7], [0, 800, 900])
    assert (partly.tokens_T, partly.micros_T.tolist()) == (None, [0, 0, 700])


@pytest.mark.parametrize("by_step", [False, True], ids=["layer-by-layer", "step-by-step"])
@pytest.mark.parametrize("layers", [1, 3])
def test_rings_in_one_tensor_are_reported_as_rings_of_their_own(layers: int, by_step: bool) -> None:
    """Read by one operation; the counts, also those around the ring's end, are the same, and copies."""
    rings_LWS = torch.zeros(layers, ROWS, SLOTS, dtype=torch.int32)
    if by_step:
        rings_LWS = torch.zeros(ROWS, layers, SLOTS, dtype=torch.int32).transpose(0, 1)
    whole, apart = ([CountingLayer(False, 100 * index) for index in range(layers)] for _ in range(2))
    for ring_WS, layer in zip(rings_LWS, whole, strict=True):
        layer.moe_load, layer.load_counter = ring_WS, whole[0].load_counter
    reported = []
    for some in (whole, apart):
        recorder = HeatRecorder(some, segment_steps=3)
        for step in range(20):
            for layer in some:
                layer.moe_load[step % ROWS] = step + layer.first
            for counter in {id(layer.load_counter): layer.load_counter for layer in some}.values():
                counter += 1
            recorder.step_done(step, StepPhase.DECODE, (0,) * layers)
        assert (recorder._slot_rings._whole_LWX is not None) == (some is whole or layers == 1)
        reported.append(recorder.take())
        assert recorder.lost_steps == 0
    rings_LWS.zero_()
    found = [[(one.first_step, one.slot_counts_TLS.tolist()) for one in reports] for reports in reported]
    assert found[0] == found[1]
    assert len(found[0]) == 6
