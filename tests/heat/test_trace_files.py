"""A trace file is read as it was written, or refused in one line that names the file and what is wrong."""

import numpy as np
import pytest

from eplb_service.heat.trace import read_heat
from eplb_service.heat.window import HeatError

HEAT_TLE = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)


@pytest.mark.parametrize("name", ["heat", "counts"])
def test_reads_npz_under_either_name(tmp_path, name):
    path = tmp_path / "trace.npz"
    np.savez_compressed(path, other=np.zeros(1), **{name: HEAT_TLE})
    heat = read_heat(path)
    assert heat.dtype == np.int64
    assert np.array_equal(heat, HEAT_TLE)


def test_reads_npy_and_keeps_fractions(tmp_path):
    path = tmp_path / "trace.npy"
    np.save(path, HEAT_TLE / 2)
    heat = read_heat(path)
    assert heat.dtype == np.float64
    assert np.array_equal(heat, HEAT_TLE / 2)


def refusal(path):
    with pytest.raises(HeatError) as caught:
        read_heat(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_a_file_cut_at_any_point_is_refused(tmp_path, suffix):
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    if suffix == ".npz":
        np.savez_compressed(whole, heat=HEAT_TLE)
    else:
        np.save(whole, HEAT_TLE)
    data = whole.read_bytes()
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        refusal(cut)


def test_damage_inside_an_npz_is_refused(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez_compressed(path, heat=np.random.default_rng(0).integers(0, 1000, (20, 3, 8)))
    data = bytearray(path.read_bytes())
    for place in range(60, len(data) - 200, 37):
        damaged = data.copy()
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        refusal(path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((2, 3, 4), -1), "heat is -1 at step 0, layer 0, expert 0"),
        (np.full((2, 3, 4), np.nan), "heat is nan at step 0"),
        (np.full((2, 3, 4), np.inf), "heat is inf at step 0"),
        (np.zeros((3, 4)), r"[steps, layers, experts], got [3, 4]"),
        (np.zeros((2, 3, 4, 1)), r"got [2, 3, 4, 1]"),
        (np.zeros((0, 3, 4)), "holds no steps"),
        (np.zeros((2, 0, 4)), r"got [2, 0, 4]"),
        (np.full((2, 3, 4), "1"), "holds numbers"),
        (np.full((2, 3, 4), 1j), "holds numbers"),
        (np.full((2, 3, 4), None), "Object arrays cannot be loaded"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_arrays_that_cannot_be_heat_are_refused(tmp_path, suffix, array, message):
    path = tmp_path / f"trace{suffix}"
    if suffix == ".npz":
        np.savez(path, heat=array)
    else:
        np.save(path, array)
    assert message in refusal(path)


def test_an_npz_without_heat_tells_what_it_holds(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, routes=HEAT_TLE, num_experts=4)
    assert "found routes, num_experts" in refusal(path)


def test_other_files_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.npz")
    folder = tmp_path / "folder.npz"
    folder.mkdir()
    assert "Is a directory" in refusal(folder)
    for suffix, message in ((".csv", "got .csv"), ("", "got no suffix"), (".npy", "is not a numpy .npy")):
        path = tmp_path / f"text{suffix}"
        path.write_text("1,2,3\n")
        assert message in refusal(path)


def test_a_header_that_claims_the_impossible_is_refused(tmp_path):
    path = tmp_path / "trace.npy"
    with path.open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40, 1 << 10, 1 << 10)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(64))
    refusal(path)
