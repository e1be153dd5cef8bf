"""Tests of decoding heat reports: packed types are kept, step counters wrap, and contradictions are rejected."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.heat.phase import StepPhase
from eplb_core.wire.agent import Shape
from eplb_core.wire.codec import encode, pack
from eplb_core.wire.fields import MAX_STEP, WireError
from eplb_core.wire.generated import agent_pb2
from eplb_core.wire.heat import HeatReport, decode_heat_report, is_quick_to_decode

SHAPE = Shape(ranks=4, layers=3, experts=8, slots=3, bytes_per_expert=0)


def message(steps: int) -> agent_pb2.HeatReport:
    slots_TLS = np.ones((steps, SHAPE.layers, SHAPE.slots), dtype=np.int32)
    sources_TLE = np.full((steps, SHAPE.layers, SHAPE.experts), 200, dtype=np.int32)
    phase_T = np.full(steps, StepPhase.DECODE, dtype=np.uint8)
    return encode(HeatReport(16, (0,) * SHAPE.layers, slots_TLS, phase_T, sources_TLE))


def test_decoded_counts_are_read_only_and_keep_their_packed_type() -> None:
    report = decode_heat_report(message(8), SHAPE, most_steps=8)
    assert report.source_counts_TLE is not None
    assert report.source_counts_TLE.dtype == np.uint8
    assert not report.source_counts_TLE.flags.writeable


@pytest.mark.parametrize("step", [1 << 48, (1 << 48) + 5, 1 << 62, (1 << 63) - 1, -1, -(1 << 63)])
def test_both_sides_wrap_a_step_counter_that_jumps(step: int) -> None:
    report = HeatReport(
        step, (0,) * SHAPE.layers, np.ones((4, SHAPE.layers, SHAPE.slots), np.int32), np.ones(4, np.uint8)
    )
    sent = encode(report)
    assert sent.first_step == step % MAX_STEP
    sent.first_step = step % (1 << 64)
    assert decode_heat_report(sent, SHAPE, most_steps=8).first_step == step % MAX_STEP


def test_source_sums_require_slot_counts_and_exclude_source_counts() -> None:
    report = message(8)
    report.source_sums.CopyFrom(pack(np.ones((SHAPE.layers, SHAPE.experts), dtype=np.int32)))
    with pytest.raises(WireError, match="cannot be combined with source_counts"):
        decode_heat_report(report, SHAPE, most_steps=8)
    report.ClearField("source_counts")
    assert decode_heat_report(report, SHAPE, most_steps=8).source_sums_LE is not None
    report.ClearField("slot_counts")
    with pytest.raises(WireError, match="requires slot_counts"):
        decode_heat_report(report, SHAPE, most_steps=8)


def test_only_small_reports_are_quick_to_decode() -> None:
    report = message(8)
    assert is_quick_to_decode(report)
    report.slot_counts.CopyFrom(pack(np.random.default_rng(0).integers(0, 1 << 30, (16, 58, 512))))
    assert not is_quick_to_decode(report)
