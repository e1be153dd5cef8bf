"""Tests of torch files: values are exact, and hostile files are rejected without executing their code."""

import io
import pickle
import random
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from eplb_core.heat.window import HeatError
from eplb_service.io.containers import read_torch
from eplb_service.io.open_trace import read_heat

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "dtype", ["int64", "int32", "int16", "int8", "uint8", "float64", "float32", "float16", "bool"]
)
def test_every_dtype_is_read(tmp_path, dtype):
    path = tmp_path / "a.pt"
    tensor = (torch.arange(24).reshape(2, 3, 4) % 5).to(getattr(torch, dtype))
    torch.save({"x": tensor, "rank": 0, "none": None, "list": [1.5, "y"]}, path)
    read = read_torch(path)
    assert read["x"].dtype == np.dtype(dtype)
    assert np.array_equal(read["x"], tensor.numpy())
    assert (read["rank"], read["none"], read["list"]) == (0, None, [1.5, "y"])


def test_bfloat16_and_views_of_one_storage_are_read(tmp_path):
    path = tmp_path / "a.pt"
    whole = torch.arange(24.0).reshape(2, 3, 4)
    torch.save(
        [whole.to(torch.bfloat16), whole.transpose(0, 2), whole[1, 1:], whole[:0], torch.tensor(7)], path
    )
    halves, transposed, view, empty, scalar = read_torch(path)
    assert np.array_equal(halves, whole.numpy())
    assert np.array_equal(transposed, whole.numpy().transpose(2, 1, 0))
    assert np.array_equal(view, whole.numpy()[1, 1:])
    assert empty.shape == (0, 3, 4)
    assert scalar == 7


def test_a_file_truncated_at_any_point_is_rejected(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"logical_count": torch.ones(2, 3, 4)}, path)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(HeatError):
            read_torch(path)


def with_program(path, program, storages=()):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", program)
        archive.writestr("a/version", "3\n")
        for key, data in storages:
            archive.writestr(f"a/data/{key}", data)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Evaluated:
    def __reduce__(self):
        return eval, ("1 + 1",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_pickle_is_rejected_before_it_runs(tmp_path, protocol):
    sprung = tmp_path / "sprung"
    path = tmp_path / "a.pt"
    for hostile in (Trap(sprung), Evaluated(), {"logical_count": Trap(sprung)}, np.ones(3), Path("x")):
        with_program(path, pickle.dumps(hostile, protocol=protocol))
        with pytest.raises(HeatError, match=r"refers to|uses pickle protocol 4"):
            read_torch(path)
    assert not sprung.exists()


class Rebuilt:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.arguments


class Storage(tuple):
    """Object that is pickled as a persistent id."""


class StoragePickler(pickle.Pickler):
    def persistent_id(self, value):
        return tuple(value) if isinstance(value, Storage) else None


def tensor_program(size, stride, offset=0, count=4, kind=torch.FloatStorage, key="0"):
    """Return a pickle of one tensor with this size, stride and offset."""
    file = io.BytesIO()
    storage = Storage(("storage", kind, key, "cpu", count))
    StoragePickler(file, protocol=2).dump(Rebuilt(storage, offset, size, stride, False, OrderedDict()))
    return file.getvalue()


def test_the_helper_for_hostile_tensors_also_writes_valid_ones(tmp_path):
    path = tmp_path / "a.pt"
    with_program(path, tensor_program((2, 2), (2, 1)), [("0", np.arange(4, dtype="<f4").tobytes())])
    assert read_torch(path).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (tensor_program((2, 3), (3, 1)), "not a valid tensor file"),
        (tensor_program((2, 2), (2, 1), offset=1), "not a valid tensor file"),
        (tensor_program((2, 2), (2, -1)), "not a valid tensor file"),
        (tensor_program((2, 2), (2, 1), offset=-1), "not a valid tensor file"),
        (tensor_program((1 << 40, 1 << 10), (0, 0)), "more than this machine's memory"),
        (tensor_program((1 << 62, 1 << 10), (0, 0)), "not a valid tensor file"),
        (tensor_program((2, 2), (1,)), "not a valid tensor file"),
        (tensor_program((1 << 12,), (1,), count=1 << 40), "not a valid tensor file"),
        (tensor_program((2, 2), (2, 1), count=-4), "not a valid tensor file"),
        (tensor_program((2, 2), (2, 1), key="../../0"), "not a valid tensor file"),
        (tensor_program((2, 2), (2, 1), key="7"), "not a valid tensor file"),
        (tensor_program((2, 2), (2, 1), kind=torch.UntypedStorage), "refers to torch.storage.UntypedStorage"),
        (b"\x80\x02", "not a valid tensor file"),
        (b"\x80\x02}R.", "not a valid tensor file"),
    ],
)
def test_hostile_pickles_are_rejected(tmp_path, program, message):
    path = tmp_path / "a.pt"
    with_program(path, program, [("0", np.arange(4, dtype="<f4").tobytes())])
    with pytest.raises(HeatError, match=message.replace(".", r"\.")):
        read_torch(path)


def test_zip_files_that_are_not_torch_files_are_rejected(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(HeatError, match=r"has no data\.pkl of at most 64 MiB"):
        read_torch(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", "N.")
        archive.writestr("a/Data.pkl", "N.")
    with pytest.raises(HeatError, match="two members with the same name"):
        read_torch(path)


def test_the_byte_order_of_the_file_is_respected(tmp_path):
    path = tmp_path / "a.pt"
    with_program(path, tensor_program((2, 2), (2, 1)), [("0", np.arange(4, dtype=">f4").tobytes())])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/byteorder", "big")
    assert read_torch(path).tolist() == [[0, 1], [2, 3]]


def test_a_storage_that_claims_too_many_numbers_is_limited_to_the_file(tmp_path):
    path = tmp_path / "a.pt"
    program = tensor_program((2, 2), (2, 1), count=1 << 40)
    with_program(path, program, [("0", np.arange(4, dtype="<f4").tobytes())])
    assert read_torch(path).tolist() == [[0, 1], [2, 3]]


def test_arrays_outlive_the_file(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(torch.ones(2, 3, 4), path)
    ones = read_torch(path)
    path.write_bytes(b"")
    assert ones.sum() == 24


def test_a_missing_torch_is_reported_with_the_command_that_installs_it(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    torch.save(torch.ones(2, 3, 4), path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(HeatError, match=r"a torch file, which needs torch; install it with: "):
        read_torch(path)


def damaged(data, rng):
    """Change some bytes and remove others."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.choice([0, 255, rng.randrange(256), *b"9-{"])
    position = rng.randrange(len(changed))
    del changed[position : position + rng.choice([0, 0, 0, 1, 8])]
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_pickle_is_read_or_rejected_with_a_one_line_error(tmp_path):
    whole = tmp_path / "whole.pt"
    path = tmp_path / "a.pt"
    rng = random.Random(1)
    torch.save({"rank": 0, "logical_count": torch.ones(2, 3, 4), "other": [torch.ones(2), None]}, whole)
    with zipfile.ZipFile(whole) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(150):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, damaged(data, rng) if name.endswith("data.pkl") else data)
        message = ""
        try:
            read_heat(path)
        except HeatError as error:
            message = str(error)
        assert "\n" not in message
