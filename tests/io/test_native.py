"""Tests of native traces: round trips with any slicing, crashes that lose at most one batch, and damage."""

import gzip
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.atomic_write import OutputError
from eplb_core.heat.window import HeatError
from eplb_service.io import zarr_column
from eplb_service.io.copy_trace import check_trace_output, copy_trace
from eplb_service.io.native import BATCH_STEPS, TraceWriter
from eplb_service.io.open_trace import open_trace, read_heat
from eplb_service.io.trace import ArrayTrace, TraceFacts
from tests.io.traces import by_expert

RANKS = 4
SLOTS = 3
LAYERS = 2
EXPERTS = 8
FACTS = TraceFacts(
    model="toy", ranks=RANKS, slots=SLOTS, top_k=2, phases=("prefill", "decode"), nodes_R=(0, 0, 1, 1)
)
RNG = np.random.default_rng(3)
HEAT_TLE = RNG.integers(0, 50, (200, LAYERS, EXPERTS))
SOURCE_TRLE = RNG.integers(0, 9, (200, RANKS, LAYERS, EXPERTS))


def record(path, steps=200, batch=37):
    with TraceWriter(path, FACTS, LAYERS, EXPERTS) as writer:
        for first in range(0, steps, batch):
            rows = slice(first, min(steps, first + batch))
            numbers = np.arange(rows.start, rows.stop)
            writer.append(
                HEAT_TLE[rows],
                step_T=numbers * 2,
                tokens_T=numbers + 1,
                phase_T=numbers % 2,
                source_TRLE=SOURCE_TRLE[rows],
            )
    return path


def test_a_trace_survives_a_round_trip(tmp_path):
    trace = open_trace(record(tmp_path / "a.zarr"))
    assert trace.shape == (200, LAYERS, EXPERTS)
    assert trace.facts == FACTS
    assert np.array_equal(trace.heat(0, 200), HEAT_TLE)
    assert np.array_equal(trace.source(10, 90), SOURCE_TRLE[10:90].sum(axis=0))
    assert trace.step_numbers(5, 8).tolist() == [10, 12, 14]
    assert trace.tokens(5, 8).tolist() == [6, 7, 8]
    assert trace.phase_numbers(5, 8).tolist() == [1, 0, 1]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), st.data())
def test_any_slice_of_a_trace_is_read_with_any_batch_sizes(tmp_path_factory, batches, data):
    path = tmp_path_factory.mktemp("traces") / "a.zarr"
    heat_TLE = RNG.integers(0, 2**32, (sum(batches), 1, 3))
    ends = np.cumsum(batches)
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        # Each batch has a separate writer, as if recording had been restarted.
        with TraceWriter(path, TraceFacts(), 1, 3) as writer:
            writer.append(heat_TLE[first:last])
    first = data.draw(st.integers(0, len(heat_TLE)))
    last = data.draw(st.integers(first, len(heat_TLE)))
    assert np.array_equal(open_trace(path).heat(first, last), heat_TLE[first:last])


def placements(epoch):
    """Return placements in which each rank shares one of its three experts with the next rank."""
    rows = np.random.default_rng(epoch).permutation(EXPERTS)
    return np.stack([np.roll(rows, -2 * rank)[:SLOTS] for rank in range(RANKS)]).astype(np.int32)


def by_slot(path, known_epochs=(0, 5)):
    """Record a trace in which layer 1 switches at step 60, and return its heat by expert."""
    slot_heat_TLP = RNG.integers(0, 50, (100, LAYERS, RANKS * SLOTS))
    epoch_TL = np.zeros((100, LAYERS), dtype=int)
    epoch_TL[60:, 1] = 5
    with TraceWriter(path, FACTS, LAYERS, EXPERTS) as writer:
        for layer, epoch in [(0, 0), (1, 0), (1, 5)]:
            if epoch in known_epochs:
                writer.place(layer, epoch, placements(epoch))
        writer.append(slot_heat_TLP, epoch_TL)
    before_TLE, after_TLE = (
        by_expert(slot_heat_TLP, np.stack([placements(epoch).ravel()] * LAYERS), EXPERTS) for epoch in (0, 5)
    )
    return np.where(epoch_TL[:, :, None] == 5, after_TLE, before_TLE)


