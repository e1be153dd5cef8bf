"""Tests of recording: reports are stored unchanged with their epochs' placements, and no missing value is guessed."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb_core.atomic_write import OutputError
from eplb_core.heat.phase import StepPhase
from eplb_core.heat.window import HeatError
from eplb_core.placement import Placement, default_log2phy, step_par
from eplb_core.wire.heat import HeatReport
from eplb_service.io import recorder as recorder_module
from eplb_service.io.open_trace import open_trace
from eplb_service.io.recorder import Recorder
from eplb_service.io.trace import PHASES, TraceFacts
from tests.io import traces
from tests.io.recorded_trace import EXPERTS, FACTS, LAYERS, RANKS, SLOTS
from tests.placement.drawn import dealt_one_by_one

ROOT = Path(__file__).parents[2]
LINEAR = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
OTHER = Placement(np.roll(LINEAR.phy2log_LRS, 1, axis=1), EXPERTS)
COUNTS_TLRS = np.random.default_rng(1).integers(0, 50, (300, LAYERS, RANKS, SLOTS)).astype(np.int32)


def report(rank, first, last, epochs=(0, 0), dummy=False):
    counts_TLS = COUNTS_TLRS[first:last, :, rank]
    phase_T = np.full(last - first, StepPhase.DUMMY if dummy else StepPhase.DECODE, dtype=np.uint8)
    return HeatReport(first, epochs, counts_TLS * (not dummy), phase_T)


def source_report(rank, first, source_TLE, epochs=(0, 0)):
    """Return a report from a rank that does not count tokens by slot."""
    phase_T = np.full(len(source_TLE), StepPhase.DECODE, dtype=np.uint8)
    return HeatReport(first, epochs, None, phase_T, source_TLE)


def by_expert(counts_TLRS, placement):
    shape = LAYERS, RANKS * SLOTS
    return traces.by_expert(counts_TLRS.reshape(-1, *shape), placement.phy2log_LRS.reshape(shape), EXPERTS)


def add_reports(recorder, first, last, ranks=range(RANKS), by=None, **options):
    """Add reports of ``by`` steps each from every rank, or one report of all steps."""
    for start in range(first, last, by or last - first):
        for rank in ranks:
            recorder.add(rank, report(rank, start, start + (by or last - first), **options))


def recorded(recorder):
    recorder.close()
    return open_trace(Path("decode.zarr"))


@pytest.fixture(autouse=True)
def _working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recorder():
    recorder = Recorder(Path("decode.zarr"), FACTS, LAYERS, EXPERTS, pending_steps=32)
    placed(recorder)
    return recorder


def placed(recorder, placement=LINEAR, tables_RLE=None):
    tables_RLE = placement.default_log2phy() if tables_RLE is None else tables_RLE
    for layer, phy2log_RS in enumerate(placement.phy2log_LRS):
        recorder.place(layer, 0, phy2log_RS, tables_RLE[:, layer])


def test_steps_are_recorded_as_reported(recorder):
    for first in range(0, 300, 20):
        for rank in np.random.default_rng(first).permutation(RANKS):
            recorder.add(int(rank), report(int(rank), first, first + 20))
    trace = recorded(recorder)
    assert trace.shape == (300, LAYERS, EXPERTS)
    assert trace.facts == replace(FACTS, phases=PHASES)
    assert np.array_equal(trace.heat(0, 300), by_expert(COUNTS_TLRS, LINEAR))
    assert trace.step_numbers(0, 300).tolist() == list(range(300))


def test_a_switch_may_be_reported_after_the_steps_that_follow_it(recorder):
    add_reports(recorder, 0, 10)
    add_reports(recorder, 10, 20, epochs=(0, 1))
    recorder.place(1, 1, OTHER.phy2log_LRS[1], OTHER.default_log2phy()[:, 1])
    trace = recorded(recorder)
    assert np.array_equal(trace.heat(0, 10), by_expert(COUNTS_TLRS[:10], LINEAR))
    assert np.array_equal(trace.heat(10, 20)[:, 0], by_expert(COUNTS_TLRS[10:20], LINEAR)[:, 0])
    assert np.array_equal(trace.heat(10, 20)[:, 1], by_expert(COUNTS_TLRS[10:20], OTHER)[:, 1])


def test_steps_that_a_rank_did_not_report_are_lost(recorder):
    add_reports(recorder, 0, 10)
    add_reports(recorder, 10, 20, ranks=(0, 1, 3))
    add_reports(recorder, 10, 20, ranks=[2], epochs=(0, 1))
    add_reports(recorder, 20, 30, ranks=range(3))
    add_reports(recorder, 30, 90, by=20)
    # This report is late: newer steps have already replaced its steps.
    recorder.add(3, report(3, 20, 30))
    assert recorded(recorder).step_numbers(0, 70).tolist() == [*range(10), *range(30, 90)]
    assert (recorder.steps, recorder.lost) == (70, 20)


def test_steps_without_tokens_are_skipped(recorder):
    add_reports(recorder, 0, 10, dummy=True)
    add_reports(recorder, 10, 20, ranks=[0])
    add_reports(recorder, 10, 20, ranks=range(1, RANKS), dummy=True)
    assert recorded(recorder).step_numbers(0, 10).tolist() == list(range(10, 20))


def test_restarted_ranks_are_recorded_from_their_first_step(recorder):
    for _ in range(2):
        recorder.begin_again()
        add_reports(recorder, 0, 200, by=20)
    assert recorded(recorder).step_numbers(0, 400).tolist() == [*range(200), *range(200)]


def test_steps_under_a_placement_that_is_never_reported_are_lost(recorder):
    add_reports(recorder, 0, 10)
    add_reports(recorder, 10, 20, epochs=(0, 1))
    assert recorded(recorder).steps == 10
    assert recorder.lost == 10


def sources_of(rank, steps, offset=0):
    return np.random.default_rng([rank, offset]).integers(0, 9, (steps, LAYERS, EXPERTS)).astype(np.uint8)


def test_source_heat_tokens_and_phases_are_recorded_as_reported(recorder):
    phases = {0: StepPhase.PREFILL, 1: StepPhase.DECODE, 2: StepPhase.DUMMY, 3: StepPhase.DUMMY}
    for first in (0, 10, 20, 30):
        for rank in range(RANKS):
            counted = report(rank, first, first + 10)
            phase = (phases[rank], StepPhase.PREFILL, StepPhase.MIXED)[max(first // 10 - 1, 0)]
            sent = replace(
                counted,
                phase_T=np.full(10, StepPhase.DECODE if first == 0 else phase, dtype=np.uint8),
                source_counts_TLE=sources_of(rank, 10, first),
                tokens_T=None if (first, rank) == (10, 2) else np.full(10, 5 + rank),
            )
            recorder.add(rank, sent)
    trace = recorded(recorder)
    names = [trace.facts.phases[number] for number in trace.phase_numbers(0, 40)]
    assert names == ["decode"] * 10 + ["mixed"] * 10 + ["prefill"] * 10 + ["mixed"] * 10
    expected = [
        np.concatenate([sources_of(rank, 10, first) for first in (0, 10, 20)]) for rank in range(RANKS)
    ]
    assert np.array_equal(trace.source_rows(0, 30), np.stack(expected, axis=1))
    assert trace.tokens(0, 10).tolist() == [26] * 10
    assert trace.tokens(0, 30) is None


def test_steps_without_source_heat_are_lost_in_a_trace_with_source_heat(recorder):
    for first in range(0, 80, 20):
        for rank in range(RANKS):
            sent = report(rank, first, first + 20)
            if (first, rank) != (60, 1):
                sent = replace(sent, source_counts_TLE=sources_of(rank, 20))
            recorder.add(rank, sent)
    assert recorded(recorder).steps == 60
    assert recorder.lost == 20


def test_source_heat_of_very_large_deployments_is_not_recorded(monkeypatch):
    monkeypatch.setattr(recorder_module, "MAX_SOURCE_COUNTS", RANKS * LAYERS * EXPERTS - 1)
    recorder = Recorder(Path("decode.zarr"), FACTS, LAYERS, EXPERTS, pending_steps=32)
    placed(recorder)
    for rank in range(RANKS):
        recorder.add(rank, replace(report(rank, 0, 10), source_counts_TLE=sources_of(rank, 10)))
    trace = recorded(recorder)
    assert trace.steps == 10
    assert trace.source_rows(0, 10) is None


def test_incomplete_steps_at_the_start_do_not_count_as_lost(recorder):
    recorder.add(3, report(3, 0, 20))
    add_reports(recorder, 20, 100, by=20)
    assert recorded(recorder).step_numbers(0, 80).tolist() == list(range(20, 100))
    assert recorder.lost == 0


@pytest.mark.parametrize("deals", [False, True], ids=["one-replica", "dealing"])
def test_missing_slot_counts_are_computed_from_source_heat_and_tables(deals):
    tables = [placement.default_log2phy(3 if deals else 1) for placement in (LINEAR, OTHER)]
    source_TLRE = np.random.default_rng(2).integers(0, 9, (20, LAYERS, RANKS, EXPERTS)).astype(np.uint8)
    recorder = Recorder(Path("decode.zarr"), FACTS, LAYERS, EXPERTS, pending_steps=32)
    placed(recorder, LINEAR, tables[0])
    for rank in range(RANKS):
        recorder.add(rank, source_report(rank, 0, source_TLRE[:10, :, rank]))
        recorder.add(rank, source_report(rank, 10, source_TLRE[10:, :, rank], (0, 1)))
    # Layer 1's switch is reported after tokens that were counted under the new layout.
    recorder.place(1, 1, OTHER.phy2log_LRS[1], tables[1][:, 1])
    trace = recorded(recorder)
    assert np.array_equal(trace.heat(0, 20), source_TLRE.sum(axis=2, dtype=int))
    assert np.array_equal(trace.source_rows(0, 20), source_TLRE.transpose(0, 2, 1, 3))
    assert set(recorder._tables) == {(0, 0), (1, 1)}
    expected_TLP, switched_TLP = (
        dealt_one_by_one(source_TLRE.transpose(0, 2, 1, 3), tables_RLED, RANKS * SLOTS)
        for tables_RLED in tables
    )
    expected_TLP[10:, 1] = switched_TLP[10:, 1]
    assert np.array_equal(trace.slot_heat(0, 20)[0], expected_TLP)
    assert np.array_equal(
        trace.served_loads(0, 20), expected_TLP.reshape(20, LAYERS, RANKS, SLOTS).sum(axis=3)
    )


def test_a_step_that_only_some_ranks_count_by_slot_is_lost(recorder):
    add_reports(recorder, 0, 10)
    add_reports(recorder, 10, 20, ranks=range(1, RANKS))
    recorder.add(0, source_report(0, 10, np.ones((10, LAYERS, EXPERTS), dtype=np.uint8)))
    assert recorded(recorder).steps == 10
    assert recorder.lost == 10


def test_missing_slot_counts_are_rejected_if_the_tables_are_unknown():
    recorder = Recorder(Path("decode.zarr"), FACTS, LAYERS, EXPERTS, 32)
    for layer in range(LAYERS):
        recorder.place(layer, 0, LINEAR.phy2log_LRS[layer], None)
    with pytest.raises(HeatError, match="rank 2 does not count tokens by slot"):
        recorder.add(2, source_report(2, 0, np.ones((4, LAYERS, EXPERTS), dtype=np.uint8)))


def test_two_recorders_cannot_write_the_same_trace():
    first = Recorder(Path("decode.zarr"), FACTS, LAYERS, EXPERTS, 64)
    for path in ("decode.zarr", str(Path("decode.zarr").absolute())):
        with pytest.raises(
            OutputError, match="another recording is writing to this trace; stop that recording"
        ):
            Recorder(Path(path), FACTS, LAYERS, EXPERTS, 64)
    Recorder(Path("other.zarr"), FACTS, LAYERS, EXPERTS, 64).close()
    first.close()
    first.close()
    Recorder(Path("decode.zarr"), FACTS, LAYERS, EXPERTS, 64).close()
    assert not list(Path().glob(".*.lock"))


def test_a_killed_recorder_releases_the_trace():
    script = (
        "import os\n"
        "from pathlib import Path\n"
        "from eplb_service.io.recorder import Recorder\n"
        "from tests.io.recorded_trace import EXPERTS, FACTS, LAYERS\n"
        "recorder = Recorder(Path('decode.zarr'), FACTS, LAYERS, EXPERTS, 64)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=300, env=environment)
    assert killed.returncode == -9
    Recorder(Path("decode.zarr"), FACTS, LAYERS, EXPERTS, 64).close()


def test_a_recorder_that_fails_to_start_releases_the_trace():
    Path("decode.zarr").write_text("a file, not a folder")
    with pytest.raises((HeatError, OutputError)):
        add_reports(Recorder(Path("decode.zarr"), FACTS, LAYERS, EXPERTS, 64), 0, 8)
    Path("decode.zarr").unlink()
    Recorder(Path("decode.zarr"), FACTS, LAYERS, EXPERTS, 64).close()


def test_the_tokens_of_ranks_that_pick_entries_by_row_fall_on_random_replicas():
    facts = TraceFacts(ranks=2, slots=2, split="even")
    phy2log_RS = np.array([[0, 1], [2, 0]], dtype=np.int32)
    recorder = Recorder(Path("decode.zarr"), facts, 1, 3, pending_steps=1000)
    recorder.place(0, 0, phy2log_RS, default_log2phy(phy2log_RS, 3, 2))
    source_TLE = np.tile(np.array([3, 1, 1], dtype=np.int32), (1000, 1, 1))
    recorder.add(0, source_report(0, 0, source_TLE, epochs=(0,)))
    recorder.add(1, source_report(1, 0, 0 * source_TLE, epochs=(0,)))
    trace = recorded(recorder)
    assert np.array_equal(trace.heat(0, 1000), source_TLE)
    # One of four steps sends all three tokens of expert 0 to one rank, which then has 4 of the 5 tokens.
    par_T1 = step_par(trace.served_loads(0, 1000))
    assert par_T1.mean() == pytest.approx(1.6 / 4 + 1.2 * 3 / 4, abs=0.02)
