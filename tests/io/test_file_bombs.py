"""Tests of small files that would unpack to gigabytes: each is rejected before the memory is allocated."""

import io
import pickle
import tracemalloc
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from eplb_service.io.containers import read_torch
from eplb_service.io.open_trace import read_heat
from tests.io.traces import refusal

MAX_BYTES = 300 << 20
"""Maximum memory that rejecting a file may use, in bytes."""


@pytest.fixture(autouse=True)
def _memory_of_64_gib(monkeypatch):
    """Simulate 64 GiB of memory, because a smaller machine might reject the files for lack of memory."""
    monkeypatch.setattr("eplb_service.io.containers.os.sysconf", lambda _: 1 << 18)


def zipped(path, members, how=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def stride_0(count):
    """Return a pickle of ``count`` tensors of 2^26 numbers that all alias one stored number."""

    class Rebuilt:
        def __init__(self, storage):
            self.storage = storage

        def __reduce__(self):
            torch = pytest.importorskip("torch")
            return torch._utils._rebuild_tensor_v2, (self.storage, 0, (1 << 26,), (0,), False, OrderedDict())

    class Storage(tuple):
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return tuple(value) if isinstance(value, Storage) else None

    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    storage = Storage(("storage", torch.FloatStorage, "0", "cpu", 1))
    Pickler(file, protocol=2).dump([Rebuilt(storage) for _ in range(count)])
    return file.getvalue()


def shared(levels):
    """Return a pickle of nested lists that each contain one list 64 times: 64^levels numbers in a few hundred bytes."""
    value = [1] * 64
    for _ in range(levels - 1):
        value = [value] * 64
    return pickle.dumps({"heat": value}, protocol=2)


def itself():
    value = []
    value.extend([value, value])
    return pickle.dumps({"heat": value}, protocol=2)


def byte_array(size):
    """Return a pickle that calls ``bytearray(size)``."""
    return b"\x80\x02c__builtin__\nbytearray\n\x8a\x08" + size.to_bytes(8, "little") + b"\x85R."


def lists(count):
    """Return a pickle that creates ``count`` empty lists."""
    return b"\x80\x02]" + b"(" + b"]" * count + b"e."


@pytest.mark.parametrize(
    ("program", "how", "message"),
    [
        (lists(1 << 20), zipfile.ZIP_BZIP2, "uses a compression method that numpy and torch never use"),
        (lists(1 << 20), zipfile.ZIP_LZMA, "uses a compression method that numpy and torch never use"),
        (lists(60 << 20), zipfile.ZIP_DEFLATED, "is compressed, which torch files never are"),
        (shared(5), zipfile.ZIP_STORED, "asks for 8.0 GiB of memory"),
        (itself(), zipfile.ZIP_STORED, "holds a container that contains itself"),
        (b"\x80\x02" + b"\x8f" * 100 + b".", zipfile.ZIP_STORED, "builds a set"),
        (byte_array(1 << 34), zipfile.ZIP_STORED, "refers to __builtin__.bytearray"),
    ],
)
def test_a_pickle_bomb_is_rejected(tmp_path, program, how, message):
    pytest.importorskip("torch")
    path = tmp_path / "bomb.pt"
    zipped(path, {"a/data.pkl": program, "a/version": "3\n"}, how)
    assert path.stat().st_size < 1 << 17
    tracemalloc.start()
    try:
        assert message in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def test_many_expanded_tensors_are_rejected(tmp_path):
    path = tmp_path / "bomb.pt"
    members = {"a/data.pkl": stride_0(2), "a/version": "3\n", "a/data/0": np.ones(1, "<f4").tobytes()}
    zipped(path, members)
    assert "asks for 0.5 GiB of memory, although it has only" in refusal(path)


def test_one_expanded_tensor_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "heat.pt"
    torch.save(torch.ones(1, 1, 8).expand(4096, 58, 8), path)
    assert read_torch(path).shape == (4096, 58, 8)


def test_an_archive_bomb_is_rejected(tmp_path):
    path = tmp_path / "bomb.npz"
    zipped(path, {"heat.npy": bytes(1 << 20)}, zipfile.ZIP_BZIP2)
    assert "uses a compression method that numpy and torch never use" in refusal(path)


def test_a_table_of_equal_rows_is_rejected(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "bomb.parquet"
    zeros = np.zeros(1_000_000, dtype=np.int64)
    table = pa.table(dict.fromkeys(("step", "layer", "expert", "tokens"), zeros))
    with parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(4):
            writer.write_table(table)
    assert path.stat().st_size < 100_000
    assert "asks for 0.4 GiB of memory" in refusal(path)


def test_a_table_of_long_strings_is_rejected(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "bomb.parquet"
    text = pa.array(["1" * (1 << 20)]).dictionary_encode().take(pa.array([0] * 4096))
    numbers = pa.array(np.zeros(4096, dtype=np.int64))
    parquet.write_table(
        pa.table({"step": numbers, "layer": numbers, "expert": numbers, "tokens": text}), path
    )
    assert "has column tokens of type" in refusal(path)


def test_a_row_with_a_distant_step_is_rejected(tmp_path):
    path = tmp_path / "bomb.csv"
    path.write_text("step,layer,expert,tokens\n0,0,0,1\n999999,99,99,1\n")
    assert "asks for 1.5 GiB of memory, although it has only" in refusal(path)
    path.write_text("step,layer,expert,tokens\n0,0,0,1\n999,57,255,1\n")
    assert read_heat(path).shape == (1000, 2, 256)