def test_tokens_by_slot_are_converted_with_the_placement_of_their_epoch(tmp_path):
    heat_TLE = by_slot(tmp_path / "a.zarr")
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.by_slot
    assert np.array_equal(trace.heat(0, 100), heat_TLE)
    assert np.array_equal(trace.heat(55, 65), heat_TLE[55:65])


def test_an_epoch_without_a_placement_is_rejected(tmp_path):
    by_slot(tmp_path / "a.zarr", known_epochs=(0,))
    trace = open_trace(tmp_path / "a.zarr")
    trace.heat(0, 60)
    with pytest.raises(HeatError, match="layer 1 was counted at epoch 5"):
        trace.heat(0, 61)


def test_a_crash_loses_at_most_the_last_batch(tmp_path):
    path = tmp_path / "a.zarr"
    writer = TraceWriter(path, FACTS, LAYERS, EXPERTS)
    for step in range(150):
        writer.append(HEAT_TLE[step : step + 1])
    # A killed process neither flushes nor closes its file.
    trace = open_trace(path)
    assert 150 - BATCH_STEPS < trace.steps <= 150
    assert np.array_equal(trace.heat(0, trace.steps), HEAT_TLE[: trace.steps])


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_crash_at_any_write_keeps_the_earlier_batches(tmp_path, monkeypatch, nth):
    path = record(tmp_path / "a.zarr", steps=100)
    calls = iter(range(1, 100))
    write = zarr_column.write_atomically

    def dying(*arguments, **options):
        if next(calls) == nth:
            raise OSError(5, "the power is gone")
        write(*arguments, **options)

    monkeypatch.setattr(zarr_column, "write_atomically", dying)
    writer = TraceWriter(path, FACTS, LAYERS, EXPERTS)
    with pytest.raises(OutputError):
        writer.append(HEAT_TLE[100:170], source_TRLE=SOURCE_TRLE[100:170])
    monkeypatch.undo()
    trace = open_trace(path)
    assert np.array_equal(trace.heat(0, trace.steps)[:100], HEAT_TLE[:100])
    assert trace.tokens(0, 100).tolist() == list(range(1, 101))
    # Recording resumes after the last complete batch.
    with TraceWriter(path, FACTS, LAYERS, EXPERTS) as writer:
        writer.append(HEAT_TLE[trace.steps : 170], source_TRLE=SOURCE_TRLE[trace.steps : 170])
    assert np.array_equal(open_trace(path).heat(0, 170), HEAT_TLE[:170])


def test_a_trace_is_readable_by_other_zarr_libraries(tmp_path):
    group = zarr.open_group(record(tmp_path / "a.zarr"), mode="r")
    assert group.attrs["format"] == "eplb-trace"
    assert np.array_equal(group["heat"][:], HEAT_TLE)
    assert np.array_equal(group["source_heat"][60:70], SOURCE_TRLE[60:70])
    assert group["heat"].metadata.dimension_names == ("step", "layer", "expert")


@pytest.mark.parametrize("keys", [("default", "/"), ("default", "."), ("v2", "."), ("v2", "/")])
def test_arrays_written_by_other_zarr_libraries_are_read_and_extended(keys, tmp_path):
    path = record(tmp_path / "a.zarr")
    (name, separator) = keys
    shutil.rmtree(path / "heat")
    array = zarr.create_array(
        path / "heat",
        shape=HEAT_TLE.shape,
        chunks=(64, LAYERS, EXPERTS),
        dtype="uint32",
        compressors=zarr.codecs.GzipCodec(level=9),
        chunk_key_encoding={"name": name, "separator": separator},
        dimension_names=("step", "layer", "expert"),
    )
    array[:] = HEAT_TLE
    assert np.array_equal(open_trace(path).heat(0, 200), HEAT_TLE)
    with TraceWriter(path, FACTS, LAYERS, EXPERTS) as writer:
        writer.append(HEAT_TLE[:70], source_TRLE=SOURCE_TRLE[:70])
    both_TLE = np.concatenate((HEAT_TLE, HEAT_TLE[:70]))
    assert np.array_equal(open_trace(path).heat(0, 270), both_TLE)
    assert np.array_equal(zarr.open_group(path, mode="r")["heat"][:], both_TLE)


