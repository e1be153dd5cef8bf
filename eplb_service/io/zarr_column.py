"""Arrays of a Zarr v3 folder that grow along their first axis, in gzip chunks of whole rows.

This module implements the part of Zarr that a native trace needs. It is compatible with the ``zarr`` package in both
directions. It never inflates a chunk beyond the size that the metadata states.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core.atomic_write import write_atomically
from eplb_core.heat.window import HeatError
from eplb_service.io.containers import Array, check_fits_memory, one_line

METADATA = "zarr.json"
"""Name of the metadata file of a group or an array."""
_CHUNK_BYTES = 4 << 20
_MAX_CHUNK_STEPS = 256
_MAX_METADATA_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 1 << 30
_MAX_LENGTH = 1 << 62
_GZIP = 31
"""zlib window size that selects the gzip format, whose checksum detects damage."""
_GZIP_LEVEL = 1


@contextlib.contextmanager
def reading_metadata(folder: Path) -> Iterator[None]:
    """Convert any error in a folder's metadata to a one-line ``HeatError``."""
    try:
        yield
    except (HeatError, MemoryError):
        raise
    except Exception as error:
        raise HeatError(
            f"{folder.name}/{METADATA} cannot be read, or is not a trace's metadata ({one_line(error)})"
        ) from error


def read_metadata(folder: Path, node_type: str) -> dict[str, Any]:
    """Return the metadata of a group or an array. May raise any exception (see ``reading_metadata``)."""
    path = folder / METADATA
    if path.stat().st_size > _MAX_METADATA_BYTES:
        raise HeatError(f"{folder.name}/{METADATA} is too large to be a trace's metadata")
    document: dict[str, Any] = json.loads(path.read_bytes())
    if (document["zarr_format"], document["node_type"]) != (3, node_type):
        raise ValueError(f"this is not the metadata of a Zarr v3 {node_type}")
    return document


def write_metadata(folder: Path, document: dict[str, Any]) -> None:
    """Replace a folder's metadata atomically. Raises ``OutputError``."""
    write_atomically(folder / METADATA, json.dumps(document, indent=1).encode(), durable=False)


