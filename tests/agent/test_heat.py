"""Recorded segments hold exactly the steps that were counted, or say how many were lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.wire.heat import HeatReport, StepPhase
from eplb_service.wire.reporting import Reporting
from worker_agent import heat
from worker_agent.heat import HeatRecorder

ROWS, SLOTS, EXPERTS = 8, 3, 4


@dataclass
class CountingLayer:
    """A layer that counts its step's number in every bin."""

    counts_source: bool = True
    expert_map: torch.Tensor = field(default_factory=lambda: torch.zeros(EXPERTS, dtype=torch.int32))
    log2phy: torch.Tensor = field(default_factory=lambda: torch.zeros(EXPERTS, dtype=torch.int32))
    moe_load: torch.Tensor = field(default_factory=lambda: torch.zeros(ROWS, SLOTS, dtype=torch.int32))
    source_load: torch.Tensor | None = None
    load_counter: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    shares_tokens: bool = False

    def __post_init__(self) -> None:
        if self.counts_source:
            self.source_load = torch.zeros(ROWS, EXPERTS, dtype=torch.int32)

    def expert_weights(self) -> list[torch.Tensor]:
        return [torch.zeros(SLOTS, 1)]

    def forward(self, step: int) -> None:
        row = int(self.load_counter) % ROWS
        self.moe_load[row] = step
        if self.source_load is not None:
            self.source_load[row] = 10 * step
        self.load_counter += 1


class SourcesOnly:
    """A layer whose host does not count by slot."""

    moe_load = None

    def __init__(self, counting: CountingLayer) -> None:
        self._counting = counting

    def __getattr__(self, name: str) -> object:
        return getattr(self._counting, name)


def _run(layers: list[CountingLayer], recorder: HeatRecorder, steps: range) -> None:
    for step in steps:
        for layer in layers:
            layer.forward(step)
        recorder.step_done(step, StepPhase.DECODE, (0, 0))


def _steps_of(segments: list[HeatReport]) -> list[int]:
    return [int(row.flat[0]) for segment in segments for row in segment.slot_counts_TLS]


@given(cuts=st.sets(st.integers(1, 40)), segment_steps=st.integers(1, ROWS), warm_up=st.integers(0, 20))
def test_every_step_is_in_one_segment_in_order_wherever_it_is_cut(
    cuts: set[int], segment_steps: int, warm_up: int
) -> None:
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
        assert segment.source_counts_TLE is not None
        assert (segment.source_counts_TLE[:, :, 0] == 10 * segment.slot_counts_TLS[:, :, 0]).all()
        assert segment.slot_counts_TLS[0, 0, 0] == segment.first_step
    assert recorder.lost_steps == 0


def test_a_forward_pass_unknown_to_the_agent_loses_heat_but_misplaces_none() -> None:
    layers = [CountingLayer(), CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=4)
    _run(layers, recorder, range(0, 6))
    for layer in layers:
        layer.forward(999)
    _run(layers, recorder, range(6, 20))
    segments = recorder.take()
    taken = _steps_of(segments)
    assert 999 not in taken
    assert taken == sorted(set(taken))
    assert set(range(4)) <= set(taken)
    # The recorder has found its place again: later steps are whole.
    _run(layers, recorder, range(20, 32))
    assert _steps_of(recorder.take())[-4:] == [28, 29, 30, 31]
    assert recorder.lost_steps > 0


def out_of_memory(*_: object) -> None:
    raise MemoryError


def test_steps_that_cannot_be_copied_are_lost_and_never_reported_with_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=8)
    _run(layers, recorder, range(3))
    with monkeypatch.context() as broken:
        broken.setattr(heat._Rings, "copy_of", out_of_memory)
        with pytest.raises(MemoryError):
            recorder.cut((0, 0))
    _run(layers, recorder, range(3, 5))
    recorder.cut((0, 1))
    (segment,) = recorder.take()
    assert (segment.first_step, segment.steps, segment.layer_epochs) == (3, 2, (0, 1))
    assert recorder.lost_steps == 3


def test_a_host_that_counts_no_sources_is_reported_without() -> None:
    layers = [CountingLayer(counts_source=False)]
    recorder = HeatRecorder(layers, segment_steps=2)
    _run(layers, recorder, range(2))
    assert recorder.take()[0].source_counts_TLE is None


def test_segments_longer_than_the_ring_are_refused() -> None:
    with pytest.raises(ValueError, match="segments of 9 steps do not fit heat rings of 8 rows"):
        HeatRecorder([CountingLayer()], segment_steps=9)


def test_the_service_may_ask_for_other_segments_within_the_ring() -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=2)
    recorder.adopt(500)
    _run(layers, recorder, range(ROWS))
    assert [segment.steps for segment in recorder.take()] == [ROWS]


def test_segments_end_at_the_same_steps_wherever_a_rank_began() -> None:
    for first_step in (0, 5, 7):
        layers = [CountingLayer()]
        recorder = HeatRecorder(layers, segment_steps=4)
        _run(layers, recorder, range(first_step, 16))
        assert [(one.first_step + one.steps) % 4 for one in recorder.take()] == [0] * -(
            -(16 - first_step) // 4
        )


def test_sums_are_over_the_steps_of_their_segment() -> None:
    layers = [CountingLayer(), CountingLayer()]
    recorder = HeatRecorder(layers, segment_steps=5)
    recorder.adopt(5, Reporting(source_sums=True))
    # Rings of eight rows: the second segment goes around their end.
    _run(layers, recorder, range(10))
    for segment in recorder.take():
        assert segment.source_counts_TLE is None
        assert segment.source_sums_LE is not None
        assert (segment.source_sums_LE == 10 * segment.slot_counts_TLS[:, 0, 0].sum()).all()