def test_reading_and_writing_do_not_need_the_zarr_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    assert open_trace(record(tmp_path / "a.zarr")).steps == 200


def edited(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def of_group(**attributes):
    return lambda path: edited(path / "zarr.json", lambda document: document["attributes"].update(attributes))


def of_heat(**metadata):
    return lambda path: edited(path / "heat" / "zarr.json", lambda document: document.update(metadata))


def in_chunks(*shape):
    grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
    return of_heat(shape=[200, *shape[1:]], chunk_grid=grid)


def of_endless_steps(path):
    of_group(steps=1 << 50)(path)
    for name in ("step", "tokens", "phase", "heat", "source_heat"):
        edited(path / name / "zarr.json", lambda document: document["shape"].__setitem__(0, 1 << 50))


def packed(path, data):
    (path / "heat/c/0/0/0").write_bytes(gzip.compress(data))


DAMAGE = {
    "no metadata": (lambda p: (p / "heat" / "zarr.json").unlink(), "cannot be read"),
    "cut metadata": (lambda p: (p / "heat" / "zarr.json").write_text('{"zarr'), "cannot be read"),
    "endless metadata": (lambda p: (p / "zarr.json").write_bytes(bytes(1 << 21)), "too large"),
    "another group": (of_group(format="x"), "is not an eplb-trace file of version 1"),
    "a newer version": (of_group(version=9), "'version': 9"),
    "odd attributes": (of_group(ranks="x"), "cannot be read"),
    "no heat": (lambda p: (p / "heat").rename(p / "other"), "may be an incomplete copy"),
    "no steps": (of_group(steps=0), "attributes claim 0 rows"),
    "missing steps": (of_group(steps=201), "attributes claim 201 rows"),
    "a missing chunk": (lambda p: (p / "heat/c/0/0/0").unlink(), "is missing"),
    "a cut chunk": (lambda p: cut(p / "heat/c/0/0/0"), "truncated"),
    "a flipped byte": (lambda p: flip(p / "heat/c/0/0/0"), "heat/c/0/0/0 is"),
    "a chunk that unpacks to more": (
        lambda p: packed(p, bytes(1 << 20)),
        "its size differs from the metadata",
    ),
    "another codec": (of_heat(codecs=[{"name": "bytes"}]), "encoded with bytes (little) and gzip"),
    "a gigantic chunk": (in_chunks(1 << 29, LAYERS, EXPERTS), "whole rows, up to 1 GiB"),
    "rows of another size": (
        in_chunks(256, LAYERS, EXPERTS + 1),
        "rows of shape [2, 9], but the attributes claim 200 rows of shape [2, 8]",
    ),
    "more steps than memory": (of_endless_steps, "more than this machine's memory"),
    "chunks in another order": (of_heat(chunk_key_encoding={"name": "x"}), "chunk layout differs"),
    "a group for an array": (of_heat(node_type="group"), "not the metadata of a Zarr v3 array"),
    "no codecs": (of_heat(codecs=None), "cannot be read"),
    "another type": (of_heat(data_type="int64"), "expected uint32"),
    "big numbers first": (
        of_heat(codecs=[{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "gzip"}]),
        "encoded with bytes (little) and gzip",
    ),
    "chunks of nothing": (in_chunks(0, LAYERS, EXPERTS), "expected positive lengths"),
    "negative steps": (of_heat(shape=[-1, LAYERS, EXPERTS]), "non-negative"),
}


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_trace_is_rejected_with_a_one_line_error(tmp_path, damage, message):
    path = record(tmp_path / "a.zarr")
    damage(path)
    with pytest.raises(HeatError) as caught:
        read_heat(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_batches_are_rejected(tmp_path):
    writer = TraceWriter(tmp_path / "a.zarr", FACTS, LAYERS, EXPERTS)
    for heat_TLE, message in [
        (-HEAT_TLE, "whole token counts below 2"),
        (HEAT_TLE / 2, "whole token counts below 2"),
        (HEAT_TLE + 2**32, "whole token counts below 2"),
        (HEAT_TLE[:, :1], r"heat has shape \[200, 1, 8\]; expected \[200, 2, 8\]"),
    ]:
        with pytest.raises(HeatError, match=message):
            writer.append(heat_TLE)
    assert writer.steps == 0
    writer.append(HEAT_TLE)
    with pytest.raises(HeatError, match=r"cannot append steps with .*'source_heat'.* to steps with"):
        writer.append(HEAT_TLE, source_TRLE=SOURCE_TRLE)
    writer.place(0, 0, placements(0))
    with pytest.raises(HeatError, match="a different placement of layer 0 at epoch 0"):
        writer.place(0, 0, placements(1))
    with pytest.raises(HeatError, match=r"is a trace of 8 experts in 2 layers .*, but the recording has 9"):
        TraceWriter(tmp_path / "a.zarr", FACTS, LAYERS, EXPERTS + 1)
    with pytest.raises(OutputError, match="cannot be written"):
        TraceWriter(tmp_path / "absent" / "b.zarr", FACTS, LAYERS, EXPERTS).append(HEAT_TLE)


@pytest.mark.parametrize("suffix", [".zarr", ".npz", ".npy"])
def test_a_copy_contains_exactly_the_requested_slice(tmp_path, suffix):
    trace = open_trace(record(tmp_path / "a.zarr"))
    out = tmp_path / f"b{suffix}"
    assert copy_trace(trace, out, (20, 150), (1, None)) == (130, 1, EXPERTS)
    copied = open_trace(out)
    assert np.array_equal(copied.heat(0, 130), HEAT_TLE[20:150, 1:])
    if suffix == ".zarr":
        assert copied.facts == replace(FACTS, layer_numbers=(1,))
        assert np.array_equal(copied.source(0, 130), SOURCE_TRLE[20:150, :, 1:].sum(axis=0))
        assert copied.step_numbers(0, 2).tolist() == [40, 42]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", out.name]


def test_a_native_copy_keeps_slots_and_placements(tmp_path):
    heat_TLE = by_slot(tmp_path / "a.zarr")
    copy_trace(open_trace(tmp_path / "a.zarr"), tmp_path / "b.zarr", (50, 70), (1, 2))
    copied = open_trace(tmp_path / "b.zarr")
    assert copied.by_slot
    assert np.array_equal(copied.heat(0, 20), heat_TLE[50:70, 1:])


def test_a_failed_copy_leaves_no_file(tmp_path):
    heat_TLE = HEAT_TLE.astype(float)
    heat_TLE[120, 0, 0] = -1
    for suffix in (".zarr", ".npz", ".npy"):
        with pytest.raises(HeatError, match="heat is -1"):
            copy_trace(ArrayTrace(heat_TLE), tmp_path / f"b{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_invalid_output_paths_are_rejected(tmp_path):
    (tmp_path / "a.zarr").mkdir()
    for name, message in [
        ("a.zarr", "already exists"),
        ("b.txt", "must end in"),
        ("c/d.npz", "does not exist"),
    ]:
        with pytest.raises(OutputError, match=message):
            check_trace_output(tmp_path / name)


def test_a_trace_written_by_the_first_release_can_be_opened():
    trace = open_trace(Path(__file__).parents[1] / "data" / "trace-0.1.0.zarr")
    phy2log_LP = np.array([[0, 1, 2, 3, 0, 1]])
    slots_TLP = np.arange(24).reshape(4, 1, 6)
    np.testing.assert_array_equal(trace.heat(0, 4), by_expert(slots_TLP, phy2log_LP, 4))
    np.testing.assert_array_equal(trace.source_rows(0, 4), np.ones((4, 2, 1, 4)))
    assert trace.step_numbers(0, 4).tolist() == [3, 4, 5, 6]
    assert trace.tokens(0, 4).tolist() == [7, 8, 9, 10]
    assert trace.phase_numbers(0, 4).tolist() == [0, 1, 1, 1]
    assert (trace.facts.model, trace.facts.nodes_R) == ("toy", (0, 1))