class Column:
    """Array that is open for reading and appending. It has ``rows`` rows of shape ``tail``."""

    def __init__(self, path: Path, document: dict[str, Any], dtype: str) -> None:
        """Parse the array's metadata. May raise any exception if it is damaged or of a different kind."""
        self._path = path
        self._document = document
        self._dtype = np.dtype(dtype).newbyteorder("<")
        shape = _lengths(document["shape"], 0)
        self._chunks = _lengths(document["chunk_grid"]["configuration"]["chunk_shape"], 1)
        self.rows = shape[0]
        self.tail = shape[1:]
        encoding = document["chunk_key_encoding"]
        separator = encoding.get("configuration", {}).get("separator")
        indices = ["{}", *["0"] * len(self.tail)]
        if encoding["name"] == "default":
            self._key = (separator or "/").join(["c", *indices])
        else:
            self._key = (separator or ".").join(indices)
        grid = document["chunk_grid"]["name"]
        named = encoding["name"] in ("default", "v2")
        if (
            grid != "regular"
            or not named
            or separator not in (None, "/", ".")
            or document.get("storage_transformers")
        ):
            raise ValueError("its chunk layout differs from that of a trace")

    @classmethod
    def create(cls, path: Path, dtype: str, axes: tuple[str, ...], tail: tuple[int, ...]) -> Column:
        """Create an empty array with rows of shape ``tail``. Raises ``OSError`` or ``OutputError``."""
        steps = _CHUNK_BYTES // (np.dtype(dtype).itemsize * math.prod(tail))
        chunks = [min(max(1, steps), _MAX_CHUNK_STEPS), *tail]
        document = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [0, *tail],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "gzip", "configuration": {"level": _GZIP_LEVEL}},
            ],
            "attributes": {},
            "dimension_names": list(axes),
        }
        path.mkdir()
        write_metadata(path, document)
        return cls(path, document, dtype)

    @classmethod
    def open(cls, path: Path, dtype: str, axes: tuple[str, ...]) -> Column:
        """Open an array. Raises ``HeatError`` if it is not an array of a trace."""
        with reading_metadata(path):
            document = read_metadata(path, "array")
            column = cls(path, document, dtype)
            codecs = document["codecs"]
            packed = [codec["name"] for codec in codecs] == ["bytes", "gzip"]
            little = packed and codecs[0].get("configuration", {}).get("endian") in (None, "little")
        whole_rows = len(column._chunks) == len(axes) and column._chunks[1:] == column.tail
        if (
            not little
            or not whole_rows
            or document["data_type"] != dtype
            or column._chunk_bytes > _MAX_CHUNK_BYTES
        ):
            raise HeatError(
                f"{path.name} is {document['data_type']} {document['shape']} in chunks {list(column._chunks)}, encoded "
                f"with {one_line(Exception(codecs))}; expected {dtype} [{', '.join(axes)}] in chunks of whole rows, up "
                "to 1 GiB, encoded with bytes (little) and gzip"
            )
        return column

    @property
    def _chunk_bytes(self) -> int:
        return int(self._dtype.itemsize) * math.prod(self._chunks)

    def write(self, first: int, rows: Array) -> None:
        """Write rows from index ``first`` to the new end. Raises ``HeatError``, ``OSError`` or ``OutputError``."""
        steps = self._chunks[0]
        last = first + len(rows)
        for begin in range(first - first % steps, last, steps):
            chunk = np.zeros(self._chunks, self._dtype)
            if begin < first:
                chunk[: first - begin] = self._chunk(begin // steps)[: first - begin]
            low = max(first, begin)
            high = min(last, begin + steps)
            chunk[low - begin : high - begin] = rows[low - first : high - first]
            path = self._path / self._key.format(begin // steps)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, gzip.compress(chunk.tobytes(), _GZIP_LEVEL, mtime=0), durable=False)
        # The shape is written last, so that readers see all of the new rows or none.
        write_metadata(self._path, {**self._document, "shape": [last, *self.tail]})
        self.rows = last

    def read(self, first: int, last: int) -> Array:
        """Return rows ``first`` to ``last`` (exclusive). Raises ``HeatError`` if a chunk is missing or damaged."""
        steps = self._chunks[0]
        check_fits_memory((last - first) * math.prod(self.tail) * self._dtype.itemsize)
        rows = np.empty((last - first, *self.tail), self._dtype)
        for begin in range(first - first % steps, last, steps):
            low = max(first, begin)
            high = min(last, begin + steps)
            rows[low - first : high - first] = self._chunk(begin // steps)[low - begin : high - begin]
        return rows

    def _chunk(self, number: int) -> Array:
        """Return the rows of one chunk."""
        key = self._key.format(number)
        unpacker = zlib.decompressobj(_GZIP)
        try:
            data = unpacker.decompress((self._path / key).read_bytes(), self._chunk_bytes + 1)
        except (OSError, zlib.error) as error:
            raise HeatError(
                f"{self._path.name}/{key} is missing or damaged; the trace may be an incomplete copy ({error})"
            ) from error
        if len(data) != self._chunk_bytes or not unpacker.eof or unpacker.unused_data:
            raise HeatError(f"{self._path.name}/{key} is truncated, or its size differs from the metadata")
        rows: Array = np.frombuffer(data, self._dtype).reshape(self._chunks)
        return rows


def _lengths(value: Any, minimum: int) -> tuple[int, ...]:
    """Return the axis lengths as a tuple. Raises ``ValueError`` if the value is not a list of lengths."""
    lengths = tuple(value)
    if not lengths or not all(type(length) is int and minimum <= length < _MAX_LENGTH for length in lengths):
        raise ValueError(
            f"expected {'non-negative' if minimum == 0 else 'positive'} lengths, got {one_line(Exception(value))}"
        )
    return lengths
