"""Tests that damaged, hostile and contradictory traces produce a one-line error that names the file."""

import json

import numpy as np
import pytest

from eplb_core.heat.window import HeatError
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import open_trace
from tests.io.traces import HEAT_TLE, PHY2LOG_LP, refusal, slots_of


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".json"])
def test_a_file_truncated_at_any_point_is_rejected(tmp_path, suffix):
    whole = tmp_path / f"whole{suffix}"
    cut = tmp_path / f"cut{suffix}"
    if suffix == ".npz":
        np.savez_compressed(whole, heat=HEAT_TLE)
    elif suffix == ".npy":
        np.save(whole, HEAT_TLE)
    else:
        whole.write_text(json.dumps({"heat": HEAT_TLE.tolist()}))
    data = whole.read_bytes()
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        refusal(cut)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((2, 3, 4), -1), "heat is -1 at step 0, layer 0, expert 0"),
        (np.full((2, 3, 4), np.nan), "heat is nan at step 0"),
        (np.full((2, 3, 4), np.inf), "heat is inf at step 0"),
        (np.zeros(3), "[steps, layers, experts]"),
        (np.zeros((2, 3, 4, 1)), "[2, 3, 4, 1]"),
        (np.zeros((0, 3, 4)), "has no steps"),
        (np.zeros((2, 0, 4)), "[2, 0, 4]"),
        (np.full((2, 3, 4), "1"), "heat must be numeric"),
        (np.full((2, 3, 4), 1j), "heat must be numeric"),
        (np.full((2, 3, 4), None), "not a valid array of plain numbers"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_arrays_that_cannot_be_heat_are_rejected(tmp_path, suffix, array, message):
    path = tmp_path / f"trace{suffix}"
    if suffix == ".npz":
        np.savez(path, heat=array)
    else:
        np.save(path, array)
    reported = refusal(path)
    assert message in reported or str(list(array.shape)) in reported


def test_an_invalid_step_late_in_a_trace_is_named_when_it_is_read(tmp_path):
    path = tmp_path / "trace.npy"
    heat = np.ones((100, 1, 2))
    heat[90, 0, 1] = -3
    np.save(path, heat)
    trace = open_trace(path)
    trace.heat(0, 90)
    with pytest.raises(HeatError, match=r"step 10, layer 0, expert 1.*steps are counted from step 80"):
        trace.heat(80, 100)


HOSTILE = {
    "an npz of other arrays": (
        lambda p: np.savez(p, xs=HEAT_TLE),
        "holds xs [2, 3, 4]: specify the meaning with --as",
    ),
    "an empty file": (lambda p: p.write_bytes(b""), "is empty"),
    "a pickle": (lambda p: p.write_bytes(b"\x80\x04K\x01."), "could run code"),
    "an executable": (lambda p: p.write_bytes(b"\x7fELF\x02\x01\x01\x00" + bytes(64)), "known format"),
    "prose": (lambda p: p.write_text("hello\nworld\n"), "CSV of plain numbers"),
    "other bytes": (lambda p: p.write_bytes(b"\xff\xfe\xfd\xfc" * 20), "CSV of plain numbers"),
    "a zip of something": (np.savez, "data.pkl"),
    "ragged JSON": (lambda p: p.write_text("[[[1, 2]], [[1]]]"), "rows of equal length"),
    "deep JSON": (lambda p: p.write_text("[" * 100_000), "is not JSON"),
    "JSON of text": (lambda p: p.write_text('{"heat": "hot"}'), "its fields are heat"),
    "records of nothing": (lambda p: p.write_text('{"records": []}'), "all 0 ranks"),
    "records without counts": (lambda p: p.write_text('{"records": [{"rank": 0}]}'), "global_physical_count"),
    "a CSV with text": (
        lambda p: p.write_text("step,layer,expert,tokens\n0,0,zero,1\n"),
        "CSV of plain numbers",
    ),
    "a CSV with a negative layer": (lambda p: p.write_text("step,layer,expert,tokens\n0,-1,0,1\n"), "row 1"),
    "a CSV with a huge step": (
        lambda p: p.write_text("step,layer,expert,tokens\n0,0,0,1\n2147483647,2000000,9,1\n"),
        "more than this machine's memory",
    ),
}


@pytest.mark.parametrize(("write", "message"), HOSTILE.values(), ids=HOSTILE)
def test_files_that_are_not_traces_are_rejected(tmp_path, write, message):
    path = tmp_path / "trace.npz"
    write(path)
    assert message in refusal(path)


def test_missing_files_and_folders_are_rejected(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.npz")
    assert "folder in an unknown format" in refusal(tmp_path)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_header_with_an_impossible_shape_is_rejected(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    header = {"descr": "<f8", "fortran_order": False}
    with (tmp_path / "trace.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (1 << 20, 1 << 10, 1 << 10)})
        file.write(bytes(64))
    if suffix == ".npz":
        import zipfile

        with zipfile.ZipFile(path, "w") as archive:
            archive.write(tmp_path / "trace.npy", "heat.npy")
    assert "damaged" in refusal(path) or "larger than the file" in refusal(path)


@pytest.mark.parametrize(
    ("read_as", "message"),
    [
        (ReadAs(phy2log=PHY2LOG_LP[:, :5]), "does not match heat of 3 layers x 6 slots"),
        (ReadAs(phy2log=PHY2LOG_LP - 1), "refers to experts -1 to 2"),
        (ReadAs(phy2log=PHY2LOG_LP / 1.0), "the map (float64, shape [3, 6]) does not match"),
        (ReadAs(phy2log=PHY2LOG_LP, experts=3), "refers to experts 0 to 3, but there are only 3 experts"),
    ],
)
def test_a_map_that_does_not_fit_is_rejected(tmp_path, read_as, message):
    path = tmp_path / "window.npz"
    np.savez(path, expert_load_window=slots_of(HEAT_TLE, PHY2LOG_LP))
    assert message in refusal(path, read_as)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"routes": np.full((4, 1, 2), 9), "num_experts": 8},
            "refer to experts 9 to 9, but there are only 8 experts",
        ),
        ({"routes": np.full((4, 1, 2), -1), "num_experts": 8}, "refer to experts -1 to -1"),
        ({"routes": np.zeros((4, 1, 2), dtype=int), "req_ptr": [0, 3]}, "increasing integers from 0 to 4"),
        (
            {"routes": np.zeros((4, 1, 2), dtype=int), "req_ptr": [0, 3, 2, 4]},
            "increasing integers from 0 to 4",
        ),
        (
            {"routes": np.zeros((4, 1, 2), dtype=int), "req_ptr": [0.0, 4.0]},
            "increasing integers from 0 to 4",
        ),
        ({"routes": np.zeros((4, 1, 2), dtype=int)}, "too few for one step of 64"),
        ({"routes": np.zeros((4, 1, 2))}, "expected integers of shape [tokens, layers, choices]"),
        ({"routes": np.zeros((4, 2), dtype=int)}, "expected integers of shape [tokens, layers, choices]"),
        ({"routes": np.zeros((4, 1, 2), dtype=int), "num_experts": -1}, "one positive integer"),
    ],
)
def test_contradictory_routes_are_rejected(tmp_path, arrays, message):
    path = tmp_path / "routes.npz"
    np.savez(path, **arrays)
    assert message in refusal(path)
