"""Whatever bytes of a trace are changed, it is read or refused in one line; nothing else ever comes of it."""

import json
import random
import zipfile

import numpy as np
import pytest

from eplb_service.heat.window import HeatError
from eplb_service.io.native.writer import TraceWriter
from eplb_service.io.open_trace import open_trace
from eplb_service.io.placement_file import read_placement
from eplb_service.io.trace import TraceFacts
from eplb_service.placement import PlacementError

HEAT_TLE = np.arange(24).reshape(2, 3, 4)
ROUNDS = 150
pytestmark = pytest.mark.filterwarnings("ignore")


def write_npz(path):
    np.savez_compressed(path, counts=HEAT_TLE, source=np.arange(96).reshape(2, 4, 3, 4))


def write_npy(path):
    np.save(path, HEAT_TLE)


def write_json(path):
    path.write_text(json.dumps({"heat": HEAT_TLE.tolist(), "records": []}))


def write_csv(path):
    path.write_text("step,layer,expert,tokens\n0,0,0,1\n1,1,1,5\n")


def write_yaml(path):
    path.write_text("num_slots: 4\ninitial_global_assignments: {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}\n")


def damaged(data, rng):
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        kind = rng.random()
        if kind < 0.7:
            data[place] = rng.choice([0, 255, rng.randrange(256), *b"9-{"])
        elif kind < 0.85:
            del data[place : place + rng.randint(1, 8)]
        else:
            data[place:place] = rng.randbytes(3)
        data = data or bytearray(b"x")
    return bytes(data)


def read_all(path):
    """Read a trace and a placement out of ``path``; refusals must be one line."""
    for read in (read_trace, lambda path: read_placement(path, 4, 2)):
        message = ""
        try:
            read(path)
        except (HeatError, PlacementError) as error:
            message = str(error)
        assert "\n" not in message


def read_trace(path):
    trace = open_trace(path)
    trace.heat(0, trace.steps)
    trace.source(0, trace.steps)


@pytest.mark.parametrize("write", [write_npz, write_npy, write_json, write_csv, write_yaml])
def test_single_files(tmp_path, write):
    path, rng = tmp_path / f"a.{write.__name__.removeprefix('write_')}", random.Random(1)
    write(path)
    whole = path.read_bytes()
    for _ in range(ROUNDS):
        path.write_bytes(damaged(whole, rng))
        read_all(path)


def test_the_pickle_in_a_torch_file(tmp_path):
    torch = pytest.importorskip("torch")
    whole, path, rng = tmp_path / "whole.pt", tmp_path / "a.pt", random.Random(1)
    torch.save({"rank": 0, "logical_count": torch.tensor(HEAT_TLE), "other": [torch.ones(2), None]}, whole)
    with zipfile.ZipFile(whole) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(ROUNDS):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, damaged(data, rng) if name.endswith("data.pkl") else data)
        read_all(path)


def test_any_file_of_a_native_trace(tmp_path):
    path, rng = tmp_path / "a.zarr", random.Random(1)
    with TraceWriter(path, TraceFacts(ranks=2, slots=2), 3, 4, sources=True) as writer:
        writer.append(HEAT_TLE, source_TRLE=np.ones((2, 2, 3, 4), dtype=int))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for _ in range(ROUNDS):
        file = rng.choice(files)
        whole = file.read_bytes()
        file.write_bytes(damaged(whole, rng))
        read_all(path)
        file.write_bytes(whole)