@pytest.mark.parametrize("counts_source", [False, True])
def test_sums_are_only_made_where_slots_are_counted(counts_source: bool) -> None:
    layer = CountingLayer(counts_source=counts_source)
    recorder = HeatRecorder([SourcesOnly(layer) if counts_source else layer], segment_steps=2)
    recorder.adopt(2, Reporting(source_sums=True))
    _run([layer], recorder, range(2))
    (segment,) = recorder.take()
    assert segment.source_sums_LE is None
    assert (segment.source_counts_TLE is not None) == counts_source


def test_of_a_few_blocks_one_is_reported_the_same_by_all_ranks() -> None:
    taken = []
    for cut_at in (None, 5):
        layers = [CountingLayer()]
        recorder = HeatRecorder(layers, segment_steps=2)
        recorder.adopt(2, Reporting(one_in=4))
        for step in range(20):
            _run(layers, recorder, range(step, step + 1))
            if step == cut_at:
                recorder.cut((0,))
        taken.append(_steps_of(recorder.take()))
        assert recorder.lost_steps == 0
    assert taken == [[0, 1, 8, 9, 16, 17]] * 2


def test_ranks_that_hear_of_longer_reports_at_different_steps_cut_alike_again() -> None:
    cuts = []
    for heard_at in (0, 3, 4, 6):
        layers = [CountingLayer()]
        recorder = HeatRecorder(layers, segment_steps=2)
        for step in range(24):
            if step == heard_at:
                recorder.adopt(8)
            _run(layers, recorder, range(step, step + 1))
        taken = recorder.take()
        assert _steps_of(taken) == list(range(24))
        cuts.append([one.first_step for one in taken])
    assert [[first for first in firsts if first >= 8] for firsts in cuts] == [[8, 16]] * 4


def test_tokens_are_reported_where_the_host_gave_them_for_every_step() -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, 4)
    for step, tokens in enumerate([5, 6, 7, 8, 9, None, 2, 3]):
        layers[0].forward(step)
        recorder.step_done(step, StepPhase.DECODE, (0,), tokens)
    whole, partly = recorder.take()
    assert whole.tokens_T is not None
    assert whole.tokens_T.tolist() == [5, 6, 7, 8]
    assert partly.tokens_T is None


def test_wall_times_go_with_their_steps_and_what_no_message_holds_is_not_known() -> None:
    layers = [CountingLayer()]
    recorder = HeatRecorder(layers, 3)
    for step, micros in enumerate([0, 800, 900, 1 << 32, -1, 700]):
        layers[0].forward(step)
        recorder.step_done(step, StepPhase.DECODE, (0,), micros=micros)
    first, second = recorder.take()
    assert first.micros_T is not None
    assert second.micros_T is not None
    assert first.micros_T.tolist() == [0, 800, 900]
    assert second.micros_T.tolist() == [0, 0, 700]


def test_a_host_that_counts_no_slots_is_reported_by_sources_alone() -> None:
    layers = [CountingLayer(), CountingLayer()]
    recorder = HeatRecorder([SourcesOnly(layer) for layer in layers], segment_steps=4)
    _run(layers, recorder, range(4))
    (segment,) = recorder.take()
    assert segment.slot_counts_TLS is None
    assert segment.source_counts_TLE is not None
    assert segment.source_counts_TLE[:, 0, 0].tolist() == [0, 10, 20, 30]


@pytest.mark.parametrize("by_step", [False, True], ids=["layer-by-layer", "step-by-step"])
@pytest.mark.parametrize("layers", [1, 3])
def test_rings_in_one_tensor_are_reported_as_rings_of_their_own(layers: int, by_step: bool) -> None:
    """Read by one operation; the counts, also those around the ring's end, are the same, and copies."""
    rings_LWS = torch.zeros(layers, 8, 2, dtype=torch.int32)
    if by_step:
        rings_LWS = torch.zeros(8, layers, 2, dtype=torch.int32).transpose(0, 1)
    counter = torch.zeros((), dtype=torch.int64)
    whole = [CountingLayer(counts_source=False) for _ in range(layers)]
    apart = [CountingLayer(counts_source=False) for _ in range(layers)]
    for index, layer in enumerate(whole):
        layer.moe_load, layer.load_counter = rings_LWS[index], counter
    for layer in apart:
        layer.moe_load = torch.zeros(8, 2, dtype=torch.int32)
    both = [HeatRecorder(some, segment_steps=3) for some in (whole, apart)]
    found: list[list[HeatReport]] = [[], []]
    for step in range(20):
        for index, layer in enumerate(apart):
            layer.moe_load[step % 8] = rings_LWS[index, step % 8] = torch.tensor([step, index])
            layer.load_counter += 1
        counter += 1
        for recorder, reports in zip(both, found, strict=True):
            recorder.step_done(step, StepPhase.DECODE, (0,) * layers)
            reports += recorder.take()
    assert both[0]._slot_rings._whole_LWX is not None
    rings_LWS.zero_()
    reported = [
        [(report.first_step, report.slot_counts_TLS.tolist()) for report in reports] for reports in found
    ]
    assert reported[0] == reported[1]
    assert len(reported[0]) == 6
    assert both[0].lost_steps == both[1].lost_steps == 0
