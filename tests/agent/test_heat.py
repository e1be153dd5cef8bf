"""The heat recorder: reports contain exactly the counted steps, and lost steps are counted."""

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
def test_every_step_is_reported_once_and_in_order_for_any_report_length(cuts, segment_steps, warm_up) -> None:
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


@pytest.mark.parametrize("correction_delay", [1, 3])
def test_an_unnoticed_forward_pass_loses_heat_but_misattributes_none(correction_delay: int) -> None:
    """The clock corrects its step number a few calls later. No earlier row is reported under the wrong step."""
    layers = [CountingLayer(), CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=4)
    _run(layers, recorder, range(0, 6))
    for layer in layers:
        layer.forward(6)
    for step in range(7, 20):
        for layer in layers:
            layer.forward(step)
        recorder.step_done(step - (step < 6 + correction_delay), StepPhase.DECODE, (0, 0))
    segments = recorder.take()
    for segment in segments:
        assert _steps_of([segment]) == [*range(segment.first_step, segment.first_step + segment.steps)]
    reported_steps = _steps_of(segments)
    assert set(range(4)) <= set(reported_steps)
    assert set(range(12, 20)) <= set(reported_steps)
    assert 6 not in reported_steps
    assert recorder.lost_steps == 20 - len(reported_steps)


def test_an_extra_and_a_missing_call_do_not_cancel_out() -> None:
    """The counter ends at the right value, but one row has the counts of two passes and the next row is empty."""
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


def test_steps_that_cannot_be_copied_are_counted_as_lost(monkeypatch) -> None:
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


@pytest.mark.parametrize("reporting", [Reporting(), Reporting(source_sums=True)], ids=["steps", "sums"])
@pytest.mark.parametrize(("slots", "sources"), [(True, True), (True, False), (False, True)])
def test_a_report_contains_only_counts_that_the_host_records(
    reporting: Reporting, slots: bool, sources: bool
) -> None:
    """Sums cover their report's steps and are computed only if the host also counts tokens per slot."""
    layers = [CountingLayer(counts_source=sources) for _ in range(2)]
    for layer in layers if not slots else ():
        layer.moe_load = None
    recorder = HeatRecorder(layers, segment_steps=5)
    recorder.adopt(5, reporting)
    # The rings have eight rows, so the second report wraps around their end.
    _run(layers, recorder, range(10))
    for first, report in zip((0, 5), recorder.take(), strict=True):
        steps = range(first, first + 5)
        summed = reporting.source_sums and slots
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
def test_reports_end_at_the_same_steps_for_any_first_step(first_step: int) -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=4)
    for step in range(first_step):
        layers[0].forward(step)
    _run(layers, recorder, range(first_step, 16))
    ends = [report.first_step + report.steps for report in recorder.take()]
    assert ends == [step for step in (4, 8, 12, 16) if step > first_step]


@pytest.mark.parametrize("cut_at", [None, 5])
def test_one_block_in_four_is_reported_at_fixed_steps(cut_at: int | None) -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=2)
    recorder.adopt(2, Reporting(one_in=4))
    for step in range(20):
        _run(layers, recorder, range(step, step + 1))
        if step == cut_at:
            recorder.cut((0,))
    assert _steps_of(recorder.take()) == [0, 1, 8, 9, 16, 17]
    assert recorder.lost_steps == 0


def test_shorter_reports_take_effect_at_the_next_step() -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=8)
    sent = []
    for step in range(12):
        if step in (2, 3):
            recorder.adopt(4)
        _run(layers, recorder, range(step, step + 1))
        sent += [(step, report.first_step, report.steps) for report in recorder.take()]
    assert sent == [(2, 0, 3), (3, 3, 1), (7, 4, 4), (11, 8, 4)]


@pytest.mark.parametrize("adopted_at", [0, 3, 4, 6])
def test_reports_are_aligned_again_after_ranks_lengthen_them_at_different_steps(adopted_at: int) -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=2)
    for step in range(24):
        if step == adopted_at:
            recorder.adopt(500)  # The rings hold eight steps.
        _run(layers, recorder, range(step, step + 1))
    reports = recorder.take()
    assert _steps_of(reports) == list(range(24))
    assert [report.first_step for report in reports if report.first_step >= 8] == [8, 16]


def test_known_tokens_and_step_times_are_reported() -> None:
    """Token counts are reported only if the host provided them for every step.

    Times that do not fit in the field are reported as 0.
    """
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, 3)
    for step, (tokens, micros) in enumerate([(5, 0), (6, 800), (7, 900), (9, 1 << 32), (None, -1), (2, 700)]):
        layers[0].forward(step)
        recorder.step_done(step, StepPhase.DECODE, (0,), tokens, micros)
    complete, partial = recorder.take()
    assert (complete.tokens_T.tolist(), complete.micros_T.tolist()) == ([5, 6, 7], [0, 800, 900])
    assert (partial.tokens_T, partial.micros_T.tolist()) == (None, [0, 0, 700])


@pytest.mark.parametrize("by_step", [False, True], ids=["layer-by-layer", "step-by-step"])
@pytest.mark.parametrize("layers", [1, 3])
def test_rings_in_one_tensor_give_the_same_reports_as_separate_rings(layers: int, by_step: bool) -> None:
    """One operation reads all rings in a tensor.

    The counts are copies, and are the same even if they wrap around the end of the rings.
    """
    rings_LWS = torch.zeros(layers, ROWS, SLOTS, dtype=torch.int32)
    if by_step:
        rings_LWS = torch.zeros(ROWS, layers, SLOTS, dtype=torch.int32).transpose(0, 1)
    shared, separate = ([CountingLayer(False, 100 * index) for index in range(layers)] for _ in range(2))
    for ring_WS, layer in zip(rings_LWS, shared, strict=True):
        layer.moe_load, layer.load_counter = ring_WS, shared[0].load_counter
    reported = []
    for group in (shared, separate):
        recorder = HeatRecorder(group, segment_steps=3)
        for step in range(20):
            for layer in group:
                layer.moe_load[step % ROWS] = step + layer.first
            for counter in {id(layer.load_counter): layer.load_counter for layer in group}.values():
                counter += 1
            recorder.step_done(step, StepPhase.DECODE, (0,) * layers)
        assert (recorder._slot_rings._whole_LWX is not None) == (group is shared or layers == 1)
        reported.append(recorder.take())
        assert recorder.lost_steps == 0
    rings_LWS.zero_()
    counts = [
        [(report.first_step, report.slot_counts_TLS.tolist()) for report in reports] for reports in reported
    ]
    assert counts[0] == counts[1]
    assert len(counts[0]) == 6
